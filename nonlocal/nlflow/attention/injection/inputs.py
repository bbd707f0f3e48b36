"""What models are called with."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nlflow._array import on_host
from nlflow.attention.injection.blocks import transformers_library
from nlflow.attention.threads import evaluating
from nlflow.errors import (
    FileFormatError,
    InputError,
    check_array,
    check_filled,
    check_integer,
    check_path,
    not_installed,
    shortened,
    warn_caller,
)


def text_inputs(model: nn.Module, source: str | os.PathLike[str], text: Any) -> dict[str, Tensor]:
    """Return the tokens of a text as a model's inputs, one sequence without padding.

    Parameters
    ----------
    model : torch.nn.Module
    source : str or path
        Where its tokenizer is: the folder or the name that the model came from.
    text : str

    Raises
    ------
    InputError
        For an empty text, one that the tokenizer does not take, and a model without a tokenizer.

    Warns
    -----
    NlflowWarning
        When the text has more tokens than the model has positions, and is truncated.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"text: got {text!r}, expected some words")
    tokenizer = tokenizer_of("text", source, ", or give tokens")
    most = min(positions(model), int(min(tokenizer.model_max_length, 10**9)))
    whole = encoded("text", tokenizer, source, text)
    count = len(whole["input_ids"])
    if count > most:
        warn_caller(
            f"text: got {count} tokens, more than the {most} positions of the model; the first {most} are used",
        )
        whole = tokenizer(text, truncation=True, max_length=most, padding=False)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return with_decoder(
        model, {name: torch.tensor([whole[name]]) for name in names if name in whole and takes(model, name)}
    )


