"""Ensembles of paths."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Brief, Floats, namespace, to_numpy
from nlflow.errors import (
    InputError,
    NumericalError,
    check_integer,
    check_memory,
    check_number,
    checked_call,
    is_function,
    kind_of,
)
from nlflow.flows.flow import Flow, as_flow, start_of
from nlflow.flows.gradient import AttentionFlow, GradientFlow
from nlflow.flows.integrators.base import Integrator
from nlflow.flows.linear import LinearFlow
from nlflow.flows.solver import solve
from nlflow.functionals.energies import E

_CHANNELS = 256  # of one run
_LEVEL = 0.95


@dataclass(frozen=True, repr=False)
class Ensemble(Brief):
    """What was kept of paths of a flow with noise.

    Attributes
    ----------
    t : array of shape (T,)
    values : array of shape (M, T, ...), or (M, ...) with `keep`
        Of one path after another.
    seed : int
        Path m has the noise ``Noise(..., rng=seed, path=k + m)``, k being the path of the flow's noise.
    stats : dict
        Of the first run, with the numbers of ``paths`` and of those ``side_by_side`` in one run.
    """

    t: Floats
    values: NDArray[Any]
    seed: int
    stats: dict[str, Any] = field(repr=False)

    @property
    def mean(self) -> Floats:
        """The mean over paths, in float64."""
        return np.asarray(np.mean(self.values, axis=0, dtype=np.float64))

    @property
    def variance(self) -> Floats:
        """The unbiased variance over paths, in float64."""
        return np.asarray(np.var(self.values, axis=0, dtype=np.float64, ddof=1))

    def interval(self, level: float = _LEVEL, of: str = "mean") -> tuple[Floats, Floats]:
        """Return the ends of a pointwise confidence interval, for large M.

        Parameters
        ----------
        level : float
            Probability, in (0, 1), that it holds the true value.
        of : {'mean', 'variance'}
            Student's interval of the mean, or the normal one of the variance.

        Raises
        ------
        InputError
            For another level.
        """
        level = check_number("level", level, minimum=0, strict=True, below=1.0)
        count = len(self.values)
        if of == "mean":
            middle, error = self.mean, np.sqrt(self.variance / count)
            width = students_t(count - 1, level)
        elif of == "variance":
            middle = self.variance
            fourth = np.mean((self.values - self.mean) ** 4, axis=0, dtype=np.float64)
            error = np.sqrt(np.maximum(fourth - middle**2 * (count - 3) / (count - 1), 0.0) / count)
            width = students_t(math.inf, level)  # Gauss' law
        else:
            raise InputError(f"of: got {of!r}, expected 'mean' or 'variance'")
        low = middle - width * error
        return np.maximum(low, 0.0) if of == "variance" else low, middle + width * error

    def quantile(self, share: float) -> Floats:
        """Return a quantile of the paths at each place, for a share in [0, 1]."""
        share = check_number("share", share, minimum=0)
        if share > 1:
            raise InputError(f"share: got {share:g}, expected at most 1")
        return np.asarray(np.quantile(self.values, share, axis=0))


def students_t(freedom: float, level: float = _LEVEL) -> float:
    """Return half the width of an interval in standard errors, by Student's t."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes half a second to load

    upper = (1 + level) / 2
    return float(ndtri(upper) if freedom == math.inf else stdtrit(freedom, upper))


