"""Tiny models of transformers with random weights, and NeuTRENO models made of stock ones by hooks alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
transformers = pytest.importorskip("transformers", reason="transformers is optional")

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS = 61, 9, 32, 4, 3
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BODY = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 40,
    "initializer_range": 0.3,  # so that attention is far from uniform
}
IMAGE = {"image_size": 12, "patch_size": 4}


def bert(**options: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**TEXT | BODY | options))


def vit(**options: Any) -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**IMAGE | BODY | options))


def deit(**options: Any) -> Any:
    return transformers.DeiTModel(transformers.DeiTConfig(**IMAGE | BODY | options))


def gpt2(**options: Any) -> Any:
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "initializer_range": 0.3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TEXT | shape | options))


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **TEXT | BODY | options))


def bart(**options: Any) -> Any:
    shape = {"d_model": WIDTH, "init_std": 0.3, "forced_eos_token_id": 2, "decoder_start_token_id": 2}
    for part in ("encoder", "decoder"):
        shape |= {f"{part}_layers": LAYERS, f"{part}_attention_heads": HEADS, f"{part}_ffn_dim": 40}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**TEXT | shape | options))


MODELS = {"bert": bert, "vit": vit, "deit": deit, "gpt2": gpt2, "llama": llama, "bart": bart}
FOUR = ("bert", "vit", "deit", "gpt2")
DECODERS = ("gpt2", "llama")
EVERYTHING: dict[str, Any] = {
    "semi_implicit": True,
    "feat_scale": True,
    "attn_scale": True,
    "cures": {"similarity-removal": 0.5},
}


def build(name: str, base: str = "eager", seed: int = 0, **options: Any) -> Any:
    """Return a model in evaluation mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    model = MODELS[name](**options).eval()
    model.set_attn_implementation(base)
    return model


def inputs(name: str, seed: int = 0, batch: int = 2) -> dict[str, Any]:
    """Return what a model is called with: pictures, or texts whose second one is padded."""
    random = torch.Generator().manual_seed(seed)
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=random)}
    tokens = torch.randint(3, VOCABULARY, (batch, TOKENS), generator=random)
    mask = torch.ones_like(tokens)
    if batch > 1:
        mask[1, 6:] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    if name == "bart":
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, TOKENS - 2), generator=random)
    return given


def output(model: Any, given: dict[str, Any]) -> Any:
    """Return hidden states or logits, the first output."""
    return model(**given)[0]


def projections(model: Any) -> list[list[tuple[Any, Any]]]:
    """List for each stack the modules that compute v and those that take the merged heads, layer by layer."""
    kind = type(model).__name__
    if kind.startswith("Bert"):
        return [[(layer.attention.self.value, layer.attention.output.dense) for layer in model.encoder.layer]]
    if kind.startswith(("ViT", "DeiT")):
        return [[(layer.attention.v_proj, layer.attention.o_proj) for layer in model.layers]]
    if kind.startswith("GPT2"):
        return [[(layer.attn.c_attn, layer.attn.c_proj) for layer in model.transformer.h]]
    if kind.startswith("Llama"):
        return [[(layer.self_attn.v_proj, layer.self_attn.o_proj) for layer in model.model.layers]]
    stacks = (model.model.encoder, model.model.decoder)
    return [[(layer.self_attn.v_proj, layer.self_attn.out_proj) for layer in stack.layers] for stack in stacks]


def by_hooks(model: Any, step: Any) -> Any:
    """Make NeuTRENO of a stock model without any attention function: the merged heads become step(Pv, v, v0, layer).

    Since the term is the same for each feature of each head, it can be added to the merged heads, which the output
    projection takes; v is what the value projection has given.
    """
    for stack in projections(model):
        seen: dict[int, Any] = {}
        for index, (value, out) in enumerate(stack):

            def keep(module: Any, args: Any, result: Any, index: int = index, seen: Any = seen) -> None:
                v = result.split(WIDTH, dim=-1)[2] if result.shape[-1] == 3 * WIDTH else result
                if v.shape[-1] < WIDTH:  # heads of values that serve two heads of queries each
                    v = v.unflatten(-1, (-1, WIDTH // HEADS)).repeat_interleave(2, dim=-2).flatten(-2)
                seen[index] = v

            def add(module: Any, args: Any, index: int = index, seen: Any = seen) -> Any:
                return (step(args[0], seen[index], seen[0], index), *args[1:]) if index else None

            value.register_forward_hook(keep)
            out.register_forward_pre_hook(add)
    return model


def explicit(average: Any, v: Any, v0: Any, layer: int) -> Any:
    return average + 0.6 * (v0 - v)


def moved(model: Any) -> Any:
    """Move the parameters of all terms away from where they are the identity."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".neutreno." in name:
                # Alike scales of the mean and of what is left would hide which mean it is.
                sign = -1 if name.endswith("high") else 1
                parameter += sign * torch.linspace(0.2, 0.5, parameter.numel()).reshape(parameter.shape)
    return model


def gradients(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    model.zero_grad()
    result = output(model, given)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)
    (result * weights.sin()).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def checkpointed(model: Any, **options: Any) -> None:
    """Switch gradient checkpointing on, which transformers has renamed."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options or None)
    else:
        model.gradient_checkpointing_enable(options or None)


def assert_same(ours: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, **(tolerance or {"rtol": 1e-7, "atol": 1e-9}), msg=name)
