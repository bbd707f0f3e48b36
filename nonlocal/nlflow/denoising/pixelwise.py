"""The flow of pixels under the patch kernel."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import Affinity, affinity
from nlflow.denoising.frame import Frame, Spread
from nlflow.denoising.options import Options
from nlflow.denoising.runs import ALONE, Problem, Run, Watch, run, within
from nlflow.domains import Grid
from nlflow.errors import InputError, MemoryLimitError, NlflowWarning, remedied
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators import SemiImplicit
from nlflow.flows.result import Solution
from nlflow.flows.trackers import DiscrepancyPrinciple
from nlflow.functionals.energies import E
from nlflow.kernels import Patch

Array = NDArray[Any]

# Chosen on BSD68 and Kodak photographs (images) and on synthetic test signals (1-D) with `benchmarks/tune_denoise.py`.
MOST_STEPS = 10
_ENOUGH_RESIDUAL = 0.4  # of sigma; one step at the widths below removes more, unless hardly any patches are alike
_VARIANCE_MARGIN = 1.4  # patches that happen to be alike overestimate the variance beyond the noise
SMOOTHING = 0.55  # nodes; patches are compared after a Gaussian of this width, which takes more noise than signal
_WIDTH = 1.9  # of the noise left in the patches, over the fourth root of the samples in a patch
_LEVEL_STEP = math.log(1.5)  # of the noise, where it varies
_SPATIAL = 0.6  # of the search radius: near patches are likelier alike
#: Pixels are compared and averaged in single precision where the range is below so many times the noise: weights halve
#: in size, and time with them.
SINGLE = 1e4
FUNCTIONAL = "E of patch tokens under the patch kernel, one fidelity a pixel; semi-implicit steps of 1"
_WEIGHTS_SHARE = 0.5  # of the work, told when the weights are there
#: Bytes of weights that are stored. More are computed anew at each average, of which there are three for most images:
#: from a megapixel on that takes no longer than to write and read them.
STORED = 2.5e8
#: Bytes a sample and channel of a part, in double precision; half of them in single precision.
_PART_BYTES = 100
_MORE_PIXELS = (0.32, 0.65)  # noise over signal, a channel: from here on patches of 5 and of 7 pixels instead of 3


@dataclass(frozen=True)
class Pixels:
    """An image's flow."""

    kernel: Patch  # in units of the noise
    precision: np.dtype[Any]
    unit: float = 1.0  # the noise in the units of the input, for what is told
    fidelity: float | None = None  # a constant in place of the local one
    steps: int | None = None  # exactly so many, in place of the rule to stop

    @classmethod
    def of(cls, spread: Spread, dimension: int, options: Options, unit: float = 1.0) -> Pixels:
        width = None if options.width is None else options.width / unit
        kernel = kernel_for(spread.ratio, dimension, spread.channels, width, options.patch_size, options.search_radius)
        precision = np.dtype(np.float32) if spread.extent < SINGLE else spread.dtype
        return cls(kernel, precision, unit, options.fidelity, options.steps)

    @property
    def halo(self) -> tuple[int, int, int]:
        return (reach(self.kernel, self.steps or MOST_STEPS),) * 3

    def bytes_needed(self, shape: tuple[int, ...], channels: int) -> int:
        return _PART_BYTES * channels * math.prod(shape)

    def told(self) -> dict[str, Any]:
        method = "stencil: weights are computed anew at each average"
        return {"functional": FUNCTIONAL, "parameters": parameters(self.kernel, self.unit), "method": method,
                "steps": self.steps or 0}  # fmt: skip

    def of_part(self, f: Array, corner: tuple[int, ...], whole: tuple[int, ...], missing: Array | None = None) -> Array:
        path = solved(f.astype(self.precision, copy=False), self, missing=missing, store=False).path
        return path[-1].astype(f.dtype, copy=False)

    def whole_problem(self, f: Array, variance: Array | None) -> Problem:
        if variance is not None:
            raise InputError("sigma: got a map, for which 'pixels' runs a flow for each level; use denoise()")
        return problem(f.astype(self.precision, copy=False), self)

    def run(self, f: Array, frame: Frame, watch: Watch) -> Run:
        if watch.device.tensors:
            raise InputError(
                f"device: got {watch.device.name!r} with quality='pixels', a flow on the CPU alone, "
                "expected 'cpu'; or take 'balanced'"
            )
        given = f.astype(self.precision, copy=False)
        if frame.variance is None:
            outcome = solved(given, self, watch, missing=frame.missing)
        else:
            asked = (frame.options, self.unit)
            outcome = solved_by_level(given, frame.variance, *asked, watch, missing=frame.missing)
        solution = outcome.solution
        told = {**outcome.problem.told, "steps": int(solution.stats["steps"]), "stopped_by": solution.message}
        return Run([u.astype(f.dtype, copy=False) for u in outcome.path], told)


