"""Objects as people have them: texts, pictures, pipelines, SentenceTransformers, models of timm and torchvision.

The libraries need not be installed: small doubles have the attributes that count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.errors import InputError, NlflowWarning
from tests.transformer_models import HEADS, WIDTH, build, inputs, output, torch

from nlflow.attention import (  # isort: skip  # torch may be missing above
    Classification, attach, blocks, detach, explain, fidelities, image_inputs, load_terms, probe, survey, sweep,
    token_inputs,
)  # fmt: skip
from nlflow.attention.injection.everyday import gathered, inputs_of  # isort: skip

TEXTS = ["one two three", "four five six seven eight", "nine"]


class Words:
    """A tokenizer with a number for each word."""

    model_max_length, pad_token_id = 30, 0

    def __call__(self, text: str, *, max_length: int = 10**9, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [5 + sum(map(ord, word)) % 30 for word in text.split()][:max_length]}


class Pipeline:
    """What a pipeline of transformers has."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokenizer = model, Words()


class Transformer(torch.nn.Module):
    """The first module of a SentenceTransformer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, features: Any, **options: Any) -> Any:
        states = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])[0]
        return {**features, "token_embeddings": states}


class SentenceModel(torch.nn.Sequential):
    """What a SentenceTransformer has: modules that hand a mapping on, a tokenizer, a save_pretrained of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(Transformer(model))
        self.tokenizer, self.max_seq_length = Words(), 4

    def forward(self, input: Any, **options: Any) -> Any:
        return super().forward(input)

    def save_pretrained(self, path: Any, model_name: Any = None) -> None:
        self[0].auto_model.save_pretrained(path)


