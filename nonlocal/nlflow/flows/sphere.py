"""Tokens on the sphere."""

from __future__ import annotations

import math
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    Pending,
    constant_like,
    is_numpy,
    namespace,
    numbers,
    same_kind,
    scalar,
    to_numpy,
    underflowing,
)
from nlflow.affinities.doubly_stochastic import SinkhornAffinity
from nlflow.affinities.rows import RowAffinity
from nlflow.domains import Points
from nlflow.domains.mask import Mask, check_mask
from nlflow.errors import InputError, NumericalError, check_array, check_choice, check_number, kind_of
from nlflow.flows.flow import Flow, of_signal
from nlflow.flows.integrators import FixedStep, StepFailureError
from nlflow.kernels import ExpDotProduct

NORMALIZATIONS = ("softmax", "none", "sinkhorn")
_LENGTH = {4: 1e-5, 8: 1e-10}
"""By the bytes of a number: how far lengths of tokens on the sphere may be from 1, many roundings of a square root."""
_TABLE = 2**22  # cosines at a time
_PARALLEL = 1e-9
"""How far W_V may be from a multiple of W_Q W_K^T, relatively, for the flow to descend an energy: their rounding."""


@underflowing
def on_sphere(tokens: Any) -> Array:
    """Return tokens divided by their lengths.

    Parameters
    ----------
    tokens : array_like of shape (N, d)

    Raises
    ------
    InputError
        For a token of length 0, which has no direction.

    Examples
    --------
    >>> from nlflow import on_sphere
    >>> on_sphere([[3.0, 4.0]]).tolist()
    [[0.6, 0.8]]
    """
    x = check_array("tokens", tokens, ndim=2)
    xp = namespace(x)
    x = x / _size(xp, x)
    lengths = xp.sqrt(xp.sum(x * x, axis=1, keepdims=True))
    return x / lengths


def _size(xp: Any, x: Array) -> Array:
    """Return the largest coordinate of each token, by which its square is in range."""
    largest = xp.max(xp.abs(x), axis=1, keepdims=True)
    if bool(xp.any(largest == 0)):
        number = int(xp.argmax(xp.astype(largest[:, 0] == 0, xp.int32)))
        raise InputError(f"tokens: got token {number} of length 0, expected a direction; leave it out")
    return largest


