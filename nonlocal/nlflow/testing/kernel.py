"""Promises of kernels."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import warnings
from typing import Any

import numpy as np

from nlflow.affinities import affinity
from nlflow.affinities.pair_sums import not_compiled
from nlflow.domains import Grid, Points
from nlflow.errors import NlflowWarning, check_integer
from nlflow.kernels import Kernel, PositionKernel, RadialKernel
from nlflow.testing.contract import Contract, random

_ROUNDING = 1e-11


def check_kernel(kernel: Kernel, *, dimensions: int = 2) -> None:
    """Check the promises of a kernel against plain numbers, and averages with it against sums over all pairs.

    Parameters
    ----------
    kernel : Kernel
    dimensions : int
        Number of coordinates of the features that it compares.

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no kernel, and for `dimensions` below 1.

    Examples
    --------
    >>> from nlflow import Gaussian
    >>> from nlflow.testing import check_kernel
    >>> check_kernel(Gaussian(width=0.5))
    """
    contract = Contract("kernel", kernel, Kernel)
    dimensions = check_integer("dimensions", dimensions, minimum=1)
    _check_value(contract, kernel)
    compared: Kernel = kernel.compared
    x, y = random(12, dimensions), random(9, dimensions, seed=1)
    x, y = kernel.map_features(y, x)
    nodes = random(12, dimensions)
    logs = contract.asked("log_matrix(x, y) gives log k", compared.log_matrix, x, y)
    contract.holds(
        tuple(logs.shape) == (12, 9), "log_matrix(x, y) has a row for each x", tuple(logs.shape), "shape (12, 9)"
    )
    contract.holds(bool(np.all(logs < np.inf)), "log k is a number or -infinity", logs.max(), "k finite and >= 0")
    contract.near("log k belongs to a pair alone", compared.log_matrix(x[:3], y[4:]), logs[:3, 4:], _ROUNDING)
    single = compared.log_matrix(x.astype(np.float32), y.astype(np.float32))
    contract.near("float32 features give what float64 ones do", single, logs, 1e-4)
    own = compared.log_matrix(x, x)
    if kernel.symmetric:
        contract.near("symmetric: k(x, y) = k(y, x)", own, own.T, _ROUNDING)
    with np.errstate(under="ignore"):
        k = np.exp(own - own.max())
    if kernel.is_definite(dimensions):
        lowest = float(np.linalg.eigvalsh((k + k.T) / 2)[0])
        contract.holds(lowest >= -1e-8, "positive semidefinite", f"an eigenvalue of {lowest:.3g}", "eigenvalues >= 0")
    if isinstance(compared, RadialKernel):
        _check_radial(contract, compared, x, y, logs)
    if kernel is compared and isinstance(kernel, RadialKernel) and importlib.util.find_spec("torch"):
        tensor = importlib.import_module("torch").from_numpy  # only where it is installed
        contract.near("tensors give what arrays give", kernel.log_matrix(tensor(x), tensor(y)), logs, 1e-9)
    if isinstance(kernel, PositionKernel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NlflowWarning)  # nodes that see no other are compared too
            _check_averages(contract, kernel, nodes, k * np.exp(own.max()))


def _check_value(contract: Contract, kernel: Kernel) -> None:
    contract.holds(0 < kernel.amplitude < np.inf, "amplitude > 0", kernel.amplitude, "a number > 0")
    contract.holds(isinstance(getattr(kernel, "formula", None), str), "formula says what k is", None, "a text")
    twin: Any = copy.copy(kernel)
    contract.holds(twin == kernel and repr(twin) == repr(kernel), "a kernel is a value", twin, "its copy to be equal")
    other: Any = dataclasses.replace(kernel, amplitude=2 * kernel.amplitude)
    contract.holds(
        other != kernel and repr(other) != repr(kernel), "repr and == tell kernels apart", other,
        "another one for another amplitude",
    )  # fmt: skip
    try:
        twin.amplitude = 3.0
    except (AttributeError, TypeError):
        return
    contract.holds(False, "a kernel does not change", "an amplitude that was set", "a frozen dataclass")


def _check_radial(contract: Contract, kernel: RadialKernel, x: Any, y: Any, logs: Any) -> None:
    contract.asked("k is a finite number >= 0 at all distances", kernel.check_profile)
    start = float(np.asarray(kernel.log_profile(np.zeros(1)))[0])
    contract.holds(abs(start) <= 1e-6, "k = 1 at r = 0", f"log k = {start:.3g}", "0; pass k(0) as the amplitude")
    squared = ((x[:, None] - y[None]) ** 2).sum(axis=-1)
    profile = contract.asked("log_profile takes squared distances", kernel.log_profile, squared)
    contract.near("log_matrix is log_profile of |x - y|^2", logs, profile, 1e-9)
    for rtol in (1e-2, 1e-6):
        end = kernel.support(rtol)
        if np.isfinite(end) and end > 0:
            with np.errstate(all="ignore"):
                beyond = np.asarray(kernel.log_profile((end * np.geomspace(1 + 1e-9, 1e3, 200)) ** 2))
            most = float(np.exp(beyond.max() - start))
            contract.holds(most <= rtol * (1 + 1e-6), f"k <= rtol beyond support({rtol:g})", most, f"at most {rtol:g}")


def _check_averages(contract: Contract, kernel: Any, x: Any, k: Any) -> None:
    """Compare averages and degrees of each exact method with sums over all pairs."""
    weights, u = 0.5 + np.abs(random(len(x))), random(len(x), 2, seed=2)
    k = kernel.amplitude * k
    degree = k @ weights
    expected = k @ (weights[:, None] * u) / degree[:, None]
    for method in ("dense", *(() if not_compiled(kernel) else ("pairwise",))):
        built = affinity(kernel, Points(x, weights), method=method)
        contract.near(f"averages of method {method!r} are sums over all pairs", built.average(u), expected, 1e-9)
        contract.near(f"the degree of method {method!r} is sum w k", built.degree, degree, 1e-9)
    grid = Grid((5, 4), spacing=0.7, boundary="isolated")
    nodes = grid.nodes
    on_grid = affinity(kernel, grid, method="dense")
    near = np.exp(np.asarray(kernel.compared.log_matrix(*kernel.map_features(nodes))))
    signal = random(5, 4, seed=3)
    sums = near @ signal.ravel() / near.sum(axis=1)
    contract.near("averages on a grid are sums over its nodes", on_grid.average(signal).ravel(), sums, 1e-9)
