"""Models from a folder or a hub name, safetensors alone, and what they are called with: text, an image, tokens."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nlflow.attention.adapters import transformers_library
from nlflow.attention.dispatch import TERMS
from nlflow.attention.registry import attach
from nlflow.attention.stored import check_declared, check_whole
from nlflow.errors import FileFormatError, InputError, NlflowWarning, check_array, shortened

__all__ = ["attach_as_trained", "image_inputs", "load_model", "no_bars", "text_inputs", "token_inputs"]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_SETTINGS, _TERMS = "attention.json", "terms.safetensors"
_CONVERT = (
    "convert it where you trust it: load it with torch.load(..., weights_only=True) and "
    "model.load_state_dict, then model.save_pretrained(folder), which writes model.safetensors"
)


def load_model(source: str | os.PathLike[str]) -> nn.Module:
    """Return a model of transformers, in evaluation mode, in float32 on the CPU.

    Where a folder has a file ``attention.json`` the model gets the terms that it was trained with: an object whose
    ``"attach"`` holds the arguments of `nlflow.attention.attach`, or null for none, and whose ``"format"`` is 1. What
    they learned lies beside it in ``terms.safetensors``.

    Parameters
    ----------
    source : str or path
        A folder with ``config.json`` and ``model.safetensors``, which is read without network; or the name of a model
        on the Hugging Face hub (``'owner/name'``), which is taken from the cache or downloaded.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    FileFormatError
        For a folder without configuration or weights, damaged or incomplete weights, a configuration of a model that
        the weights cannot be those of, and weights that only pickle can read (``.bin``, ``.pt``), which run code when
        they are read and are refused; the message tells how to convert them.
    MemoryLimitError
        For a configuration of a model beyond the memory limit; nothing has been allocated then.
    InputError
        For a name that the hub does not give, and if transformers is missing or older than 5.
    """
    library = transformers_library()
    folder = Path(source)
    if folder.suffix in (*_PICKLES, ".safetensors") and not folder.is_dir():
        got = "a file of weights alone"
        advice = "name the folder that holds it and config.json"
        if folder.suffix != ".safetensors":
            got, advice = "weights that only pickle can read, which runs code", _CONVERT
        raise FileFormatError(
            f"{source}: got {got}, expected a folder with config.json and model.safetensors; {advice}"
        )
    if folder.exists():
        _check_folder(folder)
        check_declared(folder)
        offline = True
    elif _is_name(str(source)):
        offline = False
    else:
        raise FileFormatError(
            f"{source}: got no such folder, expected one with config.json and model.safetensors, or the name of a "
            "model on the hub such as 'owner/name'; check the name"
        )
    try:
        with no_bars() if offline else nullcontext():  # what is downloaded shows its progress
            model, report = library.AutoModel.from_pretrained(
                str(source),
                output_loading_info=True,
                local_files_only=offline,
                use_safetensors=True,
                trust_remote_code=False,  # or the library would offer to run code that lies in the folder
                dtype=torch.float32,
            )
    except Exception as error:  # loaders fail in many ways: OSError, KeyError, SafetensorError, ValueError ...
        reason = shortened(error, 300)
        if offline:
            raise FileFormatError(
                f"{source}: got a folder that cannot be loaded ({reason}), expected a model of transformers "
                f"{library.__version__} with its weights; save it again with model.save_pretrained(folder)"
            ) from error
        raise InputError(
            f"model: got {str(source)!r}, which the hub does not give with safetensors weights ({reason}); expected "
            "the name of such a model, or a folder; check the name and the connection"
        ) from error
    check_whole(source, report["missing_keys"])
    if offline:
        attach_as_trained(model, folder)
    found: nn.Module = model.eval()
    return found


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the progress bars of transformers off the terminal, which belongs to those of the caller, for a while."""
    logs = transformers_library().utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


