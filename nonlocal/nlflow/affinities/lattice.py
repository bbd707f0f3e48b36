"""Weights of the kernels of Levy flights between the nodes of a uniform grid, in units of its spacing."""

# The singular kernel is not cut off: the weights have the second moment of the kernel, exactly.

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import integrate, special

from nlflow._array import Floats

WHOLE = 192  # largest horizon, in nodes, whose ball is summed over node by node
_WINDOW = {1: 256, 2: 32, 3: 12}  # half sides of the box in which far sums are split off


def normalization(ndim: int, s: float) -> float:
    """Return c_{m,s} = 4^s Gamma(m/2 + s) / (pi^(m/2) |Gamma(-s)|) (Kwasnicki 2017, doi 10.1515/fca-2017-0002)."""
    return float(4**s * special.gamma(ndim / 2 + s) * abs(special.rgamma(-s)) / math.pi ** (ndim / 2))


def sphere(ndim: int) -> float:
    return float(2 * math.pi ** (ndim / 2) / math.gamma(ndim / 2))


@lru_cache(maxsize=256)
def epstein(ndim: int, power: float) -> float:
    """Return the sum of |n|^-power over all n != 0 with integer coordinates, continued to powers below `ndim`."""
    # By the theta function (Epstein 1903, doi 10.1007/BF01444309), to rounding.
    points, weights = np.polynomial.legendre.leggauss(64)
    t = 1 + 6 * (points + 1)
    theta = 1 + 2 * sum(np.exp(-math.pi * k * k * t) for k in range(1, 5))
    powers = t ** (power / 2 - 1) + t ** ((ndim - power) / 2 - 1)
    whole = 6 * float(np.sum(weights * powers * (theta**ndim - 1))) - 2 / (ndim - power)
    return float(math.pi ** (power / 2) * special.rgamma(1 + power / 2) * (power / 2 * whole - 1))


def window(r: Floats) -> Floats:
    """Return a smooth function of r that is 1 up to 1/2 and 0 from 1."""
    t = np.clip(2 * (1 - r), 1e-3, 1 - 1e-3)
    a, b = np.exp(-1 / t), np.exp(-1 / (1 - t))
    return np.where(r <= 0.5, 1.0, np.where(r >= 1, 0.0, a / (a + b)))


@dataclass(frozen=True)
class Lattice:
    """Weights w_n of sum_n w_n (u_i - u_{i+n}) for ``constant r^(-m-2s) exp(-tempering r)`` up to `horizon`."""

    # Weights of the trapezoidal rule, cut off at the horizon by the integrals of hat functions; to those of the nearest
    # nodes a number is added that makes the second moment exact. Without a horizon it comes from the Epstein zeta
    # function, and then the sum is that of the operator to O(h^(4-2s)) for smooth u.
    # Horizon and tempering are in units of the spacing, and of its reciprocal.

    ndim: int
    s: float
    horizon: float
    tempering: float
    constant: float

    def density(self, r: Floats) -> Floats:
        return np.asarray(self.constant * r ** (-self.ndim - 2 * self.s) * np.exp(-self.tempering * r))

    def radial(self, start: float, power: float, stop: float = math.inf) -> float:
        exponent = power - 1 - 2 * self.s
        scale = self.constant * sphere(self.ndim)
        if self.tempering == 0:
            top = 0.0 if math.isinf(stop) else stop ** (exponent + 1)
            return scale * (top - (start ** (exponent + 1) if start > 0 else 0.0)) / (exponent + 1)
        stop = min(stop, start + 745 / self.tempering)  # beyond it the exponential underflows
        if start == 0:
            incomplete = special.gammainc(exponent + 1, self.tempering * stop)
            return float(scale * incomplete * special.gamma(exponent + 1) / self.tempering ** (exponent + 1))
        value, _ = integrate.quad(
            lambda x: math.exp((exponent + 1) * x - self.tempering * math.exp(x)),
            math.log(start), math.log(stop), epsabs=0, epsrel=1e-12, limit=400,
        )  # fmt: skip
        return scale * value

    @property
    def _listed(self) -> bool:
        """Whether all nodes within the horizon are summed over."""
        return self.horizon <= WHOLE / self.ndim

    @cached_property
    def nearest(self) -> float:
        """What is added to the weights of the nearest nodes, for the second moment of the kernel."""
        if self._listed:
            reach = math.ceil(self.horizon)
            table = self._plain((reach + 1,) * self.ndim)
            line = np.arange(-reach, reach + 1.0) ** 2
            summed = float(table.sum(axis=tuple(range(1, self.ndim))) @ line)
            return 0.5 * (self.radial(0.0, 2.0, self.horizon) / self.ndim - summed)
        terms = [
            (-self.tempering) ** j / math.factorial(j) * epstein(self.ndim, self.ndim + 2 * self.s - 2 - j)
            for j in range(1 if self.tempering == 0 else 30)
        ]
        return -self.constant / (2 * self.ndim) * math.fsum(terms)

    @cached_property
    def total(self) -> float:
        near = 2 * self.ndim * self.nearest
        if self._listed:
            return near + float(self._plain((math.ceil(self.horizon) + 1,) * self.ndim).sum())
        if self.tempering == 0:
            whole = self.constant * epstein(self.ndim, self.ndim + 2 * self.s)
        else:
            half = _WINDOW[self.ndim]
            r = _distances((half + 1,) * self.ndim)
            inner = np.where(r > 0, self.density(np.where(r > 0, r, 1.0)) * window(r / half), 0.0)
            points, weights = np.polynomial.legendre.leggauss(100)
            x = half * (0.75 + 0.25 * points)
            shell = sphere(self.ndim) * x ** (self.ndim - 1) * self.density(x) * (1 - window(x / half))
            whole = float(inner.sum() + half / 4 * (weights @ shell)) + self.radial(half, 0.0)
        beyond = 0.0 if math.isinf(self.horizon) else self.radial(self.horizon, 0.0)
        return near + whole - beyond

    def table(self, shape: tuple[int, ...]) -> Floats:
        """Return w_n for |n_a| < shape_a, with 0 at the centre; shape (2 shape_a - 1, ...)."""
        table = self._plain(shape)
        for axis, n in enumerate(shape):
            for step in (-1, 1) if n > 1 else ():
                table[tuple(m - 1 + (step if a == axis else 0) for a, m in enumerate(shape))] += self.nearest
        return table

    def _plain(self, shape: tuple[int, ...]) -> Floats:
        """Return the weights of the trapezoidal rule, cut off at the horizon."""
        r = _distances(shape)
        centre = tuple(n - 1 for n in shape)
        r[centre] = 1.0
        table = self.density(r)
        table[centre] = 0.0
        if r.max() + math.sqrt(self.ndim) > self.horizon:
            table[r >= self.horizon + math.sqrt(self.ndim)] = 0.0
            edge = np.abs(r - self.horizon) < math.sqrt(self.ndim)
            edge[centre] = False
            offsets = np.abs(np.argwhere(edge) - np.array(centre))
            table[edge] *= _inside(np.sort(offsets, axis=1), self.horizon)
        return table

    def symbol(self, shape: tuple[int, ...]) -> Floats:
        """Return sum_n w_n cos(n . theta) at the frequencies of `scipy.fft.rfftn` on a periodic grid; no horizon."""
        # The sum over all images of the kernel. O(Q N) time, Q being the 180 points of a rule for the theta function.
        turns: list[Floats] = [np.asarray(np.fft.fftfreq(n), np.float64) for n in shape]
        turns[-1] = np.asarray(np.fft.rfftfreq(shape[-1]), np.float64)
        thetas: list[Floats] = [2 * math.pi * turn for turn in turns]
        nearest = [2 * np.cos(t) for t in thetas]
        grids = np.meshgrid(*thetas, indexing="ij", sparse=True)
        waves = np.asarray(sum(t * t for t in grids) / (4 * math.pi))
        power = self.ndim + 2 * self.s
        points, weights = np.polynomial.legendre.leggauss(60)
        result = _gamma_tail(self.s, waves) - 2 / power
        for low, high in ((1.0, 4.0), (4.0, 12.0), (12.0, 60.0)):
            for x, weight in zip(points, weights, strict=True):
                t, part = (low + high) / 2 + (high - low) / 2 * x, (high - low) / 2 * weight
                here = [_waves(t, a) for a in thetas]
                there = [_images(t, turn) for turn in turns]
                result += part * t ** (power / 2 - 1) * (_product(here) - 1)
                result += part * t ** (-self.s - 1) * (_product(there) - np.exp(-t * waves))
        result *= self.constant * math.pi ** (power / 2) / math.gamma(power / 2)
        return np.asarray(result + self.nearest * sum(np.meshgrid(*nearest, indexing="ij", sparse=True)))