@checked_call
def ensemble(
    flow: Flow,
    start: Any = None,
    count: int = 100,
    *,
    t: float | None = None,
    t_eval: Any = None,
    integrator: Integrator | None = None,
    keep: Callable[[Floats, NDArray[Any]], Any] | None = None,
    side_by_side: int | None = None,
    memory_limit: float | None = None,
) -> Ensemble:
    """Return many paths of a flow with noise from one start.

    Parameters
    ----------
    flow : Flow
        With a `Noise`.
    start : array, optional
        As that of `solve`.
    count : int
        The number of paths M, at least 2.
    t, t_eval, integrator
        As those of `solve`.
    keep : callable, optional
        What to keep of a path: a function of the times (T,) and the path (T, ...) that returns a number or an array of
        one shape; the whole path by default.
    side_by_side : int, optional
        How many paths are run as one, where the flow treats channels alike; as many as make 256 channels by default.
        With 1 a path has the bits of its run by `solve`.
    memory_limit : float, optional
        Bytes of what is kept; half of the physical memory by default.

    Returns
    -------
    Ensemble

    Raises
    ------
    InputError
        As `solve`, and for a flow without noise.
    MemoryLimitError
        When what is kept does not fit, after the first run.
    NumericalError
        When a run fails.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, GradientFlow, Grid, Noise, affinity, ensemble
    >>> energy = E(affinity(Gaussian(width=2.0), Grid(16, boundary="periodic")), np.ones(16), fidelity=1.0)
    >>> found = ensemble(GradientFlow(energy) + Noise(beta=10.0, rng=3), None, 400, t=5.0)
    >>> low, high = found.interval(0.999)
    >>> bool((low[-1] < 1).all() and (high[-1] > 1).all())
    True
    """
    flow = as_flow(flow)
    if keep is not None and not is_function(keep):
        raise InputError(f"keep: got {kind_of(keep)}, expected a callable of the times and a path")
    if flow.noise is None:
        raise InputError("flow: got one without noise, all of whose paths are the same, expected flow + Noise(...)")
    count = check_integer("count", count, minimum=2)
    if flow.affinity.shared:
        raise InputError("flow: its nodes are shared out among processes, which have one path at a time; use solve()")
    u = start_of(flow.when(0.0), start)
    width = math.prod(u.shape) // flow.affinity.domain.size
    most = (
        max(1, _CHANNELS // width) if side_by_side is None else check_integer("side_by_side", side_by_side, minimum=1)
    )
    together = min(most, count) if _by_channel(flow) else 1
    options = {"t": t, "t_eval": t_eval, "integrator": integrator, "energies": False}
    values: NDArray[Any] | None = None
    times, stats = np.zeros(0), dict[str, Any]()
    for first in range(0, count, together):
        number = min(together, count - first)
        times, paths, told = _run(flow, u, first, number, options)
        for m, path in enumerate(paths):
            kept = path if keep is None else np.asarray(keep(times, path))
            if values is None:
                check_memory(f"what is kept of {count} paths", count * kept.nbytes, "keep less", memory_limit)
                values, stats = np.empty((count, *kept.shape), kept.dtype), told
            if kept.shape != values.shape[1:]:
                raise InputError(
                    f"keep: got shape {kept.shape} for path {first + m}, expected {values.shape[1:]}, that of others"
                )
            values[first + m] = kept
    assert values is not None
    return Ensemble(times, values, flow.noise.seed, {**stats, "paths": count, "side_by_side": together})


def _by_channel(flow: Flow) -> bool:
    """Whether all that a flow does to channels it does to each by itself."""
    if not isinstance(flow, LinearFlow) or flow.evolving or not flow.plain or flow.timed:
        return False
    noise, terms = flow.noise, flow.terms
    alone = terms.reaction is None or (terms.reaction.components is None and not terms.reaction.turns)
    mixed = flow.fidelity is not None and flow.fidelity.width > 1
    known = isinstance(flow, GradientFlow | AttentionFlow)
    plain = noise is not None and noise.channels is None and (noise.uniform or callable(noise.strength))
    return known and alone and plain and not mixed and terms.constraint is None and terms.source is None


def _run(
    flow: Flow, u: Array, first: int, number: int, options: dict[str, Any]
) -> tuple[Floats, list[NDArray[Any]], dict[str, Any]]:
    assert flow.noise is not None
    one = copy.copy(flow)
    one.noise = flow.noise.on_path(first)
    nodes = len(flow.affinity.domain.shape)
    width = 1 if u.ndim == nodes else int(u.shape[-1])
    if number > 1:
        one, start = _beside(one, number, nodes), _repeated(u, number, nodes)
        # Channel c of path m has the number D m + c among all, as in a run of that path alone.
        one.noise = flow.noise.on_channel(width * (flow.noise.path + first))
    else:
        start = u
    found = solve(one, start, **options)
    if not found.success:
        raise NumericalError(
            f"ensemble: paths {first} to {first + number - 1} did not come to their end: {found.message}"
        )
    whole = to_numpy(found.u)
    if number == 1:
        return found.t, [whole], found.stats
    pieces = [whole[..., m * width : (m + 1) * width] for m in range(number)]
    return found.t, [piece[..., 0] if u.ndim == nodes else piece for piece in pieces], found.stats


def _repeated(u: Array, number: int, nodes: int) -> Array:
    xp = namespace(u)
    return xp.concat([u[..., None] if u.ndim == nodes else u] * number, axis=-1)


def _beside(flow: Flow, number: int, nodes: int) -> Flow:
    """Return the flow of as many copies of its channels."""
    if flow.observed is None:
        return flow
    f = _repeated(flow.observed, number, nodes)
    functional = flow.functional
    flow.observed = f
    if isinstance(flow, GradientFlow) and isinstance(functional, E):
        flow._functional = E(functional.given, f, functional._fidelity, measure=functional.measure)
    return flow
