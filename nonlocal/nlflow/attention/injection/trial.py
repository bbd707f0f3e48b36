"""A run of a model on a few tokens, by which `attach` sees that the term arrives; checks of what a model is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.places import evaluating
from nlflow.errors import InputError

_TOKENS = 6
_SIDE = 64  # of an image, for models that take any
_LARGEST = 2**21  # numbers of an image or a sound
_INSTEAD = ("inputs_embeds", "encoder_outputs")  # what a model may be given in the place of its main input


def try_out(model: nn.Module, inputs: Any) -> None:
    """Run a model once, without derivatives and dropout; let `InputError` pass.

    With `inputs`, what else fails passes too. Without, the model is run with what its configuration tells, and a
    failure means that this was no input for it: the next is tried.
    """
    if inputs is not None:
        check_inputs(model, inputs)
    tried = several(simple_inputs(model)) if inputs is None else [inputs]
    devices = [one.device for one in model.parameters() if one.device.type == "cuda"][:1]
    for given in tried:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), evaluating(model):
                if isinstance(given, Mapping):
                    model(**given)
                else:
                    model(given)
        except InputError:
            raise
        except Exception:
            if inputs is not None:
                raise
        else:
            return


def check_inputs(model: Any, inputs: Any) -> None:
    """Raise `InputError` for names, token numbers and images that a model does not take.

    The errors of torch say little of them: which name, which shape is expected, and what to do.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : mapping or tensor
        What it is to be called with; a tensor alone is its main input.
    """
    model = without_wrapper(model)
    main = getattr(model, "main_input_name", "")
    main = main if isinstance(main, str) else ""  # a few have a list, of which none comes first
    if isinstance(inputs, Mapping):
        _check_names(model, main, inputs)
        shown = inputs
    else:
        shown = {"inputs": inputs}
    if main == "pixel_values":
        _check_images(model, shown)
    if isinstance(inputs, Mapping) or main == "input_ids":
        _check_ids(model, shown)
        _check_lengths(model, shown)


def without_wrapper(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, whose forward names no arguments; any other itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_names(model: Any, main: str, inputs: Mapping[Any, Any]) -> None:
    """Refuse names that the forward of a model does not have.

    A forward with ``**kwargs`` hands others on. So they are refused where nothing that it can begin with is given.
    """
    arguments = inspect.signature(model.forward).parameters
    kinds = {one.kind for one in arguments.values()}
    unknown = [name for name in inputs if name not in arguments]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        begun = main not in arguments or any(name == main or str(name) in _INSTEAD for name in inputs)
        unknown = [] if begun else unknown
    if unknown:
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        taken = ", ".join(name for name, one in arguments.items() if one.kind not in several)
        first = f"the tokens or pixels under {main!r}" if main in arguments else "what is to be computed"
        raise InputError(
            f"inputs: got {', '.join(map(repr, unknown))}, expected names that the forward of {type(model).__name__} "
            f"takes: {taken}; give {first}"
        )


def _check_images(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse what is no image for a model of images, such as token numbers."""
    config = getattr(model, "config", None)
    for name in ("inputs", "pixel_values"):
        if not isinstance(pixels := inputs.get(name), Tensor):
            continue
        flat = pixels.ndim < 4 and hasattr(config, "image_size")  # without a size, images may come as rows of patches
        if flat or not pixels.is_floating_point():
            shape = _shape(config)
            axes = ", ".join(("frames", "channels", "height", "width")[-max(len(shape), 3) :])
            such = f", such as {(1, *shape)}" if shape else ""
            raise InputError(
                f"{name}: got numbers of {pixels.dtype} of shape {tuple(pixels.shape)}, expected pixel values, "
                f"floating-point of shape (batch, {axes}){such}, for {type(model).__name__}; make them with the "
                "model's image processor, or nlflow.attention.image_inputs(model, folder, image)"
            )


