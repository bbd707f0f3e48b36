"""Triton kernels of our own, where no fused kernel of torch serves."""
