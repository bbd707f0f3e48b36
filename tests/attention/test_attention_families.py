"""Terms in contrasting families of models, against hooks on stock models; and what of them is refused, by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.errors import FileFormatError, InputError, NlflowWarning
from tests.problems import devices, torch_on_one_thread

torch = torch_on_one_thread()
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from nlflow.attention import (  # noqa: E402
    Adapter,
    attach,
    blocks,
    detach,
    explain,
    load_model,
    load_terms,
    probe,
    save_terms,
)
from nlflow.attention.injection import keeping  # noqa: E402
from tests.transformer_models import build as known  # noqa: E402
from tests.transformer_models import checkpointed  # noqa: E402
from validation.families import RECORD, ROUNDED, look, outputs, page, same  # noqa: E402
from validation.tiny_inputs import inputs_of  # noqa: E402
from validation.tiny_models import build  # noqa: E402

# One of each kind: a grouped decoder with windows and caps, sinks, a shared layer, shifted windows that ask and that
# sum, position biases and two stacks, keywords that are dropped, projections that are one.
CONTRASTING = (
    pytest.param("gemma3n_text", marks=pytest.mark.slow),  # streams of the same tokens, shared keys
    "jamba",
    pytest.param("gemma2", marks=pytest.mark.slow),
    "gpt_oss",
    "albert",
    "swin",
    "donut-swin",
    "t5",
    "siglip_vision_model",
    "falcon",
    "llama",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTRASTING)
@pytest.mark.sampled(2)
def test_a_family(kind: str) -> None:
    check(look(kind))


def check(row: dict[str, Any]) -> None:
    """Check what was found out about a family: see `validation.families`."""
    assert row["status"] in ("acts", "refused", "no attention", "not built"), row
    if row["status"] == "acts":
        assert row["detached"] is True
        assert row["sdpa"] in (True, None), row
        assert row["eager"] in (True, None), row
        assert row["cached"] is None or row["cached"] < (ROUNDED if row["rounds"] else 1e-9), row  # float64
        assert row["probe"] is None or isinstance(row["probe"], str) or row["probe"] < 1e-6, row


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.sampled(1)
def test_both_towers_are_tried(kind: str) -> None:
    model = build(kind)
    runs: list[str] = []
    for name in ("text_model", "vision_model"):
        getattr(model, name).register_forward_hook(lambda module, given, found, name=name: runs.append(name))
    attach(model, fidelity=0.6)
    assert set(runs) == {"text_model", "vision_model"}


@pytest.mark.slow
def test_all_families() -> None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    rows = [look(kind) for kind in MODEL_MAPPING_NAMES if not kind.startswith(("vibevoice", "vits", "afmoe"))]
    for row in rows:
        check(row)
    assert sum(row["status"] == "acts" for row in rows) >= 460  # of release 5.23


def test_the_page_is_made_from_the_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert RECORD.with_suffix(".md").read_text(encoding="utf-8") == page(record["rows"], record["transformers"])
    for row in record["rows"]:
        check(row)
    assert sum(row["status"] == "acts" for row in record["rows"]) >= 460


def by_projections(model: Any, layers: list[Any], names: tuple[str, str], strength: float) -> Callable[[], None]:
    """Add the term to a stock model where the output projection gets the averages; return what ends it."""
    first: list[Any] = []
    handles = []

    def take(module: Any, args: Any, output: Any) -> None:
        first.append(output)

    for layer in layers:
        values: list[Any] = []
        handles.append(layer.get_submodule(names[0]).register_forward_hook(take))

        def give(module: Any, args: Any, values: list[Any] = values) -> Any:
            return (args[0] + strength * (first[0] - first[-1])[..., -args[0].shape[-1] :],)  # values come last

        handles.append(layer.get_submodule(names[1]).register_forward_pre_hook(give))
    handles.append(model.register_forward_pre_hook(lambda *_: first.clear()))
    return lambda: [handle.remove() for handle in handles] and None


@pytest.mark.parametrize(
    ("kind", "layers", "names"),
    [
        ("siglip_vision_model", lambda m: [one.self_attn for one in m.encoder.layers], ("v_proj", "out_proj")),
        ("albert", lambda m: [m.encoder.albert_layer_groups[0].albert_layers[0].attention], ("value", "dense")),
        ("t5_encoder", lambda m: [one.layer[0].SelfAttention for one in m.encoder.block], ("v", "o")),
        ("rembert", lambda m: [one.attention for one in m.encoder.layer], ("self.value", "output.dense")),
        ("gptj", lambda m: [one.attn for one in m.h], ("v_proj", "out_proj")),
    ],
)
def test_term_equals_hooks_on_projections(kind: str, layers: Any, names: tuple[str, str]) -> None:
    if kind == "t5_encoder":
        from transformers import T5EncoderModel

        model = T5EncoderModel(build("t5").config).eval().double()
    else:
        model = build(kind).double()
    given = inputs_of(model)
    given.pop("decoder_input_ids", None)
    given = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    stock = outputs(model, given)[0]
    end = by_projections(model, layers(model), names, 0.3)
    expected = outputs(model, given)[0]
    end()
    found = outputs(attach(model, fidelity=0.3, semi_implicit=False), given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (expected - stock).abs().max() > 1e-6
    assert torch.equal(outputs(detach(model), given)[0], stock)


def test_two_sets_of_values_with_the_same_matrix_have_their_own_v0() -> None:
    """DiffLlama calls its function twice in a layer; its term is that of the sums of both calls."""
    from transformers.models.diffllama import modeling_diffllama as diffllama

    model = build("diffllama", attn_implementation="eager").double()
    given = inputs_of(model)
    usual, values, begun = diffllama.eager_attention_forward, [], []

    def with_term(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        output, weights = usual(module, query, key, value, *rest, **options)
        values.append(diffllama.repeat_kv(value, module.num_key_value_groups).transpose(1, 2))
        if len(values) <= 2:
            begun.append(values[-1])
            return output, weights
        return output + 0.3 * (begun[(len(values) - 1) % 2] - values[-1]), weights

    diffllama.eager_attention_forward = with_term
    try:
        expected = outputs(model, given)[0]
    finally:
        diffllama.eager_attention_forward = usual
    trace = probe(model, given)
    assert trace[0].v.shape[-1] == 2 * trace[0].q.shape[-1]
    found = outputs(attach(model, fidelity=0.3, semi_implicit=False), given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (found - outputs(detach(model), given)[0]).abs().max() > 1e-6


@pytest.fixture
def pictures() -> tuple[Any, dict[str, Any]]:
    """A vision tower with windows in its first and last layers, and two pictures of different sizes."""
    model = build("qwen2_5_vl_vision", window_size=32, fullatt_block_indexes=[1]).double()
    grid = torch.tensor([[1, 4, 12], [1, 8, 4]])
    rows = torch.randn(80, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, {"hidden_states": rows, "grid_thw": grid}


def test_values_of_several_pictures_in_one_sequence_are_not_mixed(pictures: Any) -> None:
    """Vision towers of language models call their function once for each picture or window."""
    model, given = pictures
    stock = outputs(model, given)[0]
    end = by_projections(model, [block.attn for block in model.blocks], ("qkv", "proj"), 0.3)
    expected = outputs(model, given)[0]
    end()
    attach(model, fidelity=0.3, semi_implicit=False)
    torch.testing.assert_close(outputs(model, given)[0], expected, rtol=1e-10, atol=1e-12)
    assert (expected - stock).abs().max() > 1e-6
    model.train()
    loss = outputs_with_derivative(model, given)
    checkpointed(model, use_reentrant=False)
    for one, other in zip(loss, outputs_with_derivative(model, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert torch.equal(outputs(detach(model).eval(), given)[0], stock)


def outputs_with_derivative(model: Any, given: dict[str, Any]) -> list[Any]:
    """Return the sum of squares of a model's states, and its derivatives with respect to the projections of values."""
    model.zero_grad()
    loss = model(**given).last_hidden_state.square().sum()
    loss.backward()
    return [loss.detach(), *(block.attn.qkv.weight.grad.clone() for block in model.blocks)]


