"""Triton kernels."""

# Triton comes with builds of torch for CUDA; nothing imports it before tensors ask for a kernel.
