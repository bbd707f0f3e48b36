"""The step on groups of alike patches on tensors: the third form of `GroupFilter`, for GPUs and for derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import Array
from nlflow.denoising.patches.filters import Correlation, Groups, Images, Stage, cosines
from nlflow.denoising.patches.lattice import Lattice, nearest_offsets
from nlflow.errors import InputError, NumericalError, check_integer

_PART = 4  # of the memory goes to chunks, at most
# Largest relative error that rounding may leave in a weight, as `nlflow.backends.numba.groups` has it. A factor of
# Cholesky's is backward stable, so that the error is eps kappa.
_ERROR = 0.1


class TensorFilter:
    """Groups and steps on torch tensors, in batches of groups; a subclass may find other groups.

    Members and counts are int32 tensors on the device of the guide. Groups are filtered in the precision of the images;
    those that would lose too many digits in float32 are filtered in float64. Estimates have derivatives in the images,
    in both modes, for groups that are found already. On the CPU there are as many workers as torch has threads, and
    the bits do not depend on their number. On a GPU sums have one order under ``torch.use_deterministic_algorithms``.

    On a GPU of CUDA, kernels in Triton take the place of torch's operations where they can: for white noise, without a
    step across the members and without derivatives; `why_no_search` and `why_no_step` tell why not.

    Parameters
    ----------
    numbers : int, optional
        How many numbers a worker holds at a time, about: 2^20 on the CPU and 2^27 on a GPU.
    kernels : bool, optional
        Whether kernels in Triton compute what they can: by default on GPUs of CUDA, where triton is installed.
    """

    def __init__(self, numbers: int | None = None, kernels: bool | None = None) -> None:
        self.numbers = None if numbers is None else check_integer("numbers", numbers, minimum=1)
        self.kernels = kernels

    def why_no_search(self, guide: Array, lattice: Lattice) -> str:
        """Return why no kernel does the search on a guide; an empty text where one does."""
        from nlflow.backends.triton import choice

        offsets = math.prod(2 * radius + 1 for radius in lattice.radii)
        return choice.why_not(guide, self.kernels) or choice.why_no_search(guide, offsets)

    def why_no_step(self, lattice: Lattice, images: Images, stage: Stage) -> str:
        """Return why no kernel does the step on images; an empty text where one does."""
        from nlflow.backends.torch.groups import tracked
        from nlflow.backends.triton import choice

        three = (images.state, images.pilot, images.observed)
        return choice.why_not(images.state, self.kernels) or choice.why_no_step(
            images.state, math.prod(lattice.patch), correlated=images.correlation is not None, across=stage.across > 0,
            tracked=tracked(three),
        )  # fmt: skip

    def _chunk(self, like: Any) -> int:
        from nlflow.backends.torch.workers import chunk_for

        return chunk_for(like.device) if self.numbers is None else self.numbers

    @classmethod
    def within(cls, like: Any, limit: float) -> tuple[TensorFilter, int]:
        """Return a filter whose chunks take a part of some bytes where tensors like this lie, and what they take."""
        from nlflow.backends.torch.workers import bytes_of_chunks, chunk_for

        held = bytes_of_chunks(like.device)
        numbers = max(1, min(chunk_for(like.device), int(min(limit, 2**62) / (_PART * held))))
        return cls(numbers), held * numbers

    def find(self, guide: Array, lattice: Lattice) -> tuple[Array, Array]:
        """Return the nearest patches of each reference, by the squared distance over all channels."""
        import torch

        from nlflow.backends.torch.groups import unpacked
        from nlflow.backends.torch.search import find_groups

        if len(lattice.motion) > 1:
            raise InputError("moving: got tensors, whose search follows no motion, expected False; give NumPy arrays")
        guide = unpacked(guide)[0].detach()
        most = math.sqrt(torch.finfo(guide.dtype).max / (8 * len(guide) * math.prod(lattice.patch)))
        if not float(guide.abs().max()) < most:
            raise NumericalError(
                "guide: got NaN, infinity or values whose squares overflow, expected a signal in units of its noise; "
                "divide it by the standard deviation of the noise first"
            )
        order = torch.from_numpy(nearest_offsets(lattice.radii)[1]).to(guide.device, torch.int64)
        references = [torch.from_numpy(one) for one in (lattice.slices, lattice.rows, lattice.columns)]
        planes = guide.reshape(len(guide), *lattice.shape)
        if not self.why_no_search(planes, lattice):
            from nlflow.backends.triton import search

            return search.find_groups(planes, references, lattice.patch, lattice.radii, order, lattice.most)
        return find_groups(
            planes, references, lattice.patch, lattice.radii, order, lattice.most,
            self._chunk(guide),
        )  # fmt: skip

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = lambda share: None
    ) -> tuple[Array, Array]:
        """Return the estimate and the next state; see `GroupFilter`."""
        import torch

        from nlflow.backends.torch.groups import Matrices, Step

        lattice, members = groups.lattice, groups.members
        state: Any = images.state
        variance: Any = images.variance
        rounding = tuple(torch.finfo(kind).eps / _ERROR for kind in (state.dtype, torch.float64))

        def placed(array: Any) -> Any:
            return torch.from_numpy(np.ascontiguousarray(array)).to(state.device, torch.float64)

        planes: Any = [one.reshape(len(one), *lattice.shape) for one in (state, images.pilot, images.observed)]
        if not self.why_no_step(lattice, images, stage):
            from nlflow.backends.triton import groups as kernels

            fused = kernels.Step(
                members, groups.counts, lattice.shape, lattice.patch, variance.reshape(len(state), -1),
                placed(cosines(lattice.patch)) if stage.cosine else None, stage.powers, stage.leave, stage.factor,
                stage.shrink, stage.running, (rounding[0], rounding[1]), self._chunk(state),
            )  # fmt: skip
            estimate, following = fused(*planes)
            during(1.0)
            return estimate.reshape(state.shape), following.reshape(state.shape)
        found = Correlation.of(images.correlation, lattice.patch, len(state))
        white = images.correlation is None
        matrices = Matrices(
            None if white else placed(found.matrices)[:, None], None if white else placed(found.whitening)[:, None],
            placed(cosines(lattice.patch)) if stage.cosine else None, stage.powers,
        )  # fmt: skip
        step = Step(
            members, groups.counts, bool((groups.counts == members.shape[1]).all()), lattice.references(),
            lattice.shape, lattice.patch, lattice.radii, variance.reshape(len(state), -1),
            placed(found.extremes).to(state.dtype), matrices, stage.leave, stage.factor, stage.shrink, stage.across,
            stage.running,
            (rounding[0], rounding[1]), self._chunk(state), during,
        )  # fmt: skip
        estimate, following = step(*planes)
        return estimate.reshape(state.shape), following.reshape(state.shape)


class FrozenFilter(TensorFilter):
    """The groups that a first run finds, in the order in which it finds them, for all runs after it."""

    def __init__(self, numbers: int | None = None) -> None:
        super().__init__(numbers)
        self._found: list[tuple[Array, Array]] = []
        self._next = 0

    def begin(self) -> None:
        """Begin a run."""
        self._next = 0

    def find(self, guide: Array, lattice: Lattice) -> tuple[Array, Array]:
        """Return the groups that were found at this place of the first run."""
        if self._next == len(self._found):
            self._found.append(super().find(guide, lattice))
        self._next += 1
        return self._found[self._next - 1]
