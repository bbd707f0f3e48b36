"""The tab "Proposition 1": what it shows is what a double sum in float64 says, and what the copied text makes."""

from __future__ import annotations

import numpy as np
import pytest

from nlflow import InputError
from nlflow.desk.explorer import proposition_view as view
from nlflow.desk.explorer.proposition_view import PropositionSettings
from tests.desk.test_explore_views import executed

CASES = [("grid", "step"), ("points", "noise"), ("points", "slowest"), ("points", "fastest")]


def chain(domain: str, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Return P and its stationary law by a double sum; a grid is mirrored at its ends."""
    if domain == "points":
        x = np.random.default_rng(1).random((view.NODES, 2))
        k = np.exp(-np.sum((x[:, None] - x) ** 2, axis=-1) / (2 * width**2))
    else:
        x = (np.arange(view.NODES) + 0.5) / view.NODES
        far = [x + 2 * n for n in range(-2, 3)] + [-x + 2 * n for n in range(-2, 3)]  # a node and its mirror images
        k = sum(np.exp(-((x[:, None] - y) ** 2) / (2 * width**2)) for y in far)
    degree = k.sum(axis=1)
    return k / degree[:, None], degree / degree.sum()


@pytest.mark.parametrize(("domain", "signal"), CASES)
@pytest.mark.parametrize("fidelity", [0.01, 1.7])
def test_what_is_shown_is_what_a_double_sum_says(domain: str, signal: str, fidelity: float) -> None:
    settings = PropositionSettings(domain=domain, signal=signal, fidelity=fidelity)
    result = view.compute(settings)
    p, law = chain(domain, settings.width)
    f = result.observed
    u = np.linalg.solve((1 + fidelity) * np.eye(len(p)) - p, fidelity * f)
    # The residual is at most 1e-10 of the data, over the diagonal, 1 to 2 more; the inverse is at most 1 / fidelity.
    error = np.sqrt(law @ (result.limit - u) ** 2)
    assert error <= 1e-10 * (fidelity + 2) / fidelity * np.sqrt(law @ f**2)
    values = np.sort(np.linalg.eigvals(p).real)
    np.testing.assert_allclose(result.rates, np.sort(1 - values), rtol=0, atol=1e-12)
    kept = np.sqrt(law @ (u - law @ u) ** 2 / (law @ (f - law @ f) ** 2))
    assert result.kept == pytest.approx(kept, rel=1e-6)
    bounds = fidelity / (fidelity + 1 - values[[0, -2]])
    assert result.bounds == pytest.approx(tuple(bounds), rel=1e-9)
    met = {"slowest": bounds[1], "fastest": bounds[0]}
    assert bounds[0] * (1 - 1e-6) <= result.kept <= bounds[1] * (1 + 1e-6)
    assert result.kept == pytest.approx(met.get(signal, result.kept), rel=1e-6)
    low, middle, high = result.curves
    assert np.all((low <= middle * (1 + 1e-6)) & (middle <= high * (1 + 1e-6)))
    at = np.argmin(np.abs(view.FIDELITIES - 1))
    expected = view.FIDELITIES[at] / (view.FIDELITIES[at] + 1 - values[0])
    assert low[at] == pytest.approx(expected, rel=1e-9)


def test_a_dragged_fidelity_has_the_bits_of_a_new_page_and_of_the_text() -> None:
    first = view.compute(PropositionSettings(fidelity=2.0))
    settings = PropositionSettings(fidelity=0.37)
    moved, anew, copied = view.compute(settings, first), view.compute(settings), executed(view.as_python(settings))
    assert moved.curves is first.curves
    for name in ("observed", "limit", "kept", "bounds", "rates", "modes"):
        assert np.array_equal(getattr(moved, name), getattr(anew, name)), name
        assert np.array_equal(copied[name], getattr(anew, name)), name
    other = view.compute(PropositionSettings(fidelity=0.37, width=0.1), first)
    assert other.curves is not first.curves


@pytest.mark.parametrize("words", [{"domain": "x"}, {"signal": "x"}, {"width": 0.0}, {"fidelity": -1.0}])
def test_settings_of_the_proposition_are_checked(words: dict[str, float | str]) -> None:
    with pytest.raises(InputError, match=next(iter(words))):
        PropositionSettings(**words)
