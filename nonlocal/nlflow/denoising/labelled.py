"""Objects of pandas and xarray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.info import together
from nlflow.denoising.options import Options
from nlflow.domains.samples import is_ruled, rounded
from nlflow.errors import InputError

_NAMES: Final = {
    "X": ("x", "lon", "longitude", "col", "column"),
    "Y": ("y", "lat", "latitude", "row"),
    "Z": ("z", "depth", "height", "altitude", "level", "lev", "plane", "slice"),
    "T": ("t", "time", "frame"),
    "C": ("c", "channel", "band", "color", "colour", "rgb"),
}
_LETTERS: Final = {name: letter for letter, names in _NAMES.items() for name in names}


def letter_of(array: Any, name: Any) -> str:
    """Return the letter of a dimension by its ``axis`` (CF conventions) or its name, or ""."""
    said = array[name].attrs.get("axis") if name in array.coords else None
    return said if said in _NAMES else _LETTERS.get(str(name).lower(), "")


def is_labelled(image: Any) -> bool:
    return _kind(image) in ("Series", "DataFrame", "DataArray", "Dataset")


def _kind(image: Any) -> str:
    """Return the name of the class of pandas or xarray that an object is of; empty where it is of none."""
    packages = ("pandas", "xarray")
    return next((one.__name__ for one in type(image).__mro__ if one.__module__.partition(".")[0] in packages), "")


def denoised_labelled(
    denoise: Callable[..., Any], image: Any, sigma: Any, options: Options, words: dict[str, Any]
) -> Any:
    kind = _kind(image)
    if kind == "Dataset":
        return _of_dataset(denoise, image, sigma, options, words)
    if kind == "DataFrame" and words["axes"] is None and words["channel_axis"] is None:
        return _of_table(denoise, image, sigma, options, words)
    if kind == "DataFrame":
        dtypes = list(image.dtypes)
        if lost := [name for name, dtype in zip(image.columns, dtypes, strict=True) if not _is_number(dtype)]:
            raise InputError(f"image: got columns {listed(lost)} without numbers, expected numbers beside axes; leave "
                             "axes out, or the columns")  # fmt: skip
        values = np.stack([_floats(image.iloc[:, c]) for c in range(len(dtypes))], axis=1)
        result, info = _filled(denoise, values, sigma, options, words)
        return _with_columns(image, dict(enumerate(result.T))), info
    if not _is_number(image.dtype):
        raise InputError(f"image: got a {kind} of {image.dtype}, expected numbers; choose another, or convert it")
    if kind == "Series":
        result, info = _filled(denoise, _floats(image), sigma, options, words)
        return _typed(image, result), info
    letters = "".join(letter_of(image, name) for name in image.dims)
    told = words["axes"] is not None or words["channel_axis"] is not None
    if not told and 1 < len(letters) == image.ndim == len(set(letters)):
        words = {**words, "axes": letters}
    beside = {name: _beside(words[name], image.dims) for name in ("mask", "keep")}
    values = image.to_numpy()
    result, info = _filled(denoise, values, _beside(sigma, image.dims), options, {**words, **beside})
    found = image.copy(data=_back(result, values.dtype))
    return (found if image.chunks is None else found.chunk(image.chunksizes)), info


def _of_dataset(denoise: Callable[..., Any], image: Any, sigma: Any, options: Options, words: dict[str, Any]) -> Any:
    names = [name for name, one in image.data_vars.items() if _is_number(one.dtype) and one.ndim]
    if not names:
        raise InputError(f"image: got a Dataset of {listed(image.data_vars)} without numbers, expected some")
    found, infos = image.copy(), []
    for name in names:
        level = sigma[name] if isinstance(sigma, Mapping) else sigma
        found[name], info = denoised_labelled(denoise, image[name], level, options, words)
        infos.append(info)
    return found, infos[0] if len(infos) == 1 else together(infos)


def _of_table(denoise: Callable[..., Any], image: Any, sigma: Any, options: Options, words: dict[str, Any]) -> Any:
    columns = {c: _floats(image.iloc[:, c]) for c, dtype in enumerate(image.dtypes) if _is_number(dtype)}
    if not columns:
        raise InputError(f"image: got a DataFrame of columns without numbers ({listed(image.columns)}), expected at "
                         "least one of numbers; convert them")  # fmt: skip
    signals = [c for c, values in columns.items() if not is_ruled(values)] or list(columns)
    names = [image.columns[c] for c in signals]

    def own(value: Any) -> Any:
        """Return what an argument says of the columns that are denoised."""
        if _kind(value) == "DataFrame":
            return np.asarray(value[names])
        by_name = _kind(value) == "Series" and set(names) <= set(value.index)
        return [value[name] for name in names] if by_name or isinstance(value, Mapping) else value

    values = np.stack([columns[c] for c in signals], axis=1)
    words = {**words, "channel_axis": 1} | {name: own(words[name]) for name in ("mask", "keep")}
    result, info = _filled(denoise, values, own(sigma), replace(options, separate=True), words)
    return _with_columns(image, dict(zip(signals, result.T, strict=True))), info


def _filled(
    denoise: Callable[..., Any], values: NDArray[Any], sigma: Any, options: Options, words: dict[str, Any]
) -> Any:
    """Return result and info for an array; NaN that no mask is about are missing, and come back."""
    mask, lost = words["mask"], None
    if mask is None and values.dtype.kind == "f" and (lost := np.isnan(values)).any() and not lost.all():
        words = {**words, "mask": lost}
    result, info = denoise(values, sigma, options=options, preserve_range=True, return_info=True, **words)
    return (result if lost is None else np.where(lost, np.nan, result)), info


def _is_number(dtype: Any) -> bool:
    """Tell whether a type of NumPy, or one of pandas that knows missing numbers, is of numbers."""
    return getattr(dtype, "kind", "O") in "iuf"


def _floats(series: Any) -> NDArray[Any]:
    """Return a Series as an array of NumPy; of missing numbers NaN."""
    if isinstance(series.dtype, np.dtype):
        return np.asarray(series.to_numpy())
    return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))


def _back(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a result in a type of NumPy: integers are rounded."""
    return rounded(values, dtype) if dtype.kind in "iu" else values.astype(dtype)


def _typed(series: Any, values: NDArray[Any]) -> Any:
    """Return a Series of other values, with index, name, attributes and type."""
    dtype = series.dtype
    if isinstance(dtype, np.dtype):
        values = _back(values, dtype)
    elif dtype.kind in "iu":
        present = np.isfinite(values)
        values[present] = rounded(values[present], np.dtype(dtype.type))
    found = type(series)(values, index=series.index, name=series.name).astype(dtype)
    return found.__finalize__(series)


def _with_columns(image: Any, columns: Mapping[int, NDArray[Any]]) -> Any:
    """Return a DataFrame of which some columns, by their places, have other values."""
    found = image.copy()
    for place, values in columns.items():
        found.isetitem(place, _typed(image.iloc[:, place], np.array(values)))
    return found


def _beside(value: Any, dims: Iterable[Any]) -> Any:
    """Return an argument that belongs to a DataArray as an array, its axes in the order of that."""
    if _kind(value) != "DataArray":
        return value
    return value.transpose(*[name for name in dims if name in value.dims]).to_numpy()


def listed(names: Any) -> str:
    return ", ".join(map(repr, map(str, names)))