def test_pieces_of_a_sequence_are_probed_as_one(pictures: Any) -> None:
    """P has a block for each picture or window, and its averages are what the output projection gets."""
    model, given = pictures
    model.set_attn_implementation("eager")
    got: list[Any] = []
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda module, args: got.append(args[0]))
    with pytest.warns(NlflowWarning, match="states after"):  # they are (N, D)
        trace = probe(model, given, keep_matrices=True)
    for layer, averages in zip(trace, got, strict=True):
        ours = (layer.matrices.double() @ layer.v)[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(ours, averages, rtol=0, atol=1e-6)  # matrices are kept in float32
        assert not layer.matrices[:, :, :48, 48:].any()
        assert not layer.matrices[:, :, 48:, :48].any()


def test_values_of_shifted_windows_are_those_of_the_same_pixels() -> None:
    """In Swin, v0 goes back to its pixels, and from there into the layer's windows, as the model's own code cuts."""
    from transformers.models.swin import modeling_swin as swin

    model = build("swin").double()
    given = {"pixel_values": inputs_of(model)["pixel_values"].double()}
    handles = []
    for stage in model.encoder.layers:
        kept: dict[str, Any] = {}
        for number, layer in enumerate(stage.blocks):

            def enter(module: Any, args: Any, kwargs: Any, kept: dict[str, Any] = kept) -> None:
                kept["size"] = next(one for one in (*args, *kwargs.values()) if isinstance(one, tuple))

            def take(module: Any, args: Any, output: Any, kept: Any = kept, number: int = number) -> None:
                kept[number] = output

            def give(module: Any, args: Any, kept: Any = kept, number: int = number, layer: Any = layer) -> Any:
                if number == 0:
                    return args
                window = layer.window_size
                high, wide = (-(-one // window) * window for one in kept["size"])
                pixels = swin.window_reverse(kept[0].view(-1, window, window, kept[0].shape[-1]), window, high, wide)
                moved = torch.roll(pixels, (-layer.shift_size, -layer.shift_size), (1, 2))
                cut = swin.window_partition(moved, window).view(kept[number].shape)
                return (args[0] + 0.5 * (cut - kept[number]),)

            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.attention.v_proj.register_forward_hook(take))
            handles.append(layer.attention.o_proj.register_forward_pre_hook(give))
    expected = outputs(model, given)[0]
    for handle in handles:
        handle.remove()
    assert model.encoder.layers[0].blocks[1].shift_size > 0
    stock = outputs(model, given)[0]
    torch.testing.assert_close(
        outputs(attach(model, fidelity=0.5, semi_implicit=False), given)[0], expected, rtol=1e-9, atol=1e-11
    )
    assert (expected - stock).abs().max() > 1e-4


def plain_layer(layer: Any, x: Any, hidden: Any, v0: Any, strength: float, implicit: bool) -> tuple[Any, Any]:
    """A layer of `torch.nn.TransformerEncoder` by sums, with the term."""
    made = x @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias
    q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in made.chunk(3, -1))
    logits = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden[:, None, None], -torch.inf)
    average = logits.softmax(-1) @ v
    if v0 is not None:
        average = (average + strength * v0) / (1 + strength) if implicit else average + strength * (v0 - v)
    x = layer.norm1(x + layer.self_attn.out_proj(average.transpose(1, 2).flatten(-2)))
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x)))), v if v0 is None else v0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the stock encoder makes
@pytest.mark.filterwarnings("ignore:nested_from_padded CUDA kernels")  # of double precision, on a GPU
@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("device", devices())
def test_encoders_of_torch(device: str, batch_first: bool, implicit: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=batch_first).eval().to(device)
    x, hidden = torch.randn(2, 7, 32, dtype=torch.float64).to(device), torch.zeros(2, 7, dtype=torch.bool).to(device)
    hidden[1, 5:] = True
    given = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        stock = model(given, src_key_padding_mask=hidden)
        assert torch.equal(attach(model, fidelity=0.0)(given, src_key_padding_mask=hidden), stock)
        found = attach(model, fidelity=0.5, semi_implicit=implicit)(given, src_key_padding_mask=hidden)
        expected, v0 = x, None
        for one in model.layers:
            expected, v0 = plain_layer(one, expected, hidden, v0, 0.5, implicit)
        found = found if batch_first else found.transpose(0, 1)
        torch.testing.assert_close(found[~hidden], expected[~hidden], rtol=1e-10, atol=1e-12)
        assert torch.equal(detach(model)(given, src_key_padding_mask=hidden), stock)


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pvt", r"values of shape .* in encoder\.block\.0\.0\.attention\.self .PvtEfficientSelfAttention"),
        ("segformer", r"4 values for 256 queries in stages\.0\.blocks\.0\.attention, without a cache: reduced keys"),
        ("convbert", r"averages whose columns are not those of the values in encoder\.layer\.0"),
        ("timesformer", r"values of TimesformerSelfAttention that each belong to several tokens"),
        ("efficientloftr", r"values of EfficientLoFTRAttention that each belong to several tokens"),
        ("ibert", r"encoder\.layer\.1\.attention\.self.* did not get the term"),
        ("xlnet", r"no attention is found.*XLNetRelativeAttention"),
        ("resnet", "no attention is found.*none that is called attention"),
    ],
)
def test_what_cannot_have_a_term_is_refused_when_attached(kind: str, words: str) -> None:
    model = build(kind)
    given = inputs_of(model)
    stock = outputs(model, given)
    with pytest.raises(InputError, match=words):
        attach(model)
    assert same(outputs(model, given), stock)  # as it was