@dataclass(frozen=True)
class Outcome:
    """What was run."""

    problem: Problem
    solution: Solution[Any]
    path: list[Array]


def problem(
    f: Array, chosen: Pixels, watch: Watch = ALONE, *, missing: NDArray[np.bool_] | None = None, store: bool = True
) -> Problem:
    kernel, fidelity, steps = chosen.kernel, chosen.fidelity, chosen.steps
    grid, compared = Grid(f.shape[:-1], boundary="reflect"), _smoothed(f)

    def build() -> Affinity:
        return _affinity(kernel, grid, compared, store, watch.limit)

    trail = watch.trail
    operator = build() if trail is None else trail.weights(build, kernel, grid, compared, store, watch.limit)
    strength: Any = _local_fidelity(operator, f, kernel.patch_size) if fidelity is None else fidelity
    if missing is not None:
        strength = np.where(missing, f.dtype.type(0), f.dtype.type(strength) if fidelity is not None else strength)
    kind = GradientFlow if trail is None else _RememberingFlow
    flow = kind(E(operator, f, strength, measure="degree"), metric="degree")
    rules = (DiscrepancyPrinciple(f, 1.0, _ENOUGH_RESIDUAL),) if steps is None else ()
    told = {
        "functional": FUNCTIONAL,
        "parameters": {**parameters(kernel, chosen.unit), "fidelity_mean": float(np.mean(strength))},
        "method": f"{operator.method}: {operator.reason}",
        "memory_bytes": operator.memory_bytes,
    }
    return Problem(flow, SemiImplicit(dt=1.0), float(steps or MOST_STEPS), rules, told=told)


def solved(f: Array, chosen: Pixels, watch: Watch = ALONE, **options: Any) -> Outcome:
    made = problem(f, chosen, watch, **options)
    path, solution = run(made, replace(watch, tell=within(watch.tell, _WEIGHTS_SHARE, 1.0)))
    return Outcome(made, solution, path)


def solved_by_level(
    f: Array, variance: Array, asked: Options, unit: float = 1.0, watch: Watch = ALONE, **options: Any
) -> Outcome:
    """Run the flow at levels of the noise at most a factor of 1.5 apart, and interpolate between them."""
    sigma, dimension = np.sqrt(variance), sum(n > 1 for n in f.shape[:-1])
    low, high = np.log(float(sigma.min())), np.log(float(sigma.max()))
    count = max(math.ceil((high - low) / _LEVEL_STEP), 1) + 1
    levels = np.exp(np.linspace(low, high, count))
    position = (np.log(sigma) - low) / max((high - low) / (count - 1), np.finfo(float).tiny)
    results = []
    for k, level in enumerate(levels):
        part = replace(watch, trail=None, tell=within(watch.tell, k / count, (k + 1) / count))
        one = f / f.dtype.type(level)
        outcome = solved(one, Pixels.of(Spread.of(one), dimension, asked, unit), part, **options)
        near = np.maximum(1 - np.abs(position - k), 0)[..., None].astype(f.dtype)
        results.append((outcome, near * f.dtype.type(level)))
    length = min(len(outcome.path) for outcome, _ in results)
    path = [sum(share * outcome.path[k - length] for outcome, share in results) for k in range(length)]
    return replace(results[-1][0], path=path)


