"""Formulas of k and their parameters, a family a file."""

from typing import TypeAlias

from nlflow.kernels.anisotropic import Anisotropic
from nlflow.kernels.base import Kernel, RadialKernel
from nlflow.kernels.dot_product import ExpDotProduct
from nlflow.kernels.formula import Formula
from nlflow.kernels.gaussian import Gaussian
from nlflow.kernels.heavy_tailed import InverseMultiquadric, RationalQuadratic, TruncatedPower
from nlflow.kernels.laplace import Laplace
from nlflow.kernels.matern import Matern
from nlflow.kernels.patch import Patch
from nlflow.kernels.top_hat import TopHat
from nlflow.kernels.wendland import Wendland

NAMED: dict[str, type[Kernel]] = {
    "gaussian": Gaussian, "laplace": Laplace, "tophat": TopHat, "matern": Matern,
    "rational-quadratic": RationalQuadratic, "inverse-multiquadric": InverseMultiquadric,
    "wendland": Wendland, "truncated-power": TruncatedPower, "dot": ExpDotProduct,
}  # fmt: skip
"""By the names that the command line and studies take."""

PositionKernel: TypeAlias = RadialKernel | Anisotropic
"""A kernel that compares positions of nodes."""

__all__ = [
    "NAMED",
    "Anisotropic",
    "ExpDotProduct",
    "Formula",
    "Gaussian",
    "InverseMultiquadric",
    "Kernel",
    "Laplace",
    "Matern",
    "Patch",
    "PositionKernel",
    "RadialKernel",
    "RationalQuadratic",
    "TopHat",
    "TruncatedPower",
    "Wendland",
]
