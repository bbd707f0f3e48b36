"""The widget."""

from __future__ import annotations

from typing import Any

from nlflow.denoising.noise.names import WORDS
from nlflow.denoising.priors.denoisers import base
from nlflow.desk.napari.layers import TAKES, Result, Settings, denoised, layer_of, samples_of
from nlflow.errors import InputError, NlflowError, install_command

_LABELS = {"planes": "each plane", "volumes": "each volume", "clips": "each clip (time, then planes)"}


class _StoppedError(Exception):
    """The user has pressed *Stop*."""


class DenoiseWidget(base("magicgui.widgets", "Container", install_command("napari"))):  # type: ignore[misc]  # magicgui's class
    """Denoise image layers in napari.

    *Preview* denoises a part around the middle of the view, *Denoise* the whole layer in a thread, which *Stop* ends.

    Parameters
    ----------
    napari_viewer : napari.Viewer
        Results are added to it as new layers.

    Raises
    ------
    InputError
        If magicgui is not installed.
    """

    def __init__(self, napari_viewer: Any) -> None:
        from magicgui.widgets import ComboBox, FloatSpinBox, Label, LineEdit, ProgressBar, PushButton

        self._viewer = napari_viewer
        self._worker: Any = None
        self._previewed: Any = None
        fields = [
            ComboBox(name="layer", choices=self._layers, nullable=False),
            ComboBox(name="takes", label="at once", choices=[(_LABELS[name], name) for name in TAKES]),
            LineEdit(name="channel_axis", label="channel axis", tooltip="of channels that belong together; or nothing"),
            LineEdit(name="sigma", tooltip="of the noise, in the units of the layer; nothing: it is found out"),
            ComboBox(name="noise", choices=list(WORDS)),
            ComboBox(name="quality", choices=["fast", "balanced", "best"], value="balanced"),
            FloatSpinBox(name="strength", value=1.0, min=0.0, max=10.0, step=0.1),
            PushButton(name="preview", text="Preview", tooltip="a part around the middle of the view"),
            PushButton(name="denoise", text="Denoise", tooltip="the whole layer"),
            ProgressBar(name="share", label="done", value=0, max=100),
            Label(name="said", label=" ", value=""),
        ]
        super().__init__(widgets=fields, labels=True)
        self.said.native.setWordWrap(True)
        self.preview.changed.connect(self._on_preview)
        self.denoise.changed.connect(self._on_denoise)
        for event in ("inserted", "removed", "reordered"):
            getattr(napari_viewer.layers.events, event).connect(self.reset_choices)

    def _layers(self, _: Any = None) -> list[tuple[str, Any]]:
        return [(one.name, one) for one in self._viewer.layers if one.as_layer_data_tuple()[2] == "image"]

    def settings(self) -> Settings:
        """Return what the user has chosen; `InputError` for a text that is no number."""
        return Settings(
            self.takes.value,
            _number("channel_axis", self.channel_axis.value, int),
            _number("sigma", self.sigma.value, float),
            self.noise.value,
            self.quality.value,
            self.strength.value,
        )

    def _on_preview(self) -> None:
        layer = self.layer.value
        try:
            settings = self.settings()
            part = samples_of(layer, settings, None if layer is None else self._middle(layer))
            result = denoised(part, settings)
        except NlflowError as error:
            self.said.value = str(error)
            return
        if self._previewed in self._viewer.layers:
            self._viewer.layers.remove(self._previewed)
        self._previewed = self._show(layer, result, "preview")
        if result.data.shape != layer.data.shape:
            self.said.value += "\nThe noise is that of the preview alone."

    def _middle(self, layer: Any) -> tuple[float, ...]:
        dims, world = self._viewer.dims, list(self._viewer.dims.point)
        shown = list(dims.displayed)
        camera = getattr(self._viewer, "scene", self._viewer).camera  # in a scene since napari 0.9
        for axis, place in zip(shown, camera.center[-len(shown) :], strict=True):
            world[axis] = place
        return tuple(layer.world_to_data(world[-layer.ndim :]))

    def _on_denoise(self) -> None:
        if self._worker is not None:
            self._worker.quit()
            self.said.value = "Stopping ..."
            return
        layer = self.layer.value
        try:
            settings = self.settings()
            samples = samples_of(layer, settings)
        except NlflowError as error:
            self.said.value = str(error)
            return
        from napari.qt.threading import create_worker

        def work() -> Any:
            yield 0.0  # what yields is a worker whose shares can be told
            return denoised(samples, settings, tell)

        def tell(share: float) -> None:
            if worker.abort_requested:
                raise _StoppedError
            worker.yielded.emit(share)

        worker = create_worker(work, _start_thread=False, _ignore_errors=True)
        worker.yielded.connect(self._told)
        worker.returned.connect(lambda result: self._show(layer, result, "denoised"))
        worker.errored.connect(self._failed)
        worker.aborted.connect(lambda: self._failed(_StoppedError()))
        worker.finished.connect(self._finished)
        self._worker, self.denoise.text, self.said.value = worker, "Stop", f"Denoising {layer.name} ..."
        worker.start()

    def _told(self, share: float) -> None:
        self.share.value = round(100 * share)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, _StoppedError):
            self.said.value = "Stopped: there is no result."
        elif isinstance(error, NlflowError):
            self.said.value = str(error)
        else:
            raise error

    def _finished(self) -> None:
        self._worker, self.denoise.text, self.share.value = None, "Denoise", 0

    def _show(self, layer: Any, result: Result, word: str) -> Any:
        data, attributes, _ = layer_of(layer, result, word)
        self.said.value = "\n".join(result.said)
        return self._viewer.add_image(data, **attributes)


def _number(name: str, text: str, kind: type) -> Any:
    if not text.strip():
        return None
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{name}: got {text!r}, expected a number, or nothing") from None
