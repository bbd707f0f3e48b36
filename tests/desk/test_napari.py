"""The plugin of napari: layers and their attributes, refusals by name, the manifest, the widget without a screen."""

from __future__ import annotations

import os
import re
import time
import tomllib
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import InputError
from nlflow.desk.napari import DenoiseWidget, Settings, denoise_layer
from nlflow.desk.napari.layers import denoised, layer_of, samples_of

ROOT = Path(__file__).parents[2]
MANIFEST = Path(nl.__file__).parent / "desk" / "napari" / "napari.yaml"  # what was installed has it
NEEDS = "napari with a binding of Qt is optional: pip install 'nlflow[napari]' pyqt6"
RNG = np.random.default_rng(0)
SMOOTH = 100 + 50 * np.add.outer(np.sin(np.arange(40) / 6), np.arange(36) / 36).astype(np.float32)
NOISY = (SMOOTH + RNG.normal(0, 10, SMOOTH.shape)).astype(np.float32)
FAST = Settings(sigma=10.0, quality="fast")


def part_of_napari(name: str) -> Any:
    """Return a module of napari or of what comes with it, whose import warns of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=NEEDS)


class Plain:
    """What the plugin asks of a layer of napari, for machines without it."""

    def __init__(self, data: Any, *, name: str, rgb: bool = False, kind: str = "image", **attributes: Any) -> None:
        self.data, self.name, self.rgb, self.kind = data, name, rgb, kind
        self.multiscale, self.metadata = isinstance(data, list), attributes.get("metadata", {})
        self.ndim = 0 if self.multiscale else np.ndim(data) - rgb
        self.scale = np.array(attributes.get("scale", [1.0] * self.ndim))
        self.translate = np.array(attributes.get("translate", [0.0] * self.ndim))
        self.affine = SimpleNamespace(linear_matrix=np.eye(self.ndim))
        self.contrast_limits = list(attributes.get("contrast_limits", (0, 1)))

    def data_to_world(self, place: Any) -> Any:
        return tuple(self.scale * place + self.translate)

    def as_layer_data_tuple(self) -> Any:
        names = ("name", "rgb", "multiscale", "metadata", "scale", "translate", "contrast_limits")
        return self.data, {name: getattr(self, name) for name in names}, self.kind


@pytest.fixture(params=["plain", "napari"])
def image(request: pytest.FixtureRequest) -> Any:
    """Return what makes an image layer."""
    if request.param == "plain":
        return Plain
    return part_of_napari("napari.layers").Image


def test_attributes_are_kept(image: Any) -> None:
    words = {"scale": (2, 3), "translate": (5, 7), "contrast_limits": (60, 190), "metadata": {"day": 3}}
    layer = image(NOISY, name="cells", **words)
    data, attributes, kind = denoise_layer(layer, FAST)
    before = layer.as_layer_data_tuple()[1]
    changed = {name for name, value in attributes.items() if not np.array_equal(value, before[name])}
    assert kind == "image"
    assert changed == {"name", "metadata"}
    assert attributes["name"] == "cells denoised"
    assert attributes["metadata"]["day"] == 3
    assert layer.metadata == {"day": 3}
    assert attributes["metadata"]["nlflow"][:2] == ["noise: white noise", "sigma: 10 (as given)"]
    assert data.dtype == np.float32
    assert np.array_equal(data, nl.denoise(NOISY, 10.0, quality="fast"))


@pytest.mark.parametrize(("takes", "letters"), [("planes", "YX"), ("volumes", "ZYX"), ("clips", "TYX")])
@pytest.mark.parametrize("channel_axis", [None, 1])
@pytest.mark.slow
def test_what_is_denoised_at_once(takes: str, letters: str, channel_axis: int | None, image: Any) -> None:
    shape = (2, 2, 8, 20, 20) if channel_axis else (2, 8, 20, 20)
    stack = RNG.normal(0, 10, shape).astype(np.float32)
    layer = image(stack, name="stack", scale=(1,) * (len(shape) - 3) + (4, 2, 2))
    chosen = Settings(takes, channel_axis, 10.0, quality="fast")
    data, _, _ = denoise_layer(layer, chosen)
    words = {"axes": ("C" if channel_axis else "") + letters, "spacing": (4, 2, 2) if takes == "volumes" else None}
    index = (1,) if takes != "planes" else (1, slice(None), 3) if channel_axis else (1, 3)
    assert np.array_equal(data[index], nl.denoise(stack[index], 10.0, quality="fast", **words))


@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.parametrize("bands", [3, 4])
def test_colours_stay_colours(kind: str, bands: int, image: Any) -> None:
    colours = np.clip(np.stack([NOISY, NOISY[::-1], NOISY[:, ::-1]], -1), 0, 255).astype(np.uint8)
    opacity = np.arange(1440, dtype=np.uint8).reshape(40, 36, 1)
    given = np.concatenate([colours, opacity], -1)[..., :bands]
    given, sigma = (given, 10.0) if kind == "uint8" else ((given / 255).astype(np.float32), 10 / 255)
    data, attributes, _ = denoise_layer(image(given, name="colours", rgb=True), Settings(sigma=sigma, quality="fast"))
    expected = nl.denoise(given[..., :3], sigma, channel_axis=-1, quality="fast", preserve_range=True)
    assert attributes["rgb"]
    assert data.dtype == given.dtype
    assert np.array_equal(data[..., :3], np.rint(expected).clip(0, 255) if kind == "uint8" else expected)
    assert np.array_equal(data[..., 3:], given[..., 3:])


def test_integers_become_floats_of_the_same_units(image: Any) -> None:
    grey = np.clip(NOISY, 0, 255).astype(np.uint16)
    data, _, _ = denoise_layer(image(grey, name="grey"), FAST)
    assert data.dtype == np.float32
    assert np.array_equal(data, nl.denoise(grey, 10.0, quality="fast", preserve_range=True))


def test_what_was_not_done_is_said(image: Any) -> None:
    stack = np.stack([NOISY, np.full_like(NOISY, 7)])
    data, attributes, _ = denoise_layer(image(stack, name="half"), FAST)
    assert np.array_equal(data[1], stack[1])
    assert attributes["metadata"]["nlflow"][-1] == "nothing was done to 1 of 2: the input is constant"
    said = denoise_layer(image(stack[1], name="flat"), FAST)[1]["metadata"]["nlflow"]
    assert said == ["nothing was done: the input is constant"]
    pixels = Settings(sigma=10.0, quality="pixels")
    small = denoise_layer(image(NOISY[:6, :6], name="small"), pixels)[1]["metadata"]["nlflow"]
    assert small[-1].startswith("search window of 17 nodes is larger than the grid (6, 6)")  # a warning


def test_a_part_lies_where_it_was(image: Any) -> None:
    stack = np.stack([RNG.normal(0, 10, (400, 300)).astype(np.float32) for _ in range(3)])
    layer = image(stack, name="wide", scale=(1, 2, 3), translate=(0, 5, 7))
    part = samples_of(layer, FAST, (2.2, 390.0, 100.0))
    assert part.data.shape == (1, 192, 192)
    assert part.corner == (2, 208, 4)
    assert np.array_equal(part.data[0], stack[2, 208:, 4:196])
    _, attributes, _ = layer_of(layer, denoised(part, FAST), "preview")
    assert attributes["translate"] == pytest.approx([2, 5 + 2 * 208, 7 + 3 * 4])
    colours = image(np.zeros((50, 400, 3), np.uint8), name="colours", rgb=True)
    assert samples_of(colours, FAST, (25, 0)).data.shape == (50, 192, 3)
    channels = samples_of(image(stack, name="c"), Settings(channel_axis=0), (0, 0, 0))
    assert channels.data.shape == (3, 192, 192)


def test_a_turned_part_lies_where_it_was() -> None:
    layers = part_of_napari("napari.layers")
    words = {"scale": (2, 3), "translate": (5, 7), "rotate": 30, "shear": [0.2], "affine": np.diag([2.0, 0.5, 1.0])}
    layer = layers.Image(NOISY, name="turned", **words)
    data, attributes, _ = layer_of(layer, denoised(samples_of(layer, FAST), FAST), "denoised")
    assert layers.Image(data, **attributes).extent.world == pytest.approx(layer.extent.world)
    wide = layers.Image(np.tile(NOISY, (10, 10)), name="wide", **words)
    part = samples_of(wide, FAST, (300, 200))
    shown = layers.Image(np.asarray(part.data), **layer_of(wide, denoised(part, FAST), "preview")[1])
    assert shown.data_to_world((3, 4)) == pytest.approx(wide.data_to_world(np.add(part.corner, (3, 4))))


def test_what_is_no_picture_is_refused_by_name(image: Any) -> None:
    def refused(message: str, layer: Any, settings: Settings = FAST) -> None:
        with pytest.raises(InputError, match=message):
            denoise_layer(layer, settings)

    good = image(NOISY, name="good")
    refused("layer: got none", None)
    # napari itself stumbles over layers with these values, and may not do so in another version.
    waves = Plain((NOISY + 1j).astype(np.complex64), name="cells")
    refused("layer: got 'cells' of complex64, expected real", waves)
    refused(r"layer: got 'cells' of shape \(0, 4\)", Plain(np.zeros((0, 4)), name="cells"))
    refused("layer: got 'cells' of 2 scales", image([NOISY, NOISY[::2, ::2]], name="cells"))
    refused("takes: got 'volumes' for a layer of shape", good, Settings("volumes"))
    refused("takes: got 'planes' for .*; take nlflow.denoise for a signal", Plain(NOISY[0], name="line"))
    refused("takes: got 'slices', expected one of 'planes'", good, Settings("slices"))
    refused("channel_axis: got 2, expected an axis of an array of 2", good, Settings(channel_axis=2))
    colours = image(np.zeros((9, 9, 3), np.uint8), name="colours", rgb=True)
    refused("channel_axis: got 0 for an RGB layer", colours, Settings(channel_axis=0))
    refused("sigma: got -1", good, Settings(sigma=-1.0))
    refused(
        "image: got 1 infinite",
        image(np.where(np.arange(36) + 36 * np.arange(40)[:, None] == 50, np.inf, NOISY), name="holes"),
    )


@pytest.mark.parametrize("kind", ["plain", "napari"])
def test_labels_are_refused(kind: str) -> None:
    names = np.ones((9, 9), int)
    if kind == "plain":
        layer = Plain(names, name="cells", kind="labels")
    else:
        layer = part_of_napari("napari.layers").Labels(names, name="cells")
    with pytest.raises(InputError, match=r"layer: got (Plain|Labels) 'cells', expected an Image layer"):
        denoise_layer(layer)


def test_the_manifest_names_what_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["napari.manifest"] == {"nlflow": "nlflow.desk.napari:napari.yaml"}
    assert "Framework :: napari" in project["classifiers"]
    text = MANIFEST.read_text(encoding="utf-8")
    assert re.search(r"^name: nlflow$", text, flags=re.M)
    (place,) = re.findall(r"python_name: (\S+)", text)
    module, name = place.split(":")
    assert getattr(import_module(module), name) is DenoiseWidget


def test_the_manifest_is_valid() -> None:
    npe2 = part_of_napari("npe2")
    manifest = npe2.PluginManifest.from_file(MANIFEST)
    manifest.validate_imports()
    assert [one.command for one in manifest.contributions.widgets] == ["nlflow.denoise"]


@pytest.mark.skipif(find_spec("magicgui") is not None, reason="magicgui is there")
def test_without_magicgui_it_says_what_to_install() -> None:
    with pytest.raises(InputError, match=r"magicgui: it cannot be imported.*pip install 'nlflow\[napari\]'"):
        DenoiseWidget(None)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the widget beside the model of a viewer, which needs no screen."""
    components = part_of_napari("napari.components")
    if not os.environ.get("DISPLAY"):
        monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    widgets = part_of_napari("qtpy.QtWidgets")
    application = widgets.QApplication.instance() or widgets.QApplication([])
    viewer = components.ViewerModel()
    widget = DenoiseWidget(viewer)

    def wait() -> None:
        end = time.monotonic() + 120
        while widget.denoise.text == "Stop":
            assert time.monotonic() < end
            application.processEvents()

    return SimpleNamespace(widget=widget, viewer=viewer, wait=wait)


