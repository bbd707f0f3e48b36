"""Models of noise that files hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from nlflow.denoising.noise.figures import OfFiles
from nlflow.denoising.noise.models.base import Noise
from nlflow.denoising.noise.names import kinds, model_class
from nlflow.errors import FileFormatError, InputError, check_path, shortened
from nlflow.store.encoding import decode


def load_noise(path: str | os.PathLike[str]) -> Noise:
    """Read a model of noise from a file.

    Parameters
    ----------
    path : path
        JSON as `Noise.save` writes it: an object with the ``kind`` and the fields of a model, such as
        ``{"kind": "gaussian", "sigma": 5}``. Fields that have a default may be left out.

    Returns
    -------
    Noise

    Raises
    ------
    FileFormatError
        For a file that cannot be read, is larger than 16 MiB, or holds no model.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from nlflow.denoising.noise import GaussianNoise, load_noise
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "noise.json"
    >>> GaussianNoise.from_kernel([[1, 2, 1]], sigma=5.0).save(path)
    >>> load_noise(path)
    GaussianNoise(5.0, spectrum of 1 x 64 x 64)
    """
    place = check_path("path", path)
    try:
        return noise_of(_content(place))
    except FileFormatError:
        raise
    except InputError as error:
        raise FileFormatError(f"{path}: {error}") from error


def noise_of(entry: Any) -> Noise:
    """Return the model that `Noise.as_dict` has written down.

    Raises
    ------
    InputError
        For anything else.
    """
    return _model(entry, "noise", OfFiles.deepest)


def _content(path: Path) -> Any:
    expected = "expected a model of noise in JSON, as Noise.save writes it"
    try:
        if not path.is_file():
            got = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise FileFormatError(f"{path}: got {got}, {expected}; check the name")
        with path.open("rb") as stream:
            content = stream.read(OfFiles.most_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: got {getattr(error, 'strerror', None) or error}, {expected}") from error
    if len(content) > OfFiles.most_bytes:
        raise FileFormatError(f"{path}: got more than {OfFiles.most_bytes // 2**20} MiB, {expected}; name another file")
    try:
        return decode(content.decode())
    except ValueError as error:
        got = f"what is no JSON ({shortened(error)})" if content else "an empty file"
        raise FileFormatError(f"{path}: got {got}, {expected}; write it again") from error


def _model(entry: Any, place: str, depth: int) -> Noise:
    """Return the model of a mapping that stands at `place` in a file."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{place}: got {shortened(repr(entry), 60)}, expected an object with a kind and its fields")
    if depth == 0:
        raise InputError(f"{place}: got models within models {OfFiles.deepest} deep, expected fewer")
    known = kinds()
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in known:
        got = "no kind" if kind is None else f"the kind {shortened(repr(kind), 60)}"
        raise InputError(f"{place}: got {got}, expected one of {', '.join(known)}")
    model = model_class(kind)
    named = {field.name: field for field in fields(model)}  # type: ignore[arg-type]  # all models are dataclasses
    for name in entry:
        if name != "kind" and name not in named:
            got, expected = shortened(repr(name), 60), ", ".join(named)
            raise InputError(f"{place}: got the field {got}, which {kind} does not have, expected {expected}")
    required = [name for name, one in named.items() if one.default is MISSING and one.default_factory is MISSING]
    if lost := [name for name in required if name not in entry]:
        raise InputError(f"{place}: got {kind} without {', '.join(lost)}, expected {', '.join(required)}")
    given = {name: _value(entry[name], f"{place}.{name}", depth) for name in entry if name != "kind"}
    for name, value in given.items():
        if isinstance(value, bool) != isinstance(named[name].default, bool):
            raise InputError(f"{place}.{name}: got {shortened(repr(value), 60)}, expected "
                             f"{'a number' if isinstance(value, bool) else 'true or false'}")  # fmt: skip
    try:
        return model(**given)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:  # of texts and nothing, where a model expects numbers
        raise InputError(f"{place}: got values that are no {kind} ({shortened(error)}), expected numbers") from error


def _value(value: Any, place: str, depth: int) -> Any:
    """Return the value of a field: models where they are written down, anything else as it is."""
    if isinstance(value, Mapping):
        return _model(value, place, depth - 1)
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return tuple(_model(item, f"{place}[{k}]", depth - 1) for k, item in enumerate(value))
    if _holds_truth(value):
        raise InputError(f"{place}: got true or false among its values, expected numbers")
    return value


def _holds_truth(value: Any) -> bool:
    """Tell whether a list holds booleans, which NumPy takes for numbers."""
    return isinstance(value, list) and any(isinstance(item, bool) or _holds_truth(item) for item in value)
