"""Calls with arguments that a function or class does not have: the message names those that it has."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow
from nlflow import InputError, KeywordError
from nlflow.errors import checked_call


@checked_call
def mixed(image: Any, sigma: float = 1.0, *, quality: str = "fast", strength: float = 1.0) -> tuple[Any, ...]:
    """Do nothing."""
    return image, sigma, quality, strength


@checked_call
class Held:
    """Hold a width."""

    def __init__(self, width: float) -> None:
        self.width = width


def test_good_calls_pass() -> None:
    assert mixed(3, quality="best") == (3, 1.0, "best", 1.0)
    assert mixed(image=3, sigma=2.0) == (3, 2.0, "fast", 1.0)
    assert Held(2.0).width == Held(width=2.0).width == 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mixed(3, qualty="best"),
            "mixed: got an argument 'qualty'; did you mean quality? Expected one of: image, sigma, quality, strength",
        ),
        (
            lambda: mixed(3, x=1),
            "mixed: got an argument 'x'; leave it out, or take one of these: image, sigma, quality, strength",
        ),
        (
            lambda: mixed(3, 1.0, "best"),
            "mixed: got 3 arguments without a name, expected at most 2 (image, sigma); give others by name: quality=, "
            "strength=",
        ),
        (lambda: Held(widht=2.0), "Held: got an argument 'widht'; did you mean width? Expected one of: width"),
        (
            lambda: Held(2.0, 3.0),
            "Held: got 2 arguments without a name, expected at most 1 (width); leave the others out",
        ),
    ],
)
def test_a_misnamed_argument_is_told_with_the_names_that_there_are(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(KeywordError) as told:
        call()
    assert str(told.value) == message
    assert isinstance(told.value, TypeError)  # as Python's own
    assert isinstance(told.value, InputError)


def test_what_is_missing_stays_pythons_own_message() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'image'"):
        mixed()  # type: ignore[call-arg]


def test_signatures_names_and_classes_stay() -> None:
    assert list(inspect.signature(mixed).parameters) == ["image", "sigma", "quality", "strength"]
    assert mixed.__doc__ == "Do nothing."
    assert pickle.loads(pickle.dumps(mixed)) is mixed  # made a line ago
    assert list(inspect.signature(Held).parameters) == ["width"]
    assert isinstance(Held, type)


# What users call first, each with a word that is near to one of its own.
FIRST: list[tuple[str, dict[str, Any], str]] = [
    ("denoise", {"qualty": 0}, "quality"),
    ("estimate_noise", {"chanel_axis": 0}, "channel_axis"),
    ("estimate_sigma", {"channelaxis": 0}, "channel_axis"),
    ("solve", {"integrater": 0}, "integrator"),
    ("affinity", {"metod": 0}, "method"),
    ("affinity_from_graph", {"edge_weights": 0}, "edge_weight"),
    ("neighbour_graph", {"neighbors": 0}, "neighbours"),
    ("equilibrium", {"rtoll": 0}, "rtol"),
    ("nonlocal_tv", {"sigmas": 0}, "sigma"),
    ("Grid", {"bondary": 0}, "boundary"),
    ("Points", {"weight": 0}, "weights"),
    ("Gaussian", {"widht": 0}, "width"),
    ("Laplace", {"widht": 0}, "width"),
    ("Matern", {"widht": 0}, "width"),
    ("J", {"afinity": 0}, "affinity"),
    ("E", {"fidelty": 0}, "fidelity"),
    ("GradientFlow", {"metrics": 0}, "metric"),
    ("AttentionFlow", {"fidelty": 0}, "fidelity"),
    ("MarkovChain", {"afinity": 0}, "affinity"),
    ("ExplicitEuler", {"dtt": 0}, "dt"),
    ("SemiImplicit", {"ddt": 0}, "dt"),
    ("Poisson", {"gian": 0}, "gain"),
    ("GaussianNoise", {"sgima": 0}, "sigma"),
]


@pytest.mark.parametrize(("name", "words", "near"), FIRST, ids=[name for name, *_ in FIRST])
def test_what_is_called_first_names_the_near_word(name: str, words: dict[str, Any], near: str) -> None:
    with pytest.raises(KeywordError, match=rf"^{name}: got an argument '\w+'; did you mean {near}\? .*: .*\b{near}\b"):
        getattr(nlflow, name)(**words)


def test_the_problem_of_a_picture_names_what_it_takes() -> None:
    with pytest.raises(KeywordError, match=r"^problem: got an argument 'separate'; leave it out"):
        nlflow.denoising.problem(np.ones((4, 4)), separate=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "words", "near"),
    [
        ("attach", {"fidelty": 0.6}, "fidelity"),
        ("attach", {"strength": 0.6}, "fidelity"),
        ("probe", {"input": 0}, "inputs"),
        ("load_model", {"heads": 0}, "head"),
        ("sweep", {"cure": 0}, "cures"),
        ("NeutrenoAttention", {"num_heads": 4}, "heads"),
    ],
)
def test_attention_names_the_near_word(name: str, words: dict[str, Any], near: str) -> None:
    attention = pytest.importorskip("nlflow.attention", reason="torch is an extra")
    pytest.importorskip("torch", reason="torch is an extra")
    with pytest.raises(KeywordError, match=rf"^{name}: .*; did you mean {near}\? "):
        getattr(attention, name)(**words)


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("E", "lamda", "fidelity"),
        ("E", "lam", "fidelity"),
        ("Gaussian", "sigma", "width"),
        ("neighbour_graph", "k", "neighbours"),
        # Not where the call has no such argument: the nearest word, or none.
        ("solve", "strength", None),
        ("denoise", "kernel", None),
    ],
)
def test_names_of_others_are_known(name: str, word: str, meant: str | None) -> None:
    with pytest.raises(KeywordError) as told:
        getattr(nlflow, name)(**{word: 1})
    if meant is None:
        assert not re.search("did you mean (fidelity|affinity)", str(told.value))
    else:
        assert f"; did you mean {meant}? Expected one of: " in str(told.value)


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("LabelSpreading", "kernel", "affinity"),
        ("LabelSpreading", "k", "n_neighbors"),
        ("LabelSpreading", "sigma", "gamma = 1 / (2 width^2)"),
        ("HarmonicClassifier", "lam", "fidelity"),
        ("HarmonicRegressor", "rtol", "tol"),
        ("PLaplacianClassifier", "maxiter", "max_iter"),
        ("DiffusionMap", "kernel", "affinity"),
        ("spectral_clustering", "k", "n_clusters or n_neighbors"),
        ("spectral_clustering", "neighbours", "n_neighbors"),
        ("choose", "fold", "folds"),
        ("ask_next", "counts", "count"),
        ("log_evidence", "strength", "fidelity"),
    ],
)
def test_learning_knows_names_of_others(name: str, word: str, meant: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")
    from nlflow import learning

    with pytest.raises(KeywordError, match=rf"^{name}: .*; did you mean {re.escape(meant)}\?"):
        getattr(learning, name)(**{word: 1})


def test_clusters_take_the_affinity_by_name() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")
    from nlflow.learning import spectral_clustering

    with pytest.raises(KeywordError, match=r"got 3 arguments without a name, expected at most 2 .*: affinity=, gamma="):
        spectral_clustering([[0.0], [1.0]], 2, "knn")  # type: ignore[misc]


def test_the_channels_of_earlier_versions_of_scikit_image_have_their_new_name() -> None:
    with pytest.raises(KeywordError, match=r"^denoise: got an argument 'multichannel'; did you mean channel_axis=-1\?"):
        nlflow.denoise([[1.0]], multichannel=True)  # type: ignore[call-arg]


def test_a_misspelt_name_of_the_package_is_told_the_near_one() -> None:
    with pytest.raises(AttributeError, match=r"^module 'nlflow' has no attribute 'denois'; did you mean denoise\?$"):
        nlflow.denois  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'qqq'$"):
        nlflow.qqq  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("room", "name"), [("nlflow.denoising.large", "denoise_array"), ("nlflow.learning", "DiffusionMap")]
)
def test_a_name_that_only_a_room_has_is_told_with_the_room(room: str, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; write from {room} import {name}$"):
        getattr(nlflow, name)


def test_estimators_name_the_near_word_and_keep_scikit_learns_contract() -> None:
    base = pytest.importorskip("sklearn.base", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")
    from nlflow import learning

    names = [name for name in learning.__all__ if hasattr(getattr(learning, name), "get_params")]
    assert len(names) == 7
    for name in names:
        kind = getattr(learning, name)
        with pytest.raises(KeywordError, match=rf"^{name}: got an argument 'n_neighbours'.*did you mean n_neighbors\?"):
            kind(n_neighbours=3)
        own = kind(n_neighbors=3)
        assert base.clone(own).get_params() == own.get_params()
        assert pickle.loads(pickle.dumps(own)).get_params() == own.get_params()  # made a line ago


def test_warnings_point_at_the_call() -> None:
    alone = np.zeros((4, 4))
    alone[0, 1] = alone[1, 0] = 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        nlflow.affinity_from_graph(alone)
        nlflow.denoise(np.full((40, 40), 7, np.uint8), 0.05)
    assert [one.filename for one in told][:2] == [__file__] * 2
