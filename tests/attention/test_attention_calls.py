"""The term in calls of every kind: padding, causal masks, caches, several models, checkpointing, compilation."""

from __future__ import annotations

import copy
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from nlflow.errors import InputError
from tests.covering import pairs
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention import attach, blocks, detach, fidelities, probe  # noqa: E402
from tests.transformer_models import (  # noqa: E402  # both need torch
    DECODERS,
    EVERYTHING,
    LAYERS,
    MODELS,
    assert_same,
    build,
    checkpointed,
    gradients,
    inputs,
    moved,
    output,
    transformers,
)


@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("affinity", ["softmax", "gaussian", "sigmoid", "linear"])
def test_padding_changes_nothing(affinity: str, base: str) -> None:
    model = moved(attach(build("bert", base), affinity=affinity, **EVERYTHING))
    given = inputs("bert")
    alone = {"input_ids": given["input_ids"][1:, :6], "attention_mask": given["attention_mask"][1:, :6]}
    together = output(model, given)[1:, :6]
    torch.testing.assert_close(together, output(model, alone), rtol=1e-4, atol=1e-5)
    filled = given["input_ids"].clone()
    filled[1, 6:] = 5
    torch.testing.assert_close(output(model, {**given, "input_ids": filled})[1:, :6], together)


@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_padding_on_the_left_changes_nothing(name: str, base: str) -> None:
    model = moved(attach(build(name, base), **EVERYTHING))
    tokens = inputs(name, batch=1)["input_ids"]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    together = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False)[0][:, 3:]
    torch.testing.assert_close(together, model(input_ids=tokens, use_cache=False)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "base", "affinity"), pairs(DECODERS, ["eager", "sdpa"], ["softmax", "symmetric", "softplus"])
)
def test_the_future_is_not_seen(name: str, base: str, affinity: str) -> None:
    model = moved(attach(build(name, base), affinity=affinity, **EVERYTHING))
    tokens = inputs(name, batch=1)["input_ids"]
    changed = tokens.clone()
    changed[0, 5:] = 3
    one, two = (model(input_ids=ids, use_cache=False)[0] for ids in (tokens, changed))
    torch.testing.assert_close(one[:, :5], two[:, :5], rtol=1e-5, atol=1e-5)
    assert (one[:, 5:] - two[:, 5:]).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "affinity", "base", "cache"),
    pairs(
        DECODERS, ["softmax", "symmetric", "gaussian", "sigmoid", "matrix"], ["eager", "sdpa"], ["dynamic", "static"]
    ),
)
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(name: str, affinity: str, base: str, cache: str) -> None:
    options = {"matrix_fidelity": True} if affinity == "matrix" else {"affinity": affinity}
    model = moved(attach(build(name, base), **options, attn_scale=True))
    tokens = inputs(name, batch=1)["input_ids"]
    whole = model(input_ids=tokens, use_cache=False)[0]
    kept = (
        transformers.StaticCache(config=model.config, max_cache_len=12)
        if cache == "static"
        else transformers.DynamicCache(config=model.config)
    )
    pieces = [
        model(input_ids=piece, past_key_values=kept, use_cache=True)[0]
        for piece in tokens.split([4, 1, 2, 1, 1], dim=1)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [*DECODERS, "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_text_does_not_depend_on_the_cache(name: str, beams: int) -> None:
    model = attach(build(name, "sdpa"))
    given = {key: value for key, value in inputs(name, batch=1).items() if key != "decoder_input_ids"}
    texts = [
        model.generate(**given, max_new_tokens=6, do_sample=False, num_beams=beams, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*texts)


def test_what_needs_all_tokens_refuses_a_cache() -> None:
    for option, name in (({"feat_scale": True}, "feat_scale"), ({"cures": {"similarity-removal": 1.0}}, "cures")):
        model = attach(build("gpt2"), **option)
        tokens = inputs("gpt2", batch=1)["input_ids"]
        kept = model(input_ids=tokens[:, :4], use_cache=True).past_key_values
        with pytest.raises(InputError, match=f"{name}: got .*token.* after 4 in a cache.*use_cache=False"):
            model(input_ids=tokens[:, 4:5], past_key_values=kept)


# ---- state


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_two_models_interleaved(name: str) -> None:
    # They share one config, and one runs in the middle of a forward of the other.
    one, two = build(name, seed=1), build(name, seed=2)
    two.config = one.config
    for module in two.modules():
        if hasattr(module, "config"):
            module.config = one.config
    given, other = inputs(name), inputs(name, seed=5)
    stock = output(two, given)
    attach(one, fidelity=0.3)
    assert torch.equal(output(two, given), stock)  # not touched by what was done to the other
    attach(two, fidelity=0.9)
    alone = [output(model, given) for model in (one, two)]
    inner: list[Any] = []
    handle = blocks(one)[1].layer.register_forward_pre_hook(lambda *_: inner.append(output(two, given)))
    assert torch.equal(output(one, given), alone[0])
    assert torch.equal(inner[0], alone[1])
    handle.remove()
    nested: list[Any] = []  # a model that runs in the middle of its own forward

    def again(*_: Any) -> None:
        handle.remove()
        nested.append(output(one, other))

    handle = blocks(one)[1].layer.register_forward_pre_hook(again)
    assert torch.equal(output(one, given), alone[0])
    assert torch.equal(nested[0], output(one, other))


def test_one_model_in_several_threads() -> None:
    model = attach(build("vit"))
    given = [inputs("vit", seed=seed) for seed in range(4)]
    expected = [output(model, one) for one in given]
    results: dict[int, list[Any]] = {}

    def work(index: int) -> None:
        results[index] = [output(model, given[index]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected[index]) for index in range(4) for result in results[index])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"learned": True, **EVERYTHING}], ids=["plain", "everything"])
