"""Checkpoints of an integration: what is written, which problem it belongs to, and how a run goes on from it.

`nlflow.store.checkpoints` writes the files; the tracker `Checkpoint` says when.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, is_numpy
from nlflow.backends.machine import provenance
from nlflow.errors import FileFormatError, InputError, NlflowWarning
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.flows.trackers import Checkpoint, Tracker
from nlflow.store.checkpoints import Checkpoints
from nlflow.store.identity import described
from nlflow.store.storage import Arrays, Meta

_ANOTHER = (
    "the checkpoint belongs to another problem (signal, kernel, flow, times, those of trackers, or integrator differ); "
    "resume with the arguments that it was written with, or start afresh"
)
_EARLIER = (
    "an earlier version wrote the checkpoint, whose fingerprint had six digits of some numbers, so that nobody can "
    "tell whether it is of this problem; resume with that version, or start afresh"
)
_FINGERPRINTS = "bits:"
"""What fingerprints begin with, which have all bits of all numbers."""
_MEMORY = "memory/"
"""What the names of signals begin with in a checkpoint that the integrator remembers."""

_REMEMBERED = ("h", "error", "error_bound", "rejected", "search")  # by the package's own integrators, from step to step


@dataclass(frozen=True)
class State:
    """Where an integration stands. Replaced as a whole, so that an interruption never finds half of a step in it."""

    u: Array
    t: float = 0.0
    steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    kernel_signal: Array | None = None  # what an evolving kernel was taken from
    outputs: tuple[tuple[float, Array, float], ...] = ()  # times, signals and energies that are due
    applications: int = 0  # of P, by the steps
    analysis: int = 0  # of P, by energies and trackers


class Checkpointed:
    """An integration that writes checkpoints and goes on from them; the time loop is one."""

    flow: Flow
    state: State
    times: NDArray[np.float64]
    integrator: Integrator
    watchers: list[Tracker]
    _start: tuple[Flow, Array]

    @property
    def names(self) -> list[str]:
        """Names of the watchers, numbered where several are of one kind."""
        names: list[str] = []
        for watcher in self.watchers:
            same = sum(name.split("-")[0] == watcher.name for name in names)
            names.append(f"{watcher.name}-{same + 1}" if same else watcher.name)
        return names

    @cached_property
    def fingerprint(self) -> str:
        """Identify the problem that the loop was started on; only checkpoints need it."""
        # Steps end where trackers look at times of their own.
        looks = sorted({words for watcher in self.watchers if (words := watcher.times.words())})
        return fingerprint(*self._start, self.times, self.integrator, looks)

    @cached_property
    def probe(self) -> NDArray[np.float64]:
        """What the kernel does to a fixed signal; only checkpoints need it."""
        return probe(*self._start)

    def about(self) -> dict[str, Any]:
        """Return how the result is made and of which problem it is, for files that trackers write."""
        kernel = hashlib.sha256(self.probe.astype(np.float32).tobytes()).hexdigest()
        made = provenance_of(self.flow, self.integrator, self.state.u)
        return {**made, "problem": self.fingerprint, "kernel": kernel}

    def save(self, states: Checkpoints) -> None:
        """Write the state of the loop as a checkpoint."""
        now, whole = self.state, self.flow.affinity.whole
        writes = self.flow.affinity.writes(now.steps)
        arrays = {"u": whole(now.u), "probe": self.probe}
        if now.outputs:
            arrays["reached"] = np.array([output[0] for output in now.outputs])
            arrays["snapshots"] = np.stack([whole(output[1]) for output in now.outputs])
            arrays["energies"] = np.array([output[2] for output in now.outputs])
        if now.kernel_signal is not None:
            arrays["kernel_signal"] = whole(now.kernel_signal)
        # What begins with an underscore is a convenience of this process, recomputed after a resume.
        kept = {key: value for key, value in now.memory.items() if not key.startswith("_")}
        signals = [key for key, value in kept.items() if getattr(value, "shape", ())]
        arrays.update({_MEMORY + key: whole(kept[key]) for key in signals})
        for name, watcher in zip(self.names, self.watchers, strict=True):
            arrays.update({f"record/{name}/{key}": value for key, value in watcher.record().items()})
        meta = {
            "fingerprint": self.fingerprint,
            "t": now.t,
            "steps": now.steps,
            "memory": {key: value for key, value in kept.items() if key not in signals},
            "provenance": provenance_of(self.flow, self.integrator, now.u),
        }
        if writes:
            states.save(arrays, meta)

    def _resume(self, resume: str | os.PathLike[str] | bool | None) -> None:
        """Go on from a checkpoint, if there is to be one, and let checkpoints be written."""
        own = [watcher for watcher in self.watchers if isinstance(watcher, Checkpoint)]
        states: Checkpoints | None = None
        if resume is True:
            if not own:
                raise InputError("resume: got True without a Checkpoint among the trackers, expected one, or a path")
            states = own[0].states if self.flow.affinity.agreed(bool(own[0].states)) else None
        elif resume is not None and resume is not False:
            if not isinstance(resume, str | os.PathLike):
                raise InputError(f"resume: got {resume!r}, expected the path of a checkpoint, or True")
            # Of a path that is written to as well, the same object: it knows what it has read.
            same = [watcher.states for watcher in own if watcher.path.absolute() == Path(resume).absolute()]
            states = same[0] if same else Checkpoints(resume, "checkpoint")
        if self.flow.affinity.agreed(states is not None or any(watcher.states for watcher in own)):
            # By all processes, since they compute them together; from here on one may look at files alone.
            _ = self.fingerprint, self.probe
        if states is not None:
            self._restore(states)
        for watcher in own:
            watcher.bind(self.flow, self.save, self._unlike)

    def _unlike(self, arrays: Arrays, meta: Meta) -> str | None:
        """Return why a checkpoint does not belong to this problem, None if it does."""
        try:
            probe, fingerprint = arrays["probe"], meta["fingerprint"]
            rounding = 1e-4 if arrays["u"].dtype == np.float32 else 1e-9
        except KeyError as error:
            return f"the checkpoint has no {error}"
        same = probe.shape == self.probe.shape and probe.dtype.kind == "f"
        same = same and np.allclose(probe, self.probe, rtol=rounding, atol=rounding)
        if isinstance(fingerprint, str) and not fingerprint.startswith(_FINGERPRINTS):
            return _EARLIER
        if fingerprint != self.fingerprint or not bool(same):
            return _ANOTHER
        if self.flow.evolving and "kernel_signal" not in arrays:
            return "the checkpoint has no kernel_signal"
        nodes = self.flow.affinity.whole_shape
        return _incomplete(arrays, meta, (*nodes, *self.state.u.shape[len(nodes) :]), float(self.times[-1]))

    def _restore(self, states: Checkpoints) -> None:
        path = states.path

        def fits(arrays: Arrays, meta: Meta) -> str | None:
            # The first process alone has the whole problem to compare with.
            reason = self._unlike(arrays, meta)
            return None if self.flow.affinity.agreed(reason is None) else reason or _ANOTHER

        arrays, meta = states.load(fits)
        like, own = self.state.u, self.flow.affinity.own
        columns = [arrays[name] for name in ("reached", "snapshots", "energies") if name in arrays]
        outputs = tuple((float(t), own(u, like), float(e)) for t, u, e in zip(*columns, strict=True))
        u, t, steps = own(arrays["u"], like), float(meta["t"]), int(meta["steps"])
        memory = dict(meta["memory"])
        memory.update({k.removeprefix(_MEMORY): own(a, like) for k, a in arrays.items() if k.startswith(_MEMORY)})
        signal = None
        if self.flow.evolving:
            signal = u if steps % self.flow.every == 0 else own(arrays["kernel_signal"], like)
            self.flow = self.flow.following(signal, memory)
        self.flow = self.flow.when(t)
        self.state = State(u, t, steps, memory, signal, outputs)
        for name, watcher in zip(self.names, self.watchers, strict=True):
            prefix = f"record/{name}/"
            record = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            if record:
                try:
                    watcher.restore(record)
                except (KeyError, ValueError, TypeError, IndexError) as error:
                    raise FileFormatError(
                        f"{path}: holds records that the tracker {name!r} cannot take up ({error}); use an earlier "
                        "checkpoint, or start afresh"
                    ) from error
            elif watcher.record():
                warnings.warn(
                    f"{path}: holds no records of the tracker {name!r}, which begins at t={self.state.t:g}",
                    NlflowWarning,
                    stacklevel=6,
                )


def _incomplete(arrays: Arrays, meta: Meta, shape: tuple[int, ...], end: float) -> str | None:
    """Return what is missing or wrong in a checkpoint, None if it is whole; a valid checksum does not prove that."""
    columns = [arrays.get(name) for name in ("reached", "energies", "snapshots")]
    count = 0 if columns[0] is None else columns[0].size
    expected = {"u": shape, "reached": (count,), "energies": (count,), "snapshots": (count, *shape)}
    if all(column is None for column in columns):
        expected = {"u": shape}
    if "kernel_signal" in arrays:
        expected["kernel_signal"] = shape
    expected.update({name: shape for name in arrays if name.startswith(_MEMORY)})
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


def fingerprint(
    flow: Flow, u: Array, times: NDArray[np.float64], integrator: Integrator, looks: list[str] | None = None
) -> str:
    """Identify what a problem was given, bit by bit; `probe` stands for its kernel, `looks` for times of trackers."""
    digest = hashlib.sha256()
    given = flow.given()
    words = [word for word in given if isinstance(word, str)]
    own = [piece for piece in given if not (piece is None or isinstance(piece, str) or _is_array(piece))]
    objects = (flow.affinity.kernel, integrator, *own)
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
    return f"{_FINGERPRINTS}{digest.hexdigest()}"


def _is_array(piece: Any) -> bool:
    return hasattr(piece, "shape") and hasattr(piece, "dtype")


def probe(flow: Flow, like: Array) -> NDArray[np.float64]:
    """Return log d and P of one fixed signal, which stand for the kernel: hardly any other has both.

    To be compared up to rounding, which may differ between machines and numbers of threads.
    """
    affinity = flow.affinity
    signal = affinity.own(np.random.default_rng(0).standard_normal(affinity.whole_shape), like)
    pair = (affinity.log_degree, affinity._average(signal))
    return np.stack([np.asarray(affinity.whole(values), dtype=np.float64) for values in pair])


def provenance_of(flow: Flow, integrator: Integrator, u: Array) -> dict[str, Any]:
    """Return what a result or a checkpoint says about how it was made."""
    device = "cpu" if is_numpy(u) else str(getattr(u, "device", "cpu"))
    return {
        **provenance(device, getattr(flow.affinity, "seed", None)),
        "flow": repr(flow),
        "integrator": repr(integrator),
    }
