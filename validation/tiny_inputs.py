"""Inputs for the models of `tiny_models`, by the names of the arguments that their forward has."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.inputs import side_by_side
from validation.tiny_models import SIDE, WORDS

TOKENS, GRID, FRAMES, SOUND = 12, 4, 128, 3840

# Arguments that are given wherever a forward has them, although it may have a default for them.
_COMPANIONS = (
    "input_ids", "decoder_input_ids", "bbox", "visual_feats", "visual_pos", "input_features_mask", "lang_ids",
    "spatial_shapes", "pixel_attention_mask",
)  # fmt: skip
_SIDES = {
    "lw_detr": 128,
    "mobilevitv2": 256,
    "pp_ocrv5_mobile_rec": 128,
    "pp_ocrv5_server_rec": 128,
    "pp_ocrv6_small_rec": 128,
    "pp_ocrv6_tiny_rec": 128,
    "rf_detr": 112,
    "tvp": 448,
}  # of pictures, where it is not told

# What some types cannot do without, though their forward has a default for it.
_ALSO: dict[str, tuple[str, ...]] = {
    "autoformer": ("future_values", "future_time_features"),
    "decision_transformer": ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    "dia": ("decoder_input_ids",),
    "idefics": ("pixel_values", "image_attention_mask"),
    "informer": ("future_values", "future_time_features"),
    "speecht5": ("decoder_input_values",),
    "blip_2_qformer": ("encoder_hidden_states",),
    "bridgetower": ("pixel_values",),
    "instructblip": ("input_ids",),
    "instructblipvideo": ("input_ids",),
    "kosmos-2": ("input_ids", "image_embeds_position_mask"),
    "time_series_transformer": ("future_values", "future_time_features"),
    "tvp": ("pixel_values",),
    "voxtral_realtime": ("input_features",),
    "xclip": ("pixel_values",),
    "vilt": ("pixel_values",),
}


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """Return two inputs for a model."""
    names = inspect.signature(model.forward).parameters
    kind = str(getattr(model.config, "model_type", ""))
    main = getattr(model, "main_input_name", "input_ids")
    wanted = [
        name for name, one in names.items()
        if one.default is inspect.Parameter.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]  # fmt: skip
    wanted += [main] if isinstance(main, str) else list(main)
    wanted += [*_COMPANIONS, *_ALSO.get(kind, ())]
    wanted += [] if "input_ids" in names else ["target_sizes"]
    if side_by_side(model):
        wanted += ["pixel_values"]
    if hasattr(model, "get_text_features"):
        wanted += ["pixel_values_videos", "input_features"]
    maker = _Maker(model)
    given: dict[str, Any] = {}
    for name in names:
        if name in wanted and (made := maker.of(name, given, wanted)) is not None:
            given[name] = made
    return given


class _Maker:
    """What makes an argument of a name."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.names = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(1)
        self.vision = getattr(self.config, "vision_config", None) or self.config
        self.audio = getattr(self.config, "audio_config", None) or self.config

    def of(self, name: str, given: dict[str, Any], wanted: list[str]) -> Any:
        """Return the argument of this name; `given` has those before it."""
        if name == "decoder_input_ids" and self.config.model_type == "dia":
            return self.words()[:, :8, None].expand(-1, -1, self.config.decoder_config.num_channels)
        if name == "decoder_input_ids":
            return given["input_ids"][:, :8] if "input_ids" in given else self.words()[:, :8]
        if name.endswith("input_ids"):
            return self.words()
        if name in ("hidden_states", "pixel_values") and {"grid_thw", "spatial_shapes"} & set(self.names):
            return self.patches()
        if name == "input_ids" and "pixel_values" in wanted:
            return self.words_and_pictures()
        if name.endswith("mask") and name != "prompt_masks":
            return self.mask(name, given)
        found = getattr(self, name, None)
        if found is None:
            raise LookupError(f"no rule makes the argument {name}")
        return found()

    def number(self, *names: str, of: Any = None, default: int) -> int:
        """Return the first of these numbers that the configuration has."""
        holder = self.config if of is None else of
        found = next((value for name in names if (value := getattr(holder, name, None)) is not None), default)
        return int(found[0] if isinstance(found, list | tuple) else found)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def mask(self, name: str, given: dict[str, Any]) -> Tensor | None:
        """Return a mask that hides nothing; None where there is nothing to be hidden."""
        about = name.removesuffix("_mask")
        if name == "audio_mel_mask":
            return torch.zeros(2, FRAMES, dtype=torch.bool)  # which says what is padding
        if name == "image_embeds_position_mask":
            return (torch.arange(TOKENS) < self.config.latent_query_num).long().expand(2, -1)
        if name == "image_attention_mask":
            return torch.ones(2, TOKENS, 1, dtype=torch.long)
        if name == "input_features_mask" and self.config.model_type == "qwen3_asr_encoder":
            return torch.ones(2, given["input_features"].shape[-1], dtype=torch.long)
        if about in given:
            return torch.ones(given[about].shape[:2], dtype=torch.long)
        if about in ("input_features", "pixel_attention") and not {"input_features", "pixel_values"} & set(given):
            return None  # a text alone
        if about == "pixel_attention":
            return torch.ones(given["pixel_values"].shape[:2], dtype=torch.long)
        if about == "past_observed":
            return torch.ones_like(given["past_values"])
        return torch.ones(2, TOKENS, dtype=torch.long)

    # ---- texts

    def words(self) -> Tensor:
        text = getattr(self.config, "text_config", None) or self.config
        words = int(getattr(text, "vocab_size", WORDS) or WORDS)
        shape: tuple[int, ...] = (2, TOKENS)
        if "musicgen" in self.config.model_type:
            shape = (2 * self.config.num_codebooks, TOKENS)
        elif self.config.model_type == "kyutai_speech_to_text":
            shape = (2, TOKENS, self.config.num_codebooks + 1)
        return torch.randint(5, max(6, min(words, WORDS) - 50), shape, generator=self.generator)

    def words_and_pictures(self) -> Tensor:
        """Return a text with the places of a picture in it, in models that put the picture there."""
        ids, places = self.words(), ("image_token_index", "video_token_index")
        place = next((found for name in places if (found := getattr(self.config, name, None)) is not None), None)
        if place is not None and hasattr(self.config, "num_query_tokens"):
            count = self.config.num_query_tokens * (2 if "video" in self.config.model_type else 1)
            ids = torch.cat([torch.full((2, count), place), ids], dim=1)
        return ids

    def bbox(self) -> Tensor:
        corners = torch.randint(1, 15, (2, TOKENS, 4), generator=self.generator)
        corners[..., 2:] += corners[..., :2]
        return corners / 32 if self.config.model_type in ("bros", "udop") else corners

    def lang_ids(self) -> Tensor:
        return torch.zeros(2, dtype=torch.long)

    # ---- pictures and videos

    def size(self) -> tuple[int, int]:
        size = (
            _SIDES.get(self.config.model_type)
            or getattr(self.vision, "image_size", None)
            or getattr(self.vision, "crop_size", None)
            or SIDE
        )
        return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]

    @property
    def channels(self) -> int:
        return self.number("num_channels", "in_channels", "in_chans", of=self.vision, default=3)

    def pixel_values(self) -> Tensor:
        frames = getattr(self.vision, "num_frames", None)
        if self.config.model_type == "seggpt":  # a picture above its prompt
            return self.noise(2, self.channels, self.size()[0] // 2, self.size()[1])
        if self.config.model_type == "idefics":
            return self.noise(2, 1, self.channels, *self.size())
        if "target_sizes" in self.names and "input_ids" not in self.names:  # the patches of all pictures in a row
            return self.noise(1, self.channels, self.vision.patch_size, 2 * GRID * GRID * self.vision.patch_size)
        if "pixel_position_ids" in self.names:
            return self.noise(2, GRID * GRID, self.channels * self.vision.patch_size**2)
        if self.config.model_type in ("efficientloftr", "lightglue", "instructblipvideo"):
            frames = 2  # of a pair of pictures, or of a video whose length is not told
        if frames and self.config.model_type != "perceiver":
            return self.noise(2, frames, self.channels, *self.size())
        return self.noise(2, self.channels, *self.size())

    def pixel_values_videos(self) -> Tensor:
        frames = self.number("frames_per_clip", "num_frames", of=self.vision, default=4)
        return self.noise(2, frames, self.channels, *self.size())

    def patches(self) -> Tensor:
        """Return the patches of two pictures as rows, as vision towers of language models take them."""
        side = self.number("patch_size", of=self.vision, default=8)
        width = (
            self.channels
            * side
            * side
            * self.number(
                "temporal_patch_size", of=self.vision, default=self.number("patch_temporal", of=self.vision, default=1)
            )
        )
        if self.config.model_type == "kimi_k25_vision":
            return self.noise(2 * GRID * GRID, self.channels, side, side)
        if "spatial_shapes" in self.names:
            return self.noise(2, GRID * GRID, width)
        return self.noise(2 * GRID * GRID, width)

    def pixel_position_ids(self) -> Tensor:
        return torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).expand(2, -1, -1)

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, GRID, GRID]] * 2)

    image_grid_thw = grid_thw

    def merge_sizes(self) -> Tensor:
        return torch.tensor([2, 2])

    def spatial_shapes(self) -> Tensor:
        return torch.tensor([[GRID, GRID]] * 2)

    def target_sizes(self) -> Tensor:
        return torch.tensor([[GRID, GRID]] * 2)

    def visual_feats(self) -> Tensor:
        return self.noise(2, 5, self.config.visual_feat_dim)

    def visual_pos(self) -> Tensor:
        return torch.rand((2, 5, 4), generator=self.generator)

    def query_embeds(self) -> Tensor:
        return self.noise(2, 6, self.config.hidden_size)

    def inputs_embeds(self) -> Tensor:
        return self.noise(2, TOKENS, self.config.hidden_size)

    noise_embeds = context_hidden_states = inputs_embeds

    def task_inputs(self) -> Tensor:
        return torch.randint(5, 40, (2, self.config.task_seq_len), generator=self.generator)

    def encoder_hidden_states(self) -> Tensor:
        return self.noise(2, 5, self.config.encoder_hidden_size)

    prompt_pixel_values = prompt_masks = pixel_values

    # ---- sounds

    def input_values(self) -> Tensor:
        if self.config.model_type == "speecht5":  # its model has no layers of sounds before it
            return self.noise(2, TOKENS, self.config.hidden_size)
        if hasattr(self.config, "max_length") and hasattr(self.config, "frequency_stride"):
            return self.noise(2, self.config.max_length, self.config.num_mel_bins)
        channels = any(
            hasattr(self.config, name) for name in ("audio_channels", "codebook_size", "decoder_hidden_size")
        )
        channels = channels or any(kind in self.config.model_type for kind in ("xcodec", "neucodec", "pe_audio"))
        return self.noise(2, 1, SOUND) if channels else self.noise(2, SOUND)

    def input_features(self) -> Tensor:
        kind, audio = self.config.model_type, self.audio
        if hasattr(audio, "spec_size"):  # as Swin has it, of spectrograms
            return self.noise(2, 1, FRAMES, audio.num_mel_bins)
        if kind == "clvp":
            return self.noise(2, self.config.decoder_config.feature_size, FRAMES)
        names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "num_features")
        own = next((one for one in (audio, *vars(audio).values()) if any(hasattr(one, name) for name in names)), audio)
        bins = self.number(*names, of=own, default=128) * self.number("num_stacked_frames", of=own, default=1)
        bins *= 4 if "granite_speech5" in kind else 1  # frames that are stacked
        frames = {"qwen3_asr_encoder": 200, "voxtral_realtime": 96}.get(kind, FRAMES)
        turned = any(one in kind for one in ("whisper", "moss", "voxtral", "qwen3_asr"))
        return self.noise(2, bins, frames) if turned else self.noise(2, frames, bins)

    def audio_mel(self) -> Tensor:
        return self.noise(2, FRAMES, self.config.input_feat_size)

    def decoder_input_values(self) -> Tensor:
        return self.noise(2, 8, self.config.hidden_size)

    def latents(self) -> Tensor:
        return self.noise(2, self.number("latent_dim", "hidden_size", default=32), 8)

    # ---- series and trajectories

    def past_values(self) -> Tensor:
        length = self.number("context_length", default=32)
        lags = getattr(self.config, "lags_sequence", None)
        if lags:
            return self.noise(2, length + max(lags))
        if "freq" in self.names or "past_values_padding" in self.names:
            return self.noise(2, length)
        return self.noise(2, length, self.number("num_input_channels", default=1))

    def past_values_padding(self) -> Tensor:
        return torch.zeros(2, self.config.context_length)

    def freq(self) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.long)

    def past_time_features(self) -> Tensor:
        return self.noise(2, self.config.context_length + max(self.config.lags_sequence), self.config.num_time_features)

    def future_values(self) -> Tensor:
        return self.noise(2, self.config.prediction_length)

    def future_time_features(self) -> Tensor:
        return self.noise(2, self.config.prediction_length, self.config.num_time_features)

    def states(self) -> Tensor:
        return self.noise(2, 4, self.config.state_dim)

    def actions(self) -> Tensor:
        return self.noise(2, 4, self.config.act_dim)

    def rewards(self) -> Tensor:
        return self.noise(2, 4, 1)

    returns_to_go = rewards

    def timesteps(self) -> Tensor:
        return torch.arange(4).expand(2, 4)

    def inputs(self) -> Tensor:
        return self.noise(2, 20, self.config.d_model)
