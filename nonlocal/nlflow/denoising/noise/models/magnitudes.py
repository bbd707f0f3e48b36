"""Magnitudes of complex samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import OfLaw, OfMagnitudes, OfSpectra
from nlflow.denoising.noise.models.base import Array, refuse_negative
from nlflow.denoising.noise.models.intensities import Evened
from nlflow.errors import InputError, check_numpy

if TYPE_CHECKING:
    from scipy.interpolate import CubicHermiteSpline

_MAGNITUDES: Final = "magnitudes >= 0, as the root of a sum of squares is; for real or complex parts take white noise"


def log_density(z: Floats, a: Floats, coils: float) -> Floats:
    """Return log z (z / a)^(L - 1) exp(-(z² + a²) / 2) I_{L-1}(a z), the law of magnitudes z for L = `coils`."""
    from scipy.special import gammaln, hyp0f1, ive

    product = a * z
    z, a = np.broadcast_arrays(z, a)
    # Of the two forms of the Bessel function one overflows at large products, the other one underflows at small ones.
    small, out = product < 2 * coils + 20, np.empty(product.shape)
    near, far = z[small], z[~small]
    out[small] = np.log(hyp0f1(coils, (product[small] / 2) ** 2)) - (near**2 + a[small] ** 2) / 2
    out[small] += (2 * coils - 1) * np.log(near) - gammaln(coils) - (coils - 1) * math.log(2)
    out[~small] = np.log(far * ive(coils - 1, product[~small])) + (coils - 1) * np.log(far / a[~small])
    out[~small] -= (far - a[~small]) ** 2 / 2
    return out


def mean_magnitude(a: Any, coils: float) -> Floats:
    """Return the mean of the law, √2 Γ(L + 1/2) / Γ(L) ₁F₁(-1/2; L; -a² / 2)."""
    from scipy.special import gammaln, hyp1f1

    factor = math.sqrt(2) * math.exp(float(gammaln(coils + 0.5) - gammaln(coils)))
    return np.asarray(factor * hyp1f1(-0.5, coils, -np.square(np.asarray(a, np.float64)) / 2))


@dataclass(frozen=True, eq=False)
class Stabilizer:
    """A growing function f of magnitudes in units of the noise, for which f(z) has a standard deviation near 1."""

    coils: float
    inner: CubicHermiteSpline  # f between the knots
    way: CubicHermiteSpline  # from E[f(Z)] to y = √(a² + `least`²), a the magnitude without noise
    least: float  # √(2 L)

    def __call__(self, z: Any) -> Floats:
        """Return f(z) for magnitudes z >= 0."""
        z = np.asarray(z, np.float64)
        first, last = self.inner.x[0], self.inner.x[-1]
        out = np.asarray(self.inner(np.clip(z, first, last)))
        out += float(self.inner(first, 1)) * np.minimum(z - first, 0)
        far = z > last
        out[far] = _tail(z[far], self.coils)
        return out

    def inverse(self, mean: Any) -> Floats:
        """Return a for which E[f(Z)] is `mean`; 0 below E[f(Z)] at 0."""
        mean = np.asarray(mean, np.float64)
        first, last = self.way.x[0], self.way.x[-1]
        y = np.asarray(self.way(np.clip(mean, first, last)))
        out = np.asarray(np.sqrt(np.maximum(y**2 - self.least**2, 0)))
        out[mean <= first] = 0
        far = mean > last
        out[far] = _from_series(mean[far], self.coils)
        return out

    def mean(self, a: Any) -> Floats:
        """E[f(Z)] for a (n,)."""
        return _moments(self, np.atleast_1d(np.asarray(a, np.float64)), self.coils)[0]

    def spread(self, a: Any) -> Floats:
        """Return the standard deviation of f(Z) for a (n,)."""
        return _moments(self, np.atleast_1d(np.asarray(a, np.float64)), self.coils)[1]


@lru_cache(maxsize=16)
def stabilizer(coils: float) -> Stabilizer:
    from scipy.interpolate import CubicHermiteSpline, CubicSpline

    start, end, places, logs = _chosen(coils)
    knots = np.linspace(start, end, OfLaw.knots)
    slopes = np.exp(CubicSpline(places, logs, bc_type="natural")(knots))
    # By Simpson's rule.
    middle = np.exp(CubicSpline(places, logs, bc_type="natural")((knots[1:] + knots[:-1]) / 2))
    rises = np.diff(knots) * (slopes[1:] + 4 * middle + slopes[:-1]) / 6
    heights = np.concatenate([[0.0], np.cumsum(rises)])
    inner = CubicHermiteSpline(knots, heights - heights[-1] + _tail(knots[-1:], coils), slopes)
    least = math.sqrt(2 * coils)
    y = np.arange(least, math.hypot(end + OfLaw.last, least), OfLaw.step)
    y = np.append(y, y[-1] + OfLaw.step)
    a = np.sqrt(np.maximum(y**2 - least**2, 0))
    bare = Stabilizer(coils, inner, inner, least)
    means = _moments(bare, a, coils)[0]
    # The derivative of a noncentral chi law by a² / 2 is the law of one coil more, less its own.
    growth = y * (_moments(bare, a, coils + 1)[0] - means)
    return Stabilizer(coils, inner, CubicHermiteSpline(means, y, 1 / growth), least)


def _tail(z: Floats, coils: float) -> Floats:
    """Return √(z² - L + 1/2), whose spread is 1 to fourth order in 1 / a."""
    return np.asarray(z * np.sqrt(1 - (coils - 0.5) / np.maximum(z, 1.0) / np.maximum(z, 1.0)))


def _from_series(d: Floats, coils: float) -> Floats:
    """Return a for which the first terms of E[√(Z² - L + 1/2)], in moments of Z² about its mean, are d."""
    near = np.minimum(d, OfLaw.large)
    m = near**2
    for _ in range(4):  # each gains a factor of m, which is large
        squared = m - coils - 0.5  # a²
        second, third = 4 * (squared + coils), 8 * (3 * squared + 2 * coils)
        fourth = 48 * (4 * squared + 2 * coils) + 3 * second**2
        m = (near / (1 - second / (8 * m**2) + third / (16 * m**3) - 5 * fourth / (128 * m**4))) ** 2
    return np.asarray(np.where(d < OfLaw.large, np.sqrt(m - coils - 0.5), d))


def _panels(edges: Floats) -> tuple[Floats, Floats]:
    """Return the nodes (panels, n) and weights of Gauss's rule between edges that follow each other."""
    nodes, weights = np.polynomial.legendre.leggauss(OfLaw.nodes)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + edges[1:, None]) / 2 + half * nodes, half * weights