@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_checkpointing_gives_the_same_derivatives(name: str, options: dict[str, Any]) -> None:
    given = [inputs(name, seed=seed) for seed in (1, 2)]
    if name == "gpt2":
        given = [{**one, "use_cache": False} for one in given]
    results = []
    for checkpointing in (False, True):
        model = moved(attach(build(name), **options)).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            checkpointed(model)
        # Two forwards before one backward: each has to be recomputed with its own v0.
        (output(model, given[0]).square().mean() - output(model, given[1]).abs().mean()).backward()
        results.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert_same(results[1], results[0], rtol=1e-6, atol=1e-8)


def test_checkpointing_that_loses_derivatives_is_refused() -> None:
    model = attach(build("vit")).train()
    checkpointed(model, use_reentrant=True)
    loss = output(model, {"pixel_values": inputs("vit")["pixel_values"].requires_grad_()}).sum()
    with pytest.raises(InputError, match="use_reentrant=True"):
        loss.backward()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("bert", {"affinity": "sigmoid", "learned": True}, id="bert", marks=pytest.mark.slow),
        pytest.param("gpt2", EVERYTHING, id="gpt2"),
    ],
)
@pytest.mark.slow
def test_compiled_models_equal_those_that_are_not(name: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    given = inputs(name) | ({"use_cache": False} if name == "gpt2" else {})
    layers = {"num_hidden_layers": 2} if name == "bert" else {"n_layer": 2}
    model = moved(attach(build(name, "sdpa", **layers), **options))
    expected = gradients(model, given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(output(compiled, given), output(model, given), rtol=1e-5, atol=1e-5)
    got = {key.removeprefix("_orig_mod."): value for key, value in gradients(compiled, given).items()}
    # What is not used has no derivative, or one of 0.
    assert_same({key: got[key] for key in expected}, expected, rtol=1e-4, atol=1e-4)
    assert not any(got[key].abs().max() for key in got.keys() - expected.keys())


def test_a_copy_of_a_model_has_terms_of_its_own() -> None:
    given = inputs("bert")
    model = moved(attach(build("bert"), learned=True, **EVERYTHING))
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin, given), output(model, given))
    with torch.no_grad():
        twin.encoder.layer[1].attention.self.neutreno.raw_fidelity += 1
    before = output(model, given)
    assert not torch.equal(output(twin, given), before)
    detach(twin)
    assert torch.equal(output(model, given), before)
    assert torch.equal(output(twin, given), output(build("bert"), given))


@pytest.mark.parametrize("name", MODELS)
def test_detaching_leaves_the_model_as_it_was(name: str) -> None:
    model, given = build(name, "sdpa"), inputs(name)
    before, config = output(model, given), model.config
    names = list(model.state_dict())
    kept = {key: set(module.__dict__) for key, module in model.named_modules()}
    attach(model, affinity="sigmoid", learned=True, **EVERYTHING)
    assert len(model.state_dict()) > len(names)
    attach(model, fidelity=0.1)
    assert detach(model) is model
    assert model.config is config
    assert config._attn_implementation == "sdpa"
    assert list(model.state_dict()) == names
    assert {key: set(module.__dict__) for key, module in model.named_modules()} == kept
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(output(model, given), before)
    assert detach(model) is model


