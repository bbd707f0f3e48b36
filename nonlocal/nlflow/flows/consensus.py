"""Models of consensus and synchronization."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from nlflow._array import Array, is_numpy, kept_like, namespace, same_kind, scalar, to_numpy, underflowing
from nlflow.affinities.pair_fields import PairFields
from nlflow.affinities.unlinked import Unlinked
from nlflow.domains import Points
from nlflow.errors import (
    InputError,
    NumericalError,
    check_array,
    check_detached,
    check_floats,
    check_number,
    checked_call,
    kind_of,
)
from nlflow.flows.flow import Flow, of_signal
from nlflow.kernels import Gaussian, RadialKernel, TopHat

_UNSEEN = {4: 1e-11, 8: 1e-20}
"""By the bytes of a number: of k(0), which weights are left out."""
_FAR = 1e8  # times that: degrees, over the weights, that are summed over all pairs
_LEAST = {4: 1e-35, 8: 1e-300}
"""By the bytes of a number: degrees, over the weights, of those that see nothing; compiled powers end above."""


@checked_call
@underflowing
class AveragingFlow(Flow):
    """Each particle moves to the weighted mean of what it sees, dx_i/dt = sum_j w_j k(x_i, y_j) y_j / d_i - x_i.

    The points y are the particles, or fixed data. A velocity takes up to O(N M d) time.

    Parameters
    ----------
    particles : array_like of shape (N, d)
        They give the dtype and the shape; the start goes to `solve`.
    kernel : RadialKernel
    data : array_like of shape (M, d), optional
        y; the particles by default.
    weights : array_like of shape (M,), optional
        w_j > 0; equal by default.

    Raises
    ------
    NumericalError
        From a velocity, for a particle that sees nothing.
    """

    def __init__(self, particles: Any, kernel: RadialKernel, *, data: Any = None, weights: Any = None) -> None:
        x = _columns("particles", particles)
        if not isinstance(kernel, RadialKernel):
            raise InputError(f"kernel: got {kind_of(kernel)}, expected a radial one, such as Gaussian(1.0)")
        super().__init__(Unlinked(Points(np.arange(float(x.shape[0]))), x), "l2", None, evolving=False, every=1)
        self.kernel, self.data, self._like = kernel, None, x[:1]
        if data is not None:
            self.data = check_array("data", data, ndim=2)
            same_kind("data", self.data, x)
            if self.data.shape[1] != x.shape[1]:
                raise InputError(
                    f"data: got {self.data.shape[1]} coordinates, expected {x.shape[1]}, as particles have"
                )
        seen = int((x if self.data is None else self.data).shape[0])
        self.weights = np.ones(seen) if weights is None else check_floats("weights", weights, ndim=1)
        if self.weights.shape != (seen,) or self.weights.min() <= 0:
            raise InputError(f"weights: got shape {self.weights.shape}, expected ({seen},), numbers > 0")
        self._size = tuple(x.shape)
        self._all = PairFields(kernel.weight())
        self._pairs = PairFields(kernel.weight(), kernel.support(_UNSEEN[x.dtype.itemsize]))

    def velocity(self, u: Array) -> Array:
        self.applications += 1
        xp, seen = namespace(u), u if self.data is None else self.data
        weights = self.weights if is_numpy(u) else kept_like(self.weights, u)
        pairs, degrees = self._degrees(u, seen, weights)
        # Differences are summed, not positions: nothing cancels.
        return xp.astype(-pairs.pulls(u, seen, weights) / degrees, u.dtype, copy=False)

    def _degrees(self, u: Array, seen: Array, weights: Array) -> tuple[PairFields, Array]:
        """Return sum_j w_j k(x_i, y_j), (N, 1), and what sums it: all pairs where some particle is far from all."""
        xp, size, pairs = namespace(u), u.dtype.itemsize, self._pairs
        degrees, total = pairs.sums(u, seen, weights[:, None]), float(self.weights.sum())
        if scalar(xp.min(degrees)) < _FAR * _UNSEEN[size] * total:
            pairs = self._all
            degrees = pairs.sums(u, seen, weights[:, None])
        least = xp.min(degrees)
        if not scalar(least) > _LEAST[size] * total:
            number = int(xp.argmin(degrees[:, 0]))
            raise NumericalError(
                f"particles: particle {number} at {np.round(to_numpy(u[number]), 6).tolist()} sees nothing of the data "
                f"with {self.kernel!r}; use a wider kernel, or start nearer"
            )
        return pairs, degrees

    @property
    def has_energy(self) -> bool:
        return self.data is not None and self.kernel.gaussian_width is not None

    def energy(self, u: Array) -> float:
        """Return -width^2 mean_i log sum_j w_j k(x_i, y_j), for data and a Gaussian; else NaN."""
        width = self.kernel.gaussian_width
        if self.data is None or width is None:
            return math.nan
        weights = self.weights if is_numpy(u) else kept_like(self.weights, u)
        try:
            degrees = self._degrees(u, self.data, weights)[1]
        except NumericalError:
            return math.inf
        return -(width**2) * scalar(namespace(u).mean(namespace(u).log(degrees)))

    @property
    def _shape(self) -> tuple[tuple[int, ...], str]:
        return self._size, "that of the particles"

    def rebuilt(self, u: Array) -> Self:
        del u
        return self

    def given(self) -> list[Any]:
        return [repr(self), self.weights, None if self.data is None else to_numpy(self.data)]

    def __repr__(self) -> str:
        seen = "each other" if self.data is None else f"{len(self.data)} data"
        return f"AveragingFlow({' x '.join(map(str, self._size))} that see {seen}, {self.kernel!r})"


def mean_shift(data: Any, width: float, particles: Any = None) -> AveragingFlow:
    """Return the mean shift to the modes of data, dx/dt = sum_j k(x, y_j) y_j / sum_j k(x, y_j) - x, k Gaussian.

    (Fukunaga and Hostetler 1975, doi 10.1109/TIT.1975.1055330; Cheng 1995, doi 10.1109/34.400568.)

    Parameters
    ----------
    data : array_like of shape (M, d)
    width : float
        Of the Gaussian.
    particles : array_like of shape (N, d), optional
        The data by default.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import solve
    >>> from nlflow.flows import mean_shift
    >>> data = np.array([[0.0], [0.2], [3.0], [3.2]])
    >>> np.round(solve(mean_shift(data, width=0.5), data, t=40.0).final[:, 0], 3).tolist()
    [0.1, 0.1, 3.1, 3.1]
    """
    return AveragingFlow(data if particles is None else particles, Gaussian(width), data=data)


def hegselmann_krause(opinions: Any, confidence: float) -> AveragingFlow:
    """Return opinions that move to the mean of those within a distance: bounded confidence.

    (Hegselmann and Krause 2002, J. Artificial Societies and Social Simulation 5(3); in continuous time Blondel,
    Hendrickx and Tsitsiklis 2010, doi 10.1137/090766188.) ``EulerMaruyama(1.0)`` makes it the original model.

    Parameters
    ----------
    opinions : array_like of shape (N, d)
    confidence : float
        Distance up to which opinions are seen.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import solve
    >>> from nlflow.flows import EulerMaruyama, hegselmann_krause
    >>> x = np.linspace(0, 1, 11)[:, None]
    >>> found = solve(hegselmann_krause(x, 0.15), x, t=20.0, integrator=EulerMaruyama(1.0)).final
    >>> np.unique(np.round(found, 4)).tolist()
    [0.2004, 0.5, 0.7996]
    """
    radius = check_number("confidence", confidence, minimum=0, strict=True)
    return AveragingFlow(_columns("opinions", opinions), TopHat(radius))


def _columns(name: str, given: Any) -> Array:
    return check_array(name, given, ndim=2, hint="for one dimension a column, x[:, None]")


@checked_call
@underflowing
class Kuramoto(Flow):
    r"""Phase oscillators, dtheta_i/dt = omega_i + K/N sum_j sin(theta_j - theta_i); O(N) time.

    (Kuramoto 1975, doi 10.1007/BFb0013365; Strogatz 2000, doi 10.1016/S0167-2789(00)00094-4.) Phases are not reduced
    to [0, 2 pi).

    Parameters
    ----------
    frequencies : array_like of shape (N,)
        omega.
    coupling : float
        K.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import solve
    >>> from nlflow.flows import Kuramoto
    >>> flow = Kuramoto([0.3, -0.3], coupling=1.0)
    >>> theta = solve(flow, np.array([0.0, 1.0]), t=40.0).final
    >>> round(float(np.sin(theta[0] - theta[1])), 6)  # 2 * 0.3 / K
    0.6
    """

    def __init__(self, frequencies: Any, coupling: float) -> None:
        check_detached("frequencies", frequencies)  # the order parameter is taken out of autograd
        omega = check_array("frequencies", frequencies, ndim=1)
        super().__init__(Unlinked(Points(np.arange(float(omega.shape[0]))), omega), "l2", None, evolving=False, every=1)
        self.frequencies = self._like = omega
        self.coupling = check_number("coupling", coupling)

    @of_signal
    def order_parameter(self, theta: Array) -> tuple[float, float]:
        """Return r >= 0 and psi in [-pi, pi], with r e^(i psi) = mean_j e^(i theta_j)."""
        xp = namespace(theta)
        c, s = (scalar(xp.mean(f(theta), dtype=xp.float64)) for f in (xp.cos, xp.sin))
        return math.hypot(c, s), math.atan2(s, c)

    def velocity(self, u: Array) -> Array:
        self.applications += 1
        r, psi = self.order_parameter(u)
        return self.frequencies + self.coupling * r * namespace(u).sin(psi - u)

    @property
    def has_energy(self) -> bool:
        return True

    def energy(self, u: Array) -> float:
        """Return -K r^2 / 2 - mean_i omega_i theta_i, r from `order_parameter`."""
        xp = namespace(u)
        return -self.coupling * self.order_parameter(u)[0] ** 2 / 2 - scalar(xp.mean(self.frequencies * u))

    @property
    def _shape(self) -> tuple[tuple[int, ...], str]:
        return tuple(self.frequencies.shape), "phases"

    def rebuilt(self, u: Array) -> Self:
        del u
        return self

    def given(self) -> list[Any]:
        return [to_numpy(self.frequencies), self.coupling]

    def __repr__(self) -> str:
        return f"Kuramoto({len(self.frequencies)} oscillators, coupling={self.coupling!r})"
