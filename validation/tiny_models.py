"""Models of all families that the installed transformers has, as small as they can be; `tiny_inputs` has their inputs.

A configuration becomes small by the names of its numbers. Where numbers depend on each other in other ways, `CHANGES`
says what they become, or that the widths stay (`WIDE`).
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

LAYERS, HEADS, WIDTH, WORDS, SIDE, PATCH = 3, 4, 32, 96, 32, 8

# What a number of a configuration becomes, by the end of its name; the first that fits.
_FEW: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers", 99),  # one for each width of a list
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_.*_layers|depth|n_blocks|.*_depth"
     r"|num_(encoder|decoder)_.*layers|.*_num_hidden_layers|num_hidden_blocks|[lrx]_layers)", LAYERS),
    (r"(vocab_size|.*_vocab_size|vocab_size_per_layer_input)", WORDS),
    (r"(num_experts|num_local_experts|n_routed_experts|num_.*experts|moe_num_experts|n_experts|zero_expert_num)", 4),
    (r"(num_experts_per_tok|moe_topk|num_experts_per_token|top_k_experts|moe_k)", 2),
    (r"(num_queries|num_query_tokens|num_latents|resampler_n_latents)", 6),
    (r"(image_size|img_size|input_size|crop_size)", SIDE),
    (r"(n_group|num_group|topk_group|n_groups|num_expert_group)", 1),
    (r"(num_frames|frames_per_clip)", 4),
    (r"first_k_dense_replace", 1),
)  # fmt: skip
_NARROW: tuple[tuple[str, int], ...] = (
    (r"(num_key_value_heads|num_kv_heads|num_attention_groups|num_query_groups)", 2),
    (r"((num|n|encoder|decoder)_.*heads?|num_heads|n_heads?|.*attention_heads|num_attn_heads|heads)", HEADS),
    (r"(head_dim|.*_head_dim|d_kv|attention_head_size|v_head_dim|qk_nope_head_dim)", WIDTH // HEADS),
    (r"(q_lora_rank|kv_lora_rank|.*_rank)", 16),
    (r"qk_rope_head_dim", 4),
    (r"(.*intermediate_size.*|.*ffn_dim|d_ff|ffn_hidden_size|d_inner|n_inner|mlp_dim|hidden_dim|dim_feedforward"
     r"|.*ffn_dim.*|feed_forward_hidden_size)", 2 * WIDTH),
    (r"(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|projection_dim|projection_size|.*hidden_size|.*_embed_dim"
     r"|.*hidden_dim|model_dim|word_embed_proj_dim|rotary_dim|.*_dim|qk_head_dim)", WIDTH),
    (r"(max_position_embeddings|n_positions|max_.*positions|n_ctx|max_seq_len.*)", 64),
    (r"(patch_size)", PATCH),
    (r"(sliding_window|window|attention_window)", 8),
)  # fmt: skip
_KINDS = ("layer_types", "mlp_layer_types", "attention_types", "block_types", "layers_block_type", "attn_layers")

# What a configuration leaves to be derived from other numbers, which are no longer there.
_DERIVED = {"head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "vocab_size": WORDS, "num_experts_per_tok": 2}

# Types of models whose widths stay, since they depend on each other in many ways.
WIDE = frozenset(
    {"audio-spectrogram-transformer", "clap", "d_fine", "deimv2", "efficientloftr", "layoutlmv3", "levit",
     "lightglue", "lilt", "lw_detr", "mimi", "mimi_decoder", "mimi_encoder", "mobilebert", "pocket_tts_audio_tokenizer",
     "pocket_tts_audio_tokenizer_decoder", "pocket_tts_audio_tokenizer_encoder", "pp_doclayout_v3", "pp_doclayout_v4",
     "rf_detr", "rt_detr", "rt_detr_v2", "sam", "sam_hq", "sam2", "sam2_hiera_det_model", "sam2_vision_model",
     "sam3_tracker", "seggpt", "sew", "sew-d", "speech_to_text", "swin2sr", "tvp"}
)  # fmt: skip

_SERIES = {"context_length": 14, "prediction_length": 7, "num_time_features": 2, "lags_sequence": [1, 2, 3],
           "feature_size": 7}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}

# What becomes of the numbers of some types that the rules do not know; a dot leads into what the configuration holds.
CHANGES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "autoformer": _SERIES,
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4, **_MAMBA},
    "bridgetower": {"hidden_size": 2 * WIDTH},
    "bridgetower_text_model": {"hidden_size": 2 * WIDTH},
    "bridgetower_vision_model": {"hidden_size": 2 * WIDTH},
    "blt": {"num_hidden_layers": LAYERS},
    "blip-2": {"image_token_index": 4},
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 4, "dim_bbox_projection": 8},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
                                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.kv_n_heads": 2, "attn_config.clip_qkv": 8,
             "ffn_config.hidden_size": WIDTH, "ffn_config.ffn_hidden_size": 2 * WIDTH, "ffn_config.moe_num_experts": 4},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "depth_pro": {"intermediate_hook_ids": [2, 1]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDTH},
    "dia_decoder": {"cross_num_attention_heads": HEADS, "cross_num_key_value_heads": HEADS},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3_vqgan": {"base_channels": WIDTH},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 6}},
    "ernie4_5_vl_moe_text": {"rope_parameters.mrope_section": [1, 1, 2]},
    "esm": {"pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA},
    "fun_asr_nano_encoder": {"max_position_embeddings": 256},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [2, 2], "block_repeats": [1, 1]},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, **_MAMBA},
    "granite_speech5_encoder": {"context_size": 32},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "idefics_vision": {"hidden_size": WIDTH},
    "inkling_text": {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "sliding_window_size": 8},
    "inkling2_text": {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "sliding_window_size": 8},
    "informer": _SERIES,
    "instructblip": {"image_token_index": 4},
    "instructblipvideo": {"video_token_index": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "kosmos-2": {"latent_query_num": 4},
    "kyutai_speech_to_text": {"num_codebooks": 2},
    "lw_detr": {"projector_scale_factors": [1.0], "projector_in_channels": [256], "num_feature_levels": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8},
    "mistral4": {"head_dim": 2 * WIDTH // HEADS},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "neomme": {"head_dim": WIDTH},
    "perceiver": {"d_latents": WIDTH, "num_self_attends_per_block": 3},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4,
                       "index_n_heads": 2, "index_kv_heads": 1, "index_head_dim": 8},
    "radio": {"patch_dim": 3 * PATCH * PATCH},
    "qwen3_asr_encoder": {"max_position_embeddings": 13},
    "reformer": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 16), "max_position_embeddings": 16,
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4},
    "sam_prompt_encoder": {"image_embedding_size": 2},
    "sam_hq_prompt_encoder": {"image_embedding_size": 2},
    "sam2_vision_model": {"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    "sam3_vision_model": {"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    "seggpt": {"image_size": (2 * SIDE, SIDE), "intermediate_hidden_state_indices": (0, 1, 2)},
    "swin2sr": {"depths": [2, 2], "num_heads": [6, 6], "num_layers": 2},
    "sapiens2": {"num_key_value_heads_per_layer": [HEADS, 2, HEADS], "num_key_value_attention_heads": 2},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": _SERIES,
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS, "n_mamba_heads": 2,
              "mamba_dt_rank": 4},
    "zamba2": {"hybrid_layer_ids": [1, 3], "n_mamba_heads": 4, "mamba_headdim": 16, "attention_hidden_size": 2 * WIDTH,
               "attention_head_dim": 2 * WIDTH // HEADS, "mamba_d_state": 8},
}  # fmt: skip


def shrunk(config: Any, *, wide: bool = False) -> Any:
    """Make a configuration small, in place, and the configurations inside it. `wide`: all widths stay."""
    wide = wide or getattr(config, "model_type", "") in WIDE
    for name, value in list(vars(config).items()):
        if getattr(value, "model_type", "") == "timm_backbone":
            setattr(config, name, _small_resnet(value.out_indices))
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrunk(value, wide=wide)
    _kinds(config)
    rules = _FEW if wide else _NARROW[:2] + _FEW[:1] + _NARROW[2:] + _FEW[1:]
    for name, value in list(vars(config).items()):
        if isinstance(value, bool) or name.startswith("_"):
            continue
        if isinstance(value, int):
            _number(config, name, value, rules)
        elif name in ("image_size", "img_size") and isinstance(value, list | tuple) and len(value) == 2:
            setattr(config, name, type(value)((SIDE, SIDE)))
    if not wide:
        _dependent(config)
    if 0 < getattr(config, "initializer_range", 1.0) < 0.01:
        config.initializer_range = 0.02  # or all values would be zero
    for path, value in CHANGES.get(getattr(config, "model_type", ""), {}).items():
        holder, _, name = path.rpartition(".")
        owner = getattr(config, holder) if holder else config
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
    return config


def _small_resnet(places: Any) -> Any:
    """Return the configuration of a backbone that needs no other package."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=[f"stage{place}" for place in places if place > 0] or ["stage4"],
    )  # fmt: skip