def test_learned_fidelity_is_a_parameter_of_each_layer_but_the_first() -> None:
    model, given = attach(build("bert"), fidelity=0.4, learned=True), inputs("bert")
    learned = [name for name, _ in model.named_parameters() if name.endswith("raw_fidelity")]
    assert len(learned) == LAYERS - 1
    fixed = output(attach(build("bert"), fidelity=0.4), given)
    torch.testing.assert_close(output(model, given), fixed, rtol=1e-5, atol=1e-5)
    grown = gradients(model, given)
    assert all(grown[name].abs() > 0 for name in learned)
    # It can be stored and read again.
    with torch.no_grad():
        for parameter in (dict(model.named_parameters())[name] for name in learned):
            parameter -= 0.5 * parameter.grad.sign()
    again = attach(build("bert", seed=9), fidelity=0.4, learned=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, given), output(model, given))


def test_one_learned_fidelity_for_the_whole_model(tmp_path: Path) -> None:
    given = inputs("bart")
    model = attach(build("bart"), fidelity=0.4, learned="shared")
    learned = [name for name in model.state_dict() if name.endswith("raw_fidelity")]
    assert len(learned) == 1
    alone = attach(build("bart"), fidelity=0.4, learned=True)
    each = gradients(alone, given)
    total = sum(gradient for name, gradient in each.items() if name.endswith("raw_fidelity"))
    torch.testing.assert_close(gradients(model, given)[learned[0]], total, rtol=1e-4, atol=1e-4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(learned[0]).add_(1.0)
    torch.testing.assert_close(output(model, given), output(alone, given))
    assert (output(twin, given) - output(model, given)).abs().max() > 0.01
    twin.save_pretrained(tmp_path)  # which refuses parameters that are stored twice


@pytest.mark.parametrize("base", ["eager", "sdpa"])
def test_matrix_fidelity_in_half_precision(base: str) -> None:
    given = inputs("bert")
    half = attach(build("bert", base), fidelity=0.5, matrix_fidelity=True).to(torch.bfloat16)
    whole = attach(build("bert", base), fidelity=0.5, matrix_fidelity=True)
    whole.load_state_dict(half.state_dict())
    inside = given["attention_mask"].bool()
    with torch.no_grad():
        found, expected = (output(model, given)[inside].float() for model in (half, whole))
        plain = output(build("bert", base), given)[inside]
    assert output(half, given).dtype == torch.bfloat16
    error = (found - expected).square().mean().sqrt()
    assert error < 0.15 * (plain - expected).square().mean().sqrt()


def test_matrix_fidelity_learns_its_variance() -> None:
    model = attach(build("vit"), fidelity=0.5, matrix_fidelity=True)
    grown = gradients(model, inputs("vit"))
    names = [name for name in grown if name.endswith("log_variance")]
    assert len(names) == LAYERS - 1
    assert all(grown[name].abs() > 0 for name in names)
    # σ² -> 0 takes v0 for v's place, σ² -> ∞ leaves the average.
    given, stock = inputs("vit"), output(build("vit"), inputs("vit"))
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).fill_(40.0)
        torch.testing.assert_close(output(model, given), stock, rtol=1e-4, atol=1e-4)


# --- token numbers that a model does not take -----------------------------------------------------------------------

WRONG = [
    (torch.arange(5), r"got the shape \(5,\)", r"ids.reshape\(1, -1\)"),
    (torch.rand(1, 5), r"got numbers of torch.float32", r"pass ids.long\(\)"),
    (torch.tensor([[1, 10**6]]), r"got numbers from 1 to 1000000", "take the tokenizer"),
    (torch.tensor([[1, -1]]), r"got numbers from -1 to 1", "take the tokenizer"),
    (torch.zeros(1, 0, dtype=torch.long), r"got the empty shape \(1, 0\)", "at least one token"),
]


@pytest.mark.parametrize(("ids", "got", "remedy"), WRONG)
def test_wrong_token_numbers_are_told(ids: Any, got: str, remedy: str) -> None:
    model = build("bert", "sdpa")
    words = model.get_input_embeddings().num_embeddings
    expected = rf"{got}, expected integers of shape \(batch, length\) in \[0, {words}\); .*{remedy}"
    with pytest.raises(InputError, match=rf"^input_ids: {expected}"):
        probe(model, {"input_ids": ids})
    with pytest.raises(InputError, match=rf"^inputs: {expected}"):
        probe(model, ids)
    with pytest.raises(InputError, match=rf"^input_ids: {expected}"):
        attach(model, inputs={"input_ids": ids})


@pytest.mark.parametrize("given", [None, [[1, 2]]])
def test_what_is_no_tensor_is_told(given: Any) -> None:
    model = build("bert", "sdpa")
    with pytest.raises(InputError, match=rf"^inputs: got {type(given).__name__}, .*torch.as_tensor"):
        probe(model, given)
    if given is not None:
        with pytest.raises(InputError, match=r"^input_ids: got a list, expected integers"):
            probe(model, {"input_ids": given})


