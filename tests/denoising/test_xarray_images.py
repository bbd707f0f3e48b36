"""Images of xarray: which dimensions are what, what is kept, chunks with the bits of the whole, flows."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import InputError

xarray = pytest.importorskip("xarray", reason="xarray is optional")
import nlflow.xarray  # noqa: E402  # registers the accessor, which needs xarray

Y, X = np.arange(24) * 0.5 + 7, np.linspace(0, 1, 20, dtype=np.float32)
SMOOTH = np.add.outer(np.sin(np.arange(24) / 4), np.arange(20) / 10)
NOISY = (SMOOTH + np.random.default_rng(0).normal(0, 0.2, SMOOTH.shape)).astype(np.float32)
FAST = {"quality": "fast"}


def picture(**changes: Any) -> Any:
    given = {"data": NOISY, "dims": ("y", "x"), "coords": {"y": Y, "x": X}, "attrs": {"units": "K"}, "name": "warmth"}
    return xarray.DataArray(**{**given, **changes})


def stack(count: int = 3) -> Any:
    """Return pictures side by side along a dimension that lies between those of an image."""
    layers = [NOISY + k for k in range(count)]
    return xarray.DataArray(np.stack(layers, 1), dims=("y", "station", "x"), coords={"station": list("abc")[:count]})


def test_all_but_the_values_is_kept() -> None:
    given = picture().assign_coords(lightness=(("y", "x"), SMOOTH), day=3)
    given.encoding = {"dtype": "int16"}
    result = given.nlflow.denoise(0.2, **FAST)
    assert result.identical(given.copy(data=result.data))
    assert np.array_equal(result.data, nl.denoise(NOISY, 0.2, **FAST))
    assert result.encoding == {}  # by which a file would round the values
    assert np.std(result - SMOOTH) < 0.5 * np.std(given - SMOOTH)


def test_integers_keep_their_units() -> None:
    grey = np.clip(NOISY * 40 + 60, 0, 255).astype(np.uint8)
    result = picture(data=grey).nlflow.denoise(8.0, **FAST)
    assert np.array_equal(result, nl.denoise(grey, 8.0, preserve_range=True, **FAST))


def test_the_order_of_dimensions_does_not_matter() -> None:
    turned = picture().transpose("x", "y")
    assert turned.nlflow.denoise(0.2, **FAST).dims == ("x", "y")
    colours = xarray.DataArray(np.stack([NOISY, NOISY[::-1]]), dims=("band", "y", "x"))
    expected = nl.denoise(np.stack([NOISY, NOISY[::-1]], -1), 0.2, channel_axis=-1, **FAST)
    assert np.array_equal(colours.nlflow.denoise(0.2, **FAST).transpose("y", "x", "band"), expected)
    named = colours.rename(band="q").nlflow.denoise(0.2, channel_dim="q", **FAST)
    assert np.array_equal(named.transpose("y", "x", "q"), expected)


def test_images_along_other_dimensions_are_denoised_one_by_one() -> None:
    given, shares = stack(), []
    result, info = given.nlflow.denoise(0.2, dims=("y", "x"), progress=shares.append, return_info=True, quality="fast")
    for k in range(3):
        assert np.array_equal(result[:, k], nl.denoise(NOISY + np.float32(k), 0.2, **FAST))
    assert len(info.columns) == 3
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_arguments_go_by_name_too() -> None:
    given = stack()
    level = xarray.DataArray([0.2, 0.1, 0.3], dims="station", coords={"station": list("abc")})
    hole = xarray.DataArray(np.arange(20) == 4, dims="x")
    map_of = xarray.DataArray(np.full((20, 24), 0.2), dims=("x", "y"))
    words = {"dims": ("y", "x"), **FAST}
    result = given.nlflow.denoise(level, mask=hole, **words)
    mapped = given.nlflow.denoise(map_of, keep=hole, **words)
    where = np.broadcast_to(hole.data, (24, 20))
    for k in range(3):
        one = NOISY + np.float32(k)
        assert np.array_equal(result[:, k], nl.denoise(one, float(level[k]), mask=where, **FAST))
        assert np.array_equal(mapped[:, k], nl.denoise(one, np.full((24, 20), 0.2), keep=where, **FAST))


def test_a_clip_is_one_where_time_is_named() -> None:
    frames = np.random.default_rng(1).normal(0, 1, (3, 16, 16)).astype(np.float32)
    clip = xarray.DataArray(frames, dims=("time", "y", "x")).transpose("y", "time", "x")
    result = clip.nlflow.denoise(1.0, dims=("time", "y", "x"), **FAST)
    assert np.array_equal(result.transpose("time", "y", "x"), nl.denoise(frames, 1.0, axes="TYX", **FAST))
    with pytest.raises(InputError, match=r"dims: got an array with 'y', 'time', 'x'.*or of a clip with time"):
        clip.nlflow.denoise(1.0)


def test_coordinates_say_what_dimensions_are() -> None:
    odd = picture(coords={}, dims=("a", "b"))
    with pytest.raises(InputError, match=r"dims: got an array with 'a', 'b', of which it is not known.*\('a', 'b'\)"):
        odd.nlflow.denoise(0.2)
    told = odd.assign_coords(a=("a", Y, {"axis": "Y"}), b=("b", X, {"axis": "X"}))
    assert np.array_equal(told.nlflow.denoise(0.2, **FAST), nl.denoise(NOISY, 0.2, **FAST))
    signal = np.tile(NOISY[:, 0], 8)
    line = xarray.DataArray(signal, dims=(3,))  # a name may be anything
    assert np.array_equal(line.nlflow.denoise(0.2, **FAST), nl.denoise(signal, 0.2, **FAST))


def test_distances_come_from_coordinates_when_asked() -> None:
    data = np.random.default_rng(2).normal(0, 1, (8, 12, 12)).astype(np.float32)
    volume = xarray.DataArray(data, dims=("z", "y", "x"), coords={"z": np.arange(8) * 3.0})
    expected = nl.denoise(data, 1.0, spacing=(3, 1, 1), **FAST)
    assert np.array_equal(volume.nlflow.denoise(1.0, spacing="coordinates", **FAST), expected)
    assert np.array_equal(volume.nlflow.denoise(1.0, spacing={"z": 3.0}, **FAST), expected)
    assert not np.array_equal(volume.nlflow.denoise(1.0, **FAST), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "uint8", "float16"])
def test_chunks_have_the_bits_of_the_whole(kind: str) -> None:
    pytest.importorskip("dask.array", reason="Dask is optional")
    data = (stack() * (40 if kind == "uint8" else 1)).astype(kind)
    words = {"dims": ("y", "x"), **FAST}
    whole = data.nlflow.denoise(2.0, **words)
    lazily, info = data.chunk({"station": 1}).nlflow.denoise(2.0, return_info=True, progress=np.False_, **words)
    assert lazily.chunks is not None
    assert lazily.identical(whole.copy(data=lazily.data))
    assert lazily.dtype == whole.dtype
    assert np.array_equal(lazily.compute(), whole)
    assert len(info.columns) == 3
    for word in ({"keep": data > 0}, {"stopping": "sure"}, {"progress": True}, {"device": "auto"}):
        with pytest.raises(InputError, match=rf"{next(iter(word))}: got .* for an array in chunks"):
            data.chunk().nlflow.denoise(2.0, **words, **word)


def test_what_is_wrong_is_refused_by_name() -> None:
    given, fine = stack(), {"dims": ("y", "x")}
    cases = [
        (r"dims: got \('y', 'q'\)", {"dims": ("y", "q")}),
        (r"dims: got 2, expected one to three", {"dims": 2}),
        (r"dims: got 'x', expected .* out of 'y', 'station'", {"dims": "x", "channel_dim": "x"}),
        (r"channel_dim: got 'q', expected one of 'y', 'station', 'x'", {"channel_dim": "q"}),
        ("axes: got it beside dimensions that have names", {**fine, "axes": "YX"}),
        ("qualty: got an unknown option", {**fine, "qualty": "fast"}),
        ("mask: got an array whose dimensions have no names", {**fine, "mask": np.zeros((24, 20), bool)}),
        (r"mask: got dimension 'q'", {**fine, "mask": xarray.DataArray([True], dims="q")}),
        ("keep: got other coordinates", {**fine, "keep": (given > 0).isel(station=[0])}),
        ("keep: got other coordinates", {**fine, "keep": (given > 0).assign_coords(station=list("abd"))}),
        (r"spacing: got 'x'", {**fine, "spacing": "x"}),
        (r"spacing: got \{'q': 1\}", {**fine, "spacing": {"q": 1}}),
    ]
    for message, words in cases:
        with pytest.raises(InputError, match=message):
            given.nlflow.denoise(0.2, **words)
    with pytest.raises(InputError, match="without dimensions"):
        xarray.DataArray(1.0).nlflow.denoise(0.2)
    with pytest.raises(InputError, match="empty array of shape"):
        given.isel(station=[]).nlflow.denoise(0.2, **fine)
    with pytest.raises(InputError, match="image: got complex values"):
        picture(data=NOISY + 1j).nlflow.denoise(0.2)
    with pytest.raises(InputError, match="image: got no sample that is a number"):
        (given * np.nan).nlflow.denoise(0.2, **fine)


def test_nan_stays_and_so_does_an_image_without_samples() -> None:
    given = stack()
    given[{"station": 1}] = np.nan
    given[{"station": 0, "y": 3, "x": 4}] = np.nan
    result = given.nlflow.denoise(0.2, dims=("y", "x"), quality="fast")
    np.testing.assert_array_equal(np.isnan(result), np.isnan(given))


def test_the_grid_is_that_of_the_coordinates() -> None:
    grid = picture().nlflow.grid(boundary="periodic")
    assert grid.shape == (24, 20)
    assert grid.boundary == "periodic"
    assert grid.spacing == pytest.approx((0.5, 1 / 19), rel=1e-6)  # positions are of float32
    clip = picture().expand_dims(time=[0.0, 2.0, 4.0]).transpose("y", "x", "time")  # in the order of the array
    assert clip.nlflow.grid(("time", "y", "x")).shape == clip.shape
    assert picture(coords={"y": Y[::-1]}).nlflow.grid().spacing == (0.5, 1.0)
    uneven = picture(coords={"y": Y**2})
    with pytest.raises(InputError, match=r"coordinates 'y' with steps from 7\.25 to 18\.25, expected even"):
        uneven.nlflow.grid()
    assert uneven.nlflow.grid(spacing={"y": 2.0}).spacing == (2.0, 1.0)
    days = xarray.DataArray(NOISY[:3, 0], dims="t", coords={"t": np.arange(3).astype("datetime64[D]")})
    with pytest.raises(InputError, match=r"coordinates 't' of datetime64.*give spacing="):
        days.nlflow.grid()


@pytest.mark.parametrize("fidelity", [0.0, 0.5])
def test_a_flow_lives_on_the_coordinates(fidelity: float) -> None:
    given, kernel, times = picture().transpose("x", "y"), nl.Gaussian(width=1.0), [0.0, 1.0, 5.0]
    found = given.nlflow.flow(kernel, times, fidelity=fidelity)
    operator = nl.affinity(kernel, given.nlflow.grid())
    functional = nl.E(operator, NOISY.T, fidelity, measure="degree") if fidelity else nl.J(operator)
    expected = nl.solve(nl.GradientFlow(functional, "degree"), NOISY.T, t_eval=times)
    assert found.u.dims == ("t", "x", "y")
    assert np.array_equal(found.u, expected.u)
    assert np.array_equal(found.energy, expected.energy)
    assert found.u.attrs == given.attrs
    assert found.u.y.identical(given.y)
    assert found.attrs["status"] == "finished"
    assert found.u.sel(t=5.0).std() < given.std()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"channel_dim": np.ones(2)}, "channel_dim: got array"),
        ({"channel_dim": ["y"]}, "channel_dim: got .'y'., expected one of 'y', 'x'"),
        ({"dims": [["y"], ["x"]]}, "dims: got ..'y'., .'x'.., expected one to three different"),
        ({"sigma": [1.0, [2.0]]}, "sigma: got .1.0, .2.0..,"),
        ({"mask": [[True], [True, False]]}, "mask: got"),
        ({"mask": object()}, "mask: got values of type object"),
        ({"keep": [[True], [True, False]]}, "keep: got"),
        ({"progress": "no"}, "progress: got 'no', expected True or False, or a callable"),
        ({"progress": np.ones(3)}, "progress: got array"),
        ({"return_info": 1}, "return_info: got 1"),
    ],
)
def test_what_has_no_names_and_is_no_number_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        picture().nlflow.denoise(**{"sigma": 1.0, **words})


def test_what_a_flow_cannot_take() -> None:
    kernel = nl.Gaussian(width=1.0)
    with pytest.raises(InputError, match=r"'station' besides 'y', 'x'.*isel"):
        stack().nlflow.flow(kernel, [0, 1], dims=("y", "x"))
    with pytest.raises(InputError, match=r"dims: got 't', which the result has for itself"):
        xarray.DataArray(NOISY[0], dims="t").nlflow.flow(kernel, [0, 1])
    for name in ("t", "u", "energy"):
        with pytest.raises(InputError, match=f"dims: got '{name}', which .* drop_vars"):
            picture().assign_coords({name: 5.0}).nlflow.flow(kernel, [0, 1])
    with pytest.raises(InputError, match=r"fidelity: got an array|fidelity: got array"):
        picture().nlflow.flow(kernel, [0, 1], fidelity=np.ones(NOISY.shape))
    with pytest.raises(InputError, match=r"^t: got \[1.0, 0.5\], expected increasing times"):
        picture().nlflow.flow(kernel, [1.0, 0.5])
    with pytest.raises(InputError, match=r"^t: got 0 dimension"):
        picture().nlflow.flow(kernel, 1.0)
    with pytest.raises(InputError, match=r"^metric: got 'conserved', expected one of 'degree', 'l2'"):
        picture().nlflow.flow(kernel, [0, 1], metric="conserved")
    with pytest.raises(InputError, match="t_eval: got it beside t"):
        picture().nlflow.flow(kernel, [0, 1], t_eval=[0, 1])
    pytest.importorskip("dask.array", reason="Dask is optional")
    with pytest.raises(InputError, match=r"expected a NumPy array.*compute"):
        picture().chunk().nlflow.flow(kernel, [0, 1])


@pytest.mark.slow
def test_it_is_loaded_by_name_alone() -> None:
    code = "import sys, nlflow, xarray; print(hasattr(xarray.DataArray, 'nlflow'))\n"
    code += "import nlflow.xarray; print(hasattr(xarray.DataArray, 'nlflow'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True"]
    code = "import sys; sys.modules['xarray'] = None\nimport nlflow.xarray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "MissingPackageError: nlflow.xarray needs xarray, which is not installed; " in done.stderr
    assert "pip install 'nlflow[xarray]'" in done.stderr


def test_warnings_of_single_images_come_through() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack().isel(x=slice(6), y=slice(6)).nlflow.denoise(0.2, dims=("y", "x"), quality="pixels")
    assert caught
