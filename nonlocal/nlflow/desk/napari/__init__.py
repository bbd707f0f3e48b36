"""The napari plugin."""

from nlflow.desk.napari.layers import Settings, denoise_layer
from nlflow.desk.napari.widget import DenoiseWidget

__all__ = ["DenoiseWidget", "Settings", "denoise_layer"]
