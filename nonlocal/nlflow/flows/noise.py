"""White noise."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from nlflow._array import Array, Floats, is_numpy, kept_like, namespace, over_channels, same_kind, scalar
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_floats,
    check_integer,
    check_number,
    checked_call,
    is_function,
    is_number,
    shortened,
)

if TYPE_CHECKING:
    from nlflow.flows.flow import Flow

WHITE = ("measure", "nodes")
_WORD = 2**32  # what a word of a counter holds


def normals(
    seed: int, shape: tuple[int, int], *, node: int = 0, channel: int = 0, step: int = 0, stream: int = 0
) -> Floats:
    """Return standard normals, each of which depends on the seed and its own place alone.

    By Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, doi 10.1145/2063384.2063405) and the method of Box and Muller.

    Parameters
    ----------
    seed : int
        Below 2^64.
    shape : tuple of int
        Numbers of nodes and channels.
    node, channel : int
        Of the first number; all are below 2^33 and 2^32.
    step, stream : int
        Below 2^32.

    Returns
    -------
    array of shape `shape`
        In float64.

    Examples
    --------
    >>> from nlflow.flows import normals
    >>> whole = normals(7, (5, 3))
    >>> bool((normals(7, (2, 1), node=3, channel=1) == whole[3:, 1:2]).all())
    True
    """
    from nlflow.backends.numba.normals import loop

    pair: Any = shape
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(f"shape: got {shortened(repr(pair))}, expected a pair, the numbers of nodes and of channels")
    count, width = (check_integer("shape", length, minimum=0) for length in pair)
    placed = {"seed": (seed, 2**64), "step": (step, _WORD), "stream": (stream, _WORD)}
    first = {"node": check_integer("node", node, minimum=0), "channel": check_integer("channel", channel, minimum=0)}
    placed |= {"node": (first["node"] + max(count - 1, 0), 2 * _WORD)}
    placed |= {"channel": (first["channel"] + max(width - 1, 0), _WORD)}
    own = {name: check_integer(name, value, minimum=0, below=most) for name, (value, most) in placed.items()}
    out = np.empty((count, width))
    if out.size:
        numbers = (np.uint64(own[name]) for name in ("seed", "step", "stream"))
        loop("normals")(*numbers, first["node"], first["channel"], out)
    return out


@checked_call
class Noise:
    """White noise that is added to a flow, ``flow + Noise(beta=4.0, rng=1)``: du = v(u) dt + s dW, in the sense of Ito.

    With `beta` alone the law exp(-beta E(u)) du stays as it is, E being the energy that the flow descends (Pavliotis
    2014, Stochastic Processes and Applications, section 4.5). Held nodes get none.

    Parameters
    ----------
    beta : float, optional
        Inverse temperature > 0: s is sqrt(2 / beta), for particles with inertia sqrt(2 friction / beta).
    strength : float, array or callable, optional
        s in place of `beta`: a number >= 0, one for each node (``domain.shape``, or with channels ``domain.shape +
        (D,)``), or a function of the signal, value by value.
    channels : array of shape (D,) or (D, D), optional
        Numbers, or a matrix B, by which the channels of W are multiplied; the identity by default.
    white : {'measure', 'nodes'}
        The variance of increments of W at node i over time dt. ``measure``: dt / m_i, m_i being w_i in the L2 metric
        and w_i d_i in the degree metric; the law above asks for it. ``nodes``: dt. In the conserved metric the noise
        has the covariance of the mobility, on grids with a transform (Cook 1970, doi 10.1016/0001-6160(70)90144-6).
    rng : int or numpy.random.Generator, optional
        The seed, below 2^64, or what draws one; by default a random one. It is the attribute ``seed``.
    path : int
        Number of a path: those of one seed are independent.

    Raises
    ------
    InputError
        For both or none of beta and strength, and numbers that are not finite or below 0; where it is added to a flow,
        for shapes that do not fit, and flows that take no such noise.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, GradientFlow, Grid, Noise, affinity, solve
    >>> energy = E(affinity(Gaussian(width=2.0), Grid(40)), np.zeros(40), fidelity=1.0)
    >>> flow = GradientFlow(energy) + Noise(beta=10.0, rng=3)
    >>> one, two = (solve(flow, t=5.0).final for _ in range(2))
    >>> bool((one == two).all())
    True
    """

    def __init__(
        self,
        *,
        beta: float | None = None,
        strength: float | ArrayLike | Callable[[Array], Array] | None = None,
        channels: ArrayLike | None = None,
        white: str = "measure",
        rng: int | np.random.Generator | None = None,
        path: int = 0,
    ) -> None:
        if (beta is None) == (strength is None):
            raise InputError("beta: give beta or strength, one of them: s is sqrt(2 / beta), or the strength")
        self.strength: Any
        check_detached("strength", strength)
        if beta is not None:
            beta = check_number("beta", beta, minimum=0, strict=True)
            self.strength = math.sqrt(2 / beta)
        elif is_function(strength):
            self.strength = strength
        elif strength is not None and is_number(strength):
            self.strength = check_number("strength", strength, minimum=0)
        else:
            self.strength = check_floats("strength", strength)
            if self.strength.min() < 0:
                raise InputError(f"strength: got {self.strength.min():g} at a node, expected numbers >= 0")
        self.beta = beta
        self.channels = None if channels is None else check_floats("channels", channels, ndim=(1, 2))
        if self.channels is not None and self.channels.shape != self.channels.shape[:1] * self.channels.ndim:
            raise InputError(f"channels: got shape {self.channels.shape}, expected (D,) or (D, D)")
        if callable(self.strength) and self.channels is not None and self.channels.ndim == 2:
            raise InputError(
                "channels: got a matrix with a strength that depends on the signal, expected (D,): noise whose "
                "channels are mixed at a strength of their own is not diagonal, and no integrator here takes it"
            )
        self.white = check_choice("white", white, WHITE)
        self.seed, self.seeded = _seed(rng), isinstance(rng, int | np.integer)
        self.path, self._channel = check_integer("path", path, minimum=0), 0

    @property
    def additive(self) -> bool:
        """Whether the strength does not depend on the signal."""
        return not callable(self.strength)

    @property
    def uniform(self) -> bool:
        """Whether the strength is one number."""
        return isinstance(self.strength, float)

    def by_node(self, flow: Flow) -> bool:
        """Whether all channels have the same strength."""
        return self.uniform or (self.additive and self.strength.shape == flow.affinity.whole_shape)

    def given(self) -> list[Any]:
        """Return what tells the noise from others."""
        return [self.strength, self.beta, self.channels, self.white, self.seed, self.path, self._channel]

    def on_path(self, number: int) -> Noise:
        """Return the noise `number` paths after this one."""
        result = copy.copy(self)
        result.path = self.path + check_integer("number", number, minimum=0)
        return result

    def on_channel(self, channel: int) -> Noise:
        """Return the noise of path 0 from a channel on."""
        result = copy.copy(self)
        result.path, result._channel = 0, channel
        return result

    def check(self, flow: Flow) -> None:
        """Raise `InputError` for a flow that does not take the noise."""
        if not flow.takes_noise:
            raise InputError(
                f"flow: got a {type(flow).__name__}, which takes no noise, since its signals leave their set by it or "
                "its steps remember more than a signal; use a GradientFlow, an AttentionFlow or a PFlow"
            )
        self._check_metric(flow)
        flow.check_noise(self)
        if flow.noise is not None:
            raise InputError(
                "noise: the flow has one already, expected one at most; variances of independent noises add up: give "
                "one of the strength sqrt(s1^2 + s2^2)"
            )
        nodes = flow.affinity.whole_shape
        if not (self.uniform or callable(self.strength)) and self.strength.shape[: len(nodes)] != nodes:
            raise InputError(
                f"strength: got shape {self.strength.shape}, expected {nodes} or {(*nodes, 'D')}, that of the nodes"
            )
        if flow.affinity.shared and not self.seeded:
            raise InputError(
                "rng: got no seed, expected an int where nodes are shared out: processes would draw others"
            )

    def _check_metric(self, flow: Flow) -> None:
        """Raise `InputError` where the noise of a metric that is no sum over nodes is not known."""
        if flow.inner.by_nodes:
            return
        why: str | None = f"{self!r}, expected beta or one strength, white in the measure"
        if self.uniform and self.white == "measure":
            why = flow.unspread
        if why:
            raise InputError(
                f"noise: in the metric {flow.metric!r} it is not white between nodes and has the covariance of the "
                f"mobility; got {why}; take the metric 'l2' or 'degree' otherwise"
            )

    def check_start(self, flow: Flow, u: Array) -> None:
        """Raise `InputError` for signals that the noise does not fit."""
        self._check_metric(flow)
        nodes = len(flow.affinity.domain.shape)
        width = int(u.shape[-1]) if u.ndim > nodes else 1
        if self.channels is not None and (u.ndim == nodes or len(self.channels) != width):
            raise InputError(
                f"channels: got shape {self.channels.shape} for a signal of shape {tuple(u.shape)}, expected its "
                "number of channels"
            )
        if not (self.uniform or callable(self.strength)):
            own = self.strength.shape[nodes:]
            if own and own != tuple(u.shape[nodes:]):
                raise InputError(
                    f"strength: got shape {self.strength.shape} for a signal of shape {tuple(u.shape)}, expected one "
                    "number for each node, or for each node and channel"
                )
        if callable(self.strength):
            self._check_function(u)

    def _check_function(self, u: Array) -> None:
        """Raise `InputError` for a function that is not value by value."""
        xp = namespace(u)
        flat = xp.reshape(u, (-1,))
        half = flat[: max(1, int(flat.shape[0]) // 2)]
        whole, alone = xp.reshape(self._strength_at(u), (-1,)), self._strength_at(half)
        # Loops over arrays of other lengths may round functions differently.
        unit = float(xp.finfo(u.dtype).eps) ** 0.5 * scalar(xp.max(xp.abs(whole)))
        if scalar(xp.max(xp.abs(whole[: half.shape[0]] - alone))) > unit:
            raise InputError(
                "strength: the function gives some values of a signal another strength than it gives them among all, "
                "expected a function of each value by itself"
            )

    def _strength_at(self, u: Array) -> Array:
        try:
            with np.errstate(all="ignore"):  # found out below
                found = self.strength(u)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InputError(
                f"strength: the function fails for a signal of shape {tuple(u.shape)} ({shortened(error)}), expected "
                "one of arrays of any shape, value by value"
            ) from error
        if tuple(getattr(found, "shape", ())) != tuple(u.shape) or not hasattr(found, "dtype"):
            got = type(found).__name__ if not hasattr(found, "shape") else f"shape {tuple(found.shape)}"
            raise InputError(f"strength: the function returns {got}, expected shape {tuple(u.shape)}")
        same_kind("strength: what the function returns", found, u)
        if (is_numpy(u) or str(u.device) == "cpu") and not bool(namespace(found).all(namespace(found).isfinite(found))):
            raise NumericalError(
                "strength: the function is not finite at a value of the signal; use a smaller dt, or a function that "
                "is finite everywhere"
            )
        return found

    def increments(self, flow: Flow, like: Array, step: int, dt: float, *, stream: int = 0) -> Array:
        """Return the increments of W in the step of number `step`, of length `dt`; 0 at held nodes."""
        nodes = len(flow.affinity.domain.shape)
        width = int(like.shape[-1]) if like.ndim > nodes else 1

        def rows(first: int, count: int) -> Floats:
            place = {"node": first, "channel": self.path * width + self._channel, "step": step, "stream": stream}
            return math.sqrt(dt) * normals(self.seed, (count, width), **place)

        white = flow.affinity.formed(rows, like)
        if self.white == "measure":
            white = over_channels(flow.root_mass(like), like) * white
        return flow.free(flow.spread(white))

    def times(self, flow: Flow, u: Array, white: Array) -> Array:
        """Return s(u) times the increments."""
        return self.strength_at(flow, u) * self.mixed(white)

    def mixed(self, white: Array) -> Array:
        """Return `channels` times the increments."""
        if self.channels is None:
            return white
        share = kept_like(self.channels, white)
        return white * share if share.ndim == 1 else white @ namespace(white).matrix_transpose(share)

    def strength_at(self, flow: Flow, u: Array) -> Any:
        """Return s(u), ready to multiply a signal."""
        if callable(self.strength):
            return self._strength_at(u)
        if self.uniform:
            return self.strength if self.beta is None else self.strength * math.sqrt(flow.dissipation)
        return over_channels(flow.affinity.own(self.strength, u), u)

    def spread(self, flow: Flow, u: Array) -> Any:
        """Return the standard deviation of increments for dt = 1 and s = 1, of channels that are not mixed."""
        share = 1.0 if self.channels is None else kept_like(self.channels, u)
        return share if self.white == "nodes" else share * over_channels(flow.root_mass(u), u)

    def __repr__(self) -> str:
        s = f"beta={self.beta!r}" if self.beta is not None else f"strength={_word(self.strength)}"
        more = "" if self.channels is None else f", channels={_word(self.channels)}"
        more += "" if self.white == "measure" else f", white={self.white!r}"
        return f"Noise({s}{more}, rng={self.seed}{f', path={self.path}' if self.path else ''})"


def _seed(rng: Any) -> int:
    if rng is None or isinstance(rng, np.random.Generator):
        return int(np.random.default_rng(rng).integers(2**64, dtype=np.uint64))
    seed = check_integer("rng", rng, hint="give a seed, a numpy.random.Generator, or nothing")
    if not 0 <= seed < 2**64:
        raise InputError(f"rng: got {seed}, expected a seed >= 0 and below 2^64")
    return seed


def _word(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<array of shape {value.shape}>"
    return repr(value) if not callable(value) else str(getattr(value, "__name__", type(value).__name__))