def with_decoder(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tokens with those of a decoder: the same, moved on by one, which some models do by themselves."""
    if "input_ids" not in inputs or not takes(model, "decoder_input_ids"):
        return inputs
    found = dict(inputs)
    if _needs_decoder_ids(model):
        found["decoder_input_ids"] = model._shift_right(inputs["input_ids"])
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask.all()) and takes(model, "decoder_attention_mask"):
        found["decoder_attention_mask"] = mask
    return found


def _needs_decoder_ids(model: Any) -> bool:
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    return start is not None and callable(getattr(model, "_shift_right", None)) and takes(model, "decoder_input_ids")


def encoded(name: str, tokenizer: Any, source: object, text: str) -> Any:
    """Return all tokens of a text as a mapping; refuse one that the tokenizer does not know."""
    with warnings.catch_warnings():
        # The tokenizer itself warns of a long text, through its log. The warning is below.
        warnings.simplefilter("ignore")
        try:
            whole = tokenizer(text, truncation=False, padding=False, verbose=False)
        except Exception as error:  # the tokenizers of Rust raise nothing more specific
            unknown = sorted(set(text) - {character for token in tokenizer.get_vocab() for character in token})
            what = f"{len(unknown)} character(s), such as {unknown[0]!r}," if unknown else "a text"
            raise InputError(
                f"{name}: got {what} that the tokenizer of {source} does not know ({error}), expected words of its "
                "vocabulary alone; leave others out"
            ) from error
        bare = tokenizer(text, truncation=False, padding=False, verbose=False, add_special_tokens=False)["input_ids"]
    if all(token == getattr(tokenizer, "unk_token_id", None) for token in bare):
        raise InputError(
            f"{name}: got a text of which the tokenizer of {source} knows no word, expected words of its vocabulary; "
            "save the model's own there with tokenizer.save_pretrained, or give tokens"
        )
    return whole


def tokenizer_of(name: str, source: str | os.PathLike[str], otherwise: str) -> Any:
    folder, why = check_path("source", source), ""
    try:
        tokenizer = transformers_library().AutoTokenizer.from_pretrained(
            str(source), local_files_only=folder.exists() or bool(hub_silence(source)), trust_remote_code=False
        )
        # Without its files the library makes a tokenizer that knows no word. Those of bytes have no files.
        files = list(tokenizer.vocab_files_names.values())
        if folder.is_dir() and files and not any((folder / file).is_file() for file in files):
            why = f"there is no {' and no '.join(files)}"
    except Exception as error:  # as in load_model
        why = shortened(error, 300)
    if why:
        raise InputError(
            f"{name}: got {source}, which has no tokenizer ({why}), expected one beside the weights; save it there "
            f"with tokenizer.save_pretrained{otherwise}"
        )
    return tokenizer


def hub_silence(source: object) -> str:
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(str(source), "config.json"), timeout=5)
    except hub.errors.HfHubHTTPError:  # an answer, of which the library says more
        return ""
    except Exception as error:  # the errors of its packages for connections
        return shortened(error)
    return ""


def takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def takes_a_mapping(model: nn.Module, given: Mapping[str, Any]) -> bool:
    arguments = inspect.signature(without_wrapper(model).forward).parameters.values()
    needed = [one.name for one in arguments if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1 and needed[0] not in given


def image_inputs(
    model: nn.Module, source: str | os.PathLike[str], image: Any, *, size: int | None = None
) -> dict[str, Tensor]:
    """Return an image as a model's inputs, (1, channels, height, width).

    It is resized to the model's size (Pillow's bilinear filter, without cropping) and normalized with the mean and
    deviation of the folder's ``preprocessor_config.json``, 1/2 each without it.

    Parameters
    ----------
    model : torch.nn.Module
        One whose configuration has an ``image_size``.
    source : str or path
        The folder or the name that the model came from.
    image : array of uint8 of shape (height, width) or (height, width, 3 or 4)
    size : int, optional
        Side of the square, where it is not that of the configuration.

    Raises
    ------
    InputError
        For a model of other inputs, and another kind of array.
    FileFormatError
        For a damaged ``preprocessor_config.json``.
    """
    config: Any = getattr(model, "config", None)
    size = getattr(config, "image_size", None) if size is None else check_integer("size", size, minimum=1)
    if size is None or not takes(model, "pixel_values"):
        raise InputError(
            f"image: got an image for {type(model).__name__}, which takes none; expected a model such as ViT or DeiT"
        )
    high, wide = (size, size) if isinstance(size, int) else tuple(size)
    channels = int(getattr(config, "num_channels", 3))
    mean, deviation = _normalization(Path(source) / "preprocessor_config.json", channels)
    return {"pixel_values": normalized_pixels(image, (channels, high, wide), mean, deviation)}


def normalized_pixels(image: Any, shape: tuple[int, int, int], mean: Any, deviation: Any) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise not_installed("image: a picture", "Pillow", "plots") from error
    channels, high, wide = shape
    array = np.asarray(image)
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if array.dtype != np.uint8 or not fits or not array.size:
        raise InputError(
            f"image: got {array.dtype} of shape {array.shape}, expected uint8 of shape (height, width) or (height, "
            "width, 3); convert it to 8 bits"
        )
    if channels not in (1, 3):
        raise InputError(
            f"image: got a picture for a model of {channels} channels, expected one of 1 or 3; give it a tensor"
        )
    array = array[:, :, 0] if array.shape[2:] == (1,) else array
    picture = Image.fromarray(array).convert("L" if channels == 1 else "RGB")
    pixels = np.asarray(picture.resize((wide, high), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    normalized = (pixels.reshape(high, wide, channels) - np.float32(mean)) / np.float32(deviation)
    return torch.from_numpy(np.ascontiguousarray(normalized.transpose(2, 0, 1)))[None]


def _normalization(path: Path, channels: int) -> tuple[Any, Any]:
    """Return mean and deviation of pixels, one number or one for each channel; 1/2 without a file."""
    if not path.is_file():
        return np.float32(0.5), np.float32(0.5)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        mean, deviation = (
            np.asarray(settings.get(name, 0.5), dtype=np.float32) for name in ("image_mean", "image_std")
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path}: got a damaged file ({error}), expected JSON; restore it") from error
    fitting = all(np.isfinite(one).all() and one.shape in ((), (1,), (channels,)) for one in (mean, deviation))
    if not fitting or (deviation <= 0).any():
        raise FileFormatError(
            f"{path}: got image_mean {mean.tolist()!s:.60} and image_std {deviation.tolist()!s:.60}, expected "
            f"{channels} finite numbers each, deviations > 0; restore it"
        )
    return mean, deviation


def token_inputs(model: nn.Module, tokens: Any) -> dict[str, Tensor]:
    """Return an array of tokens as a model's inputs.

    Parameters
    ----------
    model : torch.nn.Module
    tokens : array
        Token numbers of shape (N,) or (B, N), or embeddings, floating-point numbers of shape (N, D) or (B, N, D).

    Raises
    ------
    InputError
        For another shape, NaN or infinite values, numbers that are no tokens, more tokens than positions, and models
        without such inputs.
    """
    array = on_host(tokens, "tokens")
    config: Any = getattr(model, "config", None)
    count = 0 if array.ndim == 0 else array.shape[-1 if array.dtype.kind in "iu" else -2 if array.ndim > 1 else 0]
    if array.dtype.kind in "iu":
        words = vocabulary(model)
        if array.ndim not in (1, 2) or 0 in array.shape or not takes(model, "input_ids"):
            raise InputError(
                f"tokens: got whole numbers of shape {array.shape} for {type(model).__name__}, expected (N,) or (B, N) "
                "for a model of text"
            )
        if int(array.min()) < 0 or (words and int(array.max()) >= words):
            raise InputError(
                f"tokens: got numbers from {array.min()} to {array.max()}, expected integers in [0, {words}), the "
                "words that the model knows; take the tokenizer that belongs to the model"
            )
        inputs = {"input_ids": torch.from_numpy(np.atleast_2d(array).astype(np.int64))}
    else:
        hint = "token numbers are integers, of shape (N,) or (B, N): tokens.astype(int)"
        values = np.asarray(check_array("tokens", array, ndim=(2, 3), hint=hint), dtype=np.float32)
        width = getattr(config, "embedding_size", getattr(config, "hidden_size", None))
        if not takes(model, "inputs_embeds") or _needs_decoder_ids(model):
            raise InputError(
                f"tokens: got embeddings for {type(model).__name__}, which takes none alone; give it an image, a text "
                "or token numbers"
            )
        if width is not None and values.shape[-1] != width:
            raise InputError(
                f"tokens: got shape {values.shape}, expected (N, {width}) or (B, N, {width}), the model's channels"
            )
        inputs = {"inputs_embeds": torch.from_numpy(values.reshape(-1, *values.shape[-2:]))}
    if count > positions(model):
        raise InputError(f"tokens: got {count}, expected at most {positions(model)}, the positions of the model")
    return with_decoder(model, inputs)


# ---- trials and checks

_TOKENS = 6
_SIDE = 64  # of an image, for models that take any
_LARGEST = 2**21  # numbers of an image or a sound
_INSTEAD = ("inputs_embeds", "encoder_outputs")  # what a model may be given in the place of its main input


def try_out(model: nn.Module, inputs: Any) -> None:
    """Run a model once with `inputs`, or with what it is seen to take, of whose errors `InputError` alone passes."""
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
    model = without_wrapper(model)
    main = getattr(model, "main_input_name", "")
    main = main if isinstance(main, str) else ""  # a few have a list, of which none comes first
    if isinstance(inputs, Mapping):
        _check_names(model, main, inputs)
        shown = inputs
    else:
        shown = {"inputs": inputs}
    check_model_filled(model)
    for name, one in shown.items():
        if isinstance(one, Tensor):
            check_filled(str(name), one)
    if main == "pixel_values":
        _check_images(model, shown)
    if isinstance(inputs, Mapping) or main == "input_ids":
        _check_ids(model, shown)
        _check_lengths(model, shown)


def check_model_filled(model: nn.Module) -> None:
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            check_filled(f"model: {name}", one)


def without_wrapper(model: Any) -> Any:
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
    if not isinstance(given, dict):
        return [] if given is None else [given]
    found: list[Any] = [given]
    for name, one in given.items():
        if name.startswith("pixel_values") and one.ndim == 4:
            found += [{**given, name: torch.cat([one, one])}, {**given, name: torch.stack([one, one], dim=1)}]
    return found


def simple_inputs(model: Any) -> dict[str, Tensor] | Tensor | None:
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
    if not shape or torch.Size(shape).numel() > _LARGEST:
        return None
    kind = next(one.dtype for one in model.parameters() if one.is_floating_point())
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(0)).to(place, kind)
