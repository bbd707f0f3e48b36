"""The term with a matrix fidelity without its matrices, against covariances that are formed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention.terms import neutreno  # noqa: E402  # needs torch

pytestmark = pytest.mark.numerical


def problem(count: int = 13, width: int = 11, dtype: Any = None, spread: float = 1.0) -> list[Any]:
    """Return P, v, P v, v0 and the variance, in two sequences of two heads."""
    rng = np.random.default_rng(0)
    draw = [
        torch.tensor(rng.standard_normal((2, 2, count, n)), dtype=dtype or torch.float64) for n in (count, width, width)
    ]
    weights, values = draw[0].softmax(-1), spread * draw[1] + 3
    return [weights, values, weights @ values, draw[2], torch.tensor(0.7, dtype=weights.dtype)]


def formed(weights: Any, values: Any, average: Any, first: Any, variance: Any) -> Any:
    return neutreno.matrix_step(average, first, neutreno.covariance(weights, values, weights @ values), variance)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_iterations_find_what_covariances_give(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(spread=spread)
    expected = formed(*given)
    monkeypatch.setattr(neutreno, "covariance", None)  # is not asked for
    found = neutreno.local_wiener(*given)
    assert (found - expected).abs().max() < 1e-11 * given[3].abs().max() * max(1, spread)


def test_derivatives_are_those_of_covariances() -> None:
    gradients = []
    for function in (neutreno.local_wiener, formed):
        weights, values, _, first, variance = problem()
        given = [part.clone().requires_grad_() for part in (weights.log(), values, first, variance)]
        weights = given[0].softmax(-1)  # whose rows add up to 1 however the logits move
        slope = torch.linspace(-1, 1, first.numel(), dtype=torch.float64).reshape(first.shape)
        result = function(weights, given[1], weights @ given[1], *given[2:])
        gradients.append(torch.autograd.grad((result * slope).sum(), given))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < 1e-10 * max(1.0, float(other.abs().max()))
        assert other.abs().max() > 1e-3


def test_derivatives_with_dropped_weights_in_the_average() -> None:
    """The average may have other weights than the covariance: those that dropout left."""
    weights, values, average, first, variance = problem()
    dropped = average + 0.1
    assert (neutreno.local_wiener(weights, values, dropped, first, variance)
            - formed(weights, values, dropped, first, variance)).abs().max() < 1e-11  # fmt: skip


def test_where_iterations_do_not_get_there_covariances_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(spread=3.0)
    expected = formed(*given)
    monkeypatch.setattr(neutreno, "_MOST", 2)
    assert torch.equal(neutreno.local_wiener(*given), expected)
    needing = [part.clone().requires_grad_() for part in given]
    system = neutreno._System(given[0], given[1], given[4])
    right = needing[3] - needing[2]
    monkeypatch.setattr(neutreno, "_MOST", 48)
    solution = system.solved(right.detach())
    found = neutreno._Solution.apply(right, solution, system)
    monkeypatch.setattr(neutreno, "_MOST", 1)  # backward does not get there either
    (gradient,) = torch.autograd.grad(found.sum(), needing[3])
    spread = neutreno.covariance(given[0], given[1], given[2])
    both = spread + 0.7 * torch.eye(11, dtype=torch.float64)
    expected = torch.linalg.solve(both, torch.ones_like(given[3])[..., None])[..., 0]
    assert (gradient - expected).abs().max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_precisions(dtype: Any) -> None:
    exact = formed(*problem())
    given = [part.to(dtype) for part in problem()]
    found = neutreno.local_wiener(*given)
    assert found.dtype == dtype
    # Inputs are rounded to the dtype, and what comes of it is at most a few times as far off.
    assert (found.double() - exact).abs().max() < 30 * torch.finfo(dtype).eps * problem()[1].abs().max()


def test_equal_values_and_rows_at_rest() -> None:
    weights, values, _, first, variance = problem()
    values = values[..., :1, :].expand_as(values)
    found = neutreno.local_wiener(weights, values, weights @ values, first, variance)
    assert (found - values).abs().max() < 1e-12  # without spread the average is all
    same = neutreno.local_wiener(weights, values, weights @ values, weights @ values, variance)
    assert torch.isfinite(same).all()
