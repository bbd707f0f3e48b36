"""The presets: for each quality a kernel, a functional, an integrator and a rule to stop.

``fast``
    The patch kernel (`nlflow.Patch`), frozen; E with one fidelity a pixel; semi-implicit steps of 1; stopped when the
    residual holds 0.4 sigma, which is mostly after one step.
``balanced``, ``best``, and all qualities for volumes and clips
    Groups of alike patches, evolving; E on each group with the fidelity matrix C / s^2 of its covariance; relaxed
    semi-implicit steps of 1; stopped after a number of steps that leave less and less of the noise.

A step on groups takes the running tokens z for f (a minimizing movement) and the covariance C of the running estimate:
u = (I + C/s^2)^-1 (Pz + C/s^2 z), where s is the noise that z still holds. Of the way from z to u a part is taken such
that a wanted fraction of the noise is left; u itself is the estimate. The first estimate has C from the noisy tokens,
with the eigenvalues lowered by a multiple of the noise. In volumes and clips the variances along the cosines of a patch
stand in for the eigenvalues: blocks have too many samples for their covariances to be told from noisy ones.

``best`` averages estimates whose errors differ, in each step: that from the covariance of the samples with that from
the covariance of the members, and the means over 2 x 2 samples with what groups of such means give; wide patches and
narrow ones take turns. Each is as good as the other on its own. On the middles of photographs the members gain 0.03 dB,
the turns 0.02 to 0.05, the means 0.05 to 0.1 (most where the picture is smooth and the noise strong); a smaller stride
or more steps gain nothing then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.layout import Layout
from nlflow.denoising.patches import Grouping
from nlflow.denoising.patches.lattice import Three


@dataclass(frozen=True)
class GroupPreset:
    """A flow on groups of alike patches.

    Attributes
    ----------
    steps : int
        Steps after the first estimate; with 0 that is the result.
    first, later : tuple of (limit, Grouping)
        Groups of the first estimate and of the later steps; the first entry whose limit the noise over the signal does
        not exceed is taken.
    turns : tuple of int
        Added to the sides of the patches of the later steps, in turns.
    means : bool
        Whether the means over 2 x 2 samples have groups of their own: those for half as much noise, in half as wide a
        window of means, so in the same window of samples.
    shrink : float
        Multiple of the noise variance by which eigenvalues of the first covariances are lowered.
    leave : float
        Step k of n leaves at most the fraction ``leave (1 - k/n)`` of the noise in the state.
    factor : float
        On the noise variance s^2 of the later steps; below 1 since the running estimate lacks some of the signal's
        variance.
    across : float
        Share of the step across the members in the estimates of the later steps.
    search_every : int
        Groups are found anew every so many steps.
    cosine : bool
        Whether the first covariances count as diagonal in the cosines of a patch.
    moving : bool
        Whether the search follows motion along the first axis.
    """

    steps: int
    first: tuple[tuple[float, Grouping], ...]
    later: tuple[tuple[float, Grouping], ...]
    first_signal: Grouping | None = None
    later_signal: Grouping | None = None
    shrink: float = 1.5
    leave: float = 0.75
    factor: float = 0.8
    across: float = 0.0
    turns: tuple[int, ...] = (0,)
    means: bool = False
    search_every: int = 1
    cosine: bool = False
    moving: bool = False

    def groupings(self, noise_over_signal: float, dimension: int) -> tuple[Grouping, ...]:
        """Return the groupings of the first estimate and of the later steps."""
        if dimension == 1 and self.first_signal is not None and self.later_signal is not None:
            return self.first_signal, self.later_signal
        own = self._of_images(noise_over_signal)
        if not self.means:
            return own
        coarse = (replace(g, radius=g.along("radius")[2] // 2) for g in self._of_images(noise_over_signal / 2))
        return tuple(replace(g, means=c) for g, c in zip(own, coarse, strict=True))

    def _of_images(self, noise_over_signal: float) -> tuple[Grouping, ...]:
        """Return the groupings without means for images of so much noise."""
        first, later = (
            next(g for limit, g in table if noise_over_signal <= limit) for table in (self.first, self.later)
        )
        return first, *(_wider(later, more) for more in self.turns)

    def spaced(self, spacing: tuple[float, float, float]) -> GroupPreset:
        """Return the preset for samples that lie farther apart along some axes: patches and windows are thinner there.

        Patches keep about as many samples: they are wider along the other axes, by a limited factor.
        """
        mean = math.prod(spacing) ** (1 / 3)
        shares = [min(mean / one, _WIDEST) for one in spacing]

        def thinned(grouping: Grouping) -> Grouping:
            def along(name: str) -> Three:
                a, b, c = (max(1, round(n * x)) for n, x in zip(grouping.along(name), shares, strict=True))
                return a, b, c

            return replace(grouping, patch=along("patch"), radius=along("radius"), stride=along("stride"))

        first, later = (tuple((limit, thinned(g)) for limit, g in table) for table in (self.first, self.later))
        return replace(self, first=first, later=later)


def _wider(grouping: Grouping, more: int) -> Grouping:
    """Return the grouping with wider patches, and more of them by a twelfth for each sample."""
    if more == 0:  # blocks are no cubes
        return grouping
    neighbours = round(grouping.neighbours * (1 + more / 12))
    return replace(grouping, patch=grouping.along("patch")[2] + more, neighbours=neighbours)


def noisiness(f: NDArray[np.floating]) -> float:
    """Return the noise over the signal, a channel, for a signal (..., C) in units of its noise."""
    return ratio_of(float(np.var(f, dtype=np.float64)), int(f.shape[-1]))


def ratio_of(variance: float, channels: int) -> float:
    """Return the noise over the signal, a channel, of samples of this variance in units of their noise."""
    return 1 / math.sqrt(max(variance - 1.0, 0.01)) / channels


_SIGNAL_FIRST = Grouping(16, 60, 150, 2)
_SIGNAL_LATER = Grouping(16, 40, 150, 2)

PRESETS = {
    "balanced": GroupPreset(
        steps=5,
        first=((0.4, Grouping(5, 80, 18, 5)), (0.75, Grouping(6, 100, 18, 6)), (math.inf, Grouping(7, 140, 18, 6))),
        later=((0.4, Grouping(5, 48, 18, 5)), (0.75, Grouping(6, 48, 18, 5)), (math.inf, Grouping(7, 48, 18, 5))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        search_every=2,
    ),
    "best": GroupPreset(
        steps=8,
        first=((0.4, Grouping(5, 90, 18, 4)), (0.75, Grouping(6, 120, 18, 4)), (math.inf, Grouping(7, 160, 18, 4))),
        later=((0.4, Grouping(6, 50, 20, 3)), (0.75, Grouping(7, 56, 20, 3)), (math.inf, Grouping(8, 64, 20, 3))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        leave=0.9,
        across=0.45,
        turns=(1, -1),
        means=True,
    ),
}


_WIDEST = 1.4  # times the side of a cube


def _blocks(steps: int, first: Grouping, later: Grouping, factor: float = 1.0, moving: bool = False) -> GroupPreset:
    """Return a flow on groups of blocks.

    A factor above 1: of a block with more samples than its group has members, the covariance of the estimate holds too
    much of the noise that is left, not too little of the signal.
    """
    return GroupPreset(
        steps, ((math.inf, first),), ((math.inf, later),), shrink=1.2, factor=factor, search_every=2, cosine=True,
        moving=moving,
    )  # fmt: skip


# Chosen on a part of a T1 template of the brain with white noise of 5 to 15 % of its peak, on counts of drawn cells,
# and on frames of two clips.
VOLUMES = {
    "fast": _blocks(0, Grouping(4, 48, 5, 4), Grouping(4, 48, 5, 4)),
    "balanced": _blocks(4, Grouping(4, 48, 5, 4), Grouping(5, 80, 5, 4), 1.3),
    "best": _blocks(6, Grouping(4, 48, 5, 3), Grouping(5, 80, 5, 4), 1.4),
}
_CLIP_FIRST = Grouping((3, 5, 5), 48, (3, 5, 5), (1, 5, 5))
CLIPS = {
    "fast": _blocks(0, Grouping((3, 5, 5), 32, (2, 4, 4), (1, 5, 5)), _CLIP_FIRST, moving=True),
    "balanced": _blocks(5, _CLIP_FIRST, Grouping((2, 6, 6), 60, (3, 5, 5), (1, 6, 6)), 1.2, moving=True),
    "best": _blocks(6, _CLIP_FIRST, Grouping((2, 6, 6), 60, (3, 5, 5), (1, 4, 4)), 1.2, moving=True),
}


def preset_for(quality: str, layout: Layout) -> GroupPreset | None:
    """Return the flow of groups of a quality for samples of a layout; None for a flow of pixels."""
    if len(layout.letters) < 3:
        return PRESETS.get(quality)
    if layout.moving:
        return CLIPS[quality]
    a, b, c = layout.spacing
    return VOLUMES[quality].spaced((a, b, c))