@underflowing
class SphereFlow(Flow):
    """Self-attention dynamics on the unit sphere, dx_i/dt = p_i sum_j a_ij x_j W_V with p_i = I - x_i x_i^T.

    (Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv 2305.05465 and 2312.10794.) With k_ij = exp(beta q_i . k_j),
    q = x W_Q and k = x W_K, the weights a_ij are

    - ``softmax``: k_ij / sum_j k_ij;
    - ``none``: k_ij / N;
    - ``sinkhorn``: the doubly stochastic matrix exp(f_i + g_j) k_ij / N (Sinkformers, arXiv 2110.11773).

    The flow descends `energy` where beta > 0, W_Q W_K^T = B is symmetric, W_V = c B /= 0, and there is no mask.
    O(N^2 d) time and O(N d) memory for a velocity, O(N^2) with ``sinkhorn``.

    Parameters
    ----------
    tokens : array_like of shape (N, d), d >= 2
        Of length 1 (`on_sphere`). They give the dtype and the shape; the start goes to `solve`.
    beta : float
        >= 0, the inverse temperature; 1/sqrt(m) in a transformer.
    query_map, key_map : array of shape (d, m), optional
        W_Q and W_K; the identity by default.
    value_map : array of shape (d, d), optional
        W_V, the identity by default.
    normalization : {'softmax', 'none', 'sinkhorn'}
    mask : Mask, optional
        Which tokens a token sees; not with ``sinkhorn``.

    Raises
    ------
    InputError
        For tokens that are not on the sphere, and other arguments.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import SphereFlow, on_sphere, solve
    >>> x = on_sphere(np.random.default_rng(0).standard_normal((32, 3)))
    >>> flow = SphereFlow(x, beta=1.0)
    >>> solution = solve(flow, x, t_eval=[0.0, 2.0, 4.0, 40.0])
    >>> bool(np.all(np.diff(solution.energy) < 0)), int(flow.clusters(solution.final).max()) + 1
    (True, 1)
    """

    takes_noise = False
    affinity: Any

    def __init__(
        self,
        tokens: Any,
        beta: float = 1.0,
        *,
        query_map: Any = None,
        key_map: Any = None,
        value_map: Any = None,
        normalization: str = "softmax",
        mask: Mask | None = None,
    ) -> None:
        x = check_array("tokens", tokens, ndim=2)
        count, width = (int(n) for n in x.shape)
        if width < 2:
            raise InputError(
                f"tokens: got {width} coordinate, expected at least 2, since a sphere of points is at rest"
            )
        self.beta = check_number("beta", beta, minimum=0)
        self.normalization = check_choice("normalization", normalization, NORMALIZATIONS)
        maps = [_map(*named, x) for named in (("query_map", query_map), ("key_map", key_map))]
        self.value_map = _map("value_map", value_map, x)
        if self.value_map is not None and tuple(self.value_map.shape) != (width, width):
            raise InputError(f"value_map: got shape {tuple(self.value_map.shape)}, expected {(width, width)}")
        shapes = [width if one is None else int(one.shape[1]) for one in maps]
        if shapes[0] != shapes[1]:
            raise InputError(f"query_map: got {shapes[0]} columns, expected {shapes[1]}, as many as key_map has")
        if check_mask(mask) is not None and normalization == "sinkhorn":
            raise InputError(
                "mask: got one with normalization='sinkhorn', expected none: with zeros a doubly stochastic matrix "
                "need not exist (a causal one is the identity); use 'softmax'"
            )
        kernel = ExpDotProduct(scale=self.beta, query_map=maps[0], key_map=maps[1])
        _check_lengths("tokens", x)
        domain = Points(np.arange(float(count)), np.full(count, 1 / count))
        self._slope = _slope(maps[0], maps[1], self.value_map, x)
        affinity = SinkhornAffinity.of_tokens if normalization == "sinkhorn" else RowAffinity
        rest = () if normalization == "sinkhorn" else (mask,)
        super().__init__(
            affinity(kernel, domain, x, *rest), "l2" if normalization == "none" else "degree", None,
            evolving=True, every=1,
        )  # fmt: skip
        self._mask, self._like = mask, x

    # ---- what moves the tokens

    @of_signal
    def attention(self, x: Array) -> Array:
        """Return sum_j a_ij x_j W_V."""
        now = self.at(x)
        now.applications += 1
        xp = namespace(x)
        values = x if self.value_map is None else x @ self.value_map
        if self.normalization != "none":
            return now.affinity._average(values)
        averages, logs = now.affinity.sums(values)
        with np.errstate(over="ignore"):
            result = xp.exp(logs)[:, None] * averages
        if not bool(xp.all(xp.isfinite(result))):
            raise NumericalError(
                f"beta: got {self.beta:g}, for which exp(beta q.k) overflows; use normalization='softmax', which "
                "divides by the sum of the row"
            )
        return xp.astype(result, x.dtype, copy=False)

    def velocity(self, x: Array) -> Array:
        """Return dx/dt, tangent to the sphere, at the tokens divided by their lengths."""
        x = self.held(x)
        return tangent(x, self.attention(x))

    def held(self, u: Array) -> Array:
        xp = namespace(u)
        return u / xp.sqrt(xp.sum(u * u, axis=1, keepdims=True))

    def rebuilt(self, u: Array) -> Self:
        return self._with(self.affinity.update(u), u)

    @property
    def rate(self) -> float:
        """Bound of the rate at which tokens of a cluster meet; steps along great circles above 2 / rate are refused."""
        strength = 1.0 if self.value_map is None else _norm(self.value_map)
        if self.normalization != "none":
            return strength
        maps = self.affinity.kernel.query_map, self.affinity.kernel.key_map
        exponent = self.beta * (_norm(*maps) if any(one is not None for one in maps) else 1.0)
        return strength * math.exp(exponent) if exponent < 709 else math.inf

    # ---- what it descends

    @property
    def has_energy(self) -> bool:
        return self._slope is not None and self._mask is None and self.beta > 0

    @of_signal
    def interaction(self, x: Array) -> float:
        """Return the interaction energy E_beta = sum_ij exp(beta q_i . k_j) / (2 beta N^2); infinity for beta = 0.

        (arXiv 2312.10794, section 3.) With ``sinkhorn`` it is sum_ij a_ij log(N a_ij / k_ij) / (2 beta N), which is
        -1/beta times the functional of arXiv 2110.11773; infinity for beta = 0 as well.
        """
        return float(self._pending_interaction(x))

    def _pending_interaction(self, x: Array) -> Pending | float:
        if self.beta == 0:
            return math.inf
        now, xp = self.at(x), namespace(x)
        now.applications += 1
        if self.normalization == "sinkhorn":
            return scalar(xp.sum(now.affinity.potentials[0] + now.affinity.potentials[1])) / (2 * self.beta * len(x))
        logs = now.affinity.sums(x[:, :1])[1]
        highest = xp.max(logs)

        def formed(highest: float, mean: float) -> float:
            exponent = highest + math.log(mean)
            return math.exp(exponent) / (2 * self.beta) if exponent < 709 else math.inf

        return Pending(formed, highest, xp.mean(xp.exp(logs - highest)))

    def energy(self, u: Array) -> float:
        """Return -c E_beta (c E_beta with ``sinkhorn``); NaN where the flow does not descend it.

        d/dt energy = -(1/N) sum_i r_i |dx_i/dt|^2, with r_i = 1, for ``softmax`` r_i = sum_j k_ij / N.
        """
        return float(self._pending_energy(u))

    def pending_energy(self, u: Array) -> Pending | float:
        return self._pending_energy(u) if self.leaves_pending else self.energy(u)

    @property
    def leaves_pending(self) -> bool:
        return type(self).energy is SphereFlow.energy and self.normalization != "sinkhorn"

    def _pending_energy(self, u: Array) -> Pending | float:
        if not self.has_energy or self._slope is None:
            return math.nan
        value, slope = self._pending_interaction(u), self._slope
        if isinstance(value, Pending):
            return value.times(-slope)
        return slope * (value if self.normalization == "sinkhorn" else -value)

    # ---- what is seen of the tokens

    def clusters(self, x: Array, cosine: float = 0.99) -> NDArray[np.int64]:
        """Return the number of each token's cluster, from 0, shape (N,).

        Two tokens are in one cluster where a chain of tokens leads from one to the other, each with a cosine of at
        least `cosine` to the next. O(N^2 d) time, O(N d) memory.
        """
        least = check_number("cosine", cosine, minimum=-1, below=1)
        unit = to_numpy(self.held(self.check_signal("x", x))).astype(np.float64)
        labels = np.full(len(unit), -1, dtype=np.int64)
        for number in range(len(unit)):  # as often as there are clusters
            left = np.flatnonzero(labels < 0)
            if not len(left):
                break
            labels[left[0]], met = number, left[:1]
            while len(met) and len(left):
                left = left[labels[left] < 0]
                found = np.zeros(len(left), bool)
                step = max(1, _TABLE // max(len(left), 1))
                for start in range(0, len(met), step):
                    found |= (unit[left] @ unit[met[start : start + step]].T >= least).any(axis=1)
                met = left[found]
                labels[met] = number
        return labels

    # ---- the contract

    def check_signal(self, name: str, value: Any) -> Array:
        u = super().check_signal(name, value)
        _check_lengths(name, u)
        return self.held(u)

    @property
    def _shape(self) -> tuple[tuple[int, ...], str]:
        return tuple(self.affinity.tokens.shape), "that of the flow's tokens"

    def given(self) -> list[Any]:
        return [
            self.normalization,
            self.value_map if self.value_map is None else to_numpy(self.value_map).tobytes().hex(),
        ]

    def __repr__(self) -> str:
        maps = [name for name in ("query_map", "key_map") if getattr(self.affinity.kernel, name) is not None]
        maps += [] if self.value_map is None else ["value_map"]
        words = "".join(f", {name}" for name in [*maps, *(["mask"] if self._mask is not None else [])])
        return f"SphereFlow({self.normalization}, beta={self.beta!r}{words}, {tuple(self.affinity.tokens.shape)})"


def tangent(x: Array, a: Array) -> Array:
    return a - namespace(x).sum(x * a, axis=1, keepdims=True) * x


def _map(name: str, value: Any, like: Array) -> Array | None:
    if value is None:
        return None
    matrix = check_array(name, value, ndim=2)
    if is_numpy(matrix) and not is_numpy(like):
        matrix = constant_like(matrix, like)
    same_kind(name, matrix, like)
    if int(matrix.shape[0]) != int(like.shape[1]):
        raise InputError(
            f"{name}: got shape {tuple(matrix.shape)}, expected {int(like.shape[1])} rows, the width of the tokens"
        )
    return matrix


def _norm(*maps: Array | None) -> float:
    """Return the spectral norm of A B^T, of A alone where one map is given, and of those that are not None."""
    matrices = [to_numpy(one).astype(np.float64) for one in maps if one is not None]
    product = matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1].T
    return float(np.linalg.norm(product, 2))


