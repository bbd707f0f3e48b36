"""Preconditioners of (I - P) + phi: a transform that diagonalizes P; on the graph of K multigrid, elimination, sweeps.

`capacitance` is that of fractional operators.

All are self-adjoint and positive in the inner product of the degree measure m_i = w_i d_i / sum w d, as conjugate
gradients ask, and take all channels at once. `choice` chooses; `coarsening` makes the coarse grids of `multigrid`.
"""

from nlflow.functionals.preconditioners.capacitance import Capacitance
from nlflow.functionals.preconditioners.choice import PAYS, PAYS_EDGE, PRECONDITIONERS, Choice
from nlflow.functionals.preconditioners.elimination import Elimination
from nlflow.functionals.preconditioners.multigrid import Multigrid
from nlflow.functionals.preconditioners.transform import Diagonal, Transform

__all__ = [
    "PAYS",
    "PAYS_EDGE",
    "PRECONDITIONERS",
    "Capacitance",
    "Choice",
    "Diagonal",
    "Elimination",
    "Multigrid",
    "Transform",
]