def test_parts_of_models_that_have_terms_are_refused() -> None:
    model = attach(known("bert"))
    for act in (attach, detach):
        with pytest.raises(InputError, match=r"BertEncoder, a part of a model that has terms \(at layer\.0"):
            act(model.encoder)


def test_a_layer_of_attention_alone() -> None:
    model = build("bert", num_hidden_layers=1)
    with pytest.raises(InputError, match="no two layers of self-attention"):
        attach(model)
    with pytest.raises(InputError, match=r"other options than fidelity, learned and semi_implicit"):
        attach(build("gptj"), feat_scale=True)


def test_the_function_can_be_set_and_the_term_stays() -> None:
    model, given = attach(build("bert"), fidelity=0.4), inputs_of(build("bert"))
    expected = outputs(model, given)[0]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(outputs(model, given)[0], expected, rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "neutreno"
    with pytest.raises(InputError, match="attn_implementation: got 'flex_attention' for a model with terms"):
        model.set_attn_implementation("flex_attention")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(InputError, match=r"'sdpa' in encoder\.layer\.0\.attention\.self, set after attach"):
        model(**given)
    detach(model)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_layers_may_be_dropped_in_training() -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32, conv_dim=(16, 16),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, layerdrop=0.6, mask_time_prob=0.0,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = attach(Wav2Vec2Model(config), learned=True).train()
    for _ in range(12):
        model(torch.randn(1, 400)).last_hidden_state.sum().backward()
    assert any(parameter.grad is not None for name, parameter in model.named_parameters() if "neutreno" in name)


@pytest.mark.on_cpu("torch quantizes on the CPU alone")
@pytest.mark.filterwarnings("ignore:torch", "ignore:.*quant")  # torch.ao tells of its successor
def test_quantized_models_act() -> None:
    model = torch.ao.quantization.quantize_dynamic(build("bert"), {nn.Linear}, dtype=torch.qint8)
    given = inputs_of(model)
    stock = outputs(model, given)
    assert not same(outputs(attach(model, learned=True), given), stock)
    assert same(outputs(detach(model), given), stock)


# ---- terms that are kept


@pytest.fixture
def learned() -> Any:
    """A model with terms that have learned."""
    model = attach(build("bert"), learned=True, fidelity=0.4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "neutreno" in name:
                parameter.add_(0.3)
    return model


def test_terms_are_saved_with_their_model(learned: Any, tmp_path: Path) -> None:
    given = inputs_of(learned)
    expected = outputs(learned, given)
    learned.save_pretrained(tmp_path / "whole")
    assert same(outputs(load_model(tmp_path / "whole"), given), expected)
    assert same(outputs(copy.deepcopy(learned), given), expected)
    assert save_terms(learned, tmp_path / "terms") == tmp_path / "terms"
    assert sorted(path.name for path in (tmp_path / "terms").iterdir()) == ["attention.json", "terms.safetensors"]
    stock = detach(copy.deepcopy(learned))
    assert same(outputs(load_terms(stock, tmp_path / "terms"), given), expected)
    attach(learned, fidelity=0.1)
    save_terms(learned, tmp_path / "terms")  # nothing was learned: what the folder had is gone
    assert [path.name for path in (tmp_path / "terms").iterdir()] == ["attention.json"]


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [(True, True, "terms.safetensors"), (True, False, "attention.json"), (False, True, "terms.safetensors")],
)
def test_a_kill_between_the_two_files_leaves_a_pair(
    learned: Any, first: bool, second: bool, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old terms or new ones, never the arguments of one save with the values of the other."""
    given = inputs_of(learned)
    stock = detach(copy.deepcopy(learned))
    if not first:
        attach(learned, fidelity=0.3)
    save_terms(learned, tmp_path)
    before = outputs(learned, given)
    attach(learned, fidelity=0.1, learned=second)
    after = outputs(learned, given)
    assert not same(before, after)
    calls: list[str] = []

    def killed(write: Any) -> Any:
        def call(path: Path, *words: Any) -> None:
            if calls:
                raise KeyboardInterrupt
            calls.append(path.name)
            write(path, *words)

        return call

    for name in ("write_content", "remove"):
        monkeypatch.setattr(keeping, name, killed(getattr(keeping, name)))
    with pytest.raises(KeyboardInterrupt):
        save_terms(learned, tmp_path)
    assert calls == [written]
    assert same(outputs(load_terms(stock, tmp_path), given), after if first else before)


@pytest.mark.other_bits("safetensors copies tensors of a GPU before it writes them")
def test_values_of_another_save_are_refused(learned: Any, tmp_path: Path) -> None:
    save_terms(learned, tmp_path)
    place = tmp_path / "terms.safetensors"
    save_file({name: values + 1 for name, values in load_file(place).items()}, place)
    with pytest.raises(FileFormatError, match=r"is not the one that attention.json names; save both again"):
        load_terms(detach(copy.deepcopy(learned)), tmp_path)


def test_terms_of_an_adapter_and_of_a_head(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(build("bert").config).eval()
    attach(
        model, learned=True, adapter=Adapter("BertSelfAttention", projection="../output.dense"), fidelity=[0, 0.1, 0.2]
    )
    given = inputs_of(model)
    save_terms(model, tmp_path)
    expected = outputs(model, given)
    assert same(outputs(load_terms(copy.deepcopy(detach(model)), tmp_path), given), expected)
    loaded = load_terms(model.bert, tmp_path)  # without the head
    found = [float(torch.as_tensor(one.fidelity).detach()) for one in loaded.modules() if hasattr(one, "raw_fidelity")]
    assert found == pytest.approx([0, 0.1, 0.2])


def test_terms_that_cannot_be_kept(learned: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="BertModel with 0 attached modules"):
        save_terms(build("bert"), tmp_path)
    with pytest.raises(FileFormatError, match=r"attention\.json: got no such file"):
        load_terms(build("bert"), tmp_path)
    save_terms(learned, tmp_path)
    other = build("bert", num_hidden_layers=2)
    with pytest.raises(FileFormatError, match=r"terms\.safetensors has encoder\.layer\.2"):
        load_terms(other, tmp_path)
    assert not any(hasattr(module, "neutreno") for module in other.modules())


# ---- what the probe sees


def test_capped_logits_are_in_the_probe_and_its_heads() -> None:
    model = build("gemma2", attn_implementation="eager", attn_logit_softcapping=0.5)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.data *= 300  # large logits
    given = inputs_of(model)
    with torch.no_grad():
        theirs = model(**given, output_attentions=True).attentions
    trace = probe(model, given, keep_matrices=True)
    for layer, expected in zip(trace, theirs, strict=True):
        torch.testing.assert_close(layer.matrices, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(layer.head(1, 1).matrix).float(), expected[1, 1], rtol=0, atol=1e-5)
    assert max(float((layer.q * layer.scaling).norm(dim=-1).max()) for layer in trace) > 5
    head = trace[1].head(1, 1)
    for q, k in ((head.k, head.k), (head.q, head.k[::-1].copy())):  # of other queries and keys too
        logits = np.where(np.tri(head.tokens, dtype=bool), 0.5 * np.tanh(head.scaling * q @ k.T / 0.5), -np.inf)
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(head.along(q, k).average(head.v), weights @ head.v, rtol=1e-12)


def test_deformable_attention_is_left_alone() -> None:
    found = blocks(build("deformable_detr"))
    assert [block.name for block in found] == [f"decoder.layers.{number}.self_attn" for number in range(3)]


def test_streams_of_the_same_tokens_are_followed_and_not_traced_twice() -> None:
    """In Gemma 3n a layer gets each token four times; decoding with a cache does not run the layer again."""
    model = attach(build("gemma3n_text"), fidelity=0.6)
    runs: list[Any] = []
    given = inputs_of(model)
    model.layers[1].register_forward_pre_hook(lambda module, args: runs.append(args[0].shape))
    with torch.no_grad():
        past = model(**given, use_cache=True).past_key_values
        model(input_ids=given["input_ids"][:, :1], past_key_values=past)
    assert [tuple(shape) for shape in runs] == [(4, 2, 12, 32), (4, 2, 1, 32)]


@pytest.mark.other_bits("transformers counts the rows of experts in integers on a GPU")
def test_sinks_of_rows_are_in_the_matrices() -> None:
    model = build("inkling2_text", attn_implementation="eager")
    for layer in model.layers:
        layer.self_attn.sink_proj.weight.data *= 50
    given = inputs_of(model)
    with torch.no_grad():
        theirs = model(**given, output_attentions=True).attentions
    # At the boundary of a block the layer's input goes into the states of blocks, and not into what the layer returns.
    with pytest.warns(NlflowWarning, match=r"1 layer\(s\), first layers\.0\.self_attn .* not seen to be its input"):
        trace = probe(model, given, keep_matrices=True)
    for layer, expected in zip(trace, theirs, strict=True):
        torch.testing.assert_close(layer.matrices, expected, rtol=0, atol=1e-6)
        assert float(expected.sum(-1).std()) > 1e-3


def test_the_eager_function_of_another_name_is_found() -> None:
    model = build("timesfm", attn_implementation="eager")
    given = inputs_of(model)
    probe(model, given)
    stock = outputs(model, given)
    assert same(outputs(attach(model, fidelity=0), given), stock)
    assert not same(outputs(attach(model, fidelity=0.6), given), stock)


def test_a_rule_that_the_probe_does_not_know_is_refused() -> None:
    from transformers.models.bert import modeling_bert

    model = build("bert", attn_implementation="eager")
    usual = modeling_bert.eager_attention_forward

    def sharper(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        return usual(module, 2 * query, *rest, **options)

    modeling_bert.eager_attention_forward = sharper
    try:
        with pytest.raises(InputError, match="averages are not those of a softmax"):
            probe(model, inputs_of(model))
        with pytest.warns(NlflowWarning, match="what comes to W_O is not the averages"):
            assert {tuple(block.parts) for block in explain(model, inputs_of(model)).blocks} == {
                ("attention", "norms", "mlp")
            }
    finally:
        modeling_bert.eager_attention_forward = usual


def test_the_calls_of_a_shared_layer_are_seen_one_by_one() -> None:
    trace = probe(build("albert"), inputs_of(build("albert")))
    assert [layer.name.partition(" ")[2] for layer in trace] == ["", "(call 2)", "(call 3)"]
    assert blocks(build("albert"))[0].repeated


def test_a_head_that_pools_is_left_out_and_named() -> None:
    model = build("siglip_vision_model")
    words = r"1 of 4 modules of attention \(head\.attention\) have other tokens as queries than as keys"
    for ask, parts in ((probe, "layers"), (explain, "blocks")):
        with pytest.warns(NlflowWarning, match=words) as told:
            assert len(getattr(ask(model, inputs_of(model)), parts)) == 3
        assert told[0].filename == __file__


def test_modules_that_sum_beside_others_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("siglip_vision_model")
    monkeypatch.setattr(model.head.attention, "forward", lambda q, k, v, **_: (v.mean(1, keepdim=True), None))
    with pytest.warns(NlflowWarning, match=r"1 of 4 modules of attention \(head\.attention\) sum by themselves"):
        assert len(probe(model, inputs_of(model)).layers) == 3
