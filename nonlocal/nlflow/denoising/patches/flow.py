"""The flow of E on groups, and its steps."""

from __future__ import annotations

import math
from typing import Any, Self, cast

import numpy as np
from array_api_compat import device
from numpy.typing import NDArray

from nlflow._array import Array, is_tensor, namespace, same_kind, to_numpy, underflowing
from nlflow.backends.numba import RUN
from nlflow.denoising.patches.affinity import GroupAffinity, as_planes, as_signal
from nlflow.denoising.patches.filters import (
    NOT_FINITE,
    CompiledFilter,
    GroupFilter,
    Groups,
    Images,
    Stage,
)
from nlflow.denoising.patches.lattice import Grouping, Lattice
from nlflow.denoising.patches.means import Blocks
from nlflow.errors import InputError, NumericalError, check_array, check_floats, check_integer, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.store.identity import described

_MOVING_RUN = 8  # references that move together
_OF_MEANS = 0.5  # share of the estimates from the groups of means, in the means


@underflowing
class GroupFlow(Flow):
    """Flow of E on groups of alike patches, whose kernel and fidelity evolve: all qualities but ``pixels`` run it.

    The patches of a group are the nodes of a complete graph. The fidelity is Lambda = C N^-1, with the covariance C of
    the group's patches in the estimate u and the noise N that the running state z still holds. A semi-implicit step of
    length 1 from z, with the fidelity to z itself (a minimizing movement), is the local Wiener filter
    Pz + C (C + N)^-1 (z - Pz). Patches are put back with weights that are their inverse variances, and groups are found
    anew in z. `RelaxedSemiImplicit` takes these steps; u(t) is the estimate, and u(0) the observed signal.

    Parameters
    ----------
    observed : array_like or tensor of shape (N,), (H, W) or (Z, H, W), with `channels` (..., C)
        The noisy signal f. Channels are compared together and filtered one by one.
    grouping : Grouping or tuple of Grouping
        Of all steps, or one of the first step and one or more of the later ones, which take turns from search to
        search.
    variance : float, array or tensor
        Variance of the noise of f, > 0: one number, or an array of the shape of f or of its nodes, on its device.
    correlation : array of shape (C, 2a+1, 2b+1) or (2a+1, 2b+1), optional
        Correlation of the noise of two samples by their offset along rows and columns, 1 in the middle; a signal has
        a = 0. The noise of two slices is independent. White noise by default.
    missing : bool array or tensor of the shape of the nodes, optional
        True for samples without data, which follow the estimate. There f is a first guess.
    channels : bool
        Whether the last axis of `observed` is one of channels.
    moving : bool
        Whether the first axis is time: the search then follows the motion in the first channel.
    shrink : float
        Multiple of the noise's variance that is taken from the eigenvalues of the first covariances.
    cosine : bool
        Whether the first covariances count as diagonal in the cosines of a patch.
    factor : float
        Multiplies the variance of the noise in the later steps.
    across : float
        Share, in [0, 1], of the step across the members in the estimates of the later steps; see `GroupFilter`.
    search_every : int
        How many steps have the same groups.
    filter : GroupFilter, optional
        `CompiledFilter` by default, `TensorFilter` for tensors, `PlainFilter` for a fidelity of your own, or a class of
        your own.
    origin, whole : tuple of int, optional
        As in `Lattice.of`.

    Raises
    ------
    InputError
        For wrong shapes and numbers out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Energy, solve
    >>> from nlflow.denoising.patches import GroupFlow, Grouping, RelaxedSemiImplicit
    >>> clean = np.add.outer(np.arange(32) > 15, np.sin(np.arange(32) / 4)) * 5.0
    >>> noisy = clean + np.random.default_rng(0).normal(0, 1, clean.shape)
    >>> flow = GroupFlow(noisy, Grouping(patch=4, neighbours=24, radius=8, stride=3))
    >>> solution = solve(flow, t=4, integrator=RelaxedSemiImplicit(steps=3), trackers=[Energy()])
    >>> [round(float(np.std(u - clean)), 2) for u in (noisy, solution.final)]
    [0.97, 0.31]
    """

    advice = "integrate it with RelaxedSemiImplicit(steps)"
    needs_integrator = True
    takes_noise = False
    checks_steps = True
    differentiated = "nlflow.denoise, or nlflow.denoising.derivatives"

    def __init__(
        self,
        observed: Any,
        grouping: Grouping | tuple[Grouping, ...],
        *,
        variance: Any = 1.0,
        correlation: Any = None,
        missing: Any = None,
        channels: bool = False,
        moving: bool = False,
        shrink: float = 1.5,
        cosine: bool = False,
        factor: float = 0.8,
        across: float = 0.0,
        search_every: int = 1,
        filter: GroupFilter | None = None,
        origin: tuple[int, ...] = (0, 0),
        whole: tuple[int, ...] | None = None,
    ) -> None:
        from nlflow.denoising.patches.tensors import TensorFilter

        f = check_array("observed", observed, ndim=(2, 3, 4) if channels else (1, 2, 3))
        self._flat = not channels
        self.shrink = check_number("shrink", shrink, minimum=0)
        self.cosine = bool(cosine)
        self.factor = check_number("factor", factor, minimum=0, strict=True)
        self.across = check_number("across", across, minimum=0)
        if self.across > 1:
            raise InputError(f"across: got {self.across:g}, expected a share, at most 1")
        self.search_every = check_integer("search_every", search_every, minimum=1)
        several: Any = grouping if isinstance(grouping, tuple) else (grouping, grouping)
        self.groupings: tuple[Grouping, ...] = several
        if len(several) < 2 or not all(isinstance(one, Grouping) for one in several):
            raise InputError(f"grouping: got {grouping!r}, expected a Grouping, or a tuple (first, later, ...)")
        tensors = is_tensor(f)
        self.filter: Any = filter if filter is not None else TensorFilter() if tensors else CompiledFilter()
        if isinstance(self.filter, type) or not all(
            callable(getattr(self.filter, name, None)) for name in ("find", "step")
        ):
            raise InputError(
                f"filter: got {filter!r}, expected an object with find and step, such as PlainFilter(); see GroupFilter"
            )
        if isinstance(self.filter, CompiledFilter if tensors else TensorFilter):
            raise InputError(
                f"filter: got {type(self.filter).__name__} for {'a tensor' if tensors else 'an array'}, expected "
                f"{'TensorFilter' if tensors else 'CompiledFilter or PlainFilter'}; leave it out, or convert the signal"
            )
        signal = f if channels else f[..., None]
        self._planes = as_planes(signal)
        self.moving = bool(moving)
        if self.moving and tensors:
            raise InputError("moving: got True for a tensor, whose search follows no motion, expected False; denoise "
                             "clips as NumPy arrays (.cpu().numpy())")  # fmt: skip
        run = _MOVING_RUN if self.moving else RUN
        if self.moving and any(one.along("stride")[0] > 1 for one in several):
            raise InputError("grouping: got a stride of more than 1 along frames that move, expected 1, so that each "
                             "pixel belongs to a patch")  # fmt: skip
        space = tuple(self._planes.shape[1:])
        deep = space[0] > 1 and any(one.along("patch")[0] > 1 or one.along("radius")[0] > 0 for one in several)
        if any(one.means is not None for one in several) and (deep or correlation is not None):
            raise InputError("grouping: got means for a volume or for noise that is correlated, expected means=None; "
                             "means have groups of their own in images and signals with white noise")  # fmt: skip
        self._lattices = [Lattice.of(space, one, origin, whole, run) for one in self.groupings]
        self._place = origin, whole
        self._variance = _variances(variance, signal)
        self._correlation = _correlations(correlation, self._planes)
        self.missing = None if missing is None else _booleans(missing, signal)
        if self.missing is not None and self.missing.shape != signal.shape[:-1]:
            raise InputError(
                f"missing: got shape {tuple(self.missing.shape)}, expected {tuple(signal.shape[:-1])}, that of nodes"
            )
        if self.missing is not None and self.missing.all():
            raise InputError("missing: hides every sample; leave at least one")
        self.state: Array = f  # z, the running state
        self._begun = False  # whether there is an estimate that is almost free of noise
        self._guide: Array | None = None  # what the groups of the later steps were found on
        super().__init__(self._grouped(f, 0), "l2", f, evolving=True, every=1)

    def _signal(self, u: Array) -> Array:
        return u[..., None] if self._flat else u

    def _grouped(self, guide: Array, search: int) -> GroupAffinity:
        """Return the groups of a guide, by the grouping of the first estimate (0) or of a later search (1, 2, ...)."""
        number = 1 + (search - 1) % (len(self.groupings) - 1) if search else 0
        lattice, means = self._lattices[number], self.groupings[number].means
        blocks = None if means is None else Blocks.of(lattice.shape, means, *self._place, search)
        return GroupAffinity(self._signal(guide), lattice, self.filter, self.moving, blocks)

    def rebuilt(self, u: Array) -> Self:
        """Return the flow whose estimate and running state are u, with the groups of u."""
        result = self._with(self._grouped(u, int(self._begun)), u)
        result.state, result._guide = u, None
        return result

    def following(self, u: Array, memory: dict[str, Any]) -> Self:
        """Return the flow whose estimate is u, with the running state and the groups of an integrator's memory."""
        if "state" not in memory:
            return self.rebuilt(u)
        base = memory.get("_flow", self)
        guide, affinity = memory.get("guide"), base.affinity
        if guide is not None and guide is not base._guide:
            affinity = self._grouped(guide, int(memory.get("search", 1)))
        result: Self = base._with(affinity, u)
        result.state, result._guide, result._begun = memory["state"], guide, True
        return result

    @property
    def groups(self) -> Groups:
        """The current groups."""
        held: Any = self.affinity
        return cast(Groups, held.groups.checked())

    def _stage(self, leave: float = 0.0) -> Stage:
        return (
            Stage(leave, self.factor, across=self.across)
            if self._begun
            else Stage(shrink=self.shrink, running=False, cosine=self.cosine)
        )

    def _images(self, u: Array) -> Images:
        pilot = as_planes(self._signal(u))
        state = pilot if self.state is u else as_planes(self._signal(self.state))
        return Images(state, pilot, self._seen_planes(pilot), self._variance, self._correlation)

    def step(self, u: Array, leave: float = 0.0) -> tuple[Array, Array]:
        """Return the next estimate and the next running state, which keeps a fraction of the noise.

        After the first step the running state is the observed signal.

        Parameters
        ----------
        u : array
            The estimate, which gives the covariances.
        leave : float
            The fraction.
        """
        images = self._images(u)
        planes, next_state = self._filtered(images, self._stage(leave))
        if not self._begun:
            next_state = self._seen_planes(planes)
        elif self.missing is not None:
            next_state = namespace(planes).where(self.missing.reshape(planes.shape[1:]), planes, next_state)
        self.applications += 1
        return as_signal(planes, u.shape), as_signal(next_state, u.shape)

    def _filtered(self, images: Images, stage: Stage) -> tuple[Array, Array]:
        """Return what the filter makes of planes, and of the means over their blocks."""
        held: Any = self.affinity
        from nlflow.denoising.patches.tensors import TensorFilter

        own = 1 if held.blocks is None else 0.8  # share of the time
        made = self.filter.step(held.groups, images, stage, during=lambda share: self.during(own * share))
        checked = type(self.filter).step is TensorFilter.step  # a device that is asked waits
        _check_step(made, images.state, checked)
        if held.blocks is None:
            return cast(tuple[Array, Array], made)
        blocks: Blocks = held.blocks
        uniform = math.prod(images.variance.shape[1:]) == 1
        variance = images.variance if uniform else blocks.mean(images.variance)
        coarse = Images(
            blocks.mean(images.state), blocks.mean(images.pilot), blocks.mean(images.observed),
            variance / blocks.size,
        )  # fmt: skip
        found = self.filter.step(
            held.groups_of_means, coarse, stage, during=lambda share: self.during(own + (1 - own) * share)
        )
        _check_step(found, coarse.state, checked)
        planes, next_state = (
            fine + _OF_MEANS * blocks.spread(means - blocks.mean(fine), fine)
            for fine, means in zip(made, found, strict=True)
        )
        return planes, next_state

    def _seen_planes(self, estimate: Array) -> Array:
        """The observed planes, which follow the estimate where samples are missing."""
        if self.missing is None:
            return self._planes
        return namespace(estimate).where(self.missing.reshape(estimate.shape[1:]), estimate, self._planes)

    def velocity(self, u: Array) -> Array:
        """Return du/dt = Phi(u) - u, where Phi is the step of length 1 from u with the groups of u."""
        return self.at(u).step(u)[0] - u

    @property
    def has_energy(self) -> bool:
        """Whether `energy` is a number."""
        return True

    def energy(self, u: Array) -> float:
        """Return E of the patches of u with the fidelity to those of the running state, in units of the noise.

        O(G (n D^2 + D^3)) for G groups of n patches of D samples, in float64.
        """
        from nlflow.denoising.patches.plain import PlainFilter

        plain = self.filter if isinstance(self.filter, PlainFilter) else PlainFilter()
        return plain.energy(self.groups.on_host, self._images(u).on_host, self._stage())

    def given(self) -> list[Any]:
        """What identifies the flow."""
        return [described(self.filter), self.observed, self._variance, self.missing, self._correlation]

    def __repr__(self) -> str:
        return (
            f"GroupFlow({self.groupings!r}, shrink={self.shrink!r}, cosine={self.cosine!r}, factor={self.factor!r}, "
            f"across={self.across!r}, search_every={self.search_every!r}, filter={type(self.filter).__name__})"
        )


