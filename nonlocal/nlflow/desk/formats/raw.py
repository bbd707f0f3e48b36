"""Camera raws (DNG, NEF, CR2, ARW and others), developed by LibRaw through rawpy.

A picture of 16 bits in sRGB comes out: the camera's own white balance, no brightening, the gamma of Rec. 709, turned
upright. Denoising comes after that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nlflow.desk.formats.media import Array, Media, check_declared, lacking
from nlflow.errors import install_command


def need_rawpy(path: Path) -> Any:
    """Return rawpy, or raise `FileFormatError` where it is not installed."""
    try:
        import rawpy
    except ImportError as error:
        remedy = f"{install_command('raw')}, or develop it to a 16-bit TIFF: darktable-cli {path} {path.stem}.tif"
        raise lacking(path, "rawpy", remedy) from error
    return rawpy


def decode(path: Path) -> Media:
    """Develop a camera raw."""
    rawpy = need_rawpy(path)
    try:
        data = _developed(path, rawpy)
    except rawpy.LibRawError as error:
        raise ValueError(f"LibRaw says: {error.args[0].decode()}") from error
    data = data[..., 0] if data.shape[-1] == 1 else data  # of a camera without colours
    note = f"{path}: developed with the camera's white balance to 16-bit sRGB; the EXIF block is left out"
    return Media(path, "raw", "image", data, notes=(note,))


def _developed(path: Path, rawpy: Any) -> Array:
    with rawpy.imread(str(path)) as raw:
        pixels = raw.sizes.raw_width * raw.sizes.raw_height
        # LibRaw holds four colours of 16 bits beside the mosaic, and three of what it returns.
        check_declared(path, 2 * pixels, path.stat().st_size, copies=1 + 4 + 3)
        data: Array = raw.postprocess(use_camera_wb=True, no_auto_bright=True, output_bps=16)
    return data
