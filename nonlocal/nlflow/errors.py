"""Exceptions, and checks, which raise `InputError` naming an argument."""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nlflow._looks import assure, is_tensor
from nlflow._words import all_digits, command, format_bytes, install_command, quoted, shortened, shown, visible
from nlflow._words import kind_of as kind_of
from nlflow._words import listed as listed

__all__ = [
    "FileFormatError", "InputError", "KeywordError", "MemoryLimitError", "MissingPackageError", "NlflowError",
    "NlflowWarning", "NumericalError", "StabilityError", "WorkerError", "all_digits", "check_array", "check_choice",
    "check_detached", "check_floats", "check_integer", "check_memory", "check_number", "checked_call", "command",
    "format_bytes", "install_command", "memory_limit", "physical_memory", "quoted", "shortened", "visible",
    "warn_caller",
]  # fmt: skip

Item = TypeVar("Item", bound=Callable[..., Any])

_NAME = 255  # bytes: the longest name of a file
_FIDELITY = ("fidelity",)
_WIDTH = ("width", "gamma = 1 / (2 width^2)")
_NAMED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "kernel": ("affinity",),
    "graph": ("affinity",),
    "lam": _FIDELITY,
    "lamda": _FIDELITY,
    "lambda_": _FIDELITY,
    "lmbda": _FIDELITY,
    "strength": _FIDELITY,
    "k": ("n_clusters", "n_neighbors", "neighbours"),
    "neighbours": ("n_neighbors",),
    "sigma": _WIDTH,
    "bandwidth": _WIDTH,
    "width": _WIDTH,
    "rtol": ("tol",),
    "maxiter": ("max_iter",),
    "n_iter": ("max_iter", "maxiter"),
    "multichannel": ("channel_axis=-1",),  # of earlier versions of scikit-image
}
"""What others call an argument, and its names here, each with what to pass where that is not the same number."""


class NlflowError(Exception):
    """Base class of the errors of nlflow."""

    def __str__(self) -> str:
        return visible(super().__str__(), keep="\n\t")


class InputError(NlflowError, ValueError):
    """An argument has a value, shape or type that cannot be used."""


class KeywordError(InputError, TypeError):
    """A function or class was called with an argument that it does not have, or with too many."""


class MissingPackageError(InputError, ImportError):
    """A package that an extra brings is not installed."""


class StabilityError(InputError):
    """A time step (or fidelity) lies outside the stable range of its integrator."""


class NumericalError(NlflowError, ArithmeticError):
    """A result cannot be represented, or was not reached to the accuracy asked for."""


class MemoryLimitError(NlflowError, MemoryError):
    """An allocation would pass the memory limit."""

    what = remedy = ""
    needed = kept = 0  # bytes, and those of them that stay


class FileFormatError(NlflowError, ValueError):
    """A file cannot be read or written as asked."""


class WorkerError(NlflowError, RuntimeError):
    """Worker processes have died."""


class NlflowWarning(UserWarning):
    """An argument was adapted, or a result is to be read with care."""

    def __str__(self) -> str:
        return visible(super().__str__(), keep="\n\t")


# Decorators, properties and pipelines are of the others.
_BETWEEN = frozenset({__name__.partition(".")[0], "numpy", "torch", "contextlib", "functools", "sklearn", "joblib"})


