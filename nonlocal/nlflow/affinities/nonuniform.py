"""Gaussians by non-uniform fast Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, middle_of_range, power_of_two
from nlflow.affinities.base import Affinity
from nlflow.affinities.pair_sums import relative_weights, warn_isolated
from nlflow.domains import Domain
from nlflow.errors import InputError, NumericalError, check_memory, kind_of, not_installed
from nlflow.kernels import Kernel, RadialKernel

_MOST_DIMENSIONS = 3  # of the transforms
_FINEST = 1e-14  # relative accuracy that a transform in float64 reaches
_SHARES = 4  # of the error: modes left out, periods that overlap, two transforms
_THREADED = 2**15  # nodes
_GUESS = 1e-3  # of the total weight, that the least degree is taken for at first


class NonuniformAffinity(Affinity):
    """A Gaussian between scattered nodes in up to three dimensions; O(N log(1/rtol)^m) time an average."""

    # The kernel is a short Fourier sum on a box that is larger than the domain by its reach,
    # k(x - y) = sum_m c_m exp(2 pi i m (x - y) / L): the coefficients of the weighted signal (transform of type 1) are
    # multiplied by c_m and evaluated at the nodes (type 2), by FINUFFT (Barnett, Magland and af Klinteberg 2019, doi
    # 10.1137/18M120885X). The number of modes is O((domain / width)^m).
    #
    # ``error_estimate`` is the sum of the parts left out and of the transforms' own tolerances, which FINUFFT keeps in
    # practice but does not prove, times the total weight over the least degree.

    method = "nufft"

    def __init__(
        self, kernel: Kernel, domain: Domain, features: NDArray[Any], *, rtol: float, memory_limit: float | None = None
    ) -> None:
        width = kernel.gaussian_width if isinstance(kernel, RadialKernel) else None
        if width is None:
            raise InputError(
                f"kernel: got {kind_of(kernel)}, expected a Gaussian for method='nufft': other kernels decay too "
                "slowly in frequency; use method='sparse' or 'pairwise'"
            )
        if features.shape[1] > _MOST_DIMENSIONS:
            raise InputError(
                f"features: got {features.shape[1]} dimensions, expected at most {_MOST_DIMENSIONS} for "
                "method='nufft'; use method='lowrank' or 'pairwise'"
            )
        _finufft()
        super().__init__(domain, kernel, symmetric=True, positive_semidefinite=True, dtype=features.dtype)
        self._weights, self._log_unit = relative_weights(domain.weights.reshape(-1), 0.0)
        self._limit = memory_limit
        self._width = width
        points = np.asarray(features, dtype=np.float64)
        low, high = points.min(axis=0), points.max(axis=0)
        self._points, self._extent = points - (low + high) / 2, high - low
        total = float(self._weights.sum())
        tolerance = rtol * _GUESS / 2
        while True:
            self._plan(max(tolerance, _FINEST))
            ones = np.ones((domain.size, 1))
            error = self._tolerance * total
            # Each node sees itself, and what the sum says beyond its error.
            degrees = self._sums(ones)[:, 0]
            least = float(np.maximum(degrees - error, self._weights).min())
            self.error_estimate = 2 * error / least
            if self.error_estimate <= rtol:
                wanted = 0.5 * rtol * least / total
                if wanted > 8 * self._tolerance:  # a digit less makes a transform a tenth faster
                    self._plan(wanted)
                    self.error_estimate = 2 * wanted * total / least
                break
            if self._tolerance <= _FINEST:
                raise NumericalError(
                    f"rtol: got {rtol:g}, expected at least {self.error_estimate:.2g} for method='nufft', since some "
                    "nodes have a degree far below the total weight; use a wider kernel, a larger rtol, or "
                    "method='sparse' or 'pairwise'"
                )
            tolerance = 0.5 * rtol * least / total
        self._degrees = degrees
        warn_isolated(degrees, self._weights * (1 + self.error_estimate), kernel)

    def _plan(self, tolerance: float) -> None:
        """Choose box, modes and coefficients such that sums are off by `tolerance` times the total weight."""
        self._tolerance = tolerance
        width = self._width
        modes, period = count_modes(self._extent, width, tolerance)
        check_memory(
            f"a Gaussian of width {width:g} on a domain of {' x '.join(f'{e:.3g}' for e in self._extent)}, which takes "
            f"{' x '.join(map(str, modes))} Fourier modes,",
            math.prod(modes) * 16 * 10 + 64 * len(self._points),  # transforms are oversampled by 2 in each dimension
            "use a wider kernel, or method='sparse' or 'pairwise', or raise memory_limit", self._limit,
        )  # fmt: skip
        angles = [np.ascontiguousarray(2 * np.pi / p * x) for p, x in zip(period, self._points.T, strict=True)]
        # One thread for the sums of type 1, whose order, and with it the last bits, would otherwise depend on the
        # number of threads.
        share = tolerance / _SHARES
        self._forward = _Transform(1, modes, share, -1, True, angles)
        few = len(self._points) < _THREADED  # for whom threads cost more than they save
        self._backward = _Transform(2, modes, share, 1, few, angles)
        self._symbol: Floats = np.ones((1,) * len(modes))
        for axis, (n, p) in enumerate(zip(modes, period, strict=True)):
            frequency = 2 * np.pi / p * np.arange(-(n // 2), (n + 1) // 2)
            line = width * math.sqrt(2 * np.pi) / p * np.exp(-0.5 * (width * frequency) ** 2)
            self._symbol = self._symbol * line.reshape([-1 if a == axis else 1 for a in range(len(modes))])

    def _sums(self, values: Floats) -> Floats:
        """Return sum_j w_j k_ij v_j for the columns of an (N, D) array."""
        return self._transformed(values * self._weights[:, None])

    def _transformed(self, weighted: Floats) -> Floats:
        """Return sum_j k_ij v_j for the columns of an (N, D) array."""
        result = np.empty_like(weighted)
        for start in range(0, weighted.shape[1], 2):
            pair = weighted[:, start : start + 2]  # two real channels are one complex signal
            packed = np.ascontiguousarray(pair[:, 0] + 1j * pair[:, 1] if pair.shape[1] == 2 else pair[:, 0] + 0j)
            modes = self._forward.execute(packed)
            modes *= self._symbol
            sums = self._backward.execute(modes)
            result[:, start] = sums.real
            if pair.shape[1] == 2:
                result[:, start + 1] = sums.imag
        return result

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        flat = np.asarray(self.flatten(u), dtype=np.float64)
        # About the middle of its range: errors are relative to the largest value, and constants come out exactly.
        middle = middle_of_range(flat)
        average = self._sums(flat - middle) / self._degrees[:, None] + middle
        return np.asarray(average.astype(u.dtype).reshape(u.shape))

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        # (p P)_j = w_j sum_i k_ij p_i / d_i, without the weights that would cancel: the error in the sum of absolute
        # values is that of averages, whatever the weights. The two transforms are adjoint, which keeps the mass.
        flat = np.asarray(self.flatten(law), dtype=np.float64)
        strengths = flat / self._degrees[:, None]
        size = np.array([power_of_two(float(s)) for s in np.abs(strengths).max(axis=0)])  # two channels share an error
        arrived = self._weights[:, None] * self._transformed(strengths / size) * size
        return np.asarray(arrived.astype(law.dtype).reshape(law.shape))

    def _log_degree(self) -> NDArray[Any]:
        return np.asarray(self._log_degree_wide().astype(self.dtype or np.float64))

    def _log_degree_wide(self) -> NDArray[Any]:
        return np.asarray((np.log(self._degrees) + self._log_unit).reshape(self.domain.shape))

    @property
    def memory_bytes(self) -> int:
        # The two transforms hold an oversampled grid (by 2 in each dimension) and the order of the nodes each.
        transforms = 2 * (16 * 2**self._symbol.ndim * self._symbol.size + 16 * len(self._points))
        return int(2 * self._points.nbytes + self._symbol.nbytes + self._degrees.nbytes + transforms)


def count_modes(extent: Floats, width: float, tolerance: float) -> tuple[tuple[int, ...], Floats]:
    """Return the modes along each axis, and the periods, for which a Gaussian's Fourier sum is within `tolerance`."""
    reach = math.sqrt(2 * math.log(_SHARES * 2 * len(extent) / tolerance))
    period = extent + reach * width
    modes = tuple(2 * math.ceil(p * reach / (2 * np.pi * width)) + 1 for p in period)
    return modes, period


class _Transform:
    """A plan of FINUFFT whose nodes are sorted once; copied and pickled as what it is made of."""

    def __init__(
        self, kind: int, modes: tuple[int, ...], tolerance: float, sign: int, alone: bool, angles: list[Floats]
    ) -> None:
        self._made_of = kind, modes, tolerance, sign, alone, angles
        plan = _finufft().Plan(kind, modes, 1, tolerance, sign, **({"nthreads": 1} if alone else {}))
        plan.setpts(*angles)
        self.execute = plan.execute

    def __reduce__(self) -> tuple[type[_Transform], tuple[Any, ...]]:
        return type(self), self._made_of


def _finufft() -> Any:
    try:
        import finufft
    except ImportError as error:
        raise not_installed("method: 'nufft'", "FINUFFT", "nufft") from error
    return finufft