def _check_step(made: Any, like: Array, checked: bool) -> None:
    """Refuse what a filter of one's own returns, where it is no estimate and state."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"filter: its step returned {type(made).__name__}, expected an estimate and a state")
    for name, planes in zip(("an estimate", "a state"), made, strict=True):
        if type(planes) is not type(like) or planes.shape != like.shape or planes.dtype != like.dtype:
            raise InputError(
                f"filter: its step returned {name} of shape {np.shape(planes)}, expected {tuple(like.shape)}, "
                f"{like.dtype}"
            )
        xp = namespace(planes)
        if not checked and not bool(xp.all(xp.isfinite(planes))):
            raise NumericalError(NOT_FINITE.replace("an estimate", name))


def _booleans(missing: Any, like: Array) -> Array:
    if not is_tensor(like):
        return np.asarray(to_numpy(missing) if is_tensor(missing) else missing, bool)
    if not is_tensor(missing) or missing.device != like.device:
        where = missing.device if is_tensor(missing) else "the host"
        raise InputError(f"missing: it is on {where}, expected {like.device}, as observed; move one of them")
    return missing.bool()


def _variances(variance: Any, signal: Array) -> Array:
    """Return the variance of the noise as planes (C, Z, H, W), or (C, 1, 1, 1) where it is one number."""
    xp, given = namespace(signal), check_array("variance", variance, ndim=tuple(range(signal.ndim + 1)))
    if given.ndim == 0:
        least = float(given)
        given = xp.full((signal.shape[-1], 1, 1, 1), least, dtype=signal.dtype, device=device(signal))
    elif not is_tensor(signal):
        given = np.asarray(given, signal.dtype)
    else:
        same_kind("variance", given, signal)
    if np.ndim(variance) > 0:
        least = float(given.min())
    if not least > 0:
        raise InputError(f"variance: got {least:g}, expected numbers > 0")
    if np.ndim(variance) == 0:
        return given
    full = given if given.shape == signal.shape else given[..., None]
    if full.shape[:-1] != signal.shape[:-1]:
        raise InputError(f"variance: got shape {tuple(given.shape)}, expected one number or {tuple(signal.shape[:-1])}")
    return as_planes(xp.broadcast_to(full, signal.shape))


def _correlations(correlation: Any, planes: Array) -> NDArray[Any] | None:
    """Return the correlation of the noise for each plane, or None for white noise."""
    if correlation is None:
        return None
    given = check_floats("correlation", correlation, ndim=(2, 3))
    full = given if given.ndim == 3 else given[None]
    middle = full[:, full.shape[1] // 2, full.shape[2] // 2]
    sides = full.shape[1] % 2 == full.shape[2] % 2 == 1
    if len(full) not in (1, len(planes)) or not sides or (planes.shape[2] == 1 and full.shape[1] > 1):
        raise InputError(
            f"correlation: got shape {given.shape}, expected ({len(planes)}, 2a+1, 2b+1) with the offset 0 in the "
            "middle; a signal has a = 0"
        )
    if not np.allclose(middle, 1) or np.abs(full).max() > 1 + 1e-6 or not np.allclose(full, full[:, ::-1, ::-1]):
        raise InputError("correlation: got values that are no correlation, expected 1 in the middle, the same for an "
                         "offset and its opposite, and none beyond 1")  # fmt: skip
    return np.broadcast_to(full, (len(planes), *full.shape[1:]))


@underflowing
class RelaxedSemiImplicit(Integrator):
    """Semi-implicit steps of a `GroupFlow` of which a part is taken, so that the noise is removed in parts.

    The first step gives an estimate. Step k of the n that follow moves the running state z towards the new estimate u
    until about the fraction ``leave (1 - k/n)`` of the noise is left (Herbreteau and Kervrann 2022, arXiv 2212.00422).
    A step takes a unit of time, so that the flow ends at t = steps + 1.

    Parameters
    ----------
    steps : int
        n, after the first estimate.
    leave : float
        Fraction of the noise, in [0, 1].
    """

    order = 1.0
    unit_steps = True

    def __init__(self, steps: int, leave: float = 0.75) -> None:
        self.steps = check_integer("steps", steps, minimum=1)
        self.leave = check_number("leave", leave, minimum=0)
        if self.leave > 1:
            raise InputError(f"leave: got {self.leave:g}, expected a fraction, at most 1")

    def stability_limit(self, flow: Flow) -> float:
        """Return infinity."""
        del flow
        return math.inf

    def check_kind(self, flow: Flow) -> None:
        """Refuse other flows."""
        if not isinstance(flow, GroupFlow):
            raise InputError(
                f"integrator: RelaxedSemiImplicit is for a GroupFlow, got {type(flow).__name__}; use SemiImplicit()"
            )

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        """Take one step."""
        del target
        self.check_kind(flow)
        now: Any = flow
        done = round(t)
        if done and (done - 1) % now.search_every == 0:
            memory["guide"], memory["search"] = memory["state"], 1 + (done - 1) // now.search_every
            now = now.following(u, memory)
        leave = self.leave * max(1 - done / self.steps, 0.0)
        with now.telling(flow.during):  # with whatever groups the step is taken
            estimate, memory["state"] = now.step(u, leave)
        memory["_flow"] = now
        return estimate, t + 1