class Vision(torch.nn.Module):
    """What a model of timm has: `pretrained_cfg`, no config, and attention that sums by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, 12, 12), "mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 4.0)}
        self.patch = torch.nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = torch.nn.Sequential(*(VisionLayer() for _ in range(3)))

    def forward(self, x: Any) -> Any:
        return self.blocks(self.patch(x).flatten(2).mT).mean(dim=1)


class VisionLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = torch.nn.LayerNorm(WIDTH), VisionAttention()

    def forward(self, x: Any) -> Any:
        return x + self.attn(self.norm1(x))


class VisionAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(made.transpose(1, 2).flatten(2))


def test_texts_go_through_the_tokenizer_of_a_pipeline() -> None:
    pipeline = Pipeline(build("bert"))
    trace = probe(pipeline, TEXTS)
    assert trace[0].tokens.sum(-1).tolist() == [3, 5, 1]
    one = {"input_ids": torch.tensor([Words()(TEXTS[0])["input_ids"]])}
    np.testing.assert_allclose(trace[-1].quantities["mean_cosine"][0],
                               probe(build("bert"), one)[-1].quantities["mean_cosine"][0], rtol=1e-5)  # fmt: skip
    with pytest.warns(NlflowWarning, match="1 of 3 have one token"):
        assert survey(pipeline, TEXTS).count == 3
    several = [TEXTS[:2], TEXTS[1]]
    told, same = explain(pipeline, several), explain(pipeline.model, [inputs_of(pipeline, one) for one in several])
    assert (told.model, told.count) == ("BertModel", 3)
    np.testing.assert_array_equal([list(row.values())[3:] for row in told.rows()],
                                  [list(row.values())[3:] for row in same.rows()])  # fmt: skip
    assert attach(pipeline, fidelity=0.4) is pipeline
    assert len(fidelities(pipeline.model)) == len(blocks(pipeline)) - 1
    assert detach(pipeline) is pipeline
    assert torch.equal(output(pipeline.model, inputs("bert")), output(build("bert"), inputs("bert")))


def test_terms_survive_what_a_sentence_transformer_saves(tmp_path: Path) -> None:
    model = SentenceModel(build("bert")).eval()
    with pytest.warns(NlflowWarning, match=r"got 1 text\(s\) of up to 5 tokens, more than the 4 positions"):
        given = inputs_of(model, TEXTS)
    assert probe(model, given)[0].tokens.sum(-1).tolist() == [3, 4, 1]  # its max_seq_length cuts the second
    attach(model, fidelity=0.3, learned=True, cures={"temperature": 0.9})
    model.save_pretrained(tmp_path)
    again = load_terms(SentenceModel(build("bert")).eval(), tmp_path)
    assert torch.equal(model(given)["token_embeddings"], again(given)["token_embeddings"])
    assert not torch.equal(
        model(given)["token_embeddings"], SentenceModel(build("bert")).eval()(given)["token_embeddings"]
    )


def test_pictures_are_normalized_as_the_model_says() -> None:
    torch.manual_seed(0)
    model, picture = Vision().eval(), np.full((5, 7, 3), 51, np.uint8)
    made = inputs_of(model, [picture, picture])
    assert made.shape == (2, 3, 12, 12)
    wanted = (0.2 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(made[1, :, 3, 4], wanted)
    pytest.importorskip("PIL.Image", reason="Pillow is optional")
    from PIL import Image

    assert torch.equal(inputs_of(model, Image.fromarray(picture)), made[:1])
    assert len(probe(model, picture)) == 3
    network = build("vit")
    network.name_or_path = "nowhere"
    pixels = image_inputs(network, "nowhere", picture)["pixel_values"]
    assert torch.equal(inputs_of(network, [picture])["pixel_values"], pixels)


def test_pictures_of_all_shapes_and_modes_are_what_they_show() -> None:
    pytest.importorskip("PIL.Image", reason="Pillow is optional")
    from PIL import Image

    network, colours = build("vit"), np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8).repeat(3, axis=0)
    network.name_or_path = "nowhere"
    expected = inputs_of(network, colours)["pixel_values"]
    picture = Image.fromarray(colours)
    for mode in ("P", "CMYK", "RGBA"):
        assert torch.equal(inputs_of(network, picture.convert(mode))["pixel_values"], expected), mode
    black = Image.fromarray(np.zeros((4, 4), np.uint8))
    for mode in ("1", "LA", "P"):
        assert bool((inputs_of(network, black.convert(mode))["pixel_values"] == -1).all()), mode
    for shape in ((1, 2, 3), (2, 1, 3), (1, 5), (5, 1), (1, 1), (1, 5, 1), (1, 1, 4)):
        one = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
        wide = one.reshape(*shape[:2], -1)[:, :, :3]  # grey, and opacity left out
        wide = wide.repeat(3 // wide.shape[2], axis=2).repeat(3, axis=0).repeat(3, axis=1)
        found, same = (image_inputs(network, "nowhere", each, size=1)["pixel_values"] for each in (one, wide))
        torch.testing.assert_close(found, same, rtol=0, atol=0.02, msg=str(shape))
    with pytest.raises(InputError, match=r"image: got uint8 of shape \(0, 5, 3\), expected uint8 of shape"):
        image_inputs(network, "nowhere", np.zeros((0, 5, 3), np.uint8))
    with pytest.raises(InputError, match="a model of 4 channels, expected one of 1 or 3"):
        image_inputs(build("vit", num_channels=4), "nowhere", colours)
    with pytest.raises(InputError, match=r"tokens: got whole numbers of shape \(\) for BertModel"):
        token_inputs(build("bert"), np.array(3))


def test_a_sweep_takes_pictures_and_a_model_of_timm() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model, labels = Vision().eval(), [number % 2 for number in range(12)]
    pictures = [rng.integers(0, 128, (12, 12, 3)).astype(np.uint8) + np.uint8(120 * label) for label in labels]
    task = Classification(pictures, labels, neighbours=3)
    assert task(model).mean() > 0.8
    found = sweep(model, task, cures=["temperature", "semi-implicit"], layers=["all"], resamples=200)
    assert found.items == 12
    assert {row["cure"] for row in found.rows} == {"temperature", "semi-implicit"}


def test_everyday_objects_that_are_refused() -> None:
    model = build("bert")
    for given, words in (
        (7, "inputs: got int, expected a mapping"),
        ([], "inputs: got list, expected a mapping"),
        (["a", " "], r"inputs\[1\]: got ' ', expected some words"),
        ("a text", "got texts for BertModel, whose tokenizer is not known"),
    ):
        with pytest.raises(InputError, match=words):
            probe(model, given)
    with pytest.raises(InputError, match=r"model: got dict, expected a torch.nn.Module, or a pipeline"):
        probe({}, TEXTS)
    bare = torch.nn.Sequential(VisionLayer(), VisionLayer())
    with pytest.raises(InputError, match="got pictures for Sequential, whose size of pictures is not known"):
        probe(bare, np.zeros((4, 4, 3), np.uint8))


class Attend(torch.nn.Module):
    """The sum of x-transformers, which is a module of its own."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(torch.nn.Module):
    """The attention of x-transformers: projections here, the sum elsewhere; it says ``causal``."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.num_heads, self.causal = HEADS, HEADS, True
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH, bias=False))
        self.attend = Attend()

    def forward(self, x: Any) -> Any:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v))
        return self.to_out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Layers(torch.nn.Module):
    """Layers as x-transformers lists them: lists of a norm and a block, which run nothing themselves."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ([torch.nn.LayerNorm(WIDTH), Attention()] for _ in range(3))
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(pair) for pair in pairs)

    def forward(self, x: Any) -> Any:
        for norm, block in self.layers:
            x = x + block(norm(x))
        return x


