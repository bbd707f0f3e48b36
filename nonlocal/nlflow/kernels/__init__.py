"""Formulas of k and their parameters, a family a file."""

from nlflow.kernels.base import Kernel, RadialKernel
from nlflow.kernels.dot_product import ExpDotProduct
from nlflow.kernels.gaussian import Gaussian
from nlflow.kernels.laplace import Laplace
from nlflow.kernels.patch import Patch
from nlflow.kernels.top_hat import TopHat

__all__ = ["ExpDotProduct", "Gaussian", "Kernel", "Laplace", "Patch", "RadialKernel", "TopHat"]
