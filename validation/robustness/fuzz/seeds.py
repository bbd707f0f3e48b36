"""Small valid files of every format that the package reads, made by code: where fuzzing begins."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import tempfile
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "archives",
    "checkpoints",
    "commands",
    "companions",
    "csv_tables",
    "jpeg",
    "kernels",
    "models",
    "npy",
    "packed",
    "pictures",
    "png",
    "recipe_files",
    "recipes",
    "small_flow",
    "small_model",
    "small_training",
    "states",
    "studies",
    "tiff",
    "wav",
]

_RNG = np.random.default_rng(5)
GREY = _RNG.integers(0, 256, (7, 9), dtype=np.uint8)
RGB = _RNG.integers(0, 256, (7, 9, 3), dtype=np.uint8)
WIDE = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}


def packed(files: dict[str, bytes], *, deflate: bool = False) -> bytes:
    """Return files as one zip archive, which is how a folder travels through a fuzzer."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def _folder(path: Path) -> bytes:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return packed({file.relative_to(path).as_posix(): file.read_bytes() for file in files})


def _saved(image: Any, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


def png() -> list[bytes]:
    """Return PNG files of every mode, with texts, profiles, transparency, several frames."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_text("Title", "one")
    texts.add_text("zipped", "two" * 9, zip=True)
    texts.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta/>")
    texts.add(b"gAMA", struct.pack(">I", 45455))
    exif = Image.Exif()
    exif[0x0112] = 6
    grey, rgb = Image.fromarray(GREY), Image.fromarray(RGB)
    alpha = Image.fromarray(np.dstack([RGB, GREY]))
    return [
        _saved(grey, "PNG"),
        _saved(rgb, "PNG", pnginfo=texts, dpi=(72, 72), exif=exif.tobytes(), icc_profile=b"profile"),
        _saved(alpha, "PNG"),
        _saved(alpha.convert("LA"), "PNG"),
        _saved(rgb.convert("P"), "PNG", transparency=3),
        _saved(grey, "PNG", transparency=12),
        _saved(grey.convert("1"), "PNG"),
        _saved(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
        _saved(grey, "PNG", save_all=True, append_images=[Image.fromarray(255 - GREY)]),
    ]


def jpeg() -> list[bytes]:
    """Return JPEG files of every mode, progressive ones, with EXIF, XMP, comments, several pictures."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 3
    exif[0x010E] = "words"
    grey, rgb = Image.fromarray(GREY), Image.fromarray(RGB)
    extras = {"exif": exif.tobytes(), "comment": b"a comment", "dpi": (300, 300), "icc_profile": b"p" * 20}
    return [
        _saved(grey, "JPEG"),
        _saved(rgb, "JPEG", progressive=True, **extras),
        _saved(rgb.convert("CMYK"), "JPEG", xmp=b"<x:xmpmeta/>"),
        _saved(rgb, "MPO", save_all=True, append_images=[rgb.rotate(90)]),
    ]


def tiff() -> list[bytes]:
    """Return TIFF files: integers and floats, planes, tiles, compressed, BigTIFF, many pages."""
    import tifffile
    from PIL import Image

    def written(data: Any, **options: Any) -> bytes:
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, data, **{"metadata": None, **options})
        return buffer.getvalue()

    long = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)
    tags = [(270, "s", 0, "words", True), (274, "H", 1, 6, True), (700, "B", 5, b"<xmp>", True)]
    found = [
        written(GREY, extratags=tags, resolution=(72, 72)),
        written(RGB, photometric="rgb", description="words"),
        written(RGB, photometric="rgb", compression="zlib", predictor=True),
        written(np.moveaxis(RGB, -1, 0), photometric="rgb", planarconfig="separate"),
        written(GREY.astype(np.float32) / 7),
        written(GREY.astype(np.int16), byteorder=">"),
        written(long, tile=(16, 16), bigtiff=True),
        written(GREY > 99, photometric="minisblack"),
        written(np.dstack([RGB, GREY]), photometric="rgb", extrasamples=["unassalpha"]),
        written(np.stack([GREY, GREY])),
        written(GREY, metadata={"axes": "YX"}),
        written(GREY, imagej=True, metadata={}),
        written(GREY, photometric="miniswhite"),
    ]
    found += [_saved(Image.fromarray(GREY), "TIFF", compression=name) for name in ("tiff_lzw", "packbits")]
    found.append(_saved(Image.fromarray(RGB), "TIFF", compression="jpeg"))
    colours = Image.fromarray(RGB)
    found += [_saved(colours.convert(mode), "TIFF") for mode in ("CMYK", "YCbCr", "P")]
    found.append(_saved(colours.convert("1"), "TIFF", compression="group4"))
    found += [written(RGB, photometric="rgb", compression=name) for name in ("zstd", "lzma", "lerc")]
    stack, labels = np.stack([GREY, GREY, GREY]), ["a", "b", "c"]
    found += [
        written(stack, imagej=True, metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um", "Labels": labels}),
        written(stack, ome=True, metadata={"axes": "ZYX", "PhysicalSizeZ": 0.5, "SignificantBits": 8}),
        written(stack, photometric="minisblack", compression="zlib", metadata={"axes": "TYX"}),
        written(np.stack([RGB, RGB]), photometric="rgb", ome=True, metadata={"axes": "ZYXS"}),
    ]
    return found


def nifti() -> list[bytes]:
    """Return NIfTI files: integers and floats, with a scale, with times, with extensions, of version 2."""
    import nibabel

    found = []
    one, two = nibabel.Nifti1Image, nibabel.Nifti2Image
    for kind, dtype, shape in ((one, "u1", (5, 4, 3)), (one, "f4", (5, 4, 3, 2)), (two, "i2", (5, 4, 3)),
                               (one, "i2", (5, 4, 1))):  # fmt: skip
        image = kind(np.arange(math.prod(shape)).reshape(shape).astype(dtype), np.eye(4), dtype=np.dtype(dtype))
        image.header.set_xyzt_units("mm", "sec")
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"words"))
        if dtype == "i2":
            image.header.set_slope_inter(0.5, 3)
        found.append(image.to_bytes())
    return found