class _RememberingFlow(GradientFlow):
    """A gradient flow that keeps its last average: the energies of a state and the step from it need the same one."""

    def __init__(self, *given: Any, **words: Any) -> None:
        super().__init__(*given, **words)
        self._last: list[tuple[Array, Array]] = []  # one place for the flow at all times

    def _averaged(self, u: Array) -> Array:
        if not self._last or self._last[0][0] is not u:
            self._last[:] = [(u, super()._averaged(u))]
        return self._last[0][1]


def kernel_for(
    ratio: float,
    dimension: int,
    channels: int,
    width: float | None,
    patch_size: int | None,
    search_radius: int | None,
) -> Patch:
    from scipy.ndimage import gaussian_filter

    if patch_size is None:
        # The more noise over signal, the more samples it takes to tell patches apart; channels are samples too.
        patch_size = 3 + 2 * sum(ratio > limit for limit in _MORE_PIXELS) if dimension == 2 else 15
    if search_radius is None:
        search_radius = 8 if dimension == 2 else 60
    # What the smoothing leaves of white noise of variance 1.
    impulse = np.zeros(2 * math.ceil(4 * SMOOTHING) + 3)
    impulse[len(impulse) // 2] = 1
    noise = float(np.linalg.norm(gaussian_filter(impulse, SMOOTHING))) ** dimension
    if width is None:
        width = _WIDTH * noise * float(channels * patch_size**dimension) ** -0.25
    return Patch(
        width=width, patch_size=patch_size, search_radius=search_radius, sigma=noise, tokens="patch",
        spatial_width=_SPATIAL * search_radius,
    )  # fmt: skip


def _smoothed(f: NDArray[Any]) -> NDArray[Any]:
    """Return the signal as patches of it are compared."""
    from scipy.ndimage import gaussian_filter

    return np.asarray(gaussian_filter(f, (SMOOTHING,) * (f.ndim - 1) + (0,), mode="reflect"))


def _affinity(kernel: Patch, grid: Grid, f: NDArray[Any], store: bool, memory_limit: float | None) -> Affinity:
    if not store:
        return affinity(kernel, grid, f, store=False, memory_limit=memory_limit)
    most = STORED if memory_limit is None else min(memory_limit, STORED)
    try:
        return affinity(kernel, grid, f, memory_limit=most)
    except MemoryLimitError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NlflowWarning)  # the shrunk window was reported by the first call
            with remedied("max_memory", "use a smaller search_radius or image, or raise max_memory"):
                result = affinity(kernel, grid, f, store=False, memory_limit=memory_limit)
        result.reason = f"weights take more than {most / 1e6:.4g} MB and are computed anew at each average"
        return result


def _local_fidelity(operator: Affinity, f: NDArray[Any], patch_size: int) -> NDArray[Any]:
    """Return lambda~_i = max(var_i - 1.4, 0): the variance of the neighbours found, beyond that of the noise.

    With it a semi-implicit step is the scalar form of the local Wiener filter, Pf + C / (C + sigma^2) (f - Pf).
    """
    from scipy.ndimage import correlate1d

    power = np.sum(f * f, axis=-1, keepdims=True)
    moments = operator.average(np.concatenate([f, power], axis=-1))
    mean = moments[..., :-1]
    variance = (moments[..., -1] - np.sum(mean * mean, axis=-1)) / f.shape[-1]
    # Summed anew for each node: the running sums of a uniform filter depend on where the line begins.
    for axis in range(variance.ndim):
        variance = correlate1d(variance, np.full(patch_size, 1 / patch_size), axis, mode="reflect")
    return np.asarray(np.maximum(variance - _VARIANCE_MARGIN, 0).astype(f.dtype))


def parameters(kernel: Patch, unit: float) -> dict[str, Any]:
    return {
        "width": kernel.width * unit,
        "patch_size": kernel.patch_size,
        "search_radius": kernel.search_radius,
        "spatial_width": kernel.spatial_width or 0.0,
        "smoothing": SMOOTHING,
    }


def reach(kernel: Patch, steps: int) -> int:
    smoothing = int(4 * SMOOTHING + 0.5)  # where SciPy cuts the Gaussian off
    return steps * kernel.search_radius + 3 * (kernel.patch_size // 2) + smoothing


def enough(squares: float, count: int) -> bool:
    return math.sqrt(squares / count) >= _ENOUGH_RESIDUAL
