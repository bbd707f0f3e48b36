"""Gradient flows of J and E, and flows by an averaging operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from nlflow._array import Array, namespace, underflowing
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import InputError, checked_call, is_function, kind_of
from nlflow.flows.linear import LinearFlow
from nlflow.flows.reactions import Reaction
from nlflow.flows.terms import as_terms
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import Fidelity, as_fidelity
from nlflow.functionals.metrics import Metric, as_metric


@checked_call
@underflowing
class GradientFlow(LinearFlow):
    """Gradient flow of J or E in a metric, du/dt = -grad (arXiv 2312.00751, eq. 9 and 21).

    Terms may be added afterwards: ``GradientFlow(J(a)) + AllenCahn() + Source(g)``.

    Parameters
    ----------
    functional : J or E
    metric : {'l2', 'degree', 'conserved'} or Metric
        ``l2``: du/dt = -Lu [- lambda (u - f)]. ``degree``: the same divided by d, du/dt = Pu - u [+ lambda~ (f - u)].
        Without a fidelity ``l2`` conserves sum w u, and ``degree``, for a frozen kernel, sum w d u. P, L and d are of
        K = k + k^T: for a symmetric k, P is that of k and d is twice the affinity's ``degree``.
        ``conserved``: du/dt = -L mu, mu being the gradient in the L2 metric; see `ConservedMetric`.
    evolving : bool
        Take the kernel from u(t). The affinity's own features then give the dtype and the device alone, and the flow
        descends no functional.
    every : int
        With n > 1 the kernel of an evolving flow is taken from the signal every n steps and held between. Integrators
        then have order 1 at most, and no tolerance sees that error.
    reaction : Reaction, optional
        A term R(u) that is added to du/dt, such as `AllenCahn`. With a potential F it adds sum m F(u) to the energy,
        m being w, or w d in the degree metric.
    source : array, callable or Source, optional
        A term g that is added to du/dt, see `Source`; it adds -sum m g u to the energy.
    observed : callable, optional
        f(t) or f(t, x), see `Source`, in place of the functional's f; of the same shape and dtype.
    constraint : Constraint, optional
        Values at some nodes, which are held in all stages; the start takes them too.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, GradientFlow, Grid, affinity, solve
    >>> grid = Grid(64, spacing=1 / 64, boundary="periodic")
    >>> f = np.sin(2 * np.pi * grid.nodes[:, 0])
    >>> flow = GradientFlow(E(affinity(Gaussian(width=0.1), grid), f, fidelity=0.5, measure="degree"), metric="degree")
    >>> solution = solve(flow, t=50.0)
    >>> solution.success
    True
    """

    def __init__(
        self,
        functional: J,
        metric: str | Metric = "l2",
        *,
        evolving: bool = False,
        every: int = 1,
        reaction: Reaction | None = None,
        source: Array | Callable[..., Array] | None = None,
        observed: Callable[..., Array] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        if not isinstance(functional, J):
            raise InputError(f"functional: got {kind_of(functional)}, expected J(affinity) or E(affinity, f, ...)")
        inner = as_metric(metric)
        if observed is not None and not isinstance(functional, E):
            raise InputError("observed: got a signal without a fidelity, expected none, or E(affinity, f, ...)")
        terms = as_terms(functional.affinity, reaction, source, observed, constraint)
        signal = functional.observed if terms.observed is None else terms.observed.at(0.0, functional.observed)
        super().__init__(
            functional.affinity, inner, functional.fidelity_in(inner), signal,
            evolving=evolving, every=every, terms=terms,
        )  # fmt: skip
        self._functional = functional

    @property
    def functional(self) -> J:
        """J or E, without the potential of the terms."""
        if isinstance(self._functional, E) and self.terms.observed is not None:
            return self._functional.with_observed(self.observed)
        return self._functional

    def rebuilt(self, u: Array) -> Self:
        functional = self._functional.with_affinity(self._functional.given._updated(u))
        result = self._replaced(functional.affinity, functional.fidelity_in(self.inner), u)
        result._functional = functional
        return result

    def __repr__(self) -> str:
        kind = "evolving" if self.evolving else "frozen"
        what = f"{type(self._functional).__name__}, metric={self.metric!r}, {kind}, every={self.every}"
        more = "".join(f", {word}" for word in self._words)
        return f"{type(self).__name__}({what}{more}, {self.affinity!r})"


@checked_call
@underflowing
class AttentionFlow(LinearFlow):
    """Flow by an affinity as it is, du/dt = Pu - u [+ lambda~ (f - u)], symmetric or not.

    An Euler step of length 1 is an attention layer, with f a NeuTRENO layer. With a symmetric affinity it is the
    gradient flow of J or E in the degree metric.

    Parameters
    ----------
    affinity : Affinity
    observed : array or callable, optional
        f, f(t) or f(t, x), see `Source`; needed for a fidelity, and else only the default start of `solve`.
    fidelity : float, or array of shape ``domain.shape`` or ``domain.shape + (D, D)``
        lambda~ >= 0, or a symmetric positive semidefinite matrix for each node; see `E`.
    evolving, every, reaction, source, constraint
        As in `GradientFlow`.
    """

    def __init__(
        self,
        affinity: Affinity,
        observed: Any = None,
        fidelity: float | Array | Fidelity = 0.0,
        *,
        evolving: bool = False,
        every: int = 1,
        reaction: Reaction | None = None,
        source: Array | Callable[..., Array] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        check_affinity(affinity)
        term: Fidelity | None = None
        terms = as_terms(affinity, reaction, source, observed if is_function(observed) else None, constraint)
        if observed is not None:
            if terms.observed is None:
                signal = affinity.check_signal("observed", observed)
                observed = namespace(signal).astype(signal, signal.dtype, copy=True)  # the flow stays what it is
            else:
                observed = terms.observed.at(0.0)
            term = as_fidelity(fidelity, observed, affinity)
        elif not isinstance(fidelity, float | int) or fidelity != 0:
            raise InputError("observed: the signal f is needed when a fidelity is given")
        super().__init__(affinity, "degree", term, observed, evolving=evolving, every=every, terms=terms)

    @property
    def functional(self) -> J | None:
        if not self.symmetric:
            return None
        if self.fidelity is None:
            return J(self.affinity)
        return E(self.affinity, self.observed, self.fidelity, measure="degree")

    def rebuilt(self, u: Array) -> Self:
        return self._replaced(self.affinity._updated(u), self.fidelity, u)

    def __repr__(self) -> str:
        kind = "evolving" if self.evolving else "frozen"
        more = "".join(f", {word}" for word in self._words)
        return f"{type(self).__name__}({kind}, every={self.every}{more}, {self.affinity!r})"
