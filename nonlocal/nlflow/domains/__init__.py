"""Where signals live: grids, scattered points and batches of them; masks; images as arrays with channels last."""

from nlflow.domains.spaces import Batch, Boundary, Domain, Grid, Points

__all__ = ["Batch", "Boundary", "Domain", "Grid", "Points"]
