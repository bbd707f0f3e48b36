"""Which problem a checkpoint belongs to, and whether it is a state of it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.io.storage import Arrays, Meta

__all__ = ["MEMORY", "fingerprint", "incomplete", "probe"]

MEMORY = "memory/"
"""What the names of signals begin with in a checkpoint that the integrator remembers."""

_REMEMBERED = ("h", "error", "error_bound", "rejected")  # by the package's own integrators, from step to step


def incomplete(arrays: Arrays, meta: Meta, shape: tuple[int, ...], end: float) -> str | None:
    """Return what of a checkpoint is no state of a signal of this shape, None if all is; anybody can sum a checksum."""
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


def fingerprint(flow: Flow, u: Array, times: NDArray[np.float64], integrator: Integrator) -> str:
    """Identify what a problem was given, bit by bit; `probe` stands for its kernel."""
    digest = hashlib.sha256()
    given = flow.given()
    words = [word for word in given if isinstance(word, str)]
    for text in (repr(flow), repr(integrator), repr(flow.affinity.whole_shape), *words):
        digest.update(text.encode())
    pieces = [piece for piece in given if piece is not None and not isinstance(piece, str)]
    for piece in (times, u, *pieces):
        alone = isinstance(piece, float) or piece is times
        array = np.asarray(piece) if alone else flow.affinity.whole(piece)
        digest.update(str((array.dtype, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def probe(flow: Flow, like: Array) -> NDArray[np.float64]:
    """Return log d and P of one fixed signal, which stand for the kernel: hardly any other has both.

    To be compared up to rounding, which may differ between machines and numbers of threads.
    """
    affinity = flow.affinity
    signal = affinity.own(np.random.default_rng(0).standard_normal(affinity.whole_shape), like)
    pair = (affinity.log_degree, affinity._average(signal))
    return np.stack([np.asarray(affinity.whole(values), dtype=np.float64) for values in pair])