def warn_caller(message: str | Warning, kind: type[Warning] = NlflowWarning) -> None:
    """Warn of the line that called this package; a message that is a `Warning` keeps its class."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)  # noqa: TID251 - the one home


def is_number(value: object) -> bool:
    """Tell whether a value is meant as one number, or, where it has entries, as an array."""
    # Classes, whose shape is a descriptor, are refused as numbers.
    return isinstance(value, type) or (not isinstance(value, list | tuple) and tuple(getattr(value, "shape", ())) == ())


def _has_axes(value: Any) -> bool:
    return not isinstance(value, type) and getattr(value, "ndim", 0) > 0


def is_function(value: object) -> bool:
    """Tell whether a value can be called; a class is none, as it makes something of what it is called with."""
    return callable(value) and not isinstance(value, type)


def not_installed(what: str, package: str, extra: str, otherwise: str = "") -> MissingPackageError:
    return MissingPackageError(f"{what} needs {package}, which is not installed; {install_command(extra)}{otherwise}")


def checked_call(item: Item, more: Iterable[str] = ()) -> Item:
    """Let a function or class without ``*args`` refuse unknown or too many arguments, and flags that are none."""
    function: Callable[..., Any] = item.__init__ if isinstance(item, type) else item  # type: ignore[misc]
    own = int(isinstance(item, type))  # self, which no caller names
    parameters = list(inspect.signature(function).parameters.values())[own:]
    named = [one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    possible = {one.name: one.kind is not inspect.Parameter.KEYWORD_ONLY for one in named} | dict.fromkeys(more, False)
    most = own + sum(possible.values())
    flags = [(one.name, own + place) for place, one in enumerate(named) if one.annotation in ("bool", bool)]

    @wraps(function)
    def checked(*args: Any, **words: Any) -> Any:
        if len(args) > most or not words.keys() <= possible.keys():
            raise KeywordError(f"{item.__name__}: {_misnamed(possible, words, len(args) - own)}")
        for name, place in flags:
            if name in words or place < len(args):
                check_flag(name, words[name] if name in words else args[place])
        return function(*args, **words)

    if not isinstance(item, type):
        return checked  # type: ignore[return-value]
    item.__init__ = checked  # type: ignore[misc]
    return item


def _misnamed(possible: dict[str, bool], words: dict[str, Any], given: int) -> str:
    """Return what is wrong in a call; `possible` says of each argument whether it may come without a name."""
    unknown = next((word for word in words if word not in possible), None)
    if unknown is not None:
        same = [name for name in _NAMED_ELSEWHERE.get(unknown, ()) if name.replace("=", " ").split()[0] in possible]
        near = same or get_close_matches(unknown, possible, 1)
        remedy = (
            f"did you mean {' or '.join(near)}? Expected one of: " if near else "leave it out, or take one of these: "
        )
        return f"got an argument {unknown!r}; {remedy}{', '.join(possible)}"
    first = [name for name, unnamed in possible.items() if unnamed]
    expected = f"at most {len(first)} ({', '.join(first)})" if first else "none"
    others = ", ".join(f"{name}=" for name, unnamed in possible.items() if not unnamed)
    remedy = f"give others by name: {others}" if others else "leave the others out"
    return f"got {given} arguments without a name, expected {expected}; {remedy}"


def check_detached(name: str, value: Any) -> None:
    """Raise `InputError` for a tensor that requires a gradient, or a list with one."""
    if isinstance(value, list | tuple):
        for entry in value:
            check_detached(name, entry)
    elif getattr(value, "requires_grad", None) is True and sys.modules["torch"].is_grad_enabled():
        raise InputError(
            f"{name}: got a tensor that requires a gradient, expected numbers without one: nothing is differentiated "
            "with respect to it; detach it"
        )


def check_number(
    name: str, value: Any, *, minimum: float = -math.inf, strict: bool = False, below: float = math.inf,
    finite: bool = True, hint: str = "",
) -> float:  # fmt: skip
    """Return a float; booleans, strings and complex numbers are refused, and infinities where it has to be `finite`.

    It is at least `minimum`, or above it when `strict`, and below `below`; `hint` ends the message.
    """
    bound = ""
    if minimum > -math.inf:
        bound = f" {'>' if strict else '>='} {minimum:g}"
    if below < math.inf:
        bound += f"{' and' if bound else ''} < {below:g}"
    expected = f"expected a {'finite ' if finite else ''}real number{bound}"
    tail = f"; {hint}" if hint else ""
    check_detached(name, value)
    # NumPy and torch scalars name what they are in their dtype.
    named = str(getattr(value, "dtype", ""))
    wrong = isinstance(value, bool | str | bytes | complex) or value is None or value is np.ma.masked
    if wrong or "bool" in named or "complex" in named or _has_axes(value):
        raise InputError(f"{name}: got {shown(value)}, {expected}{tail}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name}: got {shown(value)}, {expected}{tail}") from error
    inside = minimum < number or (number == minimum and not strict)
    if not inside or (finite and math.isinf(number)) or (below < math.inf and number >= below):
        raise InputError(f"{name}: got {shown(value)}, {expected}{tail}")
    return number


def check_seed(name: str, value: Any) -> int:
    seed = check_integer(name, value)
    if seed < 0:
        raise InputError(f"{name}: got {shown(value)}, expected an integer >= 0")
    return seed


def check_integer(
    name: str, value: Any, *, minimum: int | None = None, below: int = sys.maxsize, odd: bool = False, hint: str = ""
) -> int:
    check_detached(name, value)
    words = f"expected an {'odd ' if odd else ''}integer" + (f" >= {minimum}" if minimum is not None else "")
    tail = f"; {hint}" if hint else ""
    wrong = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or _has_axes(value)
    try:
        number = None if wrong else value.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None or (minimum is not None and number < minimum) or (odd and number % 2 == 0):
        raise InputError(f"{name}: got {shown(value)}, {words}{tail}")
    if minimum is not None and number >= below:
        most = "2^63 - 1" if below == sys.maxsize else below
        raise InputError(f"{name}: got {shown(value)}, {words} that is below {most}{tail}")
    return int(number)


def check_range(name: str, given: Any, *, hint: str = "") -> tuple[float, float]:
    try:
        low, high = given
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: got {shortened(repr(given))}, expected a pair (low, high)") from error
    low, high = check_number(name, low), check_number(name, high)
    if not low < high or not math.isfinite(high - low):
        raise InputError(f"{name}: got ({low:g}, {high:g}), expected low < high{hint}")
    return low, high


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name}: got {shown(value)}, expected one of {', '.join(map(repr, choices))}")
    return value


def check_generator(rng: Any) -> np.random.Generator:
    check_detached("rng", rng)
    expected = "expected a seed >= 0 or a numpy.random.Generator"
    if isinstance(rng, bool | np.bool_ | np.matrix):  # of which the first pass for 0 and 1, and the last never ends
        raise InputError(f"rng: got {shown(rng)}, {expected}")
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"rng: got {shown(rng)}, {expected} ({shortened(error)})") from error


def as_numpy(
    name: str, value: Any, expected: str = "expected a real numeric array", otherwise: str = ""
) -> NDArray[Any]:
    """Return what NumPy makes of a value that is no tensor."""
    check_unmasked(name, value, otherwise)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        uneven = isinstance(error, ValueError) and isinstance(value, list | tuple)
        why = f"; the {type(value).__name__} has parts of uneven lengths" if uneven else ""
        raise InputError(f"{name}: got {shown(value)}, {expected}{why}") from error


def check_array(
    name: str, value: Any, *, ndim: int | tuple[int, ...] | None = None, hint: str = "", missing: str = ""
) -> Any:
    """Return an array of finite floats; tensors stay tensors.

    float32 and float64 are kept and shorter floats become float32. All else becomes float64, of tensors it is refused.
    """
    tail = f"; {hint}" if hint else ""
    otherwise = f", or {missing}" if missing else ""
    if isinstance(value, os.PathLike) or (isinstance(value, str) and Path(value).suffix):
        raise InputError(
            f"{name}: got the name of a file, {shown(value)}, expected a real numeric array; read the file first, for "
            "instance with skimage.io.imread, or use the command nonlocal"
        )
    if value is None or isinstance(value, bool | np.bool_):
        raise InputError(f"{name}: got {value}, expected a real numeric array{tail}")
    foreign = is_tensor(value)
    if foreign:
        check_tensor(name, value)
    array: Any = value if foreign else as_numpy(name, value, f"expected a real numeric array{tail}", otherwise)
    if not foreign:
        if array.dtype.kind == "c":
            raise InputError(f"{name}: got complex values ({array.dtype}), expected real ones; pass .real or abs()")
        if array.dtype.kind not in "biuf":
            raise InputError(f"{name}: got dtype {array.dtype}, expected a real numeric array{tail}")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.kind in "biu":
            array = array.astype(np.float64)
        elif array.dtype == np.float16:
            array = array.astype(np.float32)
        elif array.dtype.itemsize > 8:
            array = array.astype(np.float64)
    elif not array.is_floating_point():
        raise InputError(f"{name}: got a torch tensor of dtype {array.dtype}, expected a floating-point one{tail}")
    elif array.element_size() < 4:
        array = array.float()
    array = array.resolve_neg() if foreign else array  # a view that is -x, as the imaginary part of a conjugate is
    if ndim is not None:
        allowed = (ndim,) if isinstance(ndim, int) else ndim
        if array.ndim not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise InputError(
                f"{name}: got {array.ndim} dimension(s) (shape {tuple(array.shape)}), expected {wanted}{tail}"
            )
    if 0 in tuple(array.shape):
        raise InputError(
            f"{name}: got an empty array of shape {tuple(array.shape)}, expected at least one element{tail}"
        )

    def look() -> None:
        finite = array.isfinite() if foreign else np.isfinite(array)
        if not bool(finite.all()):
            raise InputError(
                f"{name}: got {int((~finite).sum())} NaN or infinite value(s){_first(~finite)}, expected finite ones; "
                f"replace them first{otherwise}"
            )

    if foreign:
        assure(array.detach().sum().isfinite(), look)  # one pass: no infinity and no NaN leaves a sum finite
    else:
        look()
    return array


def check_numpy(
    name: str, value: Any, *, remedy: str = "; convert it (.cpu().numpy())", **options: Any
) -> NDArray[Any]:
    """Return what `check_array` does, but for tensors."""
    array = check_array(name, value, **options)
    if not isinstance(array, np.ndarray):
        raise InputError(f"{name}: got {kind_of(array)}, expected a NumPy array{remedy}")
    return array


def check_unmasked(name: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{name}: got a masked array, expected a plain one; fill it{otherwise}")


def check_tensor(name: str, tensor: Any) -> None:
    check_dense(name, tensor)
    if tensor.is_quantized:
        raise InputError(f"{name}: got a quantized tensor of {tensor.dtype}, expected floats; use .dequantize()")
    if tensor.is_floating_point() and tensor.element_size() == 1:
        raise InputError(f"{name}: got {tensor.dtype}, whose two or three digits no average keeps, expected float32 or "
                         "float64; convert it with .float()")  # fmt: skip
    check_filled(name, tensor)
    if tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
        raise InputError(
            f"{name}: a CUDA graph is being captured, which holds nothing that the host waits for, as checks of input "
            "and choices of steps do; call this before or after the capture"
        )


def check_filled(name: str, tensor: Any) -> None:
    if tensor.is_meta:
        raise InputError(
            f"{name}: it is on meta, where tensors have shapes and no values, expected a tensor on cpu or cuda; "
            "load or make the values first"
        )


def check_dense(name: str, tensor: Any) -> None:
    if tensor.is_nested:
        raise InputError(
            f"{name}: got a nested tensor, expected one of a single shape; pad it (torch.nested.to_padded_tensor) and "
            "say by a mask what is there, or give its parts one by one"
        )
    if str(tensor.layout) != "torch.strided":
        raise InputError(f"{name}: got a tensor of layout {tensor.layout}, expected a dense one; use .to_dense()")


def check_floats(name: str, value: Any, **options: Any) -> NDArray[np.float64]:
    """Return a new array in float64."""
    check_detached(name, value)
    array = check_array(name, value, **options)
    return np.array(array.detach().cpu().numpy() if hasattr(array, "detach") else array, dtype=np.float64)


def check_increasing(
    name: str, value: Any, what: str = "numbers", *, least: int = 1, minimum: float = -math.inf, strict: bool = False
) -> NDArray[np.float64]:
    found = check_floats(name, value, ndim=1)
    below = found[0] <= minimum if strict else found[0] < minimum
    if len(found) < least or below or np.any(np.diff(found) <= 0):
        several = f"at least {least} " if least > 1 else ""
        bound = f" {'>' if strict else '>='} {minimum:g}" if minimum > -math.inf else ""
        raise InputError(f"{name}: got {found.tolist()[:6]}, expected {several}increasing {what}{bound}")
    return found


def _first(wrong: Any) -> str:
    try:
        index = wrong.ravel().nonzero()
    except InputError:  # of nodes that are shared out among processes nobody knows the first
        return ""
    number = int(index[0][0])
    if wrong.ndim < 2:
        return f" (the first at index {number})" if wrong.ndim else ""
    return f" (the first at index {tuple(int(i) for i in np.unravel_index(number, tuple(wrong.shape)))})"


def memory_limit() -> int:
    """Return the default limit of one affinity in bytes: half of the memory, or ``NLFLOW_MEMORY_LIMIT`` (bytes)."""
    given = os.environ.get("NLFLOW_MEMORY_LIMIT")
    if given is not None:
        try:
            return int(check_number("NLFLOW_MEMORY_LIMIT", float(given), minimum=1))
        except ValueError as error:
            raise InputError(f"NLFLOW_MEMORY_LIMIT: got {given!r}, expected a number of bytes >= 1") from error
    return (physical_memory() or 2**34) // 2  # where it is unknown: a size that most machines have


def physical_memory() -> int | None:
    if hasattr(os, "sysconf"):
        try:
            page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
            return page * pages if min(page, pages) > 0 else None  # -1 where there is no answer
        except (OSError, ValueError):
            return None
    return _memory_of_windows()


def _memory_of_windows() -> int | None:
    import ctypes

    kernel: Any = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    if kernel is None:
        return None
    # MEMORYSTATUSEX: two numbers of 32 bits, the first of them its own length, and seven of 64, the first the memory.
    status = (ctypes.c_uint64 * 8)(64)
    return int(status[1]) if kernel.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def check_memory(what: str, needed: int, remedy: str, limit: float | None = None, *, kept: int | None = None) -> None:
    """Raise `MemoryLimitError` if more bytes are `needed`, of which some are `kept`, than the limit."""
    allowed = memory_limit() if limit is None else check_number("memory_limit", limit, minimum=1, finite=False)
    if needed > allowed:
        error = MemoryLimitError(
            f"{what} needs {format_bytes(needed)} ({needed} bytes), the limit is {format_bytes(allowed)}; {remedy}"
        )
        error.what, error.remedy, error.needed = what, remedy, needed
        error.kept = needed if kept is None else kept
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: a cycle would keep the arrays of all callers in memory


@contextmanager
def renamed(inner: str, name: str) -> Iterator[None]:
    """Let an error about an inner argument name that of the function, or of the command, that was called."""
    try:
        yield
    except (InputError, FileFormatError) as error:
        if not str(error).startswith(f"{inner}: "):
            raise
        raise type(error)(f"{name}: {str(error).removeprefix(f'{inner}: ')}") from error


@contextmanager
def remedied(name: str, remedy: str) -> Iterator[None]:
    """Let a `MemoryLimitError` name the argument, and give the advice, of the function that was called."""
    try:
        yield
    except MemoryLimitError as error:
        if not error.remedy:
            raise
        told = MemoryLimitError(f"{name}: {str(error).removesuffix(error.remedy)}{remedy}")
        told.what, told.remedy, told.needed, told.kept = error.what, remedy, error.needed, error.kept
        raise told from None


def check_flag(name: str, value: Any, otherwise: str = "") -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name}: got {shown(value)}, expected True or False{otherwise}")
    return bool(value)


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}: got {shown(value)}, expected text")
    return value


def check_path(name: str, value: Any) -> Path:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    try:
        fits = isinstance(path, str) and len(path) > 0 and max(len(os.fsencode(p)) for p in path.split("/")) <= _NAME
    except UnicodeEncodeError:  # half of a pair of letters
        fits = False
    if not isinstance(path, str) or not fits or "\0" in path:
        raise InputError(f"{name}: got {shown(value)}, expected the path of a file; give a str or a pathlib.Path")
    return Path(path)


def file_error(path: Path, got: str, expected: str, remedy: str) -> FileFormatError:
    return FileFormatError(f"{path}: got {got}, expected {expected}; {remedy}")
