"""Systems of channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, kept_like, namespace, over_channels, underflowing
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_floats, checked_call, kind_of
from nlflow.flows.linear import LinearFlow, bound_of
from nlflow.flows.modes import Modes, bases_of
from nlflow.flows.noise import Noise
from nlflow.flows.reactions import Reaction
from nlflow.flows.terms import Source, as_terms
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import E, J
from nlflow.functionals.metrics import Metric, as_metric


@checked_call
@underflowing
class SystemFlow(LinearFlow):
    """A system of D channels, du_c/dt = -sum_c' M_cc' grad J_c'(u_c') + R_c(t, x, u) + g_c(t, x).

    Without terms and with a diagonal M the flow descends sum_c M_cc J_c(u_c).

    Parameters
    ----------
    functional : J, or sequence of D of them
        One for all channels, or one for each, on the same domain.
    diffusivity : array_like of shape (D,) or (D, D)
        M_cc >= 0 of each channel, or M, whose eigenvalues have real parts >= 0.
    metric : {'l2', 'degree'}
        grad J_c = d_c (u - P_c u) or u - P_c u; 'degree' by default, unlike that of `GradientFlow`.
    reaction, source, constraint
        As in `GradientFlow`; a coupled reaction has D components.

    Raises
    ------
    InputError
        For functionals on different domains or with a fidelity, other diffusivities, and a reaction with another number
        of components.

    Examples
    --------
    Two channels that diffuse at different rates, and turn into each other.

    >>> import numpy as np
    >>> from nlflow import ETD4RK, Gaussian, Grid, J, affinity, solve
    >>> from nlflow.flows import Reaction, SystemFlow
    >>> weights = affinity(Gaussian(width=2.0), Grid(32, boundary="periodic"))
    >>> turn = Reaction(lambda u: np.stack([-u[..., 1], u[..., 0]], axis=-1), (-2, 2), components=2, bound=1.0)
    >>> flow = SystemFlow(J(weights), [1.0, 0.2], "degree", reaction=turn)
    >>> start = np.ones((32, 2))
    >>> found = solve(flow, start, t=np.pi / 2, integrator=ETD4RK(np.pi / 200))
    >>> np.round(found.final[0], 6).tolist()
    [-1.0, 1.0]
    """

    def __init__(
        self,
        functional: J | Sequence[J],
        diffusivity: Any,
        metric: str | Metric = "degree",
        *,
        reaction: Reaction | None = None,
        source: Array | Callable[..., Array] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        couplings = _checked_couplings(diffusivity)
        functionals = _checked_functionals(functional, len(couplings))
        inner = as_metric(metric)
        if not inner.by_nodes:
            raise InputError(f"metric: got {inner.name!r}, expected 'l2' or 'degree' for a system")
        affinity = functionals[0].affinity
        terms = as_terms(affinity, reaction, source, None, constraint)
        super().__init__(affinity, inner, None, None, evolving=False, every=1, terms=terms)
        self.functionals, self.couplings = functionals, couplings
        self._matrix = couplings.copy()  # torch warns of arrays that nobody may write to
        self._check_components()
        self.diagonal = bool(np.all(couplings == np.diag(np.diag(couplings))))
        one, weighted = len(set(functionals)) == 1, inner.measure == "l2"
        alike = bool(np.all(couplings == couplings.T)) and np.linalg.eigvalsh(couplings)[0] >= 0
        # M acts on channels, and gradients on nodes: their product is self-adjoint where they have one measure.
        self.symmetric = self.diagonal or (alike and (one or weighted))
        self._groups = _groups(functionals, couplings)
        self._roots = np.sqrt(np.maximum(np.diag(couplings), 0.0))  # of those that descend an energy
        self._columns = [np.array(group) for group in self._groups]
        self._rates: list[Array | float] = [inner.rate(functionals[group[0]].affinity) for group in self._groups]
        self.rate = self._diagonal_rate()

    def _check_components(self) -> None:
        reaction = self.terms.reaction
        if reaction is not None and reaction.components not in (None, self.channels):
            raise InputError(
                f"reaction: got {reaction!r} of {reaction.components} components, expected {self.channels}, the number "
                "of channels of diffusivity"
            )

    def __add__(self, term: Reaction | Source | Constraint | Noise) -> Self:
        result = super().__add__(term)
        result._check_components()
        return result

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.couplings)

    @property
    def affinities(self) -> list[Affinity]:
        return [*(one.affinity for one in dict.fromkeys(self.functionals)), *super().affinities[1:]]

    @property
    def mixes(self) -> bool:
        return not self.diagonal

    def width(self, *, diffusion: bool = False) -> int:
        del diffusion
        return self.channels

    def diffusion(self, v: Array) -> Array:
        xp, nodes = namespace(v), self.affinity.domain.shape
        many = xp.reshape(v, (*nodes, -1, self.channels))  # several signals side by side, as matrices are formed
        moved = xp.zeros_like(many)
        for group, columns, rate in zip(self._groups, self._columns, self._rates, strict=True):
            whole, columns = len(group) == self.channels, kept_like(columns, v, xp.int64)
            part = xp.reshape(many if whole else many[..., columns], (*nodes, -1))
            self.applications += 1
            part = over_channels(rate, part) * (part - self.functionals[group[0]].affinity._average(part))
            part = xp.reshape(part, (*nodes, -1, len(group)))
            if whole:
                moved = part
            else:
                moved[..., columns] = part
        matrix = kept_like(self._matrix, v)
        mixed = moved * xp.linalg.diagonal(matrix) if self.diagonal else moved @ matrix.T
        return xp.reshape(mixed, tuple(v.shape))

    def spectral_bounds(self) -> tuple[float, float]:
        return 0.0, self.diffusion_bound()

    def diffusion_bound(self) -> float:
        pairs = list(zip(self._groups, self._rates, strict=True))
        if self.diagonal:
            own = np.diag(self.couplings)
            found = [own[list(g)].max() * bound_of(self.functionals[g[0]].affinity, rate) for g, rate in pairs]
            return float(max(found, default=0.0))
        if self.symmetric:
            size = float(np.linalg.eigvalsh(self.couplings)[-1])
            return size * max(bound_of(self.functionals[g[0]].affinity, rate) for g, rate in pairs)
        # In the norm of the largest value, in which P is at most 1.
        return float(np.abs(self.couplings).sum(axis=1).max()) * max(2 * _largest(rate) for _, rate in pairs)

    @property
    def safe_step(self) -> float:
        """A stable step of explicit Euler without a reaction; 0 where A is not self-adjoint."""
        bound = self.diffusion_bound()
        return 0.0 if not self.symmetric else 2 / bound if bound > 0 else math.inf

    @property
    def has_own_bounds(self) -> bool:
        pieces = ("average", "diffusion", "linear", "spectral_bounds", "diffusion_bound")
        return all(self._depth(piece) >= self._depth("_diagonal_rate") for piece in pieces)

    def _found_modes(self) -> Modes | None:
        bases = bases_of(*(one.affinity for one in self.functionals)) if self.has_own_bounds else None
        if bases is None:
            return None
        degrees = [1.0 if self.inner.normalized else _largest(self.inner.rate(f.affinity)) for f in self.functionals]
        rest = np.stack([d * basis.rest for d, basis in zip(degrees, bases, strict=True)], axis=-1)
        return Modes(bases[0], rest * np.diag(self.couplings) if self.diagonal else rest[..., None, :] * self.couplings)

    def _diagonal_rate(self) -> Array:
        """Return M_cc r_c for each node, or for all of them, and each channel: what stands in the diagonal of A."""
        like = self.affinity.log_degree
        ones = namespace(like).ones_like(like[..., None]) if self._rates else 1.0
        columns = [0.0 * ones for _ in self.functionals]
        for group, rate in zip(self._groups, self._rates, strict=True):
            for c in group:
                columns[c] = float(self.couplings[c, c]) * (rate if isinstance(rate, float) else rate[..., None]) * ones
        return namespace(like).concat(columns, axis=-1) if self._rates else 0.0

    def measure(self, like: Array) -> Array:
        if self.inner.measure == "l2" or len(set(self.functionals)) == 1:
            return super().measure(like)
        measures = [one.affinity.measure(self.inner.measure, like, by_item=True) for one in self.functionals]
        return namespace(like).stack(measures, axis=-1)

    def mass(self, like: Array) -> Array:
        if self.inner.measure == "l2" or len(self.affinities) == 1:
            return super().mass(like)
        return namespace(like).stack([self._mass_of(one.affinity, like) for one in self.functionals], axis=-1)

    def mean(self, u: Array) -> Array:
        means = [f.affinity.mean(u[..., c : c + 1], self.inner.measure) for c, f in enumerate(self.functionals)]
        return namespace(u).concat(means, axis=-1)

    @property
    def has_energy(self) -> bool:
        return self.diagonal and self.terms.has_potential

    def energy(self, u: Array) -> float:
        if not self.has_energy:
            return math.nan
        try:
            total = self._driven_potential(u) if self.terms.drives else 0.0
            xp = namespace(u)
            for group, columns in zip(self._groups, self._columns, strict=True):
                columns = kept_like(columns, u, xp.int64)
                scale = kept_like(self._roots, u)[columns]
                self.applications += 1
                with np.errstate(over="ignore"):
                    part = scale * u[..., columns]
                if not bool(xp.all(xp.isfinite(part))):
                    return math.inf
                total += self.functionals[group[0]].value(part)
            return total
        except NumericalError:
            return math.inf

    def _driven_potential(self, u: Array) -> float:
        """Return the potential of the terms, of each channel in the measure of its own kernel."""
        kernels = dict.fromkeys(self.functionals)
        if self.inner.measure == "l2" or len(kernels) == 1:
            return float(self._potential(self.affinity, u))
        own = [(one, np.array([float(other is one) for other in self.functionals])) for one in kernels]
        return sum(float(self._potential(one.affinity, u, channels)) for one, channels in own)

    @property
    def _shape(self) -> tuple[tuple[int, ...], str]:
        words = f"a value of each of the system's {self.channels} channels at each node"
        return (*self.affinity.domain.shape, self.channels), words

    def given(self) -> list[Any]:
        kernels = [one.affinity.kernel for one in self.functionals[1:]]
        return [f"couplings {self.couplings.tolist()!r}", *kernels, *super().given()]

    def __repr__(self) -> str:
        own = np.diag(self.couplings) if self.diagonal else self.couplings
        more = "".join(f", {word}" for word in self._words)
        kinds = ", ".join(repr(one.affinity) for one in dict.fromkeys(self.functionals))
        return f"{type(self).__name__}({own.tolist()!r}, metric={self.metric!r}{more}, {kinds})"


def _largest(rate: Array | float) -> float:
    return rate if isinstance(rate, float) else float(namespace(rate).max(rate))


def _groups(functionals: tuple[J, ...], couplings: Floats) -> list[tuple[int, ...]]:
    """Return channels that share a functional, of those that move anything."""
    used = np.any(couplings != 0, axis=0)
    groups: dict[J, list[int]] = {}
    for channel, functional in enumerate(functionals):
        if used[channel]:
            groups.setdefault(functional, []).append(channel)
    return [tuple(group) for group in groups.values()]


def _checked_couplings(given: Any) -> NDArray[np.float64]:
    matrix = check_floats("diffusivity", given, ndim=(1, 2), hint="one number for each channel, or a matrix of them")
    if matrix.ndim == 1:
        matrix = np.diag(matrix)
    if matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"diffusivity: got shape {matrix.shape}, expected (D,) or (D, D) for D channels")
    least = float(np.linalg.eigvals(matrix).real.min())
    if least < -1e-12 * float(np.abs(matrix).max()):
        raise InputError(
            f"diffusivity: got {matrix.tolist()} with an eigenvalue of real part {least:.4g}, expected none below 0: "
            "there signals grow without limit as the kernel becomes narrow"
        )
    matrix.flags.writeable = False
    return matrix


def _checked_functionals(given: Any, channels: int) -> tuple[J, ...]:
    functionals = tuple(given) if isinstance(given, list | tuple) else (given,) * channels
    for one in functionals:
        if not isinstance(one, J) or isinstance(one, E):
            raise InputError(
                f"functional: got {kind_of(one)}, expected J(affinity), or one for each channel; what draws to a "
                "signal f is a reaction"
            )
        if one.affinity.domain is not functionals[0].affinity.domain and not _same(one, functionals[0]):
            raise InputError("functional: got functionals on different domains, expected the same nodes for all")
    if len(functionals) != channels:
        raise InputError(
            f"functional: got {len(functionals)} for the {channels} channels of diffusivity, expected one for each, or "
            "a single one"
        )
    return functionals


def _same(one: J, other: J) -> bool:
    first, second = one.affinity.domain, other.affinity.domain
    return first.shape == second.shape and all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("nodes", "weights")
    )
