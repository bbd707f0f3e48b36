"""Descriptions that tell values apart."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from nlflow._array import is_tensor, to_numpy
from nlflow.store.encoding import digest, encode, tagged

_FORMERLY = {  # classes that have moved, and where what was kept before knows them
    "nlflow.denoising.noise.models.intensities.Poisson": "nlflow.denoising.noise.stabilizing.Poisson",
    "nlflow.flows.gradient.AttentionFlow": "nlflow.flows.linear.AttentionFlow",
    "nlflow.flows.gradient.GradientFlow": "nlflow.flows.linear.GradientFlow",
    "nlflow.flows.integrators.exponential.ETD2RK": "nlflow.flows.integrators.etd.ETD2RK",
    "nlflow.flows.integrators.exponential.ETD4RK": "nlflow.flows.integrators.etd.ETD4RK",
    "nlflow.flows.integrators.runge_kutta.Adaptive": "nlflow.flows.integrators.adaptive.Adaptive",
    "nlflow.flows.integrators.runge_kutta.Tolerances": "nlflow.flows.integrators.control.Tolerances",
    "nlflow.flows.kinetics.AllenCahn": "nlflow.flows.reactions.AllenCahn",
    "nlflow.flows.kinetics.FisherKPP": "nlflow.flows.reactions.FisherKPP",
    "nlflow.flows.sphere.GeodesicEuler": "nlflow.flows.sphere.steps.GeodesicEuler",
    "nlflow.flows.sphere.GeodesicMidpoint": "nlflow.flows.sphere.steps.GeodesicMidpoint",
    "nlflow.flows.sphere.LayerStep": "nlflow.flows.sphere.steps.LayerStep",
}
_KNOWN = ("nlflow", "builtins", "abc", "numpy", "typing", "torch")  # told apart by their versions, not their code


def described(value: Any) -> str:
    return encode(describe(value), indent=None)


def describe(value: Any) -> Any:
    """Return plain data that tells a value from others.

    Of functions, code, defaults and closure count, but not the globals that they use.
    """
    return _describe(value, ())


def _describe(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above:  # a function that calls itself, say
        return {"above": above[::-1].index(id(value))}
    inside = (*above, id(value))
    if isinstance(value, np.generic):
        plain = value.item()
        # Of types that Python lacks, such as longdouble, it is what it was.
        return {"repr": repr(plain)} if isinstance(plain, np.generic) else _describe(plain, inside)
    if is_tensor(value) and hasattr(value, "detach"):
        value = to_numpy(value)
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return {"array": list(value.shape), "dtype": str(value.dtype), "sha256": digest(data.tobytes())}
    if isinstance(value, Mapping):
        return {str(key): _describe(entry, inside) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(entry, inside) for entry in value]
    if isinstance(value, set | frozenset):  # in an order that no process changes
        return {"set": sorted((_describe(entry, inside) for entry in value), key=lambda one: encode(one))}
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
    state = [_code(function.__code__), tagged(given)]
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
    kind: Any = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    result: dict[str, Any] = {"type": _FORMERLY.get(name, name)}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
    else:
        kept = {n for c in kind.__mro__ for n, m in vars(c).items() if isinstance(m, functools.cached_property)}
        names = sorted(set(getattr(value, "__dict__", ())) - kept)
    if names:
        result["fields"] = {name: _describe(getattr(value, name), inside) for name in names}
    elif kind.__repr__ is not object.__repr__ or not hasattr(value, "__dict__"):
        # The repr of `object` says where one lies in memory: of what hides its state nothing else is known.
        result["repr"] = repr(value)
    own = [c for c in kind.__mro__ if c.__module__.split(".")[0] not in _KNOWN]
    methods = [_describe(m, inside) for c in own for m in vars(c).values() if isinstance(m, types.FunctionType)]
    if methods:
        result["sha256"] = digest(json.dumps(methods))
    return result
