"""Models of noise in files: what comes back is what was written, and anything else is refused by name."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.denoising import noise as models
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
    Rician,
    Speckle,
    Spikes,
    Stripes,
    load_noise,
    noise_of,
)
from nlflow.errors import FileFormatError, InputError

RNG = np.random.default_rng(5)
CAMERA = GaussianNoise(
    np.array([3.0, 1 / 3, np.pi]), RNG.random((3, 64, 64)), [10.0, 90.5], [0.5, 1.5], opponent=True, compressed=0.5
)
MODELS = [
    GaussianNoise(5.0),
    GaussianNoise(2.0, RNG.random(64)),
    CAMERA,
    Poisson(2.5, 4.0, 100.0),
    Hum((0.1, 0.2), (1 / 3, 2.0), (0.0, -1e-300)),
    Hum((0.1,)),
    Drift(400.0),
    Impulses(0.1, 0.0, 255.0, random=True),
    Stripes(3.0, axis=1, shared=False),
    Speckle(4.5),
    Speckle(1.0, amplitude=True, spectrum=RNG.random((64, 64))),
    LogSpeckle(18.5, 1.0, RNG.random((64, 64))),
    Mixture([Impulses(0.05, 0.0, 255.0), CAMERA]),
    Rician(1 / 3),
    HotPixels(0.1 + 1e-17, 200 / 3, False),
    NoncentralChi(5.0, coils=4),
    Spikes(0.01, 30.0),
]


def same(one: Any, other: Any) -> bool:
    """Compare two models to the last bit of each field."""
    assert type(one) is type(other)
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right, strict=True)
        elif isinstance(left, tuple) and isinstance(left[0], Noise):
            assert all(same(a, b) for a, b in zip(left, right, strict=True))
        else:
            assert left == right, field.name
            assert type(left) is type(right)
    return True


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_comes_back_to_the_last_bit(model: Noise, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    assert same(load_noise(path), model)
    assert same(noise_of(model.as_dict()), model)
    assert [one.name for one in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize("model", [*MODELS, Impulses(), Mixture([Impulses(), Drift(40.0)])], ids=repr)
def test_models_of_the_same_numbers_are_equal_and_have_one_hash(model: Noise, tmp_path: Path) -> None:
    model.save(tmp_path / "model.json")
    again = load_noise(tmp_path / "model.json")
    assert again == model
    assert hash(again) == hash(model)
    assert {GaussianNoise(0.0), Poisson(2.0, 3.0, -0.0)} == {GaussianNoise(-0.0), Poisson(2.0, 3.0, 0.0)}
    assert (model == MODELS[0]) == (model is MODELS[0])


def test_every_public_model_has_been_in_a_file() -> None:
    classes = {one for name in models.__all__ if inspect.isclass(one := getattr(models, name))}
    public = {one for one in classes if issubclass(one, Noise) and not inspect.isabstract(one)}
    assert public == {type(model) for model in MODELS}


def test_fields_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"kind": "gaussian", "sigma": 5}')
    assert same(load_noise(path), GaussianNoise(5.0))


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.json"
    GaussianNoise(5.0).save(path)
    Poisson(2.0).save(path)
    assert same(load_noise(path), Poisson(2.0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nlflow.store.atomic.os.fsync", full)
    with pytest.raises(FileFormatError, match="No space left"):
        GaussianNoise(5.0).save(path)
    assert same(load_noise(path), Poisson(2.0))
    assert [one.name for one in tmp_path.iterdir()] == ["model.json"]
    with pytest.raises(FileFormatError, match=r"no.json: got No such file"):
        GaussianNoise(5.0).save(tmp_path / "nowhere" / "no.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "an empty file"),
        ('{"kind": "gaussian", "sig', "no JSON"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "no JSON"),
        ("[" * 5000, "no JSON"),
        ("[" * 300 + "]" * 300, "nested too deeply"),
        ("5", "noise: got 5, expected an object"),
        ("[]", r"noise: got \[\], expected an object"),
        ("{}", "got no kind, expected one of drift, gaussian"),
        ('{"kind": 3}', "got the kind 3"),
        ('{"kind": ["gaussian"]}', r"got the kind \['gaussian'\]"),
        ('{"kind": "pink"}', "got the kind 'pink', expected one of drift, gaussian, hot-pixels, hum"),
        ('{"kind": "gaussian"}', "got gaussian without sigma"),
        ('{"kind": "gaussian", "sigma": 5, "colour": 1}', "the field 'colour', which gaussian does not have"),
        ('{"kind": "gaussian", "sigma": "5"}', "sigma: "),
        ('{"kind": "gaussian", "sigma": null}', "sigma: "),
        ('{"kind": "gaussian", "sigma": true}', "noise.sigma: got True, expected a number"),
        ('{"kind": "gaussian", "sigma": [true]}', "sigma: got true or false among its values"),
        ('{"kind": "gaussian", "sigma": NaN}', "sigma: "),
        ('{"kind": "gaussian", "sigma": Infinity}', "sigma: "),
        ('{"kind": "gaussian", "sigma": {"float": "nan"}}', "sigma: "),
        ('{"kind": "gaussian", "sigma": 1' + "0" * 400 + "}", "sigma: "),
        ('{"kind": "gaussian", "sigma": 1' + "0" * 5000 + "}", "no JSON"),
        ('{"kind": "gaussian", "sigma": -1}', "sigma: got -1"),
        ('{"kind": "gaussian", "sigma": []}', "sigma: "),
        ('{"kind": "gaussian", "sigma": [[1, 2], [3]]}', "sigma: "),
        ('{"kind": "gaussian", "sigma": 5, "opponent": 1}', "noise.opponent: got 1, expected true or false"),
        ('{"kind": "gaussian", "sigma": 5, "opponent": "no"}', "noise.opponent: got 'no', expected true or false"),
        ('{"kind": "gaussian", "sigma": 5, "spectrum": [1, -1, 1]}', "spectrum: got -1, expected powers >= 0"),
        ('{"kind": "gaussian", "sigma": 5, "spectrum": [[[[1]]]]}', "spectrum: "),
        ('{"kind": "gaussian", "sigma": 5, "spectrum": "white"}', "spectrum: "),
        ('{"kind": "gaussian", "sigma": 5, "spectrum": {"kind": "gaussian", "sigma": 1}}', "spectrum: "),
        ('{"kind": "gaussian", "sigma": 5, "intensities": [1, 2]}', "strengths: give them together"),
        ('{"kind": "poisson", "gain": 0}', "gain: got 0"),
        ('{"kind": "poisson", "gain": [1]}', "gain: "),
        ('{"kind": "hum", "frequencies": []}', "frequencies: "),
        ('{"kind": "hum", "frequencies": [0.7]}', "frequencies: got 0.7"),
        ('{"kind": "stripes", "sigma": 1, "axis": 0.5}', "axis: got 0.5"),
        ('{"kind": "impulses", "density": 2, "low": 0, "high": 1}', "density: got 2"),
        (
            '{"kind": "impulses", "density": 0.1}',
            "low: got none beside density=0.1, expected the value",
        ),
        ('{"kind": "mixture", "parts": []}', "parts: "),
        ('{"kind": "mixture", "parts": 5}', "parts: "),
        ('{"kind": "mixture", "parts": [5, {"kind": "poisson"}]}', r"noise.parts\[0\]: got 5, expected an object"),
        ('{"kind": "mixture", "parts": [{"kind": "pink"}]}', r"noise.parts\[0\]: got the kind 'pink'"),
        ('{"kind": "mixture", "parts": {"kind": "poisson"}}', "parts: "),
        ('{"kind": "drift", "scale": 1}', "scale: got 1"),
    ],
)
def test_what_is_no_model_is_refused_by_name(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileFormatError, match=message) as caught:
        load_noise(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_models_within_models_end_somewhere() -> None:
    entry: dict[str, Any] = {"kind": "gaussian", "sigma": 1.0}
    for _ in range(8):
        entry = {"kind": "gaussian", "sigma": entry}
    with pytest.raises(InputError, match="models within models 4 deep"):
        noise_of(entry)


def test_other_things_than_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"none.json: got no such file"):
        load_noise(tmp_path / "none.json")
    with pytest.raises(FileFormatError, match="got a folder"):
        load_noise(tmp_path)
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"kind": "gaussian", "sigma": 5}) + " " * 2**24)
    with pytest.raises(FileFormatError, match="got more than 16 MiB"):
        load_noise(large)


@pytest.mark.parametrize(
    ("noise", "clean"),
    [
        (Rician(1.0), -np.ones((4, 4))),
        (Speckle(1.0), -np.ones((4, 4))),
        (Stripes(1.0), np.zeros(9)),
        (Stripes(1.0), np.zeros((8, 9, 10))),
        (HotPixels(0.1), np.zeros((9, 9))),
        (Hum((0.1,), (1.0,)), np.zeros((9, 9))),
        (Drift(8.0, 1.0), np.zeros((9, 9))),
        (Spikes(0.1), np.zeros((9, 9))),
        (Mixture([Rician(1.0)]), -np.ones((4, 4))),
    ],
)
def test_samples_that_cannot_have_the_noise_are_refused_by_their_name(noise: Noise, clean: Any) -> None:
    with pytest.raises(InputError, match=r"^clean: got"):
        noise.sample(clean)


def test_the_magnitude_whose_mean_is_asked_for_is_named() -> None:
    with pytest.raises(InputError, match=r"^magnitude: got"):
        Rician(1.0).mean([-1.0])


def test_a_mixture_holds_no_mixtures() -> None:
    with pytest.raises(InputError, match="none of them a mixture"):
        Mixture([Mixture([Poisson()])])
