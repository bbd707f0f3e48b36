"""What models are called with: a text, an image or tokens as tensors."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nlflow.attention.injection.adapters import transformers_library
from nlflow.attention.injection.trial import positions, vocabulary
from nlflow.attention.loading.stored import hub_silence
from nlflow.errors import FileFormatError, InputError, NlflowWarning, check_array, not_installed, shortened


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
    with warnings.catch_warnings():
        # The tokenizer itself warns of a long text, through its log. The warning is below.
        warnings.simplefilter("ignore")
        try:
            whole = tokenizer(text, truncation=False, padding=False, verbose=False)
        except Exception as error:  # the tokenizers of Rust raise nothing more specific
            unknown = sorted(set(text) - {character for token in tokenizer.get_vocab() for character in token})
            what = f"{len(unknown)} character(s), such as {unknown[0]!r}," if unknown else "a text"
            raise InputError(
                f"text: got {what} that the tokenizer of {source} does not know ({error}), expected words of its "
                "vocabulary alone; leave others out"
            ) from error
        bare = tokenizer(text, truncation=False, padding=False, verbose=False, add_special_tokens=False)["input_ids"]
    if all(token == tokenizer.unk_token_id for token in bare):
        raise InputError(
            f"text: got a text of which the tokenizer of {source} knows no word, expected words of its vocabulary; "
            "save the model's own there with tokenizer.save_pretrained, or give tokens"
        )
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


def tokenizer_of(name: str, source: str | os.PathLike[str], otherwise: str) -> Any:
    """Return the tokenizer of a folder or of a model on the hub.

    Where there is none, `InputError` names the argument `name`, and what to do `otherwise`.
    """
    folder, why = Path(source), ""
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


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def image_inputs(model: nn.Module, source: str | os.PathLike[str], image: Any) -> dict[str, Tensor]:
    """Return an image as a model's inputs, (1, 3, height, width).

    It is resized to the model's size (Pillow's bilinear filter, without cropping; the aspect may change) and normalized
    with mean and deviation of the folder's ``preprocessor_config.json``, or 1/2 each.

    Parameters
    ----------
    model : torch.nn.Module
        One whose configuration has an ``image_size``.
    source : str or path
    image : array of uint8 of shape (height, width) or (height, width, 3 or 4)
        Opacity is ignored.

    Raises
    ------
    InputError
        For a model of other inputs, and another kind of array.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise not_installed("image: a picture", "Pillow", "plots") from error
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
    mean, deviation = _normalization(Path(source) / "preprocessor_config.json", channels)
    normalized = (pixels.reshape(high, wide, channels) - mean) / deviation
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(normalized.transpose(2, 0, 1)))[None]}


def _normalization(path: Path, channels: int) -> tuple[Any, Any]:
    """Return mean and deviation of the pixels of a model, one number or one for each channel; 1/2 without a file."""
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
        without such inputs.
    """
    array = np.asarray(tokens)
    config: Any = getattr(model, "config", None)
    count = array.shape[-1] if array.dtype.kind in "iu" else array.shape[-2] if array.ndim > 1 else 0
    if array.dtype.kind in "iu":
        words = vocabulary(model)
        if array.ndim not in (1, 2) or 0 in array.shape or not _takes(model, "input_ids"):
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
        if not _takes(model, "inputs_embeds"):
            raise InputError(
                f"tokens: got embeddings for {type(model).__name__}, which takes none; give it an image or a text"
            )
        if width is not None and values.shape[-1] != width:
            raise InputError(
                f"tokens: got shape {values.shape}, expected (N, {width}) or (B, N, {width}), the model's channels"
            )
        inputs = {"inputs_embeds": torch.from_numpy(values.reshape(-1, *values.shape[-2:]))}
    if count > positions(model):
        raise InputError(f"tokens: got {count}, expected at most {positions(model)}, the positions of the model")
    return inputs