def _check_lengths(name: str, x: Array) -> None:
    xp = namespace(x)
    lengths = xp.sqrt(xp.sum(x * x, axis=1))
    low, high = numbers(xp.min(lengths), xp.max(lengths))
    if not (abs(low - 1) <= _LENGTH[x.dtype.itemsize] and abs(high - 1) <= _LENGTH[x.dtype.itemsize]):
        raise InputError(
            f"{name}: got tokens of length {low:.6g} to {high:.6g}, expected 1; divide them by their lengths with "
            "nlflow.on_sphere"
        )


def _slope(query: Array | None, key: Array | None, value: Array | None, like: Array) -> float | None:
    """Return c with W_V = c W_Q W_K^T where that is symmetric; None where there is no such c."""
    width = int(like.shape[1])
    q, k, v = (np.eye(width) if one is None else to_numpy(one).astype(np.float64) for one in (query, key, value))
    both = q @ k.T
    size = float(np.linalg.norm(both))
    if size == 0 or np.linalg.norm(both - both.T) > _PARALLEL * size:
        return None
    slope = float(np.vdot(both, v)) / float(np.vdot(both, both))  # 1 exactly for the identity
    return slope if slope != 0 and np.linalg.norm(v - slope * both) <= _PARALLEL * np.linalg.norm(v) else None


