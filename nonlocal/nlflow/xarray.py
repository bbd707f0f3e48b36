"""DataArrays of xarray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow.affinities import affinity
from nlflow.denoising import denoise
from nlflow.denoising.columns import each_item
from nlflow.denoising.labelled import letter_of, listed
from nlflow.denoising.large import denoise_array
from nlflow.denoising.layout import shape_of
from nlflow.denoising.options import Options
from nlflow.denoising.runs import check_progress
from nlflow.domains import Grid
from nlflow.domains.grid import Boundary
from nlflow.errors import InputError, check_choice, check_flag, check_increasing, check_number
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.result import need_xarray
from nlflow.flows.solver import solve
from nlflow.functionals.energies import E, J
from nlflow.kernels import Kernel

xarray = need_xarray("nlflow.xarray")

_NAMED = ("channel_axis", "axes", "preserve_range")  # of `denoise`, which names and units stand for
_ROUNDINGS = 8  # of a position: what computes evenly spaced numbers, and stores them, rounds a few times


@dataclass(frozen=True)
class _Axes:
    """Which dimensions are what: those of single images, of one image with its letters, of its channels."""

    items: tuple[str, ...]
    image: tuple[str, ...]
    letters: str
    channel: str | None

    @property
    def all(self) -> tuple[str, ...]:
        """All dimensions, in the order in which images are denoised."""
        return (*self.items, *self.image, *self.channels)

    @property
    def channels(self) -> tuple[str, ...]:
        return () if self.channel is None else (self.channel,)


@xarray.register_dataarray_accessor("nlflow")
class Accessor:
    """Denoising and flows of a DataArray by the names of its dimensions, as ``array.nlflow``.

    It is there after ``import nlflow.xarray``; needs the extra ``xarray``.

    Examples
    --------
    >>> import numpy as np, xarray
    >>> import nlflow.xarray
    >>> rng = np.random.default_rng(0)
    >>> scans = xarray.DataArray(
    ...     rng.normal(0, 1, (2, 24, 32)), dims=("scan", "y", "x"), attrs={"units": "K"}, name="warmth"
    ... )
    >>> calm = scans.nlflow.denoise(1.0, dims=("y", "x"), quality="fast")  # each scan by itself
    >>> calm.dims, calm.attrs, calm.name, bool(calm.std() < 0.2)
    (('scan', 'y', 'x'), {'units': 'K'}, 'warmth', True)
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    def denoise(
        self,
        sigma: Any = None,
        *,
        dims: str | Sequence[str] | None = None,
        channel_dim: str | None = None,
        quality: str = "balanced",
        noise: Any = "auto",
        mask: Any = None,
        keep: Any = None,
        spacing: Any = None,
        return_info: bool = False,
        progress: Any = False,
        options: Options | None = None,
        **more: Any,
    ) -> Any:
        """Denoise; see `nlflow.denoise`.

        Parameters
        ----------
        sigma : float, sequence or DataArray, optional
            In the units of the array: one number, a number for each channel, or a DataArray over some of the
            dimensions.
        dims : str or sequence of str, optional
            The one to three dimensions of a signal, image or volume; time and two others make a clip. Along the
            others, but `channel_dim`, images are denoised one by one. By default all dimensions: one with any name, or
            two or three that are known to be x, y and z by their names or by the attribute ``axis`` of their
            coordinates.
        channel_dim : str, optional
            That of colours or channels; without `dims` by default the first with a name such as ``channel`` or
            ``band``.
        quality, noise
            As `nlflow.denoise`.
        mask, keep : DataArray of bool, optional
            Over some of the dimensions: samples that are missing, or kept. With ``mask='nan'`` all that is not finite
            is missing.
        spacing : {'coordinates'} or mapping of str to float, optional
            Distances of samples along the axes of a volume, in one unit: the steps of the coordinates, or numbers by
            the names of dimensions, 1 for those that are not named. Equal by default.
        return_info : bool
            Return ``(result, info)``; of several images, ``info.columns`` has one for each, in C order.
        progress, options, **more
            As `nlflow.denoise` (for a chunked array `nlflow.denoising.large.denoise_array`).

        Returns
        -------
        DataArray
            With the dimensions, coordinates, attributes and name of the array, in its units: integers become floats and
            are not scaled. Chunked arrays stay lazy; what depends on the whole image, such as the noise, is
            computed at once.

        Raises
        ------
        InputError
            Where the dimensions of an image are not known; for a chunked array with a mask, kept samples, progress or
            an option that needs the whole image; and as `nlflow.denoise`.
        """
        check_flag("return_info", return_info)
        for name in _NAMED:
            if name in more:
                raise InputError(f"{name}: got it beside dimensions that have names and units that are kept, expected "
                                 "dims and channel_dim; leave it out")  # fmt: skip
        axes = self._axes(dims, channel_dim)
        given = self._array.transpose(*axes.all)
        if given.size == 0:
            raise InputError(f"image: got an empty array of shape {given.shape}, expected at least one element")
        own = {
            name: _own(name, value, given, axes)
            for name, value in (("sigma", sigma), ("mask", mask), ("keep", keep))
            if value is not None
        }
        words = {
            "quality": quality,
            "noise": noise,
            "options": Options.of(options, more),
            "axes": axes.letters + ("C" if axes.channel else ""),
            "spacing": self._spacing(spacing, axes.image),
        }
        items, data = tuple(given.sizes[name] for name in axes.items), given.data
        if isinstance(data, np.ndarray):
            words |= {"preserve_range": True}
            results, info = each_item(denoise, items, lambda index: data[index], own, progress, **words)
            found = np.stack(results).reshape(given.shape)
        else:
            found, info = _in_blocks(data, items, own, progress, words)
        result = given.copy(data=found).drop_encoding().transpose(*self._array.dims)
        return (result, info) if return_info else result

    def grid(
        self, dims: str | Sequence[str] | None = None, *, spacing: Any = "coordinates", boundary: Boundary = "reflect"
    ) -> Grid:
        """Return the grid whose nodes are the samples of the array.

        Parameters
        ----------
        dims : str or sequence of str, optional
            Its dimensions; by default those of an image, as `denoise` finds them. They keep the order of the array.
        spacing : {'coordinates'} or mapping of str to float
            Distances of nodes: the steps of the coordinates, or numbers by the names of dimensions. It is 1 along
            dimensions that have neither.
        boundary : {'reflect', 'periodic', 'isolated'}

        Raises
        ------
        InputError
            For coordinates that are no numbers or not evenly spaced, and where the dimensions of an image are not
            known.
        """
        found = self._axes(dims, None).image
        image = tuple(name for name in self._array.dims if name in found)  # that of a clip has its time first
        return Grid(tuple(self._array.sizes[name] for name in image), self._spacing(spacing, image) or 1.0, boundary)

    def flow(
        self,
        kernel: Kernel,
        t: Any,
        *,
        fidelity: float = 0.0,
        metric: str = "degree",
        dims: str | Sequence[str] | None = None,
        channel_dim: str | None = None,
        spacing: Any = "coordinates",
        boundary: Boundary = "reflect",
        **options: Any,
    ) -> Any:
        """Follow the gradient flow of J, or with a fidelity that of E, from the array; see `nlflow.solve`.

        Parameters
        ----------
        kernel : Kernel
            Of the positions of nodes, in the units of the coordinates.
        t : array_like
            Increasing times >= 0 at which the signal is returned.
        fidelity : float
            The number lambda of E (lambda~ in the metric ``degree``), which draws the signal to the array; 0 for J.
        metric : {'degree', 'l2'}
        dims, channel_dim
            As `denoise` takes them; no other dimensions may be left.
        spacing, boundary
            As `grid` takes them.
        **options
            Other arguments of `nlflow.solve`.

        Returns
        -------
        Dataset
            ``u`` over ``t`` and the dimensions of the array, with its coordinates and attributes, and ``energy`` over
            ``t``.

        Raises
        ------
        InputError
            As `denoise` and `nlflow.solve`; for a chunked array, and for a dimension or coordinate that is called
            ``t``, ``u`` or ``energy``.
        """
        axes = self._axes(dims, channel_dim)
        if axes.items:
            raise InputError(f"dims: got an array with {listed(axes.items)} besides {listed(axes.image)}, expected "
                             "no other dimensions; select one image with isel()")  # fmt: skip
        if taken := {"t", "u", "energy"} & {*axes.all, *self._array.coords}:
            raise InputError(f"dims: got {listed(sorted(taken))}, which the result has for itself; rename() it, or "
                             "drop_vars() a coordinate")  # fmt: skip
        if "t_eval" in options:
            raise InputError("t_eval: got it beside t, which says the same; leave it out")
        times = check_increasing("t", t, "times", minimum=0)
        fidelity = check_number("fidelity", fidelity, minimum=0)
        check_choice("metric", metric, ("degree", "l2"))
        if not isinstance(self._array.data, np.ndarray):
            raise InputError(f"image: got {type(self._array.data).__name__}, expected a NumPy array, as a flow needs "
                             "all of it at each step; call image.compute()")  # fmt: skip
        given = self._array.transpose(*axes.all)
        domain = Grid(given.shape[: len(axes.image)], self._spacing(spacing, axes.image) or 1.0, boundary)
        operator, start = affinity(kernel, domain), domain.check_signal("image", given.data)
        functional = E(operator, start, fidelity, measure=metric) if fidelity else J(operator)
        found = solve(GradientFlow(functional, metric), start, t_eval=times, **options).to_xarray()
        u = xarray.DataArray(found.u.data, dims=("t", *axes.all), coords=given.coords, attrs=given.attrs)
        return xarray.Dataset(
            {"u": u.transpose("t", *self._array.dims), "energy": ("t", found.energy.data)},
            {"t": found.t.data}, attrs=found.attrs,
        )  # fmt: skip

    def _axes(self, dims: Any, channel_dim: Any) -> _Axes:
        there = tuple(self._array.dims)
        if channel_dim is not None and not _is_one_of(channel_dim, there):
            raise InputError(f"channel_dim: got {channel_dim!r}, expected one of {listed(there)}")
        found = self._found(there, channel_dim) if dims is None else self._told(there, dims, channel_dim)
        image = found.image
        time = [name for name in image if letter_of(self._array, name) == "T"]
        if len(image) == 3 and len(time) == 1:
            image = (*time, *(name for name in image if name not in time))
            return _Axes(found.items, image, "TYX", found.channel)
        return found

    def _told(self, there: tuple[str, ...], dims: Any, channel_dim: str | None) -> _Axes:
        named = (dims,) if isinstance(dims, str) else tuple(dims) if isinstance(dims, Sequence) else ()
        known = 1 <= len(named) <= 3 and all(_is_one_of(name, there) for name in named)
        if not known or len(set(named)) < len(named) or channel_dim in named:
            raise InputError(f"dims: got {dims!r}, expected one to three different dimensions of an image out of "
                             f"{listed(name for name in there if name != channel_dim)}")  # fmt: skip
        items = tuple(name for name in there if name not in (*named, channel_dim))
        return _Axes(items, tuple(name for name in there if name in named), "ZYX"[-len(named) :], channel_dim)

    def _found(self, there: tuple[str, ...], channel_dim: str | None) -> _Axes:
        """Return which dimensions are what by their names, or raise `InputError`."""
        letters = {name: letter_of(self._array, name) for name in there if name != channel_dim}
        if channel_dim is None:
            channel_dim = next((name for name in there if letters[name] == "C" and len(there) > 1), None)
        rest = tuple(name for name in there if name != channel_dim)
        known = [letters[name] for name in rest]
        if len(rest) > 1 and (not set(known) <= set("XYZ") or len(set(known)) < len(known)):
            raise InputError(
                f"dims: got an array with {listed(rest)}, of which it is not known which are those of an image; give "
                f"them, such as dims={rest[-2:]!r}, and the others are denoised one by one"
                + (", or of a clip with time" if "T" in known else "")
            )
        if not rest:
            raise InputError("image: got an array without dimensions, expected a signal, an image or a volume")
        return _Axes((), rest, "ZYX"[-len(rest) :], channel_dim)

    def _spacing(self, given: Any, image: tuple[str, ...]) -> tuple[float, ...] | None:
        if given is None:
            return None
        if isinstance(given, str) and given == "coordinates":
            return tuple(self._step(name) for name in image)
        if not isinstance(given, Mapping) or set(given) - set(image):
            raise InputError(f"spacing: got {given!r}, expected 'coordinates', or numbers by the names of "
                             f"{listed(image)}")  # fmt: skip
        return tuple(given.get(name, 1.0) for name in image)

    def _step(self, name: str) -> float:
        """Return the distance of neighbours by the coordinates of a dimension; 1 where there are none."""
        if name not in self._array.coords or self._array.sizes[name] < 2:
            return 1.0
        values = self._array[name].to_numpy()
        if values.dtype.kind not in "iuf":
            raise InputError(f"spacing: got coordinates {name!r} of {values.dtype}, expected numbers; give "
                             f"spacing={{{name!r}: ...}}")  # fmt: skip
        places = values.astype(np.float64)
        steps = np.diff(places)
        rounding = np.finfo(values.dtype).eps if values.dtype.kind == "f" else 0.0
        step = float((places[-1] - places[0]) / (len(places) - 1))
        # A step is a difference of two positions, each of which is off by some roundings of its size.
        if not np.abs(steps - step).max() <= 2 * _ROUNDINGS * rounding * np.abs(places).max() or step == 0:
            raise InputError(
                f"spacing: got coordinates {name!r} with steps from {steps.min():g} to {steps.max():g}, expected even "
                f"ones; give spacing={{{name!r}: ...}}, or interpolate with interp()"
            )
        return abs(step)


