"""What checkpoints hold."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Pending
from nlflow.domains import Grid
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.store.identity import described
from nlflow.store.storage import Arrays, Meta

ANOTHER = (
    "the checkpoint belongs to another problem (signal, kernel, flow, times, those of trackers, or integrator differ); "
    "resume with the arguments that it was written with, or start afresh"
)
EARLIER = (
    "an earlier version wrote the checkpoint, whose fingerprint had six digits of some numbers, so that nobody can "
    "tell whether it is of this problem; resume with that version, or start afresh"
)
FINGERPRINTS = "bits:"
"""What fingerprints begin with, which have all bits of all numbers."""
MEMORY = "memory/"
"""What the names of signals begin with in a checkpoint that the integrator remembers."""

_REMEMBERED = (
    "h",
    "error",
    "error_bound",
    "rejected",
    "search",
    "draws",
)  # by the package's own integrators, from step to step


@dataclass(frozen=True)
class State:
    """Where an integration stands; interruptions find it whole."""

    u: Array
    t: float = 0.0
    steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    kernel_signal: Array | None = None  # what an evolving kernel was taken from
    outputs: tuple[tuple[float, Array, Pending | float], ...] = ()  # times, signals and energies that are due
    applications: int = 0  # of P, by the steps
    analysis: int = 0  # of P, by energies and trackers


def incomplete(arrays: Arrays, meta: Meta, shape: tuple[int, ...], end: float) -> str | None:
    columns = [arrays.get(name) for name in ("reached", "energies", "snapshots")]
    count = 0 if columns[0] is None else columns[0].size
    expected = {"u": shape, "reached": (count,), "energies": (count,), "snapshots": (count, *shape)}
    if all(column is None for column in columns):
        expected = {"u": shape}
    if "kernel_signal" in arrays:
        expected["kernel_signal"] = shape
    expected.update({name: shape for name in arrays if name.startswith(MEMORY)})
    for name, wanted in expected.items():
        found = arrays.get(name)
        if found is None or found.dtype.kind != "f" or found.shape != wanted:
            return f"the checkpoint has no {name} of shape {wanted}"
    if not all(np.isfinite(arrays[name]).all() for name in expected if name != "energies"):
        return "the checkpoint has NaN or infinite values"
    memory = meta.get("memory")
    if not isinstance(memory, dict):
        return "the checkpoint has no memory of the integrator"
    numbers = {name: meta.get(name) for name in ("t", "steps")}
    own = {name: memory[name] for name in _REMEMBERED if name in memory}
    for name, number in {**numbers, **own}.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            return f"the checkpoint has no number {name} >= 0"
    if float(meta["t"]) > end or not isinstance(meta["steps"], int):
        return "the checkpoint has no time and step within this flow"
    return None


def unseeded(meta: Meta, flow: Flow) -> str | None:
    seed, noise = meta.get("seed"), flow.noise
    if seed is None and noise is None:
        return None
    if noise is None:
        return f"the checkpoint is of a flow with noise of the seed {seed}, got one without; add Noise(..., rng={seed})"
    if seed is None:
        return f"the checkpoint is of a flow without noise, got {noise!r}; leave it out, or start afresh"
    if seed == noise.seed:
        return None
    got = f"the seed {noise.seed}" if noise.seeded else "none, for which another was drawn"
    return f"the checkpoint is of a run with the seed {seed}, got {got}; resume with Noise(..., rng={seed})"


def fingerprint(
    flow: Flow, u: Array, times: NDArray[np.float64], integrator: Integrator, looks: list[str] | None = None
) -> str:
    """Return a digest of what a problem was given; `probe` stands for its kernel."""
    digest = hashlib.sha256()
    given = flow.given()
    words = [word for word in given if isinstance(word, str)]
    own = [piece for piece in given if not (piece is None or isinstance(piece, str) or _is_array(piece))]
    place = flow.affinity.domain.item
    grids = [place] if isinstance(place, Grid) else []  # other nodes are shared out among processes
    objects = (flow.affinity.kernel, *grids, integrator, *own, *([] if flow.noise is None else [flow.noise.given()]))
    texts = (repr(flow), repr(flow.affinity.whole_shape), *words, *(looks or []), *map(described, objects))
    for text in texts:
        digest.update(text.encode())
    pieces = [piece for piece in given if _is_array(piece)]
    # What depends on time: at the start, at an odd moment and at the end.
    moments = (0.0, 0.3819660112501051 * float(times[-1]), float(times[-1])) if flow.timed else ()
    changing = [signal for t in moments for signal in flow.moments(t, u)]
    for piece in (times, u, *pieces, *changing):
        array = np.asarray(piece) if piece is times else flow.affinity.whole(piece)
        digest.update(str((array.dtype, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{FINGERPRINTS}{digest.hexdigest()}"


def _is_array(piece: Any) -> bool:
    return hasattr(piece, "shape") and hasattr(piece, "dtype")


def probe(flow: Flow, like: Array) -> NDArray[np.float64]:
    """Return log d and P of a fixed signal, by which kernels are compared up to rounding."""
    affinity = flow.affinity
    signal = affinity.own(np.random.default_rng(0).standard_normal(affinity.whole_shape), like)
    seen = [values for one in flow.affinities for values in (one.log_degree, one._average(signal))]
    return np.stack([np.asarray(affinity.whole(values), dtype=np.float64) for values in seen])