def attach_as_trained(model: Any, folder: Path) -> None:
    """Give a model the terms that its folder tells of; see `load_model`.

    Raises
    ------
    FileFormatError
        For damaged files, and terms of another model.
    """
    path = folder / _SETTINGS
    if not path.is_file():
        return
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["format"] != 1:
            raise ValueError(f"format {about['format']!r}, this version reads 1")
        if about["attach"] is not None:
            attach(model, **about["attach"])
        terms: dict[str, Tensor] = {}
        if (folder / _TERMS).is_file():
            from safetensors.torch import load_file

            # They may have been learned with a head on top, which this model need not have.
            prefix = "" if hasattr(model, model.base_model_prefix) else f"{model.base_model_prefix}."
            terms = {name.removeprefix(prefix): tensor for name, tensor in load_file(folder / _TERMS).items()}
            if unexpected := model.load_state_dict(terms, strict=False).unexpected_keys:
                raise ValueError(f"{_TERMS} has {unexpected[0]}, which the model does not have")
        for name, _ in model.named_parameters():
            if f".{TERMS}." in name and name not in terms:
                raise ValueError(f"{_TERMS} does not have {name}, which was learned")
    except Exception as error:  # of json, safetensors, torch and attach, each with its own kinds
        raise FileFormatError(
            f"{path}: got terms that the model cannot be given ({type(error).__name__}: {error}), expected the "
            "arguments of nlflow.attention.attach; remove the file for the model without terms"
        ) from error


def _is_name(text: str) -> bool:
    """Tell whether a text can be the name of a model on the hub: name, or owner/name."""
    parts = text.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() and "\\" not in part for part in parts)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileFormatError(f"{folder}: got a file, expected a folder with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise FileFormatError(
            f"{folder}: got no config.json in it, expected the folder of a model; model.save_pretrained(folder) "
            "makes one"
        )
    if any((folder / name).is_file() for name in _WEIGHTS):
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise FileFormatError(
            f"{folder}: got weights that only pickle can read ({', '.join(pickles)}), which runs code, expected "
            f"model.safetensors; {_CONVERT}"
        )
    raise FileFormatError(
        f"{folder}: got no weights in it, expected model.safetensors; model.save_pretrained(folder) writes it"
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
    library = transformers_library()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(
            str(source), local_files_only=Path(source).exists(), trust_remote_code=False
        )
    except Exception as error:  # as in load_model
        reason = shortened(error, 200)
        raise InputError(
            f"text: got a text for {source}, which has no tokenizer ({reason}); expected tokenizer.json beside the "
            "weights; give tokens or an image instead"
        ) from error
    most = min(_positions(model), int(min(tokenizer.model_max_length, 10**9)))
    with warnings.catch_warnings():
        # The tokenizer says by itself, through its log, that a text is too long: it is said below.
        warnings.simplefilter("ignore")
        try:
            whole = tokenizer(text, truncation=False, padding=False, verbose=False)
        except Exception as error:  # the tokenizers of Rust raise nothing more special
            unknown = sorted(set(text) - {character for token in tokenizer.get_vocab() for character in token})
            what = f"{len(unknown)} character(s), such as {unknown[0]!r}," if unknown else "a text"
            raise InputError(
                f"text: got {what} that the tokenizer of {source} does not know ({error}), expected words of its "
                "vocabulary alone; leave others out"
            ) from error
    count = len(whole["input_ids"])
    if count > most:
        warnings.warn(
            f"text: got {count} tokens, more than the {most} positions of the model; the first {most} are used",
            NlflowWarning,
            stacklevel=2,
        )
        whole = tokenizer(text, truncation=True, max_length=most, padding=False)
    return {
        name: torch.tensor([whole[name]])
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in whole and _takes(model, name)
    }


def _positions(model: nn.Module) -> int:
    """Return how many positions a model knows; many where its positions are not learned."""
    config: Any = getattr(model, "config", None)
    count = next(
        (int(getattr(config, name)) for name in ("max_position_embeddings", "n_positions") if hasattr(config, name)),
        10**9,
    )
    # RoBERTa's positions begin behind that of the padding.
    behind = getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert")
    return count - (int(config.pad_token_id) + 1 if behind else 0)


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def image_inputs(model: nn.Module, source: str | os.PathLike[str], image: Any) -> dict[str, Tensor]:
    """Return an image as a model's inputs, (1, 3, height, width).

    It is brought to the model's size (Pillow's bilinear filter, the aspect not kept, nothing cropped) and normalised
    with mean and deviation of the folder's ``preprocessor_config.json``, or 1/2 each.

    Parameters
    ----------
    model : torch.nn.Module
        One whose configuration has an ``image_size``.
    source : str or path
    image : array of uint8 of shape (height, width) or (height, width, 3 or 4)
        Opacity is left aside.

    Raises
    ------
    InputError
        For a model of other inputs, and another kind of array.
    """
    from PIL import Image

    config: Any = getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    if size is None or not _takes(model, "pixel_values"):
        raise InputError(
            f"image: got an image for {type(model).__name__}, which takes none; expected a model such as ViT or DeiT"
        )
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise InputError(
            f"image: got {array.dtype} of shape {array.shape}, expected uint8 of shape (height, width) or (height, "
            "width, 3); convert it to 8 bits"
        )
    high, wide = (size, size) if isinstance(size, int) else tuple(size)
    channels = int(getattr(config, "num_channels", 3))
    picture = Image.fromarray(array.squeeze()).convert("L" if channels == 1 else "RGB")
    pixels = np.asarray(picture.resize((wide, high), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    mean, deviation = _normalisation(Path(source) / "preprocessor_config.json", channels)
    normalised = (pixels.reshape(high, wide, channels) - mean) / deviation
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1)))[None]}