def test_the_last_token_of_the_vocabulary_is_one() -> None:
    model = build("bert", "sdpa")
    last = model.get_input_embeddings().num_embeddings - 1
    assert len(probe(model, torch.tensor([[0, last]]))) == LAYERS
    assert len(probe(model, torch.tensor([[0, last]], dtype=torch.int32))) == LAYERS


def test_embeddings_as_a_tensor_are_told_where_they_go() -> None:
    model = build("bert", "sdpa")
    states = torch.rand(1, 5, model.config.hidden_size)
    with pytest.raises(InputError, match=r"^inputs: got numbers of torch.float32, .*\{'inputs_embeds': x\}"):
        probe(model, states)
    assert len(probe(model, {"inputs_embeds": states})) == LAYERS


# --- names, lengths and images that a model does not take -----------------------------------------------------------


def test_more_tokens_than_positions_are_told() -> None:
    model = build("bert", "sdpa")
    most = model.config.max_position_embeddings
    assert len(probe(model, torch.ones(1, most, dtype=torch.long))) == LAYERS
    told = rf"got {most + 1} tokens in a sequence, expected at most {most}, the positions of BertModel; cut them"
    with pytest.raises(InputError, match=rf"^inputs: {told}"):
        probe(model, torch.ones(1, most + 1, dtype=torch.long))
    with pytest.raises(InputError, match=rf"^inputs_embeds: {told}"):
        probe(model, {"inputs_embeds": torch.ones(1, most + 1, model.config.hidden_size)})


@pytest.mark.slow
def test_models_without_a_table_of_positions_take_any_length() -> None:
    model = build("llama", "sdpa")
    longer = model.config.max_position_embeddings + 1
    assert len(probe(model, torch.ones(1, longer, dtype=torch.long))) == LAYERS


@pytest.mark.parametrize("given", [torch.ones(1, 5, dtype=torch.long), torch.rand(3, 8, 8)])
@pytest.mark.parametrize("wrap", [False, True])
def test_what_is_no_image_is_told(given: Any, wrap: bool) -> None:
    model = build("vit", "sdpa")
    name = "pixel_values" if wrap else "inputs"
    size = model.config.image_size
    told = (
        rf"{name}: got numbers of .*expected pixel values, .*\(batch, channels, height, width\), such as \(1, 3, {size}"
    )
    for call in (probe, lambda model, inputs: attach(model, inputs=inputs)):
        with pytest.raises(InputError, match=f"^{told}"):
            call(model, {name: given} if wrap else given)


@pytest.mark.parametrize("kind", ["bert", "vit", "gpt2"])
def test_names_that_a_model_does_not_take_are_told(kind: str) -> None:
    model = build(kind, "sdpa")
    main = model.main_input_name
    told = rf"names that the forward of {type(model).__name__} takes: .*{main}.*; give .*'{main}'"
    with pytest.raises(InputError, match=rf"^inputs: got 'ids', expected {told}"):
        probe(model, {"ids": torch.ones(1, 5, dtype=torch.long)})
    given = inputs(kind)
    whole = dict(given) if isinstance(given, dict) else {main: given}
    assert len(probe(model, {**whole, "output_hidden_states": True})) == LAYERS  # handed on


# --- what the terms have learned ------------------------------------------------------------------------------------


def test_fidelities_are_those_of_the_layers() -> None:
    model = build("bert")
    assert fidelities(model) == {}
    names = [f"encoder.layer.{number}.attention.self" for number in range(1, LAYERS)]
    assert fidelities(attach(model, fidelity=0.25)) == dict.fromkeys(names, 0.25)
    attach(model, fidelity=0.4, learned=True)
    with torch.no_grad():
        model.get_parameter(f"{names[0]}.neutreno.raw_fidelity").fill_(math.log(3))
    found = fidelities(model)
    assert list(found) == names
    assert list(found.values()) == pytest.approx([3, *(0.4,) * (LAYERS - 2)], rel=1e-6)
    shared = attach(build("bert"), fidelity=0.4, learned="shared")
    assert list(fidelities(shared).values()) == pytest.approx([0.4] * (LAYERS - 1), rel=1e-6)
    # That of the first layer, which has no term, is not used: it may be any, and warns of nothing.
    shared = attach(build("bert"), fidelity=[0, *(0.4,) * (LAYERS - 1)], learned="shared")
    assert list(fidelities(shared).values()) == pytest.approx([0.4] * (LAYERS - 1), rel=1e-6)
    attach(build("bert"), fidelity=[5, *(0.4,) * (LAYERS - 1)], semi_implicit=False)
    matrix = attach(build("bert"), fidelity=0.5, matrix_fidelity=True)
    with torch.no_grad():
        matrix.get_parameter(f"{names[0]}.neutreno.log_variance").fill_(math.log(4))
    assert fidelities(matrix)[names[0]] == pytest.approx(0.25, rel=1e-6)