def video() -> list[bytes]:
    """Return films in two containers, of two codecs."""
    import av

    found = []
    kinds = (("mp4", "mpeg4", "yuv420p"), ("matroska", "ffv1", "gray"), ("matroska", "mpeg4", "yuv420p"))
    for form, codec, pixels in kinds:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=form) as container:
            stream = container.add_stream(codec, rate=25)
            stream.height, stream.width, stream.pix_fmt = 16, 16, pixels
            for shade in (40, 90, 140):
                frame = av.VideoFrame.from_ndarray(np.full((16, 16), shade, np.uint8), format="gray")
                container.mux(stream.encode(frame.reformat(format=pixels)))
            container.mux(stream.encode())
        found.append(buffer.getvalue())
    return found


def npy() -> list[bytes]:
    """Return arrays of many dtypes and ranks, of three versions of the format."""
    arrays = [
        np.arange(6.0),
        GREY,
        RGB.astype(np.float32),
        np.asfortranarray(GREY.astype(">i4")),
        GREY > 9,
        np.array(3.5),
        np.arange(4, dtype=np.float16),
        np.ones(3, dtype=np.complex64),
        np.array(["a", "b"]),
        np.zeros(2, dtype=[("x", "f4"), ("y", "i2")]),
        np.zeros((0, 3)),
    ]
    found = []
    for array in arrays:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        found.append(buffer.getvalue())
    for version in ((2, 0), (3, 0)):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.arange(5), version=version)
        found.append(buffer.getvalue())
    objects = io.BytesIO()  # what must be refused: an array of objects, with its pickle
    np.save(objects, np.array([{}, None], dtype=object), allow_pickle=True)
    return [*found, objects.getvalue()]


def wav() -> list[bytes]:
    """Return sounds of 8 to 64 bits, whole numbers and floats, with chunks beside the samples."""
    from scipy.io import wavfile

    found = []
    for dtype in (np.uint8, np.int16, np.int32, np.float32, np.float64):
        buffer = io.BytesIO()
        wavfile.write(buffer, 8000, _RNG.integers(0, 100, (20, 2)).astype(dtype))
        found.append(buffer.getvalue())
    plain = io.BytesIO()
    with wave.open(plain, "wb") as sound:
        sound.setparams((1, 3, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(range(60)))
    found.append(plain.getvalue())
    chunk = b"LIST" + struct.pack("<I", 6) + b"INFOab"
    whole = found[1] + chunk
    found.append(whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:])
    return found


def csv_tables() -> list[bytes]:
    """Return tables with and without names, times, quotes, other delimiters."""
    quoted = io.StringIO()
    csv.writer(quoted).writerows([["t", 'a "b", c'], ["0", "1.5"], ["1", "nan"]])
    return [
        b"1\n2\n3.5\n",
        b"time (s),left,right\n0,1,2\n0.5,3,4e-3\n1,5,6\n",
        b"a;b\n1;2\n3;4\n",
        b"1\t2\n3\t-inf\n",
        "\ufeffx,y\n1,2\n\n3,4\n".encode(),
        quoted.getvalue().encode(),
    ]