def _normalisation(path: Path, channels: int) -> tuple[Any, Any]:
    """Return mean and deviation that the pixels of a model have, one number or one a channel; 1/2 without a file."""
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
        Whole numbers of shape (N,) or (B, N) are token numbers; floating-point numbers of shape (N, D) or (B, N, D)
        embeddings of D channels.

    Raises
    ------
    InputError
        For another shape, NaN or infinite values, numbers that are no tokens, more tokens than positions, and models
        that take no such inputs.
    """
    array = np.asarray(tokens)
    config: Any = getattr(model, "config", None)
    count = array.shape[-1] if array.dtype.kind in "iu" else array.shape[-2] if array.ndim > 1 else 0
    if array.dtype.kind in "iu":
        vocabulary = int(getattr(config, "vocab_size", 0) or 0)
        if array.ndim not in (1, 2) or 0 in array.shape or not _takes(model, "input_ids"):
            raise InputError(
                f"tokens: got whole numbers of shape {array.shape} for {type(model).__name__}, expected (N,) or (B, N) "
                "for a model of text"
            )
        if int(array.min()) < 0 or (vocabulary and int(array.max()) >= vocabulary):
            raise InputError(
                f"tokens: got numbers from {array.min()} to {array.max()}, expected 0 to {vocabulary - 1}, the words "
                "that the model knows"
            )
        inputs = {"input_ids": torch.from_numpy(np.atleast_2d(array).astype(np.int64))}
    else:
        values = np.asarray(check_array("tokens", array, ndim=(2, 3)), dtype=np.float32)
        width = getattr(config, "hidden_size", None)
        width = getattr(config, "embedding_size", width)
        if not _takes(model, "inputs_embeds"):
            raise InputError(
                f"tokens: got embeddings for {type(model).__name__}, which takes none; give it an image or a text"
            )
        if width is not None and values.shape[-1] != width:
            raise InputError(
                f"tokens: got shape {values.shape}, expected (N, {width}) or (B, N, {width}), the model's channels"
            )
        inputs = {"inputs_embeds": torch.from_numpy(values if values.ndim == 3 else values[None])}
    if count > _positions(model):
        raise InputError(f"tokens: got {count}, expected at most {_positions(model)}, the positions of the model")
    return inputs
