from .anisotropic import Anisotropic as Anisotropic
from .anisotropic import PositionKernel as PositionKernel
from .base import Kernel as Kernel
from .base import RadialKernel as RadialKernel
from .dot_product import ExpDotProduct as ExpDotProduct
from .formula import Formula as Formula
from .gaussian import Gaussian as Gaussian
from .heavy_tailed import InverseMultiquadric as InverseMultiquadric
from .heavy_tailed import RationalQuadratic as RationalQuadratic
from .heavy_tailed import TruncatedPower as TruncatedPower
from .interactions import Interaction as Interaction
from .interactions import Morse as Morse
from .interactions import PowerLaws as PowerLaws
from .laplace import Laplace as Laplace
from .matern import Matern as Matern
from .patch import Patch as Patch
from .top_hat import TopHat as TopHat
from .wendland import Wendland as Wendland

NAMED: dict[str, type[Kernel]]
