"""The options of studies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np

from nlflow._array import to_numpy
from nlflow.backends.devices import CPU, DEVICES, DTYPES, choose_device
from nlflow.domains import Domain
from nlflow.domains.base import check_domain
from nlflow.errors import InputError, all_digits, check_array, check_choice, check_integer, check_number
from nlflow.functionals.metrics import METRICS
from nlflow.kernels import NAMED, ExpDotProduct, Formula, Gaussian, Kernel, RadialKernel
from nlflow.studies.contract import Kind, Options
from nlflow.studies.fits import FEWEST

INTEGRATORS = ("euler", "semi-implicit", "runge-kutta")
_BOUNDARIES = ("periodic", "reflect", "isolated")
_FORM = "gaussian:width=0.1, matern:width=0.1,nu=1.5, tophat:radius=0.1, dot:scale=1 or 'formula:1/(1+r**2),width=0.1'"
KERNELS: dict[str, Any] = {**NAMED, "formula": Formula}
"""What a text may name; of a formula its own text comes first."""
_WORDS = re.compile(r"(,\s*\w+\s*=(?!=)[^,()]*)*$")  # the parameters that follow it


def parse_kernel(text: str) -> Kernel:
    """Return the kernel of a text such as ``gaussian:width=0.1`` or ``formula:1/(1 + r**2),width=0.1``."""
    name, _, rest = text.strip().partition(":")
    kind = KERNELS.get(name.strip().lower())
    if kind is None:
        raise InputError(f"kernel: got {text!r}, expected one of {', '.join(KERNELS)}, as in {_FORM}")
    numbers = [f for f in dataclasses.fields(kind) if f.init and f.name != "k" and not f.name.endswith("_map")]
    known = [f.name for f in numbers]
    needed = [f.name for f in numbers if f.default is dataclasses.MISSING]
    values: dict[str, Any] = {}
    if kind is Formula:
        values["k"] = _WORDS.sub("", rest, count=1).strip()
        rest = rest.strip()[len(values["k"]) :].strip()
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = None
        if key not in known or key in values or number is None or (key == "definite" and number not in (0, 1)):
            raise InputError(
                f"kernel: got {part!r} in {text!r}, expected NAME=NUMBER, once each, of {', '.join(known)}"
            )
        whole = bool if key == "definite" else int  # what counts has no decimals
        values[key] = whole(number) if number.is_integer() else number
    if missing := [key for key in needed if key not in values]:
        raise InputError(f"kernel: got {text!r}, expected a value for {', '.join(missing)} as well, as in {_FORM}")
    return kind(**values)


def kernel_label(kernel: Kernel) -> str:
    for name, kind in KERNELS.items():
        if type(kernel) is kind and all(getattr(kernel, f"{side}_map", None) is None for side in ("query", "key")):
            values = {
                f.name: getattr(kernel, f.name)
                for f in dataclasses.fields(kernel)
                if f.init and f.default != getattr(kernel, f.name)
            }
            text = values.pop("k", None)
            if text is not None and not isinstance(text, str):  # a function
                break
            shown = [f"{key}={all_digits(value)}" for key, value in values.items()]
            return ":".join(filter(None, (name, ",".join([text, *shown] if text else shown))))
    return " ".join(repr(kernel).split())


def _kernel(name: str, value: Any) -> Kernel:
    if isinstance(value, str):
        return parse_kernel(value)
    if not isinstance(value, Kernel):
        raise InputError(f"{name}: got {type(value).__name__}, expected a Kernel or a text such as {_FORM}")
    return value


def _integrator(name: str, value: Any) -> Any:
    # A user's own: a function of the step, or a class that takes it as its first argument.
    return value if callable(value) else check_choice(name, value, INTEGRATORS)


def _start(name: str, value: Any) -> Any:
    return value if callable(value) else _array(name, value)


def _array(name: str, value: Any) -> Any:
    return np.asarray(to_numpy(check_array(name, value)), dtype=np.float64)


def _tokens(name: str, value: Any) -> Any:
    return _array(name, check_array(name, value, ndim=(1, 2), hint="give one row for each token"))


def _domain(name: str, value: Any) -> Domain:
    return check_domain(value, name)


def _origin(name: str, value: Any) -> Any:
    array = check_array(name, value, ndim=(0, 1, 2))
    return check_integer(name, value, minimum=0) if array.ndim == 0 else _array(name, array)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "kernel": _kernel,
    "nodes": partial(check_integer, minimum=2),
    "dimension": partial(check_integer, minimum=1),
    "boundary": partial(check_choice, choices=_BOUNDARIES),
    "channels": partial(check_integer, minimum=1),
    "fidelity": partial(check_number, minimum=0),
    "metric": partial(check_choice, choices=METRICS),
    "integrator": _integrator,
    "dt": partial(check_number, minimum=0, strict=True),
    "t": partial(check_number, minimum=0, strict=True),
    "seeds": partial(check_integer, minimum=1),
    "device": partial(check_choice, choices=DEVICES),
    "dtype": partial(check_choice, choices=DTYPES),
    "laziness": partial(check_number, minimum=0, below=1),
    "eps": partial(check_number, minimum=0, strict=True, below=1, hint="give a distance of total variation"),
    "domain": _domain,
    "start": _start,
    "origin": _origin,
    "keys": _tokens,
    "queries": _tokens,
    "values": _tokens,
}
_LISTS = ("kernel", "nodes", "dimension", "boundary", "channels", "fidelity", "metric", "integrator", "dt")


def _checked(name: str, value: Any) -> Any:
    check = _CHECKS[name]
    if name not in _LISTS:
        return check(name, value)
    many = isinstance(value, list | tuple | set | range) or (isinstance(value, np.ndarray) and value.ndim == 1)
    entries = [check(name, entry) for entry in (value if many else [value])]
    if not entries:
        raise InputError(f"{name}: got an empty list, expected at least one value")
    kept: list[Any] = []
    for entry in entries:  # once each; kernels need not be hashable
        if not any(entry is other or (type(entry) is type(other) and entry == other) for other in kept):
            kept.append(entry)
    return kept


def read_options(kind: Kind, given: Mapping[str, Any]) -> Options:
    for name in given:
        if name not in kind.defaults:
            near = get_close_matches(name, kind.defaults, 1)
            has = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(kind.defaults)}"
            if name in ("device", "dtype"):
                has = f": it {'runs on the CPU' if name == 'device' else 'computes in float64'}; leave it out"
            raise InputError(f"{name}: the study {kind.name!r} has no such option{has}")
    given = {name: value for name, value in given.items() if value is not None}
    wanted = {**kind.defaults, **given}
    options = {name: None if value is None else _checked(name, value) for name, value in wanted.items()}
    _combine(kind, options, given)
    kind.check(options, given)
    if "device" in options:
        options["device"] = _device(options)
    return options


def _device(options: Options) -> Any:
    """Return the device that a name stands for; ``auto`` is the CPU where tensors do not serve all kernels."""
    name = options["device"]
    if name == "cpu":
        return CPU
    for kernel in options["kernel"]:
        maps = (getattr(kernel, f"{side}_map", None) for side in ("query", "key"))
        known = type(kernel) in NAMED.values() and all(entry is None for entry in maps)
        if known and (options.get("keys") is not None or not kernel.positional):
            continue
        if name == "auto":
            return CPU
        why = "compares node positions" if known else "is computed in NumPy"
        raise InputError(
            f"device: got {name!r} for the kernel {kernel_label(kernel)}, which {why}, expected 'cpu' or 'auto': "
            "tensors serve kernels of features; give keys, or the kernel dot"
        )
    return choose_device(name)


def _combine(kind: Kind, options: Options, given: Mapping[str, Any]) -> None:
    """Hold options against each other, and drop those that an array or a domain takes the place of."""
    tokens = "keys" in given
    for name in ("queries", "values"):
        if name in given and not tokens:
            raise InputError(f"{name}: got an array without keys, expected both; give keys as well")
        if name in given and len(options[name]) != len(options["keys"]):
            raise InputError(
                f"{name}: got {len(options[name])} rows, expected {len(options['keys'])}, one for each key"
            )
    if "values" in given and "start" in given:
        raise InputError("start: got it beside values, expected one of them: values are the signal")
    for name in ("values", "start"):
        if name in given and "channels" in given:
            raise InputError(f"channels: got them beside {name}, which has its own; leave them out")
        if name in given and "channels" in options:
            options["channels"] = None
    if tokens and "kernel" not in given:
        options["kernel"] = [ExpDotProduct()]
    if "queries" in given and "metric" in options and "metric" not in given:
        options["metric"] = ["degree"]  # the flow by P itself, as attention does
    source = "keys" if tokens else "domain"
    if source in given and not (tokens and kind.name == "monte-carlo"):
        for name in ("nodes", "dimension", "boundary"):
            if name in given:
                raise InputError(f"{name}: got it beside {source}, which fixes the nodes; leave it out")
            if name in options:
                options[name] = None


GRID: Options = {
    "kernel": [Gaussian(0.1)],
    "nodes": [64],
    "dimension": [1],
    "boundary": ["periodic"],
    "channels": [1],
}
"""Defaults of the kinds whose cases lie on a grid."""

DEVICE: Options = {"device": "cpu"}
"""Where averages by kernels of features are computed."""

OWN: Options = dict.fromkeys(("domain", "start", "keys", "queries", "values"))
"""What users give in place of a grid and its signal."""


def check_sizes(name: str, values: Sequence[Any]) -> None:
    if len(values) < FEWEST:
        raise InputError(
            f"{name}: got {len(values)} different value(s), expected at least {FEWEST} to fit a line through; give more"
        )


def check_continuum(options: Options) -> None:
    for kernel in options["kernel"]:
        if not isinstance(kernel, RadialKernel):
            raise InputError(
                f"kernel: got {type(kernel).__name__}, expected a radial kernel of node positions such as "
                "Gaussian(0.1): only of these averages of the continuum are integrated"
            )
    if max(options["dimension"]) > 2:
        raise InputError(
            f"dimension: got {max(options['dimension'])}, expected 1 or 2: averages of the continuum are integrated on "
            "lines and in planes"
        )
    if options["start"] is not None and not callable(options["start"]):
        raise InputError("start: got an array, expected a function of positions (M, m), which any grid can sample")
