"""What options are, in JSON: plain values as they are, arrays and objects by their type and a digest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["decode", "describe", "digest", "encode"]

_KNOWN = ("nlflow", "builtins", "abc", "numpy", "typing", "torch")  # told apart by their versions, not their code
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> str:
    """Return plain data as JSON text from which `decode` gets every float back to the last bit."""
    return json.dumps(_tagged(value), allow_nan=False, indent=1)


def decode(text: str) -> Any:
    """Return what `encode` was given.

    Raises
    ------
    ValueError
        For text that is no JSON, a truncated file for instance.
    """
    return json.loads(text, object_hook=lambda entry: _FLOATS[entry["float"]] if set(entry) == {"float"} else entry)


def _tagged(value: Any) -> Any:
    """Return `value` in JSON's types, NaN and infinities, which JSON lacks, as {"float": "nan"}."""
    if isinstance(value, Mapping):
        return {str(key): _tagged(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(entry) for entry in value]
    if isinstance(value, np.generic):
        return _tagged(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def describe(value: Any) -> Any:
    """Return what an option is, in plain data that is equal for equal options in every process.

    Arrays: shape, dtype and SHA-256. Functions: name and SHA-256 of code, defaults and closure (not of the global names
    that they use). Other objects: type and fields, for classes of users with the SHA-256 of their methods.
    """
    return _describe(value, ())


def _describe(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above:  # a function that calls itself, say
        return {"above": above[::-1].index(id(value))}
    inside = (*above, id(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return {"array": list(value.shape), "dtype": str(value.dtype), "sha256": digest(data.tobytes())}
    if isinstance(value, Mapping):
        return {str(key): _describe(entry, inside) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(entry, inside) for entry in value]
    if isinstance(value, functools.partial):
        return {"partial": _describe([value.func, value.args, value.keywords], inside)}
    if isinstance(value, type | types.ModuleType):
        return {"name": getattr(value, "__qualname__", value.__name__)}
    if isinstance(value, types.MethodType):
        return _describe([value.__func__, value.__self__], inside)
    if isinstance(value, types.FunctionType):
        return _describe_function(value, inside)
    return _describe_object(value, inside)


def _describe_function(function: types.FunctionType, inside: tuple[int, ...]) -> dict[str, Any]:
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    given = _describe([function.__defaults__, function.__kwdefaults__, closure], inside)
    state = [_code(function.__code__), _tagged(given)]
    return {"function": f"{function.__module__}.{function.__qualname__}", "sha256": digest(json.dumps(state))}


def _code(code: types.CodeType) -> list[Any]:
    constants = [
        _code(constant)
        if isinstance(constant, types.CodeType)
        # The order of a set of strings changes from process to process.
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _describe_object(value: Any, inside: tuple[int, ...]) -> dict[str, Any]:
    kind = type(value)
    result: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}"}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = sorted(getattr(value, "__dict__", ()))
    if names:
        result["fields"] = {name: _describe(getattr(value, name), inside) for name in names}
    else:
        result["repr"] = repr(value)
    own = [c for c in kind.__mro__ if c.__module__.split(".")[0] not in _KNOWN]
    methods = [_describe(m, inside) for c in own for m in vars(c).values() if isinstance(m, types.FunctionType)]
    if methods:
        result["sha256"] = digest(json.dumps(methods))
    return result