def companions() -> list[bytes]:
    """Return files that belong to an image; the first byte says which option names them, the second the format."""
    shape = np.arange(63).reshape(7, 9)
    mask = io.BytesIO()
    np.save(mask, (shape % 5 == 0).astype(np.uint8))
    sigma = io.BytesIO()
    np.save(sigma, 1.0 + shape)
    every = [png(), jpeg(), tiff(), [mask.getvalue(), sigma.getvalue()], csv_tables()]
    return [
        bytes([option, number]) + content
        for number, contents in enumerate(every)
        for option in range(3)
        for content in contents[:3]
    ]


def archives() -> list[bytes]:
    """Return archives of `nlflow.store.storage`, compressed ones too, and npz files of others."""
    from nlflow.store.storage import save_archive

    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive"
        for arrays in ({"u": np.arange(3.0)}, {"a/b": GREY, "c": np.array(1)}, {}):
            save_archive(path, arrays, {"kind": "checkpoint", "t": 0.5, "text": "ü", "list": [1, None]})
            found.append(path.read_bytes())
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, a=GREY)
        found.append(buffer.getvalue())
    return found


def small_flow() -> Any:
    """Return the flow whose checkpoints are fuzzed."""
    import nlflow as nl

    u = np.random.default_rng(8).standard_normal((6, 1))
    affinity = nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(6.0)), u, method="dense")
    return nl.GradientFlow(nl.E(affinity, u, 0.3, measure="degree"), "degree")


def checkpoints() -> list[bytes]:
    """Return checkpoints of a small flow at several times."""
    import nlflow as nl

    found: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        for every in (1, 3):
            path = Path(folder) / f"checkpoint-{every}"
            nl.solve(small_flow(), t_eval=[0.0, 0.5, 1.0], trackers=[nl.Checkpoint(path, every=every)])
            found.append(path.read_bytes())
    return found


def studies() -> list[bytes]:
    """Return the folder of a finished small study, whole, without a case, and with foreign files."""
    from validation.robustness.fuzz.folders import run_small_study

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        run_small_study(path)
        whole = _folder(path)
        (path / "cases" / "notes.txt").write_text("hello")
        next((path / "cases").glob("0000*")).unlink()
        return [whole, _folder(path)]


def recipes() -> list[bytes]:
    """Return files that tell a study; the arrays of the last lie in `recipe_files`."""
    from nlflow.studies.replay import NAME, study_files

    given: list[tuple[str, dict[str, Any]]] = [
        ("mixing", {"kernel": "gaussian:width=0.1", "nodes": [16, 32], "boundary": ["periodic", "reflect"]}),
        ("time-order", {"nodes": 16, "integrator": ["euler"], "dt": [0.1, 0.05, 0.025], "fidelity": 0.5}),
        ("stability", {"fidelity": [0.0, 0.5], "metric": ["l2", "degree"]}),
        ("mixing", {}),
    ]
    return [*(study_files(kind, options, 0, [])[NAME] for kind, options in given), _recipe()[NAME]]


def recipe_files() -> dict[str, bytes]:
    """Return the arrays beside the last of the files that tell a study."""
    return {name: content for name, content in _recipe().items() if name.endswith(".npy")}


def _recipe() -> dict[str, bytes]:
    from nlflow.studies.replay import study_files

    queries, keys = np.random.default_rng(5).standard_normal((2, 6, 3))
    return study_files("mixing", {"queries": queries, "keys": keys}, 7, [])


def kernels() -> list[bytes]:
    """Return texts of kernels and lists of options, one a line."""
    return [
        b"gaussian:width=0.1",
        b"laplace:width=0.1\nnodes=8,16,32\nboundary=periodic,reflect",
        b"tophat:radius=1e-3\nfidelity=0,0.5,1e12\nmetric=l2,degree",
        b"dot:scale=1\nchannels=1,2\nintegrator=euler,semi-implicit\ndt=0.1,0.01,0.001",
        b" Gaussian : width = inf , width=1\nseeds=3\nlaziness=0.5\ndimension=1,2",
    ]


