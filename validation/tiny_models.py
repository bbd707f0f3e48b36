"""Models of all families that the installed transformers has, as small as they can be, and inputs for them."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import torch
from torch import nn

from nlflow.attention.injection.trial import side_by_side

LAYERS, HEADS, WIDTH, WORDS, TOKENS, SIDE, PATCH = 3, 4, 32, 96, 12, 32, 8

# What a number of a configuration becomes, by the end of its name; the first that fits.
_SMALL: tuple[tuple[str, int], ...] = (
    (r"(num_key_value_heads|num_kv_heads|num_attention_groups|num_query_groups)", 2),
    (r"((num|n|encoder|decoder)_.*heads?|num_heads|n_heads?|.*attention_heads|num_attn_heads|heads)", HEADS),
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_.*_layers|depth|n_blocks"
     r"|num_(encoder|decoder)_.*layers|.*_num_hidden_layers|num_hidden_blocks)", LAYERS),
    (r"(head_dim|.*_head_dim|d_kv|attention_head_size|v_head_dim|qk_nope_head_dim)", WIDTH // HEADS),
    (r"(q_lora_rank|kv_lora_rank|.*_rank)", 16),
    (r"qk_rope_head_dim", 4),
    (r"(.*intermediate_size.*|.*ffn_dim|d_ff|ffn_hidden_size|d_inner|n_inner|mlp_dim|hidden_dim|dim_feedforward"
     r"|.*ffn_dim.*|feed_forward_hidden_size)", 2 * WIDTH),
    (r"(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|projection_dim|projection_size|.*hidden_size|.*_embed_dim"
     r"|.*hidden_dim|model_dim|word_embed_proj_dim|rotary_dim|.*_dim)", WIDTH),
    (r"(vocab_size|.*_vocab_size)", WORDS),
    (r"(max_position_embeddings|n_positions|max_.*positions|n_ctx|max_seq_len.*)", 64),
    (r"(num_experts|num_local_experts|n_routed_experts|num_.*experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|moe_topk|num_experts_per_token|top_k_experts|moe_k)", 2),
    (r"(image_size|img_size|input_size)", SIDE),
    (r"(patch_size)", PATCH),
    (r"(num_queries|num_query_tokens|num_latents)", 6),
    (r"(sliding_window|window|attention_window)", 8),
)  # fmt: skip

# What a configuration leaves to be derived from other numbers, which are no longer there.
_DERIVED = {"head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "vocab_size": WORDS, "num_experts_per_tok": 2}


def shrunk(config: Any) -> Any:
    """Make a configuration small, in place, and the configurations inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrunk(value)
            continue
        if isinstance(value, bool) or not isinstance(value, int | list | tuple) or name.startswith("_"):
            continue
        if isinstance(value, int):
            for pattern, number in _SMALL:
                if re.fullmatch(pattern, name):
                    if name.endswith("_token_id"):
                        break
                    if "dim" in name and value < number:
                        break
                    setattr(config, name, number)
                    break
            else:
                if name.endswith("token_id") and value >= WORDS:
                    setattr(config, name, WORDS - 1 - len(name) % 40)
        elif name in ("image_size", "img_size") and len(value) == 2:
            setattr(config, name, type(value)((SIDE, SIDE)))
        elif name in ("layer_types", "mlp_layer_types", "attention_types", "block_types"):
            setattr(config, name, _some(value))
    for name, number in _DERIVED.items():
        if vars(config).get(name, number) is None:
            setattr(config, name, number)
    pictured = re.search("vl|4v|46v|ocr|image|omni|glmga", str(getattr(config, "model_type", "")))
    for name in ("rope_parameters", "rope_scaling"):  # of text, height and width: half of the width of a head
        if pictured and isinstance(getattr(config, name, None), dict):
            setattr(config, name, {**getattr(config, name), "mrope_section": [2, 1, 1]})
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = HEADS  # latent attention has no fewer keys
    if getattr(config, "qk_rope_head_dim", None) and hasattr(config, "head_dim"):
        config.head_dim = config.qk_rope_head_dim  # latent attention turns this part alone
    if hasattr(config, "window_size") and isinstance(getattr(config, "depths", None), list | tuple):  # as Swin has it
        config.depths, config.num_heads, config.window_size, config.image_size = [2, 2], [2, 4], 4, 48
        config.patch_size, config.num_layers, config.hidden_size = 4, 2, 2 * WIDTH
        config.embed_dim = WIDTH
    if 0 < getattr(config, "initializer_range", 1.0) < 0.01:
        config.initializer_range = 0.02  # or all values would be zero
    for name, value in (("prediction_length", 4), ("rotary_dim", 4)):
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _some(kinds: Any) -> Any:
    """Return three of the kinds of layers, with each kind among them."""
    distinct = list(dict.fromkeys(kinds)) if all(isinstance(kind, str) for kind in kinds) else list(kinds)[:1]
    return type(kinds)((distinct * LAYERS)[: max(LAYERS, len(distinct))])


def build(kind: str, *, attn_implementation: str | None = None, **changes: Any) -> nn.Module:
    """Return a random model of this type (``'bert'``), in evaluation mode."""
    from transformers import CONFIG_MAPPING, AutoModel

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = shrunk(CONFIG_MAPPING[kind]())
        for name, value in changes.items():
            setattr(config, name, value)
        given = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        model = AutoModel.from_config(config, trust_remote_code=False, **given).eval()
    return model


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """Return two inputs for a model."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    text = getattr(config, "text_config", None) or config
    words = int(getattr(text, "vocab_size", WORDS) or WORDS)
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = torch.randint(5, max(6, min(words, WORDS) - 50), (2, TOKENS), generator=generator)
    text_alone = "input_ids" in names and main(model) == "input_ids" and not side_by_side(model)
    if "pixel_values" in names and not text_alone:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", SIDE)
        size = (size, size) if isinstance(size, int) else tuple(size)
        shape = (2, int(getattr(vision, "num_channels", 3) or 3), *size)
        given["pixel_values"] = torch.randn(shape, generator=generator)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = given.get("input_ids", torch.randint(5, 40, (2, TOKENS)))[:, :8]
    if main(model) == "input_values" and "input_values" in names:
        given["input_values"] = torch.randn(2, 3200, generator=generator)
    if main(model) == "input_features" and "input_features" in names:
        bins = int(getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80)))
        shape = (2, bins, 128) if "whisper" in config.model_type else (2, 128, bins)
        given["input_features"] = torch.randn(shape, generator=generator)
    return given


def main(model: Any) -> str:
    """Return the name of the main input."""
    return str(getattr(model, "main_input_name", "input_ids"))
