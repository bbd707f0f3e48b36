"""Reading and writing files."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.apart import reason_of
from nlflow.desk.foreign import check_links
from nlflow.desk.formats import FORMATS, left_out
from nlflow.desk.formats.axes import ARTICLES, laid_out
from nlflow.desk.formats.content import HEAD, by_content, foreign, is_text
from nlflow.desk.formats.media import (
    ARRAYS,
    CONTAINERS,
    EXTENSIONS,
    PICTURES,
    READABLE,
    SOUNDS,
    STACKS,
    TABLES,
    Array,
    FirstColumn,
    Kind,
    Media,
    Writing,
    as_stored,
    extension,
    format_of,
    upright,
    writing_of,
)
from nlflow.domains.samples import rounded
from nlflow.errors import FileFormatError, InputError, NlflowError, check_array, check_choice, check_memory, file_error
from nlflow.store.atomic import make_folder, write_atomic, write_folder

__all__ = [
    "EXTENSIONS",
    "STACKS",
    "Array",
    "FirstColumn",
    "Kind",
    "Media",
    "Writing",
    "as_stored",
    "check_distinct",
    "check_output",
    "check_target",
    "extension",
    "format_of",
    "identity",
    "is_stack",
    "load",
    "pictures_in",
    "read",
    "read_kind",
    "upright",
    "write",
    "write_atomic",
]

_PICTURES = ("png", "jpeg", "bmp", "webp", "pnm")  # which have one channel or three, the last axis


# ---- one file, read as its format has it, whatever is wrong with it

# Content of a format, and names that say more: camera raws are TIFF files, and MAT files of version 7.3 are HDF5.
_ALIKE = (("tiff", "raw"), ("hdf5", "mat"))
#: One extension of each format that is written, for messages.
WRITABLE = ", ".join(name for name in READABLE.split(", ") if FORMATS[format_of(Path(f"x{name}"))].written)


def missing(path: Path) -> FileFormatError:
    if path.is_symlink():
        return FileFormatError(f"{path}: got a link to {path.readlink()}, which does not exist; make the link anew")
    names: list[str] = []
    with suppress(OSError):  # a folder that is missing too, or that nobody may look into
        names = [entry.name for entry in path.parent.iterdir()]
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    remedy = f"did you mean {path.with_name(near[0])}?" if near else "check the name and the folder"
    return FileFormatError(f"{path}: there is no such file or folder; {remedy}")


def _known_format(path: Path) -> str:
    form = format_of(path)
    if not form:
        got = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        raise file_error(path, got, f"one of {WRITABLE}", "choose one of them")
    return form


def found_format(path: Path) -> tuple[str, list[str]]:
    """Return the format of a file, by its content rather than its name, and notes."""
    extension = ""
    if path.is_file():
        with suppress(OSError), path.open("rb") as stream:  # what is wrong with it is said when it is read
            extension = by_content(stream.read(HEAD))
    form, named = format_of(Path(f"x{extension}")), format_of(path)
    if form and form != named and (form, named) not in _ALIKE:
        return form, [f"{path}: the content is {form.upper()}, whatever its name says"]
    got, way = foreign(path, extension)
    if named and not got:
        return named, []
    if not path.exists():
        raise missing(path)
    if not got:
        got, way = foreign(path, path.suffix.lower())
    if not got and path.is_dir():
        got, way = "a folder", "name a file in it, or give axes (ZYX, TYX) where it holds the pictures of one stack"
    got = got or (f"the extension {path.suffix!r}" if path.suffix else "a name without extension")
    raise file_error(path, got, f"one of {READABLE}", way or "export it as one of them from the program that made it")


def load(path: str | os.PathLike[str], *, first_column: FirstColumn | None = None, array: str | None = None) -> Media:
    path = Path(path)
    form, notes = found_format(path)
    expected = f"a readable {form.upper()} file"
    words: dict[str, str | None] = {"first_column": first_column} if form in TABLES else {}
    if form in CONTAINERS:
        words = {"array": array}
    elif array is not None:
        raise InputError(f"array: got {array!r} for {path}, expected a file of several arrays; leave it out")
    if not path.exists():
        raise missing(path)
    if FORMATS[form].folder:
        if not path.is_dir():
            raise file_error(path, "a file", "a folder, as zarr stores are", "check the name")
    elif not path.is_file():
        raise file_error(path, "a folder" if path.is_dir() else "no regular file", expected, "name the file itself")
    else:
        if path.stat().st_size == 0:
            raise file_error(path, "an empty file", expected, "copy or export it again")
        try:
            with path.open("rb") as stream:
                head = stream.read(HEAD)
        except OSError as error:
            raise file_error(path, f"{error.strerror}", expected, "check its permissions") from error
        if form not in ("csv", "pnm", "pbm") and is_text(head):  # no other format is a text
            remedy = "give a picture" if form in PICTURES else "copy or export it again"
            raise file_error(path, "a text file", expected, remedy)
    try:
        with warnings.catch_warnings():  # decoders warn about odd metadata; lost samples are errors in every one
            warnings.simplefilter("ignore")
            media = FORMATS[form].decode(path, **words)
    except NlflowError:
        raise
    except MemoryError as error:
        raise file_error(path, "more samples than memory can hold", expected, "crop or downsample it") from error
    except Exception as error:  # a damaged file makes decoders fail in any way: IndexError, struct.error, zlib.error
        got = f"a damaged or foreign file ({reason_of(error)})"
        raise file_error(path, got, expected, "copy or export it again") from error
    data = media.data
    if data.dtype.kind not in "biuf":
        raise file_error(path, f"values of type {data.dtype}", "real numbers", "convert them, e.g. with astype or abs")
    if data.size == 0:
        raise file_error(path, f"an empty array of shape {data.shape}", "at least one sample", "export it again")
    if not data.dtype.isnative:
        media = replace(media, data=data.astype(data.dtype.newbyteorder("=")))
    return replace(media, notes=(*notes, *media.notes)) if notes else media


# ---- a folder of pictures as one stack: frames of a clip or slices of a volume, by the order of their names

_FRAMES = ("png", "jpeg", "tiff", "bmp", "webp", "pnm")


def natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.lower()) for part in parts if part]


def pictures_in(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir()
             if path.is_file() and not path.name.startswith(".") and format_of(path) in _FRAMES]  # fmt: skip
    return sorted(found, key=lambda path: natural(path.name))


_NAMED = re.compile(r"(?<![a-z])(time|channel|slice|[tzc])[_-]?(\d+)", re.IGNORECASE)
_LETTERS = {"time": "T", "channel": "C", "slice": "Z"}


def _placed_by_name(folder: Path, paths: Sequence[Path], letters: str) -> tuple[list[Path], tuple[int, ...]]:
    """Return pictures in the order of these axes, as their names say it (``t3_c0_z12``), and how many along each."""
    found: dict[tuple[int, ...], Path] = {}
    small = letters.lower()
    wanted = f"names with {', '.join(small)} and a number each, such as {'_'.join(f'{a}0' for a in small)}"
    for path in paths:
        said = {}
        for word, number in _NAMED.findall(path.stem):
            said[_LETTERS.get(word.lower(), word.upper())] = int(number)
        if not set(letters) <= set(said):
            raise file_error(
                path, f"a name that says {', '.join(sorted(said)).lower() or 'none of them'}", wanted, "rename it"
            )
        place = tuple(said[letter] for letter in letters)
        if place in found:
            raise file_error(path, f"the place of {found[place].name}", "one picture for each", "take one out")
        found[place] = path
    values = [sorted({place[axis] for place in found}) for axis in range(len(letters))]
    if (count := math.prod(map(len, values))) > len(found):
        lacking = next(place for place in product(*values) if place not in found)
        first = "_".join(f"{a}{n}" for a, n in zip(small, lacking, strict=True))
        got = f"{len(found)} of {count} pictures, the first that lacks is {first}"
        raise file_error(folder, got, "one for each place", "add what lacks, or take out what is beside it")
    return [found[place] for place in product(*values)], tuple(map(len, values))


def _load_frames(folder: Path, paths: Sequence[Path], axes: str | None = None) -> Media:
    """Read pictures of one size and type as one stack, whose first axis the user has to name.

    Of several axes beside Y and X (``TCZYX``) the names of the pictures say which is where.
    """
    if not paths:
        raise FileFormatError(f"{folder}: got no pictures, expected at least one; check the name")
    check_links(folder, paths, "a folder of pictures")
    beside = (axes or "").upper().partition("YX")[0]
    sizes: tuple[int, ...] = (len(paths),)
    if len(beside) > 1 and set(beside) <= set("TZC"):
        paths, sizes = _placed_by_name(folder, paths, beside)
    kept: list[Media] = []
    data: Array | None = None
    for number, path in enumerate(paths):
        one = load(path)
        if one.format not in _FRAMES or one.kind != "image":
            got = "a stack" if one.stacked else f"a {one.format.upper()} file"
            expected = "a picture that is written as well, PNG, JPEG, TIFF, BMP, WebP or PNM"
            raise FileFormatError(f"{path}: got {got}, expected {expected}; take it out of {folder}")
        if data is None:
            needed = 2 * len(paths) * one.data.nbytes
            check_memory(f"{folder}: {len(paths)} frames", needed, "denoise it in parts")
            data = np.empty((len(paths), *one.data.shape), one.data.dtype)
        first = kept[0] if kept else one
        for name, mine, theirs in (
            ("size", one.data.shape, data.shape[1:]), ("type", one.data.dtype, data.dtype),
            ("orientation", one.orientation, first.orientation),
            ("alpha channel", one.alpha is not None, first.alpha is not None),
        ):  # fmt: skip
            if mine != theirs:
                raise FileFormatError(
                    f"{path}: got the {name} {mine}, expected {theirs} as in {paths[0]}; frames of one clip are "
                    "alike: convert it, or take it out"
                )
        data[number] = one.data
        kept.append(replace(one, data=data[number], channel_axis=2 if one.data.ndim == 3 else None))
    assert data is not None
    notes = list(dict.fromkeys(note for one in kept for note in one.notes))
    if len(notes) > 1:
        notes = [notes[0] + f"; of other frames there are {len(notes) - 1} more such notes"]
    said = (beside if len(sizes) > 1 else "?") + "YX" + ("C" if data.ndim == 4 else "")
    if said.count("C") > 1:
        remedy = "leave C out of the axes, or save grey levels"
        raise file_error(folder, "pictures in colours whose names say a channel", "one or the other", remedy)
    data = data.reshape(*sizes, *data.shape[1:])
    return Media(folder, "frames", "volume", data, orientation=kept[0].orientation, extras={"frames": tuple(kept)},
                 notes=tuple(notes), axes=said)  # fmt: skip


# ---- what is read: the axes of arrays and stacks settled


def read(
    path: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    channel_axis: int | None = None,
    first_column: FirstColumn | None = None,
    axes: str | None = None,
    spacing: Sequence[float] | None = None,
    array: str | None = None,
) -> Media:
    """Read an image, a signal or a stack.

    Parameters
    ----------
    path : str or PathLike
        A file, whose content decides on the format, then its extension. With `axes` also a folder of pictures: the
        frames of a clip or the slices of a volume, in the order of their names.
    kind : {"image", "signal"}, optional
        Needed for a two-dimensional array that is a signal (N, C).
    channel_axis : int, optional
        Axis of the channels in an array. By default the last one of three, if it has 2 to 4 entries.
    first_column : {"keep", "denoise"}, optional
        What is done with the first of several columns in a table; see `nlflow.desk.formats.tables.chosen`.
    axes : str, optional
        Axes of a stack, if the file does not name them: a letter for each (T, Z, C, Y, X).
    spacing : sequence of float, optional
        Distances of the samples of a stack, instead of those in the file: a number for each axis but C, or for Z, Y and
        X only.
    array : str, optional
        Name of the array in an NPZ, MAT or HDF5 file; needed if there are several.

    Returns
    -------
    Media
        The samples as they are stored, in the units of the file, with ``notes`` about conversions.

    Raises
    ------
    FileFormatError
        For a file that is missing, damaged, of an unknown format or with unsupported content.
    InputError
        For arguments that do not fit the file, and if it is not known what an axis is.
    """
    if first_column is not None:
        check_choice("first_column", first_column, ("keep", "denoise"))
    if axes is not None and not isinstance(axes, str):
        raise InputError(f"axes: got {axes!r}, expected one letter for each axis, such as 'ZYX'")
    spacing = None if spacing is None else check_array("spacing", spacing, ndim=1).tolist()
    path = Path(path)
    if axes is not None and path.is_dir() and not format_of(path):
        if array is not None:
            raise InputError(f"array: got {array!r} for {path}, expected a file of several arrays; leave it out")
        media = _load_frames(path, pictures_in(path), axes)
    else:
        media = load(path, first_column=first_column, array=array)
    if first_column is not None and media.format not in TABLES:
        raise InputError(f"first_column: got {first_column!r} for {path}, expected a CSV table; leave it out")
    media = laid_out(media, kind, channel_axis, axes, spacing)
    return media if media.absent is not None else _without_data(media)


def is_stack(path: Path) -> bool:
    form = format_of(path)
    if form == "zarr":
        from nlflow.desk.formats.ngff import is_group

        return is_group(path)
    if form == "tiff" and path.is_file():
        from nlflow.desk.formats.tiff import is_stack as has_pages

        return has_pages(path)
    return form in ("nifti", "video")


def read_kind(path: Path) -> Kind:
    return load(path).kind


# ---- what is written


def check_target(path: str | os.PathLike[str]) -> None:
    path = Path(path)
    expected = "a file that can be written"
    if path.is_dir():
        raise file_error(path, "a folder", expected, "add a file name")
    if path.exists() and not path.is_file():
        raise file_error(path, "no regular file", expected, "choose another name")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        if folder.exists():
            raise file_error(path, f"{folder}, a file, as the folder", expected, "choose another folder")
        raise file_error(path, f"the folder {folder}, which does not exist", expected, "create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise file_error(path, f"the folder {folder} without write permission", expected, "choose another folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise file_error(path, "a write-protected file", expected, "choose another name or change its permissions")


def check_distinct(sources: Mapping[str, Path | None], targets: Mapping[str, Path | None]) -> None:
    seen = {key: name for name, path in sources.items() if path is not None for key in identity(path)}
    for name, path in targets.items():
        for key in () if path is None else identity(path):
            if key in seen:
                other = seen[key]
                raise InputError(f"{name}: got {path}, the same file as {other}, expected another; choose a new name")
        if path is not None:
            seen |= dict.fromkeys(identity(path), name)


def identity(path: Path) -> list[object]:
    try:
        found = path.stat()
    except OSError:
        return [os.path.realpath(path)]
    return [os.path.realpath(path), (found.st_dev, found.st_ino)]


def check_output(target: str | os.PathLike[str] | Writing, media: Media) -> tuple[str, ...]:
    """Return notes of what the format of an output cannot hold; `FileFormatError` if it cannot hold the result."""
    writing = writing_of(target)
    path = writing.path
    if media.format == "frames" and not format_of(path):
        _check_frames(path, media)
        return ()
    form = _known_format(path)
    why, other = FORMATS[form].instead
    if other:
        raise FileFormatError(f"{path}: {why}; name the output {path.stem}{other}, for example")
    if not FORMATS[form].folder or not path.is_dir():
        check_target(path)
    else:
        from nlflow.desk.formats.ngff import is_store

        if not is_store(path) or media.path.resolve().is_relative_to(path.resolve()):
            got = "a folder that holds the input" if is_store(path) else "a folder that is no zarr store"
            raise file_error(path, got, "a new name", "choose another")
    dtype = media.data.dtype
    count = 1 if media.channel_axis is None else media.data.shape[media.channel_axis]
    got, instead = "", ".csv or .npy" if media.kind == "signal" else ".tif or .npy"
    kinds, dtypes = FORMATS[form].kinds, FORMATS[form].dtypes
    if media.kind not in kinds.split() and not (form == media.format == "video"):  # a film of one frame is an image
        got = ARTICLES[media.kind]
        instead = {"image": ".png, .tif or .npy", "signal": ".wav, .csv or .npy", "clip": ".mp4, .tif or .npy",
                   "volume": ".tif, .nii, .ome.zarr or .npy"}[media.kind]  # fmt: skip
    elif dtypes and dtype.str[1:] not in dtypes.split():
        got = f"{dtype} samples"
        instead = ".npy or .csv" if kinds == "signal" else ".npy" if form in ("tiff", *ARRAYS) else instead
    elif form in _PICTURES and count not in (1, 3):
        got = f"{count} channels"
    elif form in ("jpeg", "bmp", "pnm") and media.alpha is not None:
        got, instead = "an alpha channel", ".png or .tif"
    elif form in SOUNDS and media.sample_rate is None:
        got, instead = f"a signal without sample rate (from {media.format.upper()})", ".npy or .csv"
    elif form in STACKS.values() and not media.axes:
        got = ARTICLES[media.kind]
    else:
        got = FORMATS[form].check(media, writing)
    if got:
        name = (path.suffix[1:] if form == "video" else form).upper()
        raise FileFormatError(f"{path}: {name} files cannot hold {got}; name the output {instead}")
    names = left_out(form, media, writing)
    told = FORMATS[form].notes(media, writing)
    if not names:
        return tuple(told)
    several = len(names) > 1 or names[0].endswith("s")
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return (f"{path}: {listed} {'are' if several else 'is'} left out", *told)


def _check_frames(folder: Path, media: Media) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder}: got a file, expected a folder for the frames; choose another name")
    if "frames" not in media.extras:
        raise FileFormatError(f"{folder}: got a name without extension, expected a file name; add .tif or .npy")


def _write_frames(writing: Writing, values: Array, media: Media) -> None:
    frames = media.extras["frames"]
    folder = make_folder(writing.path)
    for frame, one in zip(values.reshape(len(frames), *frames[0].data.shape), frames, strict=True):
        place = writing.at(folder / one.path.name)
        encode = partial(FORMATS[one.format].encode, values=frame, media=one, writing=place)
        write_atomic(place.path, encode, replace=place.replaces)


def _without_data(media: Media) -> Media:
    """Return what a file holds with the samples that hold no data, as it says, and those of which nothing is seen."""
    from nlflow.desk.formats.tiff_pages import no_data

    told, notes = no_data(media.extras.get("tags", []), media.data, media.channel_axis), list(media.notes)
    found = np.zeros(media.data.shape, bool) if told is None else told
    if found.any():
        notes.append(f"{media.path}: {np.count_nonzero(found)} sample(s) hold no data, as the file says; they count as "
                     "missing and stay as they are")  # fmt: skip
    if media.alpha is not None and media.alpha.ndim == 2 and media.alpha.any():
        found = found | (media.alpha == 0 if media.data.ndim == 2 else (media.alpha == 0)[..., None])
    return replace(media, absent=found, notes=tuple(notes)) if found.any() else media


def stored(data: Array, dtype: np.dtype[Any], form: str, bits: int | None) -> Array:
    """Return `data` in the dtype of the output; for integers rounded and clipped."""
    if form in ("npy", "npz", *TABLES):
        return data.astype(np.float32 if dtype in (np.float16, np.float32) else np.float64)
    if dtype.kind not in "iu":
        return data.astype(dtype)
    if not np.isfinite(data).all():
        raise InputError(f"data: got NaN or infinite values, expected finite ones to store as {dtype}; write .npy")
    return rounded(data if bits is None else np.clip(data, 0, 2**bits - 1), dtype)


def _kept(values: Array, media: Media) -> Array:
    """Return what is stored with missing samples to the bit: floats do not hold all integers."""
    return media.restored(values) if values.dtype == media.data.dtype else values


def write(target: str | os.PathLike[str] | Writing, data: Array, media: Media) -> None:
    """Write a result of the units and the shape of ``media.data`` as that is stored; NPY, NPZ and tables get floats."""
    writing = writing_of(target)
    path = writing.path
    check_output(writing, media)
    data = np.asarray(data)
    if data.shape != media.data.shape:
        raise InputError(f"data: got shape {data.shape}, expected {media.data.shape} as in {media.path}")
    data = media.restored(data)
    if media.format == "frames" and not format_of(path):
        _write_frames(writing, _kept(stored(data, media.data.dtype, "", None), media), media)
        return
    form = _known_format(path)
    values = _kept(stored(data, media.data.dtype, form, media.bits), media)
    if media.axes and form not in _PICTURES:
        if form in ARRAYS and media.format in ARRAYS:
            values = values.reshape(media.stored_shape)
    elif media.channel_axis is not None and form not in ARRAYS:
        values = np.ascontiguousarray(np.moveaxis(values, media.channel_axis, -1))
    write_whole = write_folder if FORMATS[form].folder else write_atomic
    try:
        write_whole(path, lambda place: FORMATS[form].encode(place, values, media, writing), replace=writing.replaces)
    except NlflowError:
        raise
    except Exception as error:  # encoders refuse odd metadata in many ways
        raise file_error(path, f"an encoder failure ({error})", f"a {form.upper()} file", "write .npy") from error