def commands() -> list[bytes]:
    """Return command lines, one word a line."""
    lines = [
        "denoise in.png out.png --quality fast --sigma 20 --json",
        "denoise in.png out.png --quality fast --width 12 --patch-size 3 --search-radius 4 --fidelity 0.5",
        "denoise in.png out.npy --noise poisson --gain 2.1 --read-noise 4 --offset 100",
        "denoise in.npy out.npy --channel-axis -1 --kind image --max-memory 2GiB --mask nan",
        "denoise in.png out.npy --quality fast --set width=12 --set steps=3 --axes channel-axis=0 --write format=npy",
        "denoise in.png in.npy out --mask in.npy --keep in.png --existing skip --stopping sure",
        "denoise *.png out --sigma 1,2,3 --reference in.png --quiet",
        "study time-order --nodes 8 --dt 0.1,0.05,0.02 --kernel gaussian:width=0.1 --json",
        "study monte-carlo --nodes 64,256,1024 --seeds 5 --seed 3 --jobs 1",
        "study mixing --laziness 0.5 --boundary reflect --device cpu",
        "study stability --keys in.npy --queries in.npy --dtype float32 --fidelity 0,1e12",
        "attention folder --tokens in.npy --neutreno 0.6 --no-spectra",
        "info --json",
        "validate --list",
        "--version",
    ]
    return [line.replace(" ", "\n").encode() for line in lines]


def small_model(folder: Path) -> None:
    """Write a transformer of one layer to a folder, with terms of its own."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**WIDE, vocab_size=5, max_position_embeddings=6))
    model.save_pretrained(folder)
    about = {"format": 1, "attach": {"fidelity": 0.5}}
    (folder / "attention.json").write_text(json.dumps(about))


def models() -> list[bytes]:
    """Return folders of small models of text and of pictures, with and without terms."""
    import transformers

    found = []
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "text"
        small_model(folder)
        found.append(_folder(folder))
        (folder / "attention.json").unlink()
        found.append(_folder(folder))
        vision = transformers.ViTModel(transformers.ViTConfig(**WIDE, image_size=4, patch_size=2))
        vision.save_pretrained(Path(base) / "vision")
        settings = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]}
        (Path(base) / "vision" / "preprocessor_config.json").write_text(json.dumps(settings))
        found.append(_folder(Path(base) / "vision"))
    return found


def layers() -> list[bytes]:
    """Return what is told of layers: a whole report, and one without heads and with gaps."""
    names = ("encoder input", "layers.0.attention", "layers.1.attention")
    columns = {"cosine": 0.5, "t_sim": 0.4, "rank": 3.5}
    more = {"J": 2.5, "gap": 0.7, "mixing": 2.5, "stable": 0.9, "share": 0.3}
    rows = [
        {"fidelity": fidelity, "layer": name, "index": number, **columns, **(more if number else {})}
        for fidelity in (0.0, 0.6)
        for number, name in enumerate(names)
    ]
    heads = [
        {"fidelity": fidelity, "layer": name, "J": [1.5, 2.5], "gradient": [0.9, None], "gap": [0.5, 0.25],
         "mixing": [2.0, 3.0], "stable": [0.9, 0.8]}
        for fidelity in (0.0, 0.6)
        for name in names[1:]
    ]  # fmt: skip
    about = {"model": "folder", "kind": "BertModel", "layers": 2, "heads": 2, "tokens": 7, "sequences": 1}
    whole = {**about, "fidelity": 0.6, "rows": rows, "by_head": heads, "warnings": []}
    bare = {**about, "fidelity": None, "rows": [{**rows[1], "gap": None}, rows[2]]}
    return [json.dumps(report, indent=1).encode() for report in (whole, bare)]


def pictures() -> list[bytes]:
    """Return zip archives of pictures to train on, and texts."""
    one, two = png()[0], png()[0]
    return [
        packed({"a/1.png": one, "b/2.png": two}),
        packed({"data/a/1.jpg": jpeg()[0], "data/b/2.jpeg": jpeg()[0], "readme.txt": b"hello"}, deflate=True),
        packed({"../a/1.png": one, "/etc/2.png": two}),
        ("To be, or not to be: that is the question. Ü\n" * 30).encode(),
    ]


def small_training() -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and its scheduler, as far as a training that has begun."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(network.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return network, optimizer, scheduler


def states() -> list[bytes]:
    """Return states of trainings, and tensors for others."""
    import torch

    from validation.training.state import save_state, states, write_tensors

    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "state"
        save_state(states(path), *small_training(), {"step": 3, "history": [{"loss": 0.5}]})
        found = [path.read_bytes()]
        write_tensors(path, {"model.weight": torch.ones(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}, {"step": 3})
        found.append(path.read_bytes())
        write_tensors(path, {}, {})
        return [*found, path.read_bytes()]
