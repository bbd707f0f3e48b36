"""The plugin of napari: denoise layers, with a preview. `napari.yaml` is its manifest; no viewer is loaded here."""

from nlflow.desk.napari.layers import Settings, denoise_layer
from nlflow.desk.napari.widget import DenoiseWidget

__all__ = ["DenoiseWidget", "Settings", "denoise_layer"]
