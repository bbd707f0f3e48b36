"""Formulas of k and their parameters."""

from nlflow.kernels.families import DotProduct, Gaussian, Kernel, Laplace, Patch, RadialKernel, TopHat

__all__ = ["DotProduct", "Gaussian", "Kernel", "Laplace", "Patch", "RadialKernel", "TopHat"]
