"""Potentials of pairs: their slopes against the derivatives that torch finds, their reach, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nlflow import Formula, Gaussian, InputError
from nlflow.kernels import Interaction, Matern, Morse, PowerLaws, RationalQuadratic, Wendland
from nlflow.kernels.differentiation import PARAMETER, derivative, substituted
from nlflow.kernels.expressions import FUNCTIONS, SQUARED, value

RADII = np.linspace(0.0513, 2.9, 57)
INTERACTIONS = [
    Morse(),
    Morse(2.0, 0.3, 1.0, 0.9, cutoff=2.0),
    PowerLaws(2, 0),
    PowerLaws(4, 1.5),
    PowerLaws(2, 0, softening=0.1),
    Interaction(Gaussian(0.5), strength=-2.0),
    Interaction(Wendland(1.0)),
    Interaction(Matern(0.7)),
    Interaction(RationalQuadratic(0.7, alpha=0.3)),
    Interaction(Formula("exp(-r**1.5)", width=0.3)),
    Interaction("minimum(r*r, 0.25) / 2"),
    Interaction("maximum(r, 1) + abs(r - 1.5)**3 + log1p(r) + pow(1 + r, r)"),
    Interaction("exp(-r)", cutoff=2.0) + Morse(),
    Interaction(lambda r: np.where(r < 1, (1 - r) ** 2, 0.0)),
]


def written(interaction: Any, r: Any) -> Any:
    """Return W by torch from the expression of W alone."""
    return value(interaction._potential, r * r)


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=lambda w: repr(w)[:60])
def test_slopes_are_the_derivatives_that_torch_finds(interaction: Any) -> None:
    r = torch.tensor(RADII, requires_grad=True)
    (expected,) = torch.autograd.grad(written(interaction, r).sum(), r)
    assert interaction.slope(RADII) == pytest.approx(expected.numpy(), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=lambda w: repr(w)[:60])
def test_potentials_are_what_their_formulas_say(interaction: Any) -> None:
    with torch.no_grad():
        assert interaction(RADII) == pytest.approx(written(interaction, torch.tensor(RADII)).numpy(), rel=1e-13)


def test_morse_and_powers_are_their_formulas() -> None:
    r = RADII
    assert Morse(2.0, 0.3, 1.0, 0.9)(r) == pytest.approx(2 * np.exp(-r / 0.3) - np.exp(-r / 0.9), rel=1e-13)
    assert PowerLaws(2, 0)(r) == pytest.approx(r**2 / 2 - np.log(r), rel=1e-13, abs=1e-15)
    assert PowerLaws(4, 1.5)(r) == pytest.approx(r**4 / 4 - r**1.5 / 1.5, rel=1e-13, abs=1e-15)


def test_interactions_know_where_they_end_and_whether_they_are_singular() -> None:
    assert [w.singular for w in (PowerLaws(2, 0), PowerLaws(2, -1), Interaction("log(r)"), PowerLaws(2, 0.5))] == [
        True
    ] * 4
    assert not any(w.singular for w in (Morse(), PowerLaws(4, 2), PowerLaws(2, 0, softening=0.1), Interaction("r")))
    assert Interaction("minimum(r*r, 0.25) / 2").reach() == pytest.approx(0.5, rel=1e-9)
    assert Morse(cutoff=0.75).reach() == pytest.approx(0.75, rel=1e-9)
    assert Morse().reach(1e-6) == pytest.approx(math.log(1e6) * 1.0 + math.log(0.5 / 1.5), rel=0.05)
    assert PowerLaws(2, 0).reach(1e-6) == math.inf
    assert all(Interaction(text).singular for text in ("r**-6", "r**-12", "4 * (r**-12 - r**-6)"))
    assert Morse().reach(1e-6) < Morse().seen(1e-6) < 2.5 * Morse().reach(1e-6)
    assert Interaction("(r*r + 1e-4)**-6").seen(1e-9) == math.inf
    assert Interaction("r**-6", cutoff=2.5).seen(1e-9) == pytest.approx(2.5, rel=1e-9)


def test_a_cut_potential_is_continuous() -> None:
    cut = Morse(cutoff=0.75)
    assert float(cut(0.75 * (1 - 1e-9))) == pytest.approx(0.0, abs=1e-8)
    assert float(cut(1.0)) == 0.0
    assert float(cut.slope(0.5)) == float(Morse().slope(0.5))


def test_derivatives_by_a_parameter_are_those_that_torch_finds() -> None:
    def k(squared: Any, p: Any, xp: Any) -> Any:
        return xp.exp(-squared / p) * (1 + squared / p) ** (-1.5) + xp.where(squared < 1.0, p * squared, 3 * squared)

    found = substituted(derivative(k(SQUARED, PARAMETER, FUNCTIONS), PARAMETER), 0.7)
    p = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    s = RADII**2
    expected = [float(torch.autograd.grad(k(torch.tensor(one), p, torch), p)[0]) for one in s]
    assert value(found, s) == pytest.approx(np.array(expected), rel=1e-13)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Interaction("log(r - 1)"), "no finite number"),
        (lambda: Interaction("1 +"), "^w: .*no expression"),
        (lambda: Interaction("tanh(r)"), "^w: .*not known"),
        (lambda: Interaction("exp(r, r)"), "^w: .*2 arguments"),
        (lambda: Interaction(3), "expected text"),  # type: ignore[arg-type]
        (lambda: Interaction(math.exp), "failed on a symbol|single numbers"),
        (lambda: Interaction("r", cutoff=-1.0), "cutoff"),
        (lambda: Interaction("r", strength=math.nan), "strength"),
        (lambda: Morse(repulsion_length=0.0), "repulsion_length"),
        (lambda: Morse(attraction=-1.0), "attraction"),
        (lambda: Morse(1e308), r"^Morse\(repulsion=1e\+308, .*: it is no finite number"),
        (lambda: Morse(cutoff=1e308), r"^cutoff: got 1e\+308, expected at most 1e\+150"),
        (lambda: Morse()(math.nan), "^r: got 1 NaN"),
        (lambda: Morse().slope([1.0, -1.0]), "^r: got distances from -1 to 1, expected them from 0"),
        (lambda: Morse()(1e200), "^r: got distances from"),
        (lambda: Morse()(1j), "^r: got complex"),
        (lambda: Morse().slope(["1"]), "^r: got dtype"),
        (lambda: PowerLaws(1, 2), "more than that of the repulsion"),
        (lambda: PowerLaws(2, 0, softening=-1.0), "softening"),
        (lambda: Interaction("+".join(f"exp(-{n}.5*r)" for n in range(200))), "operations"),
    ],
)
def test_what_is_no_potential_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()
