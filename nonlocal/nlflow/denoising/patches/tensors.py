"""Steps on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np

from nlflow._array import Array
from nlflow.denoising.patches.filters import (
    NOT_FINITE,
    OUT_OF_RANGE,
    Correlation,
    Groups,
    Images,
    Stage,
    cosines,
)
from nlflow.denoising.patches.lattice import Lattice, nearest_offsets
from nlflow.errors import InputError, NumericalError, check_integer

_PART = 4  # of the memory goes to chunks, at most
_MOST = 32  # constants that are kept
# Largest relative error that rounding may leave in a weight, as `nlflow.backends.numba.groups` has it. A factor of
# Cholesky's is backward stable, so that the error is eps kappa.
_ERROR = 0.1


class TensorFilter:
    """The filter of torch tensors, in batches of groups; a subclass may find other groups.

    Groups of float32 that would lose too many digits are filtered in float64. Estimates have derivatives in the images,
    for groups held still. On a GPU bits repeat only under ``torch.use_deterministic_algorithms``.

    Parameters
    ----------
    numbers : int, optional
        About how many numbers a worker holds at a time; 2^22 on the CPU and 2^27 on a GPU by default.
    kernels : bool, optional
        Whether kernels in Triton compute what they can; by default on GPUs of CUDA if triton is installed.
    """

    def __init__(self, numbers: int | None = None, kernels: bool | None = None) -> None:
        self.numbers = None if numbers is None else check_integer("numbers", numbers, minimum=1)
        self.kernels = kernels

    def why_no_search(self, guide: Any, lattice: Lattice) -> str:
        """Return why no kernel in Triton does the search, or ""."""
        from nlflow.backends.triton import choice

        offsets = math.prod(2 * radius + 1 for radius in lattice.radii)
        return choice.why_not(guide, self.kernels) or choice.why_no_search(guide, offsets)

    def why_no_step(self, lattice: Lattice, images: Images, stage: Stage) -> str:
        """Return why no kernel in Triton does the step, or ""."""
        from nlflow.backends.torch.groups import tracked
        from nlflow.backends.triton import choice

        state: Any = images.state
        three: Any = (state, images.pilot, images.observed)
        return choice.why_not(state, self.kernels) or choice.why_no_step(
            state, math.prod(lattice.patch), correlated=images.correlation is not None, across=stage.across > 0,
            tracked=tracked(three),
        )  # fmt: skip

    def told(self, like: Any, across: float) -> str:
        """Return in words what computes groups and steps."""
        from nlflow.backends.triton import choice

        why = choice.why_not(like, self.kernels) or ("estimates are combined across members" if across else "")
        return f"on tensors by operations of torch, as {why}" if why else "on tensors by kernels in Triton"

    def _chunk(self, like: Any) -> int:
        from nlflow.backends.torch.workers import chunk_for

        return chunk_for(like.device) if self.numbers is None else self.numbers

    @classmethod
    def within(cls, like: Any, limit: float) -> tuple[TensorFilter, int]:
        """Return a filter for a limit in bytes, and the bytes of its chunks."""
        from nlflow.backends.torch.workers import bytes_of_chunks, chunk_for

        held = bytes_of_chunks(like.device)
        numbers = max(1, min(chunk_for(like.device), int(min(limit, 2**62) / (_PART * held))))
        return cls(numbers), held * numbers

    @staticmethod
    def held(like: Any) -> Any:
        """Return a context that keeps the workers over many steps."""
        from nlflow.backends.torch.workers import workers_for

        return workers_for(like.device)

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        """What is constant on a device: made once, as each copy there takes as long as a small step."""
        return {}

    def _constant(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            if len(self._kept) >= _MOST:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def _placed(self, key: tuple[Any, ...], make: Callable[[], Any], like: Any) -> Any:
        """Return a constant array on the device of a tensor."""
        import torch

        return self._constant(key, lambda: torch.from_numpy(np.ascontiguousarray(make())).to(like.device))

    def find(self, guide: Array, lattice: Lattice) -> tuple[Array, Array]:
        """Return the nearest patches of each reference, by squared distance; counts of 0 for a guide out of range."""
        import torch

        from nlflow.backends.torch.groups import unpacked
        from nlflow.backends.torch.search import Windows, find_groups

        if len(lattice.motion) > 1:
            raise InputError("moving: got tensors, whose search follows no motion, expected False; give NumPy arrays")
        guide = unpacked(guide)[0].detach()
        references = (lattice.slices, lattice.rows, lattice.columns)
        most = math.sqrt(torch.finfo(guide.dtype).max / (8 * len(guide) * math.prod(lattice.patch)))
        planes, key = guide.reshape(len(guide), *lattice.shape), _key(lattice, guide)
        order = nearest_offsets(lattice.radii)[1]
        if not self.why_no_search(planes, lattice):
            from nlflow.backends.triton import search

            *places, order = (
                self._placed((name, *key), partial(np.asarray, array), guide)
                for name, array in zip("zyxo", (*references, order.astype(np.int64)), strict=True)
            )
            members, counts = search.find_groups(planes, places, lattice.patch, lattice.radii, order, lattice.most)
        else:
            windows = self._constant(
                ("windows", *key),
                lambda: Windows.of(references, lattice.patch, lattice.radii, lattice.shape, order, guide.device),
            )
            members, counts = find_groups(planes, windows, lattice.most, self._chunk(guide))
        return members, torch.where(guide.abs().amax() < most, counts, 0)

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = lambda share: None
    ) -> tuple[Array, Array]:
        """See `GroupFilter`."""
        import torch

        from nlflow.backends.torch.groups import Step

        lattice, members = groups.lattice, groups.members
        state: Any = images.state
        variance: Any = images.variance
        rounding = tuple(torch.finfo(kind).eps / _ERROR for kind in (state.dtype, torch.float64))
        planes: Any = [one.reshape(len(one), *lattice.shape) for one in (state, images.pilot, images.observed)]
        if images.pilot is state:
            planes[1] = planes[0]
        within, matrices = self._constants(lattice, images.correlation, stage, state)
        if not self.why_no_step(lattice, images, stage):
            from nlflow.backends.triton import groups as kernels

            fused = kernels.Step(
                members, groups.counts, lattice.shape, lattice.patch, variance.reshape(len(state), -1), matrices.basis,
                stage.powers, stage.leave, stage.factor, stage.shrink, stage.running, (rounding[0], rounding[1]),
                self._chunk(state),
            )  # fmt: skip
            estimate, following = fused(*planes)
            during(1.0)
            in_range, finite = torch.stack(
                (groups.counts.amin() > 0, estimate.isfinite().all() & following.isfinite().all())
            ).tolist()  # fmt: skip
            _check(in_range, finite)
            return estimate.reshape(state.shape), following.reshape(state.shape)
        own = str(self.find.__module__).startswith("nlflow.")  # which finds all that there are
        full = lattice.fewest >= members.shape[1] if own else bool((groups.counts == members.shape[1]).all())
        step = Step(
            members, groups.counts, full, lattice.shape, lattice.patch, within, variance.reshape(len(state), -1),
            matrices, stage.leave, stage.factor, stage.shrink, stage.across, stage.running, (rounding[0], rounding[1]),
            self._chunk(state), during, _check,
        )  # fmt: skip
        estimate, following = step(*planes)
        return estimate.reshape(state.shape), following.reshape(state.shape)

    def _constants(self, lattice: Lattice, correlation: Any, stage: Stage, like: Any) -> tuple[Any, Any]:
        """Return how far the samples of a patch lie behind its first, and `Matrices`."""
        from nlflow.backends.torch.groups import Matrices
        from nlflow.backends.torch.search import patch_offsets

        key = lattice.shape, lattice.patch, like.device
        within = self._placed(("within", *key), lambda: patch_offsets(lattice.patch, lattice.shape), like)
        basis = self._placed(("cosines", *key), lambda: cosines(lattice.patch), like) if stage.cosine else None
        if correlation is None:
            return within, Matrices(None, None, None, basis, stage.powers)
        found = Correlation.of(correlation, lattice.patch, len(like))
        given = found.matrices[:, None], found.whitening[:, None], found.extremes
        matrices, whitening, extremes = (
            self._placed((name, *key, correlation.tobytes()), partial(np.asarray, array), like)
            for name, array in zip(("matrices", "whitening", "extremes"), given, strict=True)
        )
        return within, Matrices(matrices, whitening, extremes, basis, stage.powers)


def _key(lattice: Lattice, like: Any) -> tuple[Any, ...]:
    places = (one.tobytes() for one in (lattice.slices, lattice.rows, lattice.columns))
    return lattice.shape, lattice.patch, lattice.radii, like.device, *places


def _check(in_range: bool, finite: bool) -> None:
    if not in_range:
        raise NumericalError(OUT_OF_RANGE)
    if not finite:
        raise NumericalError(NOT_FINITE)


class FrozenFilter(TensorFilter):
    """A filter whose later runs have the groups of the first."""

    def __init__(self, numbers: int | None = None) -> None:
        super().__init__(numbers)
        self._found: list[tuple[Array, Array]] = []
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def find(self, guide: Array, lattice: Lattice) -> tuple[Array, Array]:
        if self._next == len(self._found):
            self._found.append(super().find(guide, lattice))
        self._next += 1
        return self._found[self._next - 1]
