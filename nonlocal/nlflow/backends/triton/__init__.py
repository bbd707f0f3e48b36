"""Triton kernels of our own, where no fused kernel of torch serves."""

# Triton comes with builds of torch for CUDA; nothing imports it before tensors ask for a kernel.
