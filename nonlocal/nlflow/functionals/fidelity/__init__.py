"""Fidelity operators: what draws a signal to the observed one, by a number or by a matrix at each node.

Flows, integrators and minimizers know the fidelity through the methods of `Fidelity` alone. In the gradient it is the
operator Lambda of Lambda (u - f), in the functional the form 1/2 sum_i m_i (u_i - f_i)^T Lambda_i (u_i - f_i).
"""

from nlflow.functionals.fidelity.base import Fidelity, NodeFidelity, checked_method
from nlflow.functionals.fidelity.build import as_fidelity
from nlflow.functionals.fidelity.matrix import MatrixFidelity

__all__ = ["Fidelity", "MatrixFidelity", "NodeFidelity", "as_fidelity", "checked_method"]
