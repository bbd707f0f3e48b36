"""Sweeps of terms over trained models: tasks, simultaneous intervals, what is recommended, and how they refuse."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from nlflow.errors import InputError
from tests.transformer_models import WIDTH, assert_same, build, by_hooks, inputs, output, torch, transformers

from nlflow.attention import (  # isort: skip  # torch may be missing above
    Perplexity,
    Retrieval,
    Sweep,
    attach,
    blocks,
    load_terms,
    masked_tokens,
    neighbouring_passages,
    reciprocal_ranks,
    report,
    sweep,
)
from nlflow.attention.sweeping.intervals import paired_differences  # isort: skip


class Words:
    """A tokenizer with a number for each word."""

    model_max_length = 30

    def __call__(self, text: str, *, max_length: int = 10**9, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [5 + sum(map(ord, word)) % 30 for word in text.split()][:max_length]}


TEXT = "= One =\n" + " ".join(f"w{i}" for i in range(45)) + "\n = Two = \n" + " ".join(f"v{i}" for i in range(70))


# ---- the default of attach


def test_the_default_is_the_semi_implicit_form_at_0_4() -> None:
    given = inputs("bert")
    found = output(attach(build("bert")), given)
    assert torch.equal(found, output(attach(build("bert"), fidelity=0.4, semi_implicit=True), given))

    def mean(average: Any, values: Any, first: Any, fidelity: float) -> Any:
        return (average + 0.4 * first) / 1.4

    torch.testing.assert_close(found, output(by_hooks(build("bert"), mean), given), rtol=1e-5, atol=2e-5)


def test_files_of_terms_without_a_form_are_of_the_explicit_one(tmp_path: Path) -> None:
    (tmp_path / "attention.json").write_text(json.dumps({"format": 1, "attach": {"fidelity": 0.6}}))
    given = inputs("bert")
    expected = output(attach(build("bert"), fidelity=0.6, semi_implicit=False), given)
    assert torch.equal(output(load_terms(build("bert"), tmp_path), given), expected)
    # Terms that say their form keep it.
    attach(build("bert")).save_pretrained(tmp_path / "own")
    about = json.loads((tmp_path / "own" / "attention.json").read_text())
    assert about["attach"]["semi_implicit"]


# ---- tasks


def test_reciprocal_ranks() -> None:
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(2, 40, 6))
    documents += queries
    cosine = 1 - np.array([[_cosine_distance(q, d) for d in documents] for q in queries])
    expected = [1 / stats.rankdata(-row, method="max")[i] for i, row in enumerate(cosine)]
    np.testing.assert_array_equal(reciprocal_ranks(queries, documents), expected)
    np.testing.assert_array_equal(reciprocal_ranks(1e300 * queries, 1e-300 * documents), expected)
    # All alike: nothing is found.
    np.testing.assert_array_equal(reciprocal_ranks(np.ones((5, 3)), np.ones((5, 3))), np.full(5, 0.2))
    np.testing.assert_array_equal(reciprocal_ranks(np.zeros((5, 3)), np.ones((5, 3))), np.full(5, 0.2))
    with pytest.raises(InputError, match=r"documents: got shape \(4, 3\), expected \(5, 3\)"):
        reciprocal_ranks(np.ones((5, 3)), np.ones((4, 3)))
    with pytest.raises(InputError, match="queries: got 1 NaN"):
        reciprocal_ranks([[np.nan, 1.0]], [[1.0, 1.0]])


def _cosine_distance(a: Any, b: Any) -> float:
    from scipy.spatial.distance import cosine

    return float(cosine(a, b))


def test_passages_follow_each_other_within_a_section() -> None:
    pairs = neighbouring_passages([TEXT], words=10)
    assert [(a.split()[0], b.split()[0]) for a, b in pairs] == [
        *(("w0", "w10"), ("w20", "w30"), ("v0", "v10"), ("v20", "v30"), ("v40", "v50"))
    ]
    assert all(len(one.split()) == 10 for pair in pairs for one in pair)
    assert [a.split()[0] for a, _ in neighbouring_passages([TEXT], words=10, pairs=2)] == ["w0", "v0"]
    with pytest.raises(InputError, match=r"texts: got 1 pair\(s\) of passages of 30 words, expected at least 2"):
        neighbouring_passages([TEXT], words=30)


def test_embeddings_do_not_depend_on_padding() -> None:
    model = build("bert").double()
    texts = ["one", "two three four five six seven", "eight nine", "a b c d e f g h"]
    task = Retrieval(Words(), [(texts[0], texts[1]), (texts[2], texts[3])], batch=3)
    together = task.embed(model, texts)
    for text, found in zip(texts, together, strict=True):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([Words()(text)["input_ids"]])).last_hidden_state[0]
        np.testing.assert_allclose(found, states.mean(dim=0).numpy(), rtol=1e-10, atol=1e-12)
    for pooling, place in (("first", 0), ("last", -1)):
        other = Retrieval(Words(), task.pairs, pooling=pooling).embed(model, texts)
        np.testing.assert_allclose(other[-1], states[place].numpy(), rtol=1e-10, atol=1e-12)


def test_perplexity_is_that_of_the_library() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=70, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval().double()
    task = Perplexity(Words(), [TEXT], length=12, batch=3)
    scores = task(model)
    assert scores.shape == (len(task.blocks),) == (10,)
    with torch.no_grad():
        loss = model(input_ids=task.blocks, labels=task.blocks).loss
    # The library's loss is in float32.
    assert task.summary(scores) == pytest.approx(float(loss.exp()), rel=1e-5)
    assert len(Perplexity(Words(), [TEXT], length=12, blocks=4).blocks) == 4
    with pytest.raises(InputError, match=r"gives no logits .* head='language'"):
        task(model.transformer)
    with pytest.raises(InputError, match="texts: got 1 tokens, expected at least 256"):
        Perplexity(Words(), ["word"])
    with pytest.raises(InputError, match="got 48 tokens in a sequence, expected at most 32, the positions"):
        Perplexity(Words(), [TEXT], length=48)(model)


# ---- intervals


def test_one_setting_has_the_interval_of_student() -> None:
    rng = np.random.default_rng(1)
    stock, other = rng.normal(size=300), rng.normal(0.2, 1, size=300)
    found = paired_differences([other], stock, resamples=20_000)
    student = stats.ttest_rel(other, stock)
    low, high = student.confidence_interval(0.95)
    assert found.mean[0] == pytest.approx(np.mean(other - stock), rel=1e-12)
    # The bound is a quantile of 20 000 draws: its error is below 2 % at five deviations.
    assert found.high[0] - found.low[0] == pytest.approx(high - low, rel=0.03)
    assert found.p[0] == pytest.approx(student.pvalue, abs=5 * np.sqrt(student.pvalue / 20_000) + 1e-3)


def test_intervals_of_many_settings_hold_together() -> None:
    """Of twelve settings that change nothing one at least is found to, in 5 % of experiments, not in 40 %."""
    rng = np.random.default_rng(2)
    wrong = single = 0
    for seed in range(100):
        stock = rng.normal(size=60)
        scores = stock + rng.normal(size=(12, 60))
        found = paired_differences(scores, stock, resamples=400, rng=seed)
        wrong += bool(((found.low > 0) | (found.high < 0)).any())
        single += bool((stats.ttest_1samp(scores - stock, 0, axis=1).pvalue < 0.05).any())
        np.testing.assert_allclose(found.high - found.mean, found.mean - found.low, rtol=1e-9)
    assert wrong <= 14  # 5 expected; four deviations of a binomial law
    assert single > 30


def test_differences_without_spread() -> None:
    stock = np.linspace(0, 1, 12)
    found = paired_differences([stock, stock + 1, stock * (1 + 1e-200)], stock, resamples=200)
    np.testing.assert_array_equal(found.mean, [0, found.mean[1], 0])
    np.testing.assert_allclose([found.low[1], found.high[1]], 1, rtol=1e-12)
    assert (found.low[0], found.high[0], found.p[0]) == (0, 0, 1)
    with pytest.raises(InputError, match="task: got scores of 9 items, expected at least 10"):
        paired_differences([stock[:9]], stock[:9])


# ---- sweeps


def planted(seed: int = 0) -> Any:
    """Return a task that is best served by the semi-implicit term at 0.4 in the last half of the layers."""
    given = inputs("vit", batch=16)
    stock = output(build("vit"), given)
    wanted = output(attach(build("vit"), fidelity=_last_half(0.4)), given)
    noise = 0.05 * np.random.default_rng(seed).normal(size=16)

    def task(model: Any) -> Any:
        near = (output(model, given) - wanted).flatten(1).norm(dim=1) / (stock - wanted).flatten(1).norm(dim=1)
        return noise - near.detach().numpy()

    return task


def _last_half(strength: float) -> list[float]:
    count = len(blocks(build("vit")))
    return [strength * (2 * index >= count and index > 0) for index in range(count)]


def test_what_helps_is_recommended() -> None:
    model = build("vit")
    before = output(model, inputs("vit"))
    tried = {"semi-implicit": (0.2, 0.4), "explicit": (0.2, 0.4), "temperature": (1.25,)}
    found = sweep(model, planted(), cures=tried, resamples=500)
    assert torch.equal(output(model, inputs("vit")), before)  # without terms again, to the bit
    assert found.best == {"fidelity": _last_half(0.4), "semi_implicit": True}
    assert found.verdict.startswith("recommended: semi-implicit, λ̃ = 0.4, layers last half: task -")
    assert found.items == 16
    assert len(found.rows) == len(found.scores) - 1
    row = next(row for row in found.rows if row["helps"] and row["value"] == 0.4 and row["layers"] == "last half")
    own = found.scores["semi-implicit", 0.4, "last half"]
    assert row["gain"] == pytest.approx(np.mean(own - found.scores[None]), rel=1e-12)
    assert row["metric"] == pytest.approx(np.mean(own), rel=1e-12)
    assert "semi-implicit" in found.table()
    assert row["bytes"] == (0, 4 * WIDTH)  # v0, until the last layer
    assert row["time"] > 0
    assert row["worse"] == np.mean(own < found.scores[None])
    assert json.loads(json.dumps(found.as_dict()))["best"] == found.best
    # A setting of a sweep is that of attach.
    assert_same({"": output(attach(model, **found.best), inputs("vit"))},
                {"": output(attach(build("vit"), fidelity=_last_half(0.4)), inputs("vit"))})  # fmt: skip


def test_none_helps_where_scores_are_noise() -> None:
    rng = np.random.default_rng(0)
    found = sweep(build("vit"), lambda model: rng.normal(size=30), resamples=500)
    assert isinstance(found, Sweep)
    assert found.best is None
    assert not any(row["helps"] for row in found.rows)
    assert "none is seen to help:" in found.verdict
    assert "leave the model as it is" in found.verdict


def test_layers_of_ones_own_and_of_each_stack() -> None:
    seen: list[list[float]] = []

    def task(model: Any) -> Any:
        seen.append([float(one.start) for one in model.modules() if type(one).__name__ == "LayerTerms"])
        return np.arange(10.0)

    sweep(build("bart"), task, cures={"explicit": [0.5]}, layers=["all", "last"], resamples=100)
    half = len(blocks(build("bart"))) // 2
    assert seen == [[], ([0.0] + [0.5] * (half - 1)) * 2, ([0.0] * (half - 1) + [0.5]) * 2]
    seen.clear()
    sweep(build("bert"), task, cures={"explicit": [0.5]}, layers={"second": [1]}, resamples=100)
    assert seen[1] == [0.0, 0.5, *[0.0] * (len(blocks(build("bert"))) - 2)]


def test_sweeps_that_are_refused() -> None:
    def task(model: Any) -> Any:
        return np.arange(10.0)

    model = build("bert")
    counts = iter((12, 11))
    for arguments, words in (
        ({"cures": {"explicit": [0.0]}}, r"cures\['explicit'\]: got \[0.0\], expected numbers other than 0"),
        ({"cures": {"explicit": [-1.0]}}, r"cures\['explicit'\]\[0\]: got -1, expected λ̃ from 0"),
        ({"cures": []}, "got no setting"),
        ({"cures": "explicit"}, r"cures: got 'explicit', expected a list of names; write \['explicit'\]"),
        ({"cures": ["implicit"]}, "cures: got 'implicit', expected one of 'semi-implicit', 'explicit'"),
        ({"layers": "all"}, r"layers: got 'all', expected a list of names; write \['all'\]"),
        ({"layers": ["middle"]}, "layers: got 'middle', expected one of"),
        ({"layers": {"none": [0]}, "cures": ["explicit"]}, "layers: got 'none', of which no layer can have a term"),
        ({"layers": {"far": [99]}}, r"layers\['far'\]: got 99, expected numbers from 0"),
        ({"level": 1.0}, "level: got 1"),
        ({"resamples": 10}, "resamples: got 10"),
        ({"task": lambda model: [np.nan] * 10}, "task: got 10 NaN"),
        ({"task": lambda model: np.ones((3, 3))}, "task: got 2 dimension"),
        ({"task": lambda model: np.arange(float(next(counts)))}, "task: got 11 scores after 12"),
        ({"task": lambda model: np.arange(9.0)}, "got scores of 9 items"),
    ):
        with pytest.raises(InputError, match=words):
            sweep(model, **{"task": task, "cures": ["explicit"], **arguments})  # type: ignore[arg-type]
    single = copy.deepcopy(model)
    single.encoder.layer = single.encoder.layer[:1]
    single.config.num_hidden_layers = 1
    with pytest.raises(InputError, match=r"got explicit, which act in the second .* of 1 layer that has none"):
        sweep(single.eval(), task, cures=["explicit"])
    with pytest.raises(InputError, match=r"training, expected evaluation mode; call model.eval\(\)"):
        sweep(build("bert").train(), task)
    with pytest.raises(InputError, match="model: has terms already; take them off first"):
        sweep(attach(build("bert")), task)
    given = inputs("bert")
    assert torch.equal(output(model, given), output(build("bert"), given))  # nothing is left of what failed
    with pytest.raises(InputError, match=r"pairs\[1\]: got \('a', ' '\), expected two passages"):
        Retrieval(Words(), [("a", "b"), ("a", " ")])
    with pytest.raises(InputError, match="gives no last_hidden_state"):
        Retrieval(Words(), [("a", "b"), ("c", "d")])(transformers.BertForMaskedLM(model.config).eval())


def test_texts_and_inputs_are_several() -> None:
    """One text is a sequence of its letters: each would be an item."""
    marks = SimpleNamespace(mask_token_id=3, all_special_ids=[])
    made: list[Any] = [neighbouring_passages, partial(Perplexity, Words()), partial(masked_tokens, marks)]
    for make in made:
        with pytest.raises(InputError, match=r"texts: got 'a text', expected a list of texts; write \[text\]"):
            make("a text")
    for given in ("a text", torch.ones(1, 3, dtype=torch.long), inputs("bert")):
        with pytest.raises(InputError, match="expected a list or a DataLoader of what probe takes"):
            report(build("bert"), given)
    with pytest.raises(InputError, match="batch: got 0, expected an integer >= 1"):
        masked_tokens(marks, ["a b"], batch=0)


def test_settings_for_which_no_time_is_left_are_named() -> None:
    found = sweep(build("bert"), lambda model: np.arange(10.0), cures={"explicit": [0.1, 0.4]}, layers=["all"],
                  seconds=1e-9, resamples=100)  # fmt: skip
    assert [row["value"] for row in found.rows] == [0.1]
    assert found.left_out == {"1 setting": "all would take longer than 1e-09 seconds: explicit λ̃ = 0.4 (all)"}