def _check_lengths(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse more tokens than a model has learned positions for; without such a table it takes any number."""
    if "position_ids" in inputs:
        return
    most = positions(model)
    tables = (
        one
        for name, one in model.named_modules()
        if isinstance(one, nn.Embedding) and ("position" in (last := name.rpartition(".")[2]) or last == "wpe")
    )
    if not any(table.num_embeddings >= most for table in tables):
        return
    for name in ("inputs", "input_ids", "inputs_embeds", "decoder_input_ids"):
        if isinstance(tokens := inputs.get(name), Tensor) and tokens.ndim > 1 and tokens.shape[1] > most:
            raise InputError(
                f"{name}: got {tokens.shape[1]} tokens in a sequence, expected at most {most}, the positions of "
                f"{type(model).__name__}; cut them: tokenizer(text, truncation=True, max_length={most}), or "
                f"tokens[:, :{most}]"
            )


def positions(model: Any) -> int:
    """Return how many positions a model knows; many where its configuration does not say."""
    config: Any = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions")
    places = ((one, name) for one in (config, getattr(config, "text_config", None)) for name in names)
    count = next((int(found) for one, name in places if (found := getattr(one, name, None)) is not None), 10**9)
    # RoBERTa's positions begin behind that of the padding.
    behind = getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert")
    return count - (int(config.pad_token_id) + 1 if behind else 0)


def _check_ids(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse what are no token numbers, or none of the model's."""
    for name in ("inputs", "input_ids", "decoder_input_ids"):
        if (ids := inputs.get(name)) is None:
            continue
        # A decoder may have words of its own, and a number beyond the words may stand for a picture or a sound.
        words = vocabulary(model) if name != "decoder_input_ids" and not any(map(_is_sensed, inputs.values())) else 0
        got, remedy = _wrong_ids(ids, words)
        if got:
            limits = f" in [0, {words})" if words else ""
            raise InputError(f"{name}: got {got}, expected integers of shape (batch, length){limits}; {remedy}")


def vocabulary(model: Any) -> int:
    """Return how many tokens a model knows; 0 where it does not say."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return 0
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 0


def _is_sensed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2


def _wrong_ids(ids: Any, words: int) -> tuple[str, str]:
    """Return what is wrong with token numbers, and what to do; two empty texts where nothing is."""
    if not isinstance(ids, Tensor):
        return f"a {type(ids).__name__}", "make a tensor: torch.as_tensor(ids)"
    if ids.dtype not in (torch.int32, torch.int64):
        embedded = ids.is_floating_point() and ids.ndim == 3
        remedy = "these are embeddings: pass {'inputs_embeds': x}" if embedded else "pass ids.long()"
        return f"numbers of {ids.dtype}", remedy
    if ids.ndim < 2:
        return f"the shape {tuple(ids.shape)}", "add the axis of the batch: ids.reshape(1, -1)"
    if not ids.numel():
        return f"the empty shape {tuple(ids.shape)}", "give at least one token"
    if words and not ids.is_meta and (int(ids.min()) < 0 or int(ids.max()) >= words):
        return f"numbers from {int(ids.min())} to {int(ids.max())}", "take the tokenizer that belongs to the model"
    return "", ""


def several(given: dict[str, Tensor] | Tensor | None) -> list[Any]:
    """Return inputs to be tried one after the other: these, two images, and a pair of images or a video."""
    if not isinstance(given, dict):
        return [] if given is None else [given]
    found: list[Any] = [given]
    for name, one in given.items():
        if name.startswith("pixel_values") and one.ndim == 4:
            found += [{**given, name: torch.cat([one, one])}, {**given, name: torch.stack([one, one], dim=1)}]
    return found


def simple_inputs(model: Any) -> dict[str, Tensor] | Tensor | None:
    """Return a few tokens, or an image or a video of noise; None for a model that does not say that it takes them.

    Models of transformers say it in their configuration, those of timm and of torchvision by the size of an image.
    """
    model = without_wrapper(model)
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", "")
    place = next((one.device for one in model.parameters()), torch.device("meta"))
    if place.type == "meta":
        return None
    if config is None:
        told, side = getattr(model, "pretrained_cfg", None), getattr(model, "image_size", None)
        if isinstance(told, Mapping) and len(told.get("input_size") or ()) == 3:
            return _image(model, tuple(told["input_size"]), place)
        return _image(model, (3, side, side), place) if isinstance(side, int) else None
    arguments = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    if name == "input_ids" and name in arguments:
        words = int(
            getattr(config, "vocab_size", 0) or getattr(getattr(config, "text_config", None), "vocab_size", 0) or 8
        )
        given[name] = (torch.arange(2 * _TOKENS, device=place).view(2, _TOKENS) % 5 + 1).clamp_max(words - 1)
        if "decoder_input_ids" in arguments:
            given["decoder_input_ids"] = given[name]
        if "pixel_values" in arguments and side_by_side(model):
            picture = _image(model, _shape(getattr(config, "vision_config", config)), place)
            given |= {} if picture is None else {"pixel_values": picture.expand(2, *picture.shape[1:])}
    elif name in ("pixel_values", "pixel_values_videos") and name in arguments:
        picture = _image(model, _shape(config), place)
        if picture is None:
            return None
        given[name] = picture
    else:
        return None
    if "use_cache" in arguments:
        given["use_cache"] = False
    return given


def side_by_side(model: Any) -> bool:
    """Return whether a model of transformers takes a text and a picture for it in two towers, as CLIP and SigLIP do."""
    return hasattr(model, "get_text_features") and hasattr(model, "get_image_features")


def _shape(config: Any) -> tuple[int, ...]:
    """Return the channels, height and width of the images of a configuration, after the number of frames of a video.

    Empty where it tells no such.
    """
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or _SIDE
    size = (size, size) if isinstance(size, int) else size
    if not isinstance(size, list | tuple) or len(size) != 2:
        return ()
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3
    return *((int(frames),) if isinstance(frames, int) else ()), int(channels), int(size[0]), int(size[1])


def _image(model: nn.Module, shape: tuple[int, ...], place: torch.device) -> Tensor | None:
    """Return an image or a video of noise; None where the shape is none, or large."""
    if not shape or torch.Size(shape).numel() > _LARGEST:
        return None
    kind = next(one.dtype for one in model.parameters() if one.is_floating_point())
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(0)).to(place, kind)
