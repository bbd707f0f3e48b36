"""The contract of models of noise: every public one keeps it, and what breaks it is named."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pytest

import nlflow.denoising.noise as models
from nlflow.denoising.noise import (
    Drift,
    GaussianNoise,
    HotPixels,
    Hum,
    Impulses,
    LogSpeckle,
    Mixture,
    Noise,
    NoncentralChi,
    Poisson,
    Reduction,
    Rician,
    Speckle,
    Spikes,
    Stripes,
    figures,
    names,
)
from nlflow.errors import InputError
from nlflow.testing import ContractError, check_noise

IMAGE = 100 + 20 * np.sin(np.add.outer(np.arange(40), np.arange(36)) / 9)
SIGNAL = 100 + 20 * np.sin(np.arange(600) / 9)
MADE: dict[type[Noise], tuple[Noise, Any]] = {
    Drift: (Drift(scale=200, sigma=5.0), SIGNAL),
    GaussianNoise: (GaussianNoise.from_kernel(np.ones((3, 3)), 5.0), IMAGE),
    HotPixels: (HotPixels(0.02, 50.0, fixed=False), IMAGE),
    Hum: (Hum((0.12,), (3.0,)), SIGNAL),
    Impulses: (Impulses(0.1, 0.0, 255.0), IMAGE),
    Mixture: (Mixture([Impulses(0.05, 0.0, 255.0), Stripes(2.0), GaussianNoise(4.0), GaussianNoise(3.0)]), IMAGE),
    NoncentralChi: (NoncentralChi(5.0, coils=4), IMAGE),
    Poisson: (Poisson(gain=2.0, sigma=1.0), IMAGE),
    Rician: (Rician(5.0), IMAGE),
    LogSpeckle: (LogSpeckle(4.0), IMAGE),
    Speckle: (Speckle(4.0), IMAGE),
    Spikes: (Spikes(0.01, 500.0), SIGNAL),
    Stripes: (Stripes(3.0, axis=1), IMAGE),
}


def public() -> list[type[Noise]]:
    found = [one for name in models.__all__ if inspect.isclass(one := getattr(models, name))]
    return [one for one in found if issubclass(one, Noise) and not inspect.isabstract(one)]


@pytest.mark.parametrize("kind", public(), ids=lambda kind: kind.__name__)
def test_every_public_model_keeps_the_contract(kind: type[Noise]) -> None:
    noise, clean = MADE[kind]  # a model that is new has to be entered
    check_noise(noise, clean)


@pytest.mark.parametrize("kind", public(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["reduce", "hits", "completed", "strength"])
def test_what_is_no_array_of_samples_is_refused_by_name(kind: type[Noise], name: str) -> None:
    method = getattr(MADE[kind][0], name, None)
    if method is None or getattr(kind, name) is getattr(Noise, name, None):  # which looks at no sample
        return
    for wrong in ([[1.0, 2.0]], np.ones(7), np.ones((5, 5, 1), complex), np.ma.ones((5, 5, 1))):
        with pytest.raises(InputError, match=r"^samples: got"):
            method(wrong)
    with pytest.raises(InputError, match=r"^missing: got bool of shape \(3,\), expected booleans of shape \(5, 5\)"):
        method(np.ones((5, 5, 1)), np.zeros(3, bool))


def test_every_public_model_is_entered_by_its_kind() -> None:
    assert {one.kind: one.__name__ for one in public()} == names.KINDS
    assert all(names.model_class(one.kind) is one for one in public())


def test_each_word_is_named_where_people_read_of_noise() -> None:
    from nlflow import denoise
    from nlflow.desk.commands.denoise import HELP

    assert "noise : {" + ", ".join(map(repr, names.WORDS)) + "} or Noise" in str(denoise.__doc__)
    assert all(f"--noise {word} " in HELP for word in names.WORDS if word != "auto")
    for word in set(names.WORDS) & set(names.KINDS):  # a word stands for a model that needs no number
        noise, sigma = names.choose_noise(word, None)
        assert isinstance(noise, names.model_class(word))
        assert sigma is None


@dataclass(frozen=True)
class Own(Noise):
    """A model whose reduction may be broken."""

    kind: ClassVar[str] = "own-of-a-test"
    scalable: ClassVar[bool] = False
    undone: ClassVar[bool] = True
    shape: Any
    fault: str = ""

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Any:
        if self.fault == "in place":
            clean += 1
        seed = None if self.fault == "seed" else rng
        return clean + np.random.default_rng(seed).normal(size=np.shape(clean))

    def describe(self) -> str:
        return "" if self.fault == "words" else "own noise"

    def reduce(self, samples: Any, missing: Any = None) -> Reduction:
        if self.fault == "samples":
            samples *= 2
        rest = GaussianNoise(1.0) if self.fault == "rest" else None
        return Reduction(samples[:-1] if self.fault == "shape" else samples, rest=rest)

    def scaled(self, factor: float) -> Self:
        if self.fault == "strength":
            return self
        raise InputError("strength: got another one")


def test_an_own_model_with_an_array_compares_by_its_numbers() -> None:
    check_noise(Own(np.arange(3.0)), IMAGE)
    assert Own(np.arange(3.0)) == Own(np.arange(3.0)) != Own(np.arange(1, 4.0))


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("in place", "sample"),
        ("seed", "sample"),
        ("words", "describe"),
        ("samples", "reduce"),
        ("shape", "reduce"),
        ("strength", "scaled"),
        ("rest", "undone"),
    ],
)
def test_what_breaks_the_contract_is_named(fault: str, named: str) -> None:
    with pytest.raises(ContractError, match=rf"^noise Own: {named}: got"):
        check_noise(Own(np.arange(3.0), fault), IMAGE.copy())


def test_models_of_the_same_numbers_are_equal() -> None:
    assert GaussianNoise(5) == GaussianNoise(5) != GaussianNoise(6)
    assert len({GaussianNoise([1, 2]), GaussianNoise([1, 2]), GaussianNoise([1, 3])}) == 2
    assert Mixture([GaussianNoise([1, 2])]) == Mixture([GaussianNoise([1, 2])])


# ---- sums in a mixture


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GaussianNoise(24.0), GaussianNoise(3.0)),
        (GaussianNoise(4.0), GaussianNoise.from_kernel(np.ones((3, 3)), 6.0)),
        (GaussianNoise(4.0, intensities=[0, 100, 200], strengths=[1, 2, 3]), GaussianNoise(2.0)),
    ],
)
def test_what_gaussian_parts_leave_adds_up(one: GaussianNoise, other: GaussianNoise) -> None:
    samples = np.full((30, 30, 1), 100.0)
    for parts in ([one, other], [other, one], [one, Stripes(0.0), other]):
        rest = Mixture(parts).reduce(samples).rest
        assert isinstance(rest, GaussianNoise)
        expected = np.hypot(one.strength(samples), other.strength(samples))
        assert rest.strength(samples) == pytest.approx(expected, rel=1e-12)
    alone = Mixture([one, Stripes(0.0)]).reduce(samples).rest
    assert alone == one


def test_a_gaussian_noise_in_units_that_change_is_refused() -> None:
    for parts in ([GaussianNoise(24.0), Poisson()], [Poisson(), GaussianNoise(24.0)]):
        with pytest.raises(InputError, match="units"):
            Mixture(parts).reduce(np.full((30, 30, 1), 100.0))


def test_each_figure_says_what_it_means_and_where_it_came_from() -> None:
    subjects = figures.Figures.__subclasses__()
    assert sum(len(one.table) for one in subjects) > 250
    for subject in subjects:
        for name, one in subject.table.items():
            assert one.meaning, name
            assert one.source, name
            assert getattr(subject, name) is one.value