def _gamma_tail(s: float, x: Floats) -> Floats:
    """Return the integral of t^(-s-1) exp(-x t) from 1 to infinity."""
    return np.asarray((np.exp(-x) - x**s * special.gamma(1 - s) * special.gammaincc(1 - s, x)) / s)


def _images(t: float, shift: Floats) -> Floats:
    """Return the sum of exp(-pi t (k + shift)^2) over integers k."""
    return np.asarray(sum(np.exp(-math.pi * t * (k + shift) ** 2) for k in range(-3, 4)))


def _waves(t: float, theta: Floats) -> Floats:
    """Return the sum of exp(-pi t k^2) cos(k theta) over integers k, for t >= 1."""
    return np.asarray(1 + 2 * sum(math.exp(-math.pi * k * k * t) * np.cos(k * theta) for k in range(1, 5)))


def _product(factors: list[Floats]) -> Floats:
    return np.asarray(math.prod(np.meshgrid(*factors, indexing="ij", sparse=True)))


def _distances(shape: tuple[int, ...]) -> Floats:
    """Return |n| for |n_a| < shape_a."""
    lines = np.meshgrid(*(np.arange(1 - n, n, dtype=np.float64) ** 2 for n in shape), indexing="ij", sparse=True)
    return np.asarray(np.sqrt(sum(lines)))


def _inside(offsets: Floats, radius: float) -> Floats:
    """Return the integrals, over a ball, of the hat functions at offsets whose coordinates are >= 0 and sorted."""
    # Exact along the last axis, by Gauss-Legendre points across it.
    points, weights = np.polynomial.legendre.leggauss(8)
    line = np.concatenate([(points - 1) / 2, (points + 1) / 2])
    hats = np.concatenate([weights, weights]) / 2 * (1 - np.abs(line))
    result = np.zeros(len(offsets))
    for numbers in itertools.product(range(len(line)), repeat=offsets.shape[1] - 1):
        across = np.sum((offsets[:, :-1] + line[list(numbers)]) ** 2, axis=1)
        end = np.sqrt(np.maximum(radius**2 - across, 0.0))
        low, high = (np.clip(side * end - offsets[:, -1], -1.0, 1.0) for side in (-1, 1))
        covered = high * (1 - np.abs(high) / 2) - low * (1 - np.abs(low) / 2)
        result += math.prod(hats[list(numbers)]) * covered
    return result