def _edges(start: float, end: float, last: float, knots: Floats) -> Floats:
    """Return edges from where the law begins to where it ends, all knots among them."""
    before = np.linspace(max(start - OfLaw.below, 0.0), start, 6)[:-1] if start > 0 else np.empty(0)
    after = np.arange(end + 0.5, last + 0.5, 0.5)
    return np.concatenate([before, knots, after])


def _moments(function: Stabilizer, a: Floats, coils: float) -> tuple[Floats, Floats]:
    """Return the mean and the standard deviation of f(Z) for each a, under the law of so many coils."""
    knots = function.inner.x
    middle = np.sqrt(a**2 + 2 * coils)
    edges = _edges(knots[0], knots[-1], float(middle.max()) + OfLaw.tail, knots)
    z, weights = _panels(edges)
    values = function(z)
    mean, spread = np.empty(len(a)), np.empty(len(a))
    for i, (one, at) in enumerate(zip(a, middle, strict=True)):
        # Sums in a fixed order: a product of matrices would depend on the number of threads.
        near = slice(np.searchsorted(edges, at - OfLaw.tail) - 1 if at > edges[0] + OfLaw.tail else 0,
                     np.searchsorted(edges, at + OfLaw.tail) + 1)  # fmt: skip
        law = weights[near] * np.exp(log_density(z[near], np.array(one), coils))  # its sum is 1 but for rounding
        mean[i] = (law * values[near]).sum()
        spread[i] = math.sqrt((law * (values[near] - mean[i]) ** 2).sum())
    return mean, spread