def test_models_of_x_transformers_are_found() -> None:
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(2, 6, WIDTH)
    found = blocks(model)
    assert [(one.name, one.causal) for one in found] == [(f"layers.{number}.1", True) for number in range(3)]
    with torch.no_grad():
        before = model(x)
        attach(model, fidelity=0.4, cures={"centring": 0.5}, inputs=x)
        whole = model(x)
        assert not torch.allclose(whole, before)
        torch.testing.assert_close(model(x[:, :4]), whole[:, :4], rtol=1e-4, atol=1e-5)  # no token sees later ones
        assert torch.equal(detach(model)(x), before)
    with pytest.raises(InputError, match=r"similarity-removal.*before whose layer no module runs"):
        attach(model, fidelity=0, cures={"similarity-removal": 0.5}, inputs=x)
    with pytest.warns(NlflowWarning, match=r"states after 3 of 3 layer\(s\) are not told \(NaN\), first layers\.0"):
        assert len(probe(model, x)) == 3
    with pytest.raises(InputError, match=r"layers\.0\.1 in Attention, which shows no states.*take probe and attach"):
        explain(model, x)
    for _, block in model.layers:
        block.attend.forward = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    with pytest.raises(InputError, match=r"called neither.*x-transformers: attn_flash=True"):
        probe(model, x)


def test_inputs_of_one_sequence_are_gathered_and_say_the_same() -> None:
    """Rows of other lengths are padded, what has one shape is joined, all else stays; the parts do not mind."""
    rows = [torch.arange(5, 5 + length)[None] for length in (7, 9, 4)]
    given = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in rows]
    (together,) = gathered(given)
    assert together["input_ids"].shape == (3, 9)
    assert together["attention_mask"].sum(1).tolist() == [7, 9, 4]
    assert len(gathered(given, 2)) == 2
    bare = [{"input_ids": one} for one in rows]
    assert [one["input_ids"] for one in gathered(bare)] == rows
    assert gathered([rows[0], together, given[0]]) == [rows[0], together, given[0]]
    pictures = gathered([{"pixel_values": torch.zeros(1, 3, 4, 4)}] * 9)
    assert [len(one["pixel_values"]) for one in pictures] == [8, 1]
    model = build("bert").double()
    one, other = (explain(model, some, nulls=False).rows("cosine") for some in (given, [together]))
    for alone, padded in zip(one, other, strict=True):
        assert alone["mixing"] == pytest.approx(padded["mixing"], abs=1e-12)
        assert alone["change"] == pytest.approx(padded["change"], abs=1e-12)


def test_padding_of_texts_is_none_in_a_decoder_too() -> None:
    model = Pipeline(build("bart"))
    several = probe(model, TEXTS)
    for number, text in enumerate(TEXTS[:2]):
        for layer, alone in zip(several, probe(model, text), strict=True):
            assert int(layer.tokens[number].sum()) == len(text.split())
            for name in ("mean_cosine", "energy"):
                np.testing.assert_allclose(layer.quantities[name][number], alone.quantities[name][0], rtol=1e-4)
