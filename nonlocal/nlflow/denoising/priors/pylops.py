"""Adapter for PyLops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.denoising.priors.denoisers import base
from nlflow.errors import InputError, install_command
from nlflow.functionals.energies import J
from nlflow.functionals.forward import Forward

Base: Any = base("pylops", "LinearOperator", install_command("pylops"))


class _OnSignals(Base):
    """An operator on signals of an affinity's domain, tested by `Forward` when it is made."""

    def __init__(self, affinity: Affinity) -> None:
        self.affinity = check_affinity(affinity)
        if isinstance(affinity.log_degree, np.ndarray):
            dims = affinity.domain.shape
            super().__init__(dtype=np.dtype(affinity.dtype or np.float64), dims=dims, dimsd=dims)
            Forward(self, dims)
        else:
            raise InputError("affinity: got one of torch features, expected NumPy ones; convert them (.cpu().numpy())")

    def _signal(self, x: Any) -> Any:
        return self.affinity.check_signal("x", np.reshape(x, self.dims).astype(self.dtype, copy=False))


class Average(_OnSignals):
    """The averaging operator P of an affinity, with its transpose: one step of a frozen nonlocal filter.

    Parameters
    ----------
    affinity : Affinity
        Of NumPy features. If it is not symmetric, its method must know the transpose, as ``dense`` does; ``nufft``
        fails the dot test.

    Raises
    ------
    InputError
        For torch features, and when the dot test fails.
    """

    def _matvec(self, x: Any) -> NDArray[Any]:
        return np.ravel(self.affinity._average(self._signal(x)))

    def _rmatvec(self, x: Any) -> NDArray[Any]:
        return np.ravel(self.affinity._push(self._signal(x)))


class Laplacian(_OnSignals):
    """The gradient of J as a symmetric operator, u -> w L u, for normal equations with J = <u, w L u> / 2.

    ``pylops.optimization.leastsquares.normal_equations_inversion(A, f, [], NRegs=[Laplacian(k)], epsNRs=[sigma])``
    minimizes |A u - f|^2 / (2 sigma^2) + J(u).

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrized to K = k + k^T.
    """

    def __init__(self, affinity: Affinity) -> None:
        self._functional = J(affinity)
        super().__init__(affinity)

    def _matvec(self, x: Any) -> NDArray[Any]:
        signal = self._signal(x)
        return np.ravel(np.asarray(self.affinity.domain.weights, signal.dtype) * self._functional.gradient(signal))

    def _rmatvec(self, x: Any) -> NDArray[Any]:
        return self._matvec(x)
