"""Where signals live, and which nodes see which."""

from nlflow.domains.base import Domain
from nlflow.domains.batch import Batch
from nlflow.domains.grid import Boundary, Grid
from nlflow.domains.mask import Mask
from nlflow.domains.points import Points

__all__ = ["Batch", "Boundary", "Domain", "Grid", "Mask", "Points"]