def _number(config: Any, name: str, value: int, rules: tuple[tuple[str, int], ...]) -> None:
    """Make one number of a configuration small."""
    if name.endswith("token_id"):
        if value >= WORDS:
            setattr(config, name, WORDS - 1 - len(name) % 40)
        return
    if name == "num_hidden_layers" and any(isinstance(vars(config).get(kinds), list | tuple) for kinds in _KINDS):
        return
    found = next((number for pattern, number in rules if re.fullmatch(pattern, name)), value)
    setattr(config, name, min(value, found))


def _kinds(config: Any) -> None:
    """Take few layers of a model whose layers are of several kinds, and each kind twice."""
    given = {name: vars(config)[name] for name in _KINDS if isinstance(vars(config).get(name), list | tuple)}
    distinct = {
        name: [one for at, one in enumerate(kinds) if one not in kinds[:at]] for name, kinds in given.items() if kinds
    }
    if not distinct:
        return
    count = max(LAYERS, *(2 * len(kinds) for kinds in distinct.values() if len(kinds) > 1), 0)
    for name, kinds in distinct.items():
        setattr(config, name, type(given[name])((kinds * count)[:count]))
    if "num_hidden_layers" in vars(config):
        config.num_hidden_layers = count


def _dependent(config: Any) -> None:
    """Make the numbers agree that depend on others."""
    own = vars(config)
    for name, number in _DERIVED.items():
        if own.get(name, number) is None:
            setattr(config, name, number)
    head = own.get("head_dim") or WIDTH // HEADS
    if own.get("kv_lora_rank"):  # latent attention
        if "num_key_value_heads" in own:
            config.num_key_value_heads = HEADS  # it has no fewer keys
        if own.get("qk_rope_head_dim") and "head_dim" in own:
            config.head_dim = config.qk_rope_head_dim  # it turns this part alone
        if "qk_head_dim" in own:
            config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if re.search("vl|4v|46v|ocr|image|omni|glmga", str(getattr(config, "model_type", ""))):
        for name in ("rope_parameters", "rope_scaling"):  # of text, height and width: half of what is turned of a head
            if isinstance(turned := own.get(name), dict):
                half = int(head * turned.get("partial_rotary_factor", 1.0)) // 2
                setattr(config, name, {**turned, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]})
    if "window_size" in own and isinstance(own.get("depths"), list | tuple) and isinstance(own.get("embed_dim"), int):
        stages = 4 if len(getattr(config, "out_indices", None) or ()) > 1 else 2  # as Swin has it
        config.depths, config.num_heads, config.window_size = [2, 2, 1, 1][:stages], [2, 4, 4, 8][:stages], 4
        config.image_size, config.patch_size, config.num_layers, config.embed_dim = 48, 4, stages, WIDTH
        config.hidden_size = WIDTH * 2 ** (stages - 1)
    for name, value in (("prediction_length", 4), ("rotary_dim", 4), ("num_kv_shared_layers", 2)):
        if own.get(name):
            setattr(config, name, value)


# Types whose model is made from a part of their configuration.
_PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}


def build(kind: str, *, attn_implementation: str | None = None, **changes: Any) -> Any:
    """Return a random model of this type (``'bert'``), in evaluation mode."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = shrunk(CONFIG_MAPPING[kind]())
        for name, value in changes.items():
            setattr(config, name, value)
        given = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        if kind in _PART:
            model = MODEL_MAPPING[type(config)]._from_config(getattr(config, _PART[kind]), **given).eval()
        else:
            model = AutoModel.from_config(config, trust_remote_code=False, **given).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.data.normal_(std=0.02)  # projections that are zero before a training, and would hide all
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_()  # the words of a codec, which are zero before a training
    return model
