"""Small flow problems with their dense operator written out from the formula, independently of the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import expm

import nlflow as nl
from nlflow.flows.integrators import Integrator

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """A flow du/dt = -A u + phi f with its matrix A, and how to know u(t)."""

    flow: nl.GradientFlow
    start: Floats
    matrix: Floats
    rate: Floats
    fidelity: Floats
    observed: Floats
    measure: Floats

    def exact(self, t: float) -> Floats:
        """Return u(t) by the matrix exponential.

        Of [[-A, phi f], [0, 0]] for short times. Over long ones that matrix loses digits, about t rho eps, and
        u* + exp(-tA) (u_0 - u*) keeps them: -A has no negative entry off its diagonal, so nothing cancels in exp(-tA).
        """
        n = len(self.start)
        start = self.start.reshape(n, -1)
        source = self.fidelity[:, None] * self.observed.reshape(n, -1)
        if not source.any():
            return np.asarray((expm(-t * self.matrix) @ start).reshape(self.start.shape))
        if t * self.radius > 10:
            limit = np.linalg.solve(self.matrix, source)
            return np.asarray((limit + expm(-t * self.matrix) @ (start - limit)).reshape(self.start.shape))
        block = np.zeros((n + start.shape[1],) * 2)
        block[:n, :n] = -t * self.matrix
        block[:n, n:] = t * source
        moved = expm(block)
        return np.asarray((moved[:n, :n] @ start + moved[:n, n:]).reshape(self.start.shape))

    def norm(self, v: Floats) -> float:
        """Return the root mean square in the flow's measure; channels are added up."""
        square = (v.reshape(len(v), -1) ** 2).sum(axis=1)
        return float(np.sqrt((self.measure * square).sum() / self.measure.sum()))

    def eigenvalues(self, *, diffusion: bool = False) -> Floats:
        """Return the eigenvalues of A (of A - phi with `diffusion`), increasing; A is self-adjoint in the measure."""
        matrix = self.matrix - np.diag(self.fidelity) if diffusion else self.matrix
        root = np.sqrt(self.measure)
        symmetric = root[:, None] * matrix / root
        return np.asarray(np.linalg.eigvalsh((symmetric + symmetric.T) / 2))

    @cached_property
    def radius(self) -> float:
        """Largest eigenvalue of A."""
        return float(self.eigenvalues()[-1])


def gaussian_matrix(x: Floats, width: float) -> Floats:
    """Return k_ij = exp(-|x_i - x_j|^2 / (2 width^2)); x has shape (N, m)."""
    square = ((x[:, None, :] - x[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-square / (2 * width**2)))


def operator(k: Floats, weights: Floats, metric: str) -> tuple[Floats, Floats]:
    """Return (r (I - P), d) for K = k + k^T by the formulas of the setting."""
    symmetrized = k + k.T
    degree = symmetrized @ weights
    average = symmetrized * weights / degree[:, None]
    rate = degree if metric == "l2" else np.ones_like(degree)
    return rate[:, None] * (np.eye(len(k)) - average), degree


def problem(
    metric: str = "degree",
    fidelity: Any = None,
    *,
    n: int = 24,
    channels: int | None = None,
    measure: str | None = None,
    width: float = 0.3,
    volume: float = 2.0,
    seed: int = 0,
    dtype: Any = np.float64,
) -> Problem:
    """Return a J-flow (`fidelity` None) or an E-flow on scattered points with uneven weights.

    The fidelity is weighted by the flow's own measure unless `measure` says otherwise.
    """
    rng = np.random.default_rng(seed)
    x = rng.random((n, 2)).astype(dtype).astype(float)
    weights = rng.uniform(0.3, 1.7, n) * volume / n
    shape = (n,) if channels is None else (n, channels)
    start, observed = rng.standard_normal((2, *shape)).astype(dtype).astype(float)
    points = nl.Points(x, weights)
    # Features rather than positions give the affinity the dtype asked for.
    affinity = nl.affinity(nl.Gaussian(width=width), points, x.astype(dtype))
    diffusion, degree = operator(gaussian_matrix(x, width), weights, metric)
    measure = metric if measure is None else measure
    if fidelity is None:
        functional = nl.J(affinity)
        phi = np.zeros(n)
    else:
        functional = nl.E(affinity, observed.astype(dtype), fidelity, measure=measure)
        given = np.broadcast_to(np.asarray(fidelity, dtype=float), (n,))
        phi = given * {("l2", "degree"): degree, ("degree", "l2"): 1 / degree}.get((metric, measure), 1.0)
    return Problem(
        flow=nl.GradientFlow(functional, metric),
        start=start,
        matrix=diffusion + np.diag(phi),
        rate=degree if metric == "l2" else np.ones(n),
        fidelity=np.asarray(phi),
        observed=observed,
        measure=weights if metric == "l2" else weights * degree / (weights @ degree),
    )


def random_chain(n: int, seed: int = 0, *, asymmetry: float = 1.0) -> Floats:
    """Return a positive matrix whose averaging operator has complex eigenvalues: mostly a step around a ring."""
    rng = np.random.default_rng(seed)
    ring = np.roll(np.eye(n), 1, axis=1)
    return np.asarray(asymmetry * ring + 0.2 * rng.random((n, n)) / n + 0.05)


def unchecked(integrator: Integrator) -> Integrator:
    """Return an integrator that refuses nothing."""
    cls = type(integrator)
    free: dict[str, Any] = {"check": lambda self, flow: None, "surely_stable": lambda self, flow: True}
    result = type(cls.__name__, (cls,), free)
    return result(**vars(integrator))


def stop_after(steps: int, how: str = "Ctrl-C") -> nl.Callback:
    """Return a tracker that ends the run after so many steps."""
    calls = iter(range(10**6))

    def end(*_: Any) -> bool:
        if next(calls) < steps:
            return False
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        return True

    return nl.Callback(end)


def torch_on_one_thread() -> Any:
    """Return torch, without the threads that tensors of a few dozen numbers only wait for; skip where it is missing."""
    torch = pytest.importorskip("torch", reason="torch is optional")
    torch.set_num_threads(1)
    return torch


def devices() -> list[Any]:
    """Return the devices of torch to run a test on: the CPU, and CUDA where there is one."""
    without = not pytest.importorskip("torch").cuda.is_available()
    return ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(without, reason="no CUDA here"))]
