"""Preconditioners of (I - P) + phi: the transform that diagonalises P, and algebraic multigrid on the graph of K.

Both are self-adjoint and positive in the inner product of the degree measure m_i = w_i d_i / sum w d, as conjugate
gradients ask, and take all channels at once. `choice` chooses; `coarsening` makes the coarse grids of `multigrid`.
"""

from nlflow.precondition.choice import PAYS, PAYS_EDGE, PRECONDITIONERS, Choice
from nlflow.precondition.multigrid import Multigrid
from nlflow.precondition.transform import Transform

__all__ = ["PAYS", "PAYS_EDGE", "PRECONDITIONERS", "Choice", "Multigrid", "Transform"]