def _chosen(coils: float) -> tuple[float, float, Floats, Floats]:
    """Return where f is free, and the log slopes there for which its spread is nearest to 1, and they are smooth.

    Least squares over magnitudes without noise from 0 on. Asymptotically f' = 1 / std(z | mean z), which makes f
    the first choice everywhere (the delta method); near 0 it is far from good.
    """
    from scipy.interpolate import CubicSpline
    from scipy.optimize import least_squares

    least = math.sqrt(2 * coils)
    start, end = max(0.0, least - OfLaw.below), least + OfLaw.span
    places = np.linspace(start, end, OfLaw.free)
    z, weights = _panels(_edges(start, end, end + 2 * OfLaw.tail, np.linspace(start, end, 2 * OfLaw.free - 1)))
    a = np.linspace(0, end, OfLaw.means)
    law = weights.ravel() * np.exp(log_density(z.ravel(), a[:, None], coils))
    law /= law.sum(axis=1, keepdims=True)
    basis = CubicSpline(places, np.eye(OfLaw.free), bc_type="natural")(np.clip(z, start, end).ravel())
    far = z.ravel() > end
    known = _tail(np.maximum(z, end).ravel(), coils)
    slope_of_tail = np.maximum(z, end).ravel() / known
    last = math.log(end / float(_tail(np.array([end]), coils)[0]))
    integral = _integral(weights)
    bends = np.diff(np.eye(OfLaw.free), 2, axis=0)

    def slopes(c: Floats) -> Floats:
        return np.asarray(np.where(far, slope_of_tail, np.exp(basis @ np.append(c, last))))

    def residuals(c: Floats) -> Floats:
        f = integral(slopes(c))
        away = f - (law @ f)[:, None]
        return np.concatenate([(law * away**2).sum(axis=1) - 1, OfLaw.smooth * (bends @ np.append(c, last))])

    def jacobian(c: Floats) -> Floats:
        slope = slopes(c)
        f = integral(slope)
        changes = integral(np.where(far, 0.0, slope) * basis.T[:-1])
        of_spread = 2 * (law * (f - (law @ f)[:, None])) @ changes.T
        return np.concatenate([of_spread, OfLaw.smooth * bends[:, :-1]])

    begin = np.full(OfLaw.free - 1, last)
    found = least_squares(residuals, begin, jacobian, method="trf", xtol=1e-12, ftol=1e-14, gtol=1e-12, max_nfev=500)
    # Rounded, as the last digits of a search depend on the number of threads of its products of matrices.
    logs = np.append(np.rint(found.x / OfLaw.digits) * OfLaw.digits, last)
    return start, end, places, logs


def _integral(weights: Floats) -> Any:
    """Return what takes values at the nodes of all panels to those of the integral from the first edge on."""
    nodes, rule = np.polynomial.legendre.leggauss(OfLaw.nodes)
    to_series = np.linalg.inv(np.polynomial.legendre.legvander(nodes, OfLaw.nodes - 1))
    unit = np.eye(OfLaw.nodes)
    parts = np.stack(
        [np.polynomial.legendre.legval(nodes, np.polynomial.legendre.legint(row, lbnd=-1)) for row in unit], axis=-1
    ) @ to_series  # fmt: skip
    half = weights.sum(axis=1, keepdims=True) / rule.sum()

    def integrate(values: Floats) -> Floats:
        panels = values.reshape(*values.shape[:-1], len(half), OfLaw.nodes) * half
        whole = panels @ rule
        before = np.cumsum(whole, axis=-1) - whole
        return np.asarray((panels @ parts.T + before[..., None]).reshape(values.shape))

    return integrate