def test_the_widget_shows_a_preview_and_denoises(desk: Any) -> None:
    desk.widget.preview.changed.emit(True)
    assert desk.widget.said.value.startswith("layer: got none")
    wide = np.tile(NOISY, (8, 8))
    layer = desk.viewer.add_image(wide, name="wide", scale=(2, 2), contrast_limits=(60, 190), colormap="magma")
    desk.viewer.add_labels(np.ones((9, 9), int))
    assert [name for name, _ in desk.widget._layers()] == ["wide"]
    desk.widget.quality.value = "fast"
    camera = getattr(desk.viewer, "scene", desk.viewer).camera
    camera.center = (0, 400, 300)
    for _ in range(2):  # the second takes the place of the first
        desk.widget.preview.changed.emit(True)
    assert [one.name for one in desk.viewer.layers] == ["wide", "Labels", "wide preview"]
    assert "found out" in desk.widget.said.value
    assert desk.widget.said.value.endswith("The noise is that of the preview alone.")
    preview = desk.viewer.layers[-1]
    middle = np.mean([preview.data_to_world((0, 0)), preview.data_to_world((191, 191))], axis=0)
    assert middle == pytest.approx((400, 300), abs=2)  # a pixel is 2 wide

    desk.widget.layer.value = layer
    desk.widget.sigma.value = "10"
    desk.widget.denoise.changed.emit(True)
    assert desk.widget.denoise.text == "Stop"
    desk.wait()
    found = desk.viewer.layers[-1]
    assert found.name == "wide denoised"
    assert found.colormap.name == "magma"
    assert list(found.contrast_limits) == [60, 190]
    assert found.scale.tolist() == [2, 2]
    assert np.array_equal(found.data, nl.denoise(wide, 10.0, quality="fast"))
    assert found.metadata["nlflow"] == desk.widget.said.value.splitlines()
    assert "as given" in desk.widget.said.value


