"""Tasks of sweeps against scikit-learn and loops, intervals that cover, and the page about a model."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from nlflow.errors import InputError
from tests import pretended
from tests.transformer_models import BODY, TEXT, build, inputs, output, torch, transformers

from nlflow.attention import Classification, TokenAccuracy, WordErrors, attach, detach, masked_tokens, report  # isort: skip
from nlflow.attention.sweeping.intervals import paired_differences  # isort: skip
from nlflow.attention.probing.groups import pooled  # isort: skip
from nlflow.attention.sweeping.tasks import word_errors  # isort: skip


class Features(torch.nn.Module):
    """A model that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return x


def _classes(count: int = 60) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    return torch.from_numpy(rng.normal(size=(count, 5)) + 1.2 * np.eye(5)[labels]), labels


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("spoil", [torch.nan, torch.inf, 7.0])
def test_padding_has_no_part_in_what_is_pooled(behind: bool, spoil: float) -> None:
    states, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    mask = mask if behind else mask.flip(1)
    spoiled = states.masked_fill(mask[..., None] == 0, spoil)
    kept = [one[inside == 1] for one, inside in zip(states, mask, strict=True)]
    expected = {"mean": [one.mean(dim=0) for one in kept], "first": [one[0] for one in kept]}
    expected["last"] = [one[-1] for one in kept]
    for pooling, rows in expected.items():
        torch.testing.assert_close(pooled(spoiled, mask, pooling), torch.stack(rows))


def test_neighbours_are_those_of_a_loop() -> None:
    x, labels = _classes()
    found = Classification(x, labels, neighbours=7)(Features())
    unit = x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    for number in range(len(x)):
        cosines = unit @ unit[number]
        others = sorted((one for one in range(len(x)) if one != number), key=lambda one: -cosines[one])[:7]
        votes = [sum(1 + cosines[one] for one in others if labels[one] == label) for label in range(3)]
        assert found[number] == (np.argmax(votes) == labels[number])


def test_a_linear_probe_is_fitted_without_the_item_that_it_tells() -> None:
    x, labels = _classes()
    found = Classification(x, labels, classifier="linear")(Features())
    unit = x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    whole = np.column_stack([unit - unit.mean(axis=0), np.ones(len(x))])
    penalty = 0.01 * np.mean(np.linalg.svd(whole, compute_uv=False) ** 2)
    for number in range(len(x)):
        rest = np.delete(np.arange(len(x)), number)
        gram = whole[rest].T @ whole[rest] + penalty * np.eye(6)
        weights = np.linalg.solve(gram, whole[rest].T @ np.eye(3)[labels[rest]])
        assert found[number] == (np.argmax(whole[number] @ weights) == labels[number])