class SphereStep(FixedStep):
    """Steps on the sphere."""

    takes_constraint = True

    def stability_limit(self, flow: Flow) -> float:
        return 2 / as_sphere(flow).rate if as_sphere(flow).rate > 0 else math.inf

    def unstable(self, flow: Flow, limit: float) -> str:
        return (
            f"dt: got {self.dt:g}, which is unstable for this flow: tokens of a cluster meet at the rate "
            f"{as_sphere(flow).rate:.6g}, so {type(self).__name__} needs dt < {limit:.6g}; reduce dt, or use "
            "RungeKutta()"
        )

    def check_kind(self, flow: Flow) -> None:
        if not isinstance(flow, SphereFlow):
            raise InputError(
                f"integrator: {type(self).__name__} is for a SphereFlow, got {kind_of(flow)}; use RungeKutta()"
            )


def as_sphere(flow: Any) -> SphereFlow:
    return cast(SphereFlow, flow)


def _length(xp: Any, v: Array) -> Array:
    return xp.sqrt(xp.sum(v * v, axis=1, keepdims=True))


def _unit(xp: Any, x: Array) -> Array:
    return x / _length(xp, x)


def turned(x: Array, centre: Array, direction: Array, dt: float) -> Array:
    """Return x after a rotation by the angle dt |v| that carries `centre` towards v = `direction`, tangent there."""
    xp = namespace(x)
    size = _length(xp, direction)
    along = direction / xp.where(size > 0, size, xp.ones_like(size))
    angle = dt * size
    a, b = xp.sum(x * centre, axis=1, keepdims=True), xp.sum(x * along, axis=1, keepdims=True)
    # cos - 1 = -2 sin^2(angle / 2), which has its digits for small angles.
    less, sine = -2 * xp.sin(angle / 2) ** 2, xp.sin(angle)
    return _unit(xp, x + less * (a * centre + b * along) + sine * (a * along - b * centre))


@underflowing
class GeodesicEuler(SphereStep):
    """Each token goes along the great circle of its velocity, x <- exp_x(dt dx/dt); order 1."""

    order = 1.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        return turned(u, u, flow.velocity(u), dt)


@underflowing
class GeodesicMidpoint(SphereStep):
    """Rotations by the velocity at the midpoint: x <- R(y) x with y = exp_x(dt/2 v(x)); order 2.

    x is turned by dt |v(y)| in the plane of y and v(y) (Munthe-Kaas 1998, doi 10.1007/BF02510919). Two averages a step.

    Parameters
    ----------
    dt : float

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import GeodesicMidpoint, SphereFlow, on_sphere, solve
    >>> x = on_sphere(np.random.default_rng(0).standard_normal((8, 3)))
    >>> found = solve(SphereFlow(x, beta=4.0), x, t=5.0, integrator=GeodesicMidpoint(0.1))
    >>> bool(np.abs(np.linalg.norm(found.final, axis=1) - 1).max() < 1e-15)
    True
    """

    order = 2.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        middle = turned(u, u, flow.velocity(u), dt / 2)
        return turned(u, middle, flow.velocity(middle), dt)


@underflowing
class LayerStep(SphereStep):
    """A layer with residual and norm, x <- (x + dt a) / |x + dt a| with a = sum_j a_ij x_j W_V; order 1."""

    order = 1.0

    def stability_limit(self, flow: Flow) -> float:
        del flow  # right where W_V is symmetric and positive definite
        return math.inf

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        xp, share = namespace(u), dt / (1 + dt)  # of a sum that is in range for every dt
        found = (1 - share) * u + share * as_sphere(flow).attention(u)
        if not bool(xp.all(_length(xp, found) > 0)):
            raise StepFailureError(
                f"dt: got {dt:g}, with which attention takes away all of a token, so that no direction is left; use "
                "another dt"
            )
        return _unit(xp, found)