def test_the_widget_says_what_is_wrong(desk: Any) -> None:
    desk.viewer.add_image(NOISY, name="good")
    for field, text, message in (
        ("sigma", "much", "sigma: got 'much', expected a number, or nothing"),
        ("channel_axis", "7", "channel_axis: got 7"),
    ):
        getattr(desk.widget, field).value = text
        for button in (desk.widget.preview, desk.widget.denoise):
            button.changed.emit(True)
            assert desk.widget.said.value.startswith(message)
        getattr(desk.widget, field).value = ""
    desk.widget.noise.value, desk.widget.sigma.value = "poisson", "3"
    desk.widget.denoise.changed.emit(True)  # refused on the thread
    desk.wait()
    assert desk.widget.said.value.startswith("sigma: got a value with noise='poisson'")
    assert len(desk.viewer.layers) == 1


def test_the_widget_stops(desk: Any) -> None:
    desk.viewer.add_image(RNG.normal(0, 10, (60, 64, 64)).astype(np.float32), name="long")
    desk.widget.quality.value = "best"
    desk.widget.denoise.changed.emit(True)
    desk.widget.denoise.changed.emit(True)
    assert desk.widget.said.value == "Stopping ..."
    desk.wait()
    assert desk.widget.said.value == "Stopped: there is no result."
    assert len(desk.viewer.layers) == 1