@pytest.mark.on_cpu("its labels lie on the host, as tokenizers give them, beside what the model gives")
def test_masked_tokens_are_counted_as_they_are() -> None:
    class Marks:
        model_max_length, mask_token_id, pad_token_id, all_special_ids = 20, 4, 0, [0, 1, 2, 4]

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, *(5 + ord(one) % 20 for one in text.split()), 2]}

    class Nothing(Marks):
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, 2]}

    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT | BODY)).eval()
    texts = ["a b c d e f g", "h i j", "k l m n o p q r"]
    task = masked_tokens(Marks(), texts, share=0.4, draws=2, batch=2)
    scores = task(model)
    assert scores.shape == (3,)
    by_hand: dict[int, list[float]] = {}
    order = 0
    for batch, (given, labels) in enumerate(zip(task.inputs, task.labels, strict=True)):
        with torch.no_grad():
            logits = model(**given).logits
        for row, wanted in enumerate(labels):
            asked = wanted >= 0
            assert set(given["input_ids"][row][asked].tolist()) == {4}
            assert not set(wanted[asked].tolist()) & {0, 1, 2, 4}
            by_hand.setdefault(2 * (batch // 2) + row, []).append(
                float((logits[row].argmax(-1) == wanted)[asked].double().mean())
            )
        order += len(labels)
    np.testing.assert_allclose(scores, [np.mean(by_hand[number]) for number in sorted(by_hand)], rtol=1e-12)
    assert order == 6
    with pytest.raises(InputError, match="gives no logits of the tokens"):
        task(model.bert)
    with pytest.raises(InputError, match="all of whose tokens are special"):
        masked_tokens(Nothing(), ["a b"])


@pytest.mark.on_cpu("puts tensors on the pretended GPU itself")
def test_labels_go_to_a_device_once_and_scores_come_in_one_copy() -> None:
    class Head(Features):
        def forward(self, x: Any) -> Any:
            return types.SimpleNamespace(logits=self.one(x[..., None]) * torch.arange(3.0, device=x.device))

    labels = torch.tensor([[2, -100, 0], [0, 1, 2]])
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    expected = TokenAccuracy([{"x": x}] * 2, [labels] * 2)(model := Head())
    with pretended.gpu():
        task = TokenAccuracy([{"x": pretended.put(x)}] * 2, [labels] * 2)
        model = model.to("cuda")
        assert np.array_equal(task(model), expected)
        with pretended.counting() as counts:
            assert np.array_equal(task(model), expected)
    assert (counts.copies_to_device, counts.copies_to_host) == (0, 1), str(counts)


def test_word_errors_are_the_fewest_changes() -> None:
    def by_recursion(a: list[str], b: list[str]) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return by_recursion(a[1:], b[1:])
        return 1 + min(by_recursion(a[1:], b), by_recursion(a, b[1:]), by_recursion(a[1:], b[1:]))

    rng = np.random.default_rng(0)
    for _ in range(20):
        one, other = (list(rng.choice(["a", "b", "c"], size=rng.integers(0, 6))) for _ in range(2))
        assert word_errors(one, other) == by_recursion(one, other)


def test_what_is_heard_is_the_largest_logit_one_after_the_other() -> None:
    torch.manual_seed(0)
    shape = {f"{part}_{name}": size for part in ("encoder", "decoder")
             for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    tokens = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        d_model=16, num_mel_bins=8, max_source_positions=20, max_target_positions=24, init_std=0.5, **shape, **tokens,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    sounds = [torch.randn(1, 8, 40) for _ in range(3)]

    def write(ids: list[int]) -> str:
        return " ".join(f"w{number}" for number in ids)

    def by_hand(sound: Any) -> list[int]:
        ids = [1, 3]
        while len(ids) < 12:
            with torch.no_grad():
                ids.append(
                    int(model(input_features=sound, decoder_input_ids=torch.tensor([ids])).logits[0, -1].argmax())
                )
            if ids[-1] == 2:
                return ids[2:-1]
        return ids[2:]

    stock = [write(by_hand(one)) for one in sounds]
    task = WordErrors(sounds, [f"{one} and MORE" for one in stock], write, begin=[1, 3], end=2, most=10)
    wanted = [-2 / (len(one.split()) + 2) for one in stock]
    np.testing.assert_allclose(task(model), wanted, rtol=1e-12)
    assert task.summary(task(model)) == pytest.approx(-np.mean(wanted))
    attach(model, fidelity=0, cures={"centring": 0.8, "temperature": 2.0})
    changed = [write(by_hand(one)) for one in sounds]
    assert changed != stock
    assert [task.heard(model, one) for one in sounds] == changed
    assert [task.heard(detach(model), one) for one in sounds] == stock
    with pytest.raises(InputError, match="writes nothing of what it hears"):
        task(model.model)
    for given, words in (
        ({"said": ["a"]}, "said: got 1 for 3 sounds"),
        ({"said": ["a", "?!", "b"]}, r"said\[1\]: got '\?!', expected some words"),
        ({"begin": []}, "begin: got no token"),
    ):
        with pytest.raises(InputError, match=words):
            WordErrors(sounds, **{"said": ["a", "b", "c"], "begin": [1], **given}, write=write, end=2)  # type: ignore[arg-type]
    for shape in ((2, 8, 40), (8, 40)):
        with pytest.raises(InputError, match=r"sounds\[0\]: got shape .*, expected \(1, ...\)"):
            WordErrors([torch.randn(*shape)], ["a"], write, begin=[1], end=2)


def test_tasks_that_are_refused() -> None:
    x, labels = _classes()
    for given, words in (
        ({"labels": labels[:-1]}, "labels: got 59 for 60 items"),
        ({"labels": np.zeros(60)}, "labels: got one class"),
        ({"classifier": "forest"}, "classifier: got 'forest'"),
    ):
        with pytest.raises(InputError, match=words):
            Classification(x, **{"labels": labels, **given})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"labels\[0\]: got shape \(3,\), expected \(batch, tokens\)"):
        TokenAccuracy([{}], [torch.zeros(3, dtype=torch.long)])


@pytest.mark.slow
@pytest.mark.parametrize(("law", "items"), [
    ("normal", 20), ("normal", 40), ("mostly none", 40), ("right or wrong", 20), ("right or wrong", 40),
    ("right or wrong", 100), ("skewed", 20), ("skewed", 40), ("skewed", 100),
])  # fmt: skip
def test_intervals_of_a_sweep_cover_together(law: str, items: int) -> None:
    """Of 200 experiments with 25 settings that depend on each other, all intervals hold in at least 93 %."""
    rng = np.random.default_rng(7)
    draws = {
        "normal": lambda size: rng.normal(size=size),
        "mostly none": lambda size: rng.normal(size=size) * (rng.random(size) < 0.3),
        "skewed": lambda size: rng.exponential(size=size) - 1,
    }
    effects = np.concatenate([np.zeros(10), rng.normal(0, 0.1, 15)])
    mixing = np.linalg.cholesky(0.6 * np.ones((25, 25)) + 0.4 * np.eye(25))
    effects = effects.clip(-0.06, 0.3) if law == "right or wrong" else effects
    held = 0
    for seed in range(200):
        stock = rng.normal(size=items)
        if law == "right or wrong":  # of 0.6 right answers a tenth is spoilt, and so many wrong ones are mended
            stock = (stock < 0.2533).astype(float)
            turned, mended = rng.random((25, items)), (0.06 + effects[:, None]) / 0.4
            scores = np.where(stock > 0, turned > 0.1, turned < mended)
        else:
            scores = stock + effects[:, None] + mixing @ draws[law]((25, items))
        found = paired_differences(scores, stock, resamples=600, rng=seed)
        held += bool(((found.low <= effects) & (effects <= found.high)).all())
    assert held >= 186


# ---- the page


def test_a_report_is_one_page_with_numbers_and_sentences(tmp_path: Path) -> None:
    given = [inputs("vit", seed=seed, batch=4) for seed in range(3)]
    model = build("vit")
    before = output(model, given[0])

    def task(model: Any) -> Any:
        return np.concatenate([output(model, one).flatten(1).norm(dim=1).detach().numpy() for one in given])

    made = report(model, given, task, cures={"layer-scale": [0.5], "explicit": [0.2]}, layers=["all"], name="a <model>")
    assert torch.equal(output(model, given[0]), before)
    assert made.before.count == 12
    assert [len(one) for one in made.answers()] != [0, 0, 0]
    (course,) = made.before.growths()
    apart = made.after.states[-1].values["cosine"] - made.before.states[-1].values["cosine"]
    (shift,) = made.before.shifts(made.after)
    test = scipy.stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert shift == pytest.approx((apart.mean(), test.low, test.high), rel=1e-9)
    way = "raises" if test.low > 0 else "lowers" if test.high < 0 else "is not seen to move"
    assert sum(f" {way} the mean cosine after the last layer of the encoder: " in one for one in made.may()) == 1
    values = made.before.states[-1].values["cosine"] - made.before.states[0].values["cosine"]
    assert course.cosine[1] - course.cosine[0] == pytest.approx(np.mean(values), rel=1e-9)
    change = sum(block.change("cosine")[0] for block in made.cause.blocks)
    assert list(made.parts()) == ["encoder"]
    assert sum(made.parts()["encoder"].values()) == pytest.approx(change, abs=1e-10)
    page = made.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>a &lt;model&gt;: do its tokens grow alike" in page
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)  # nothing from elsewhere
    assert "<script" not in page
    assert page.count("<img ") == 3
    assert "12 inputs, parts on " in page
    assert "beside nulls, on " in made.answers()[1].lower()
    assert "<th>bytes a token</th>" in page
    assert "The five largest gains" not in page  # of two
    assert {"layers.csv", "parts.csv", "cures.csv"} <= set(re.findall(r'download="([^"]+)"', page))
    for sentence in made.may():
        assert sentence.split("<")[0][:40].replace("&", "&amp;") in page
    assert any("without training" in why for _, why in made.may_not()) or made.sweep.chosen is not None
    assert made.as_dict()["tables"]["cures"][0]["cure"] == "layer-scale"
    for parts, blamed in (({"mlp": -0.8, "norms": 0.3}, ["norms"]), ({"mlp": -0.8}, [])):
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(type(made), "parts", lambda _, parts=parts: {"encoder": parts})
            # What makes tokens differ is no cause that they are alike.
            assert [one.split(" comes of ")[1] for one, _ in made.may_not() if " comes of " in one] == [
                f"{name}." for name in blamed
            ]


def test_a_report_without_a_task_says_so() -> None:
    made = report(build("vit"), [inputs("vit", batch=3)])
    assert made.answers()[2] == "Not measured: no task was given."
    assert "The encoder " in made.answers()[0]
    assert "(isotropy)" in made.answers()[0]
    assert made.html().count("<img ") == 2


def test_a_report_tells_the_parts_of_each_stack_apart() -> None:
    made = report(build("bart"), [inputs("bart", batch=3)])
    assert list(made.parts()) == ["encoder", "decoder"]
    for stack, parts in made.parts().items():
        own = [block for block in made.cause.blocks if block.stack == stack]
        assert sum(parts.values()) == pytest.approx(sum(one.change("cosine")[0] for one in own), abs=1e-10)
        assert f"{stack.capitalize()}: of the change of {sum(parts.values()):+.2f}" in made.answers()[1]
        assert f"each block of the {stack} changes" in " ".join(made.figures())
    assert "cross-attention" in made.parts()["decoder"]
    assert "cross-attention" not in made.parts()["encoder"]