def _in_blocks(
    data: Any, items: tuple[int, ...], own: Mapping[str, Callable[[tuple[int, ...]], Any]], progress: Any,
    words: dict[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Return a Dask array of results, and what is done to it."""
    if not type(data).__module__.startswith("dask."):
        raise InputError(f"image: got {type(data).__name__} of {type(data).__module__}, expected NumPy or Dask; call "
                         "image.as_numpy()")  # fmt: skip
    import dask.array

    words["options"].refuse(("separate", "stopping", "device"), "an array in chunks")
    told = check_progress(progress)
    for name, given in (("mask", "mask" in own), ("keep", "keep" in own), ("progress", told)):
        if given:
            raise InputError(f"{name}: got it for an array in chunks, which are denoised one by one, expected none; "
                             "call image.compute() first, or leave it out")  # fmt: skip
    into = np.float64 if data.dtype.kind in "iub" else np.float32 if data.dtype == np.float16 else data.dtype
    if into != data.dtype:  # floats that hold the samples, as `denoise` computes with them
        data = data.astype(np.float32 if data.dtype.itemsize <= 2 else np.float64)
    results, info = each_item(denoise_array, items, lambda index: data[index], own, **words)
    return dask.array.stack(results).reshape(data.shape).astype(into), info


def _is_one_of(name: Any, names: tuple[Any, ...]) -> bool:
    return any(name is one or (type(name) is type(one) and name == one) for one in names)


def _own(name: str, value: Any, given: Any, axes: _Axes) -> Callable[[tuple[int, ...]], Any]:
    """Return what gives the part of an argument that belongs to an image of `given`."""
    if not isinstance(value, xarray.DataArray):
        if len(shape_of(name, value)) > (name == "sigma"):
            raise InputError(f"{name}: got an array whose dimensions have no names, expected a DataArray over some of "
                             f"{listed(given.dims)}")  # fmt: skip
        return lambda index: value
    if extra := [str(one) for one in value.dims if one not in given.dims]:
        raise InputError(f"{name}: got dimension {listed(extra)}, expected some of {listed(given.dims)}")
    try:
        xarray.align(given, value, join="exact")
    except ValueError as error:
        raise InputError(f"{name}: got other coordinates or sizes than the image has; reindex_like(image)") from error
    items = tuple(one for one in axes.items if one in value.dims)
    if set(value.dims) & set(axes.image):
        value = value.expand_dims({one: given.sizes[one] for one in axes.image if one not in value.dims})
        value = value.transpose(*items, *axes.image, ...)
    array, places = value.transpose(*items, ...).to_numpy(), [axes.items.index(one) for one in items]
    return lambda index: array[tuple(index[place] for place in places)]