@underflowing
@dataclass(frozen=True)
class Magnitudes(Evened):
    """Noise of magnitudes."""

    sigma: float | None = field(
        default=None,
        metadata={
            "minimum": 0, "strict": True,
            "hint": "the standard deviation of the real and of the imaginary part, in the units of the input",
        },
    )  # fmt: skip

    coils = 1.0  # complex samples whose squares a magnitude sums up
    dark = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        most = OfSpectra.largest
        if self.sigma is not None and not 1 / most <= self.sigma <= most:
            raise InputError(f"sigma: got {self.sigma:g}, expected {1 / most:g} to {most:g}; take another unit")

    @property
    def even_sigma(self) -> float:
        """`sigma`; raises `InputError` if it is not known."""
        return float(self._known("sigma"))

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Return magnitudes of these means without noise; negative ones are refused."""
        sigma = self.even_sigma
        refuse_negative(samples, _MAGNITUDES, "clean")
        along = samples / sigma + rng.standard_normal(samples.shape)
        across = rng.chisquare(2 * self.coils - 1, samples.shape)
        return np.asarray(sigma * np.sqrt(along**2 + across))

    def _even(self, values: Array) -> Floats:
        refuse_negative(values, _MAGNITUDES)
        return self.even_sigma * stabilizer(self.coils)(values.astype(np.float64) / self.even_sigma)

    def _uneven(self, stable: Floats) -> Floats:
        return self.even_sigma * stabilizer(self.coils).inverse(stable / self.even_sigma)

    def describe(self) -> str:
        of = f"noise of magnitudes of {self.coils:.3g} coil{'s' if self.coils != 1 else ''}"
        sigma = f": sigma {self.sigma:.3g}" if self.sigma is not None else ", sigma to be found"
        return ("Rician noise" if self.kind == Rician.kind else of) + sigma

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        return (self, sigma) if sigma is None or self.sigma is not None else (replace(self, sigma=sigma), None)

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Find the strength from the samples where none was given.

        From a background whose mean and spread have the ratio of pure noise; else as the sigma for which stabilized
        samples have noise of strength sigma (Foi 2011). O(N).

        Raises
        ------
        InputError
            For negative values, and where no noise is seen.
        """
        if self.sigma is not None:
            return self
        from nlflow.denoising.noise.finding.finders import strength_of

        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        refuse_negative(samples[~absent], _MAGNITUDES)
        found = strength_of(samples, absent, self.coils)
        if found is None:
            raise InputError("noise: got samples in which no noise is seen, so that its strength cannot be found; give "
                             f"it, {type(self).__name__}(sigma=...)")  # fmt: skip
        return replace(self, sigma=found)

    def mean(self, magnitude: Any) -> Array:
        """Return the mean of noisy samples whose magnitude without noise is this."""
        values, sigma = check_numpy("magnitude", magnitude), self.even_sigma
        refuse_negative(values, _MAGNITUDES, "magnitude")
        return np.asarray(sigma * mean_magnitude(values.astype(np.float64) / sigma, self.coils), dtype=values.dtype)


@underflowing
@dataclass(frozen=True)
class Rician(Magnitudes):
    """Magnitudes z = |x + sigma (n₁ + i n₂)| of complex samples with white Gaussian noise n₁, n₂ of strength 1.

    Parameters
    ----------
    sigma : float or None
        Standard deviation of the real and of the imaginary part, in the units of the input, between 1e-150 and 1e150;
        found from the samples where it is not given.

    Raises
    ------
    InputError
        For a sigma outside of this range.

    Notes
    -----
    `stabilize` takes a growing function f for which f(z) has a standard deviation of 0.96 to 1.03 sigma; `unstabilize`
    goes from E[f(z)] to x. Near x = 0 an error of ε sigma in that mean makes an error of about 1.5 √ε sigma in x.

    References
    ----------
    Gudbjartsson and Patz 1995 (doi 10.1002/mrm.1910340618); Foi 2011 (doi 10.1109/ISBI.2011.5872758).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Rician
    >>> noise = Rician(2.0)
    >>> stable = noise.stabilize(noise.sample(np.full((300, 300), 1.0), rng=0))
    >>> bool(abs(np.std(stable) - 2) < 0.04)
    True
    >>> bool(abs(noise.unstabilize(np.array([stable.mean()]))[0] - 1) < 0.1)
    True
    """

    kind: ClassVar[str] = "rician"


@underflowing
@dataclass(frozen=True)
class NoncentralChi(Magnitudes):
    """Root of the sum of squares of several coils, z = √(Σ |x_c + sigma (n₁ + i n₂)|²), for x = √(Σ |x_c|²).

    Parameters
    ----------
    sigma : float or None
        As that of `Rician`, for each coil.
    coils : float
        From 1 to 256; fewer, and no whole number, for correlated coils.

    Raises
    ------
    InputError
        For a sigma or coils outside of their ranges.

    References
    ----------
    Constantinides, Atalar, McVeigh 1997 (doi 10.1002/mrm.1910380524); effective coils in Aja-Fernández and
    Tristán-Vega 2012 (doi 10.1002/mrm.23020).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import NoncentralChi
    >>> z = NoncentralChi(1.0, coils=4).sample(np.zeros((300, 300)), rng=0)
    >>> bool(abs(np.mean(z**2) - 8) < 0.1)
    True
    """

    kind: ClassVar[str] = "noncentral-chi"

    coils: float = field(
        default=1.0, metadata={"minimum": 1, "hint": "how many coils were combined by the root of the sum of squares"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coils > OfMagnitudes.most_coils:
            raise InputError(f"coils: got {self.coils:g}, expected at most {OfMagnitudes.most_coils:g}")
