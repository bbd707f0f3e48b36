"""Files of strangers: none runs code, writes elsewhere, loops, or takes memory before its header was looked at."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import FileFormatError, InputError
from nlflow.desk import files
from nlflow.desk.terminal import read_tokens
from nlflow.errors import MemoryLimitError, NlflowError
from nlflow.store.npy import read_array
from nlflow.store.storage import load_archive, save_archive
from tests import hostile

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("nonlocal/nlflow", "validation", "benchmarks")
REMEMBERED = 64 * 2**20  # bytes by which the peak of memory may grow until a file is refused

# --- no way to a pickle ----------------------------------------------------------------------------------------------

_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle", "yaml", "h5py"}
_CALLS = {"eval", "exec", "compile", "joblib.load", "joblib.dump", "yaml.load", "numpy.load", "np.load", "torch.load"}

_IMPORTS = {"import_module", "__import__", "installed", "partial"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _constant(call: ast.Call, name: str) -> Any:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def _ways_to_code(source: str) -> list[str]:
    """Return what of a source could read a pickle, or run text as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"import {name.name}" for name in node.names if name.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _MODULES:
            found.append(f"from {node.module} import")
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            safe = name in ("np.load", "numpy.load") and _constant(node, "allow_pickle") is False
            safe |= name == "torch.load" and _constant(node, "weights_only") is True
            if name in _CALLS and not safe:
                found.append(name)
            if name.rpartition(".")[2] in _IMPORTS:
                texts = {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
                modules = {word for text in texts for word in text.split() if word.split(".")[0] in _MODULES}
                found += [f"import {module}" for module in sorted(modules)]
            for keyword, bad in (("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)):
                if _constant(node, keyword) is bad:
                    found.append(f"{keyword}={bad}")
            if any(k.arg == "allow_pickle" and not isinstance(k.value, ast.Constant) for k in node.keywords):
                found.append("allow_pickle of some value")
            if name.endswith(("AutoModel.from_pretrained", "AutoTokenizer.from_pretrained", "AutoModel.from_config")):
                found += [] if _constant(node, "trust_remote_code") is False else [f"{name} of unknown trust"]
    return found


# Where the words above are said on purpose: a pickle as an input of the fuzzer, made here, which readers must refuse.
_KNOWN = {
    # A kernel for Triton, written from formulas of the package: numbers travel beside the text, names are its own.
    "nonlocal/nlflow/backends/triton/radial.py": ["exec", "compile"],
    "nonlocal/nlflow/store/series/hdf5.py": ["import h5py"],  # of a file it reads two words, a length and one time
    "nonlocal/nlflow/desk/formats/hdf5.py": ["import h5py"],  # which reads numbers, and no objects are asked for
    "validation/robustness/faults/outputs.py": ["import h5py"],  # which compares what it has written
    "validation/robustness/formulas.py": ["compile", "eval", "eval"],  # of its own random formulas
    "validation/robustness/fuzz/files.py": ["import h5py", "import h5py"],  # which writes there
    "validation/robustness/fuzz/seeds.py": ["allow_pickle=True"],
}


def test_no_source_unpickles_or_evaluates() -> None:
    found = {}
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        assert paths
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            if ways := _ways_to_code(path.read_text(encoding="utf-8")):
                found[name] = ways
    # Benchmarks read what they have written a moment before, and without pickles too.
    found = {
        name: ways for name, ways in found.items() if not (name.startswith("benchmarks/") and set(ways) == {"np.load"})
    }
    assert found == _KNOWN


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "f(allow_pickle=given)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "joblib.load(path)",
        "eval(text)",
        "import yaml",
        "importlib.import_module('pickle')",
        "partial(installed, 'raw', 'Dill', 'dill dill.source')",
        "library.AutoModel.from_pretrained(folder)",
        "library.AutoModel.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_search_for_pickles_finds_them(source: str) -> None:
    assert _ways_to_code(source)
    assert not _ways_to_code("np.load(path, allow_pickle=False); torch.load(path, weights_only=True); re.compile(x)")


class Payload:
    """What makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def _pickled_npy(mark: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _readers(tmp_path: Path) -> dict[str, Callable[[bytes], object]]:
    """Return every way in which bytes of a stranger are read, whatever their form."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    from nlflow.attention import load_model
    from validation.training.data import read_characters, read_pictures
    from validation.training.state import read_tensors, states

    plain = tmp_path / "plain"
    hostile.small_model(plain)

    def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def reader(content: bytes) -> object:
            path = tmp_path / name
            path.write_bytes(content)
            return read(path)

        return reader

    def model(name: str) -> Callable[[bytes], object]:
        def reader(content: bytes) -> object:
            before = (plain / name).read_bytes() if (plain / name).exists() else None
            (plain / name).write_bytes(content)
            try:
                return load_model(plain)
            finally:
                (plain / name).unlink()
                if before is not None:
                    (plain / name).write_bytes(before)

        return reader

    def study(content: bytes) -> object:
        (tmp_path / "study").mkdir(exist_ok=True)
        (tmp_path / "study" / "study.json").write_bytes(content)
        return nl.run_study("mixing", nodes=4, out=tmp_path / "study")

    readers = {f"file{suffix}": at(f"file{suffix}", files.read) for suffix in files.EXTENSIONS}
    return readers | {
        "tokens": at("tokens.npy", lambda path: read_tokens("--tokens", path)),
        "archive": at("archive.npz", lambda path: load_archive(path, "checkpoint")),
        "checkpoint": at("checkpoint", lambda path: nl.solve(_flow(), t=1.0, resume=path)),
        "study": study,
        "pictures": at("pictures.zip", lambda path: read_pictures(path, progress=False)),
        "characters": at("text", read_characters),
        "tensors": at("state.safetensors", read_tensors),
        "state": at("state.npz", lambda path: states(path).load(lambda arrays, meta: None)),
        "config.json": model("config.json"),
        "model.safetensors": model("model.safetensors"),
        "attention.json": model("attention.json"),
        "weights alone": at("model.pt", load_model),
        "weights alone, for readers of many": at("pytorch_model.bin", load_model),
    }


U = np.random.default_rng(3).standard_normal((6, 1))


def _flow() -> Any:
    affinity = nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(6.0)), U)
    return nl.GradientFlow(nl.E(affinity, U, 0.3, measure="degree"), "degree")


def test_crafted_files_run_no_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    mark = tmp_path / "mark"
    plain = pickle.dumps(Payload(mark))
    pickle.loads(plain)  # what is at stake
    assert mark.exists()
    mark.unlink()
    saved = io.BytesIO()
    torch.save({"weight": Payload(mark)}, saved)
    npy = _pickled_npy(mark)
    meta = hostile.npy("'|u1'", "(20,)", b'{"kind":"checkpoint"}'[:20])
    crafted = {
        "a pickle": plain,
        "an array of objects": npy,
        "an archive of objects": hostile.zipped({"__meta__.npy": meta, "u.npy": npy, "a/data.pkl": plain}),
        "an archive with a pickled description": hostile.zipped({"__meta__.npy": npy}),
        "an archive of pickles called pictures": hostile.zipped({"a/1.png": plain, "b/2.jpg": npy}),
        "weights of torch": saved.getvalue(),
    }
    for name, read in _readers(tmp_path).items():
        for what, content in crafted.items():
            if what == "an archive of objects" and name.startswith("file"):
                assert read(content).data.dtype == np.uint8  # type: ignore[attr-defined]  # the array beside them
            else:
                with pytest.raises(NlflowError):
                    read(content)
            assert not mark.exists(), f"{name} ran {what}"
    capfd.readouterr()


def test_models_bring_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    from nlflow.attention import load_model, text_inputs

    folder, mark = tmp_path / "model", tmp_path / "mark"
    hostile.small_model(folder)
    model = load_model(folder)
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass C: pass\n"
    (folder / "code.py").write_text(code)
    about = json.loads((folder / "config.json").read_text())
    about |= {"model_type": "stranger", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.C"}}
    (folder / "config.json").write_text(json.dumps(about))
    names = {"tokenizer_class": "C", "auto_map": {"AutoTokenizer": ["code.C", "code.C"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "no")
    with pytest.raises(FileFormatError, match="contains custom code"):
        load_model(folder)
    with pytest.raises(InputError, match="contains custom code"):
        text_inputs(model, folder, "words")
    assert not asked  # whether the code that lies there should be run
    assert not mark.exists()


# --- nothing is written elsewhere ------------------------------------------------------------------------------------


def test_archives_write_nowhere(tmp_path: Path) -> None:
    from validation.training.data import read_pictures

    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    names = [
        "../escaped",
        "../../escaped.npy",
        str(tmp_path / "absolute.npy"),
        "a/../../x.npy",
        "..\\win.npy",
        "/x/1.png",
    ]
    path = inner / "archive.npz"
    array = hostile.npy("'|u1'", "(2,)", b"{}")
    path.write_bytes(hostile.zipped(dict.fromkeys(["__meta__.npy", *names], array)))
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, str(tmp_path / "target"))
    before = sorted(tmp_path.rglob("*"))
    for read in (
        lambda: load_archive(path, "checkpoint"),
        lambda: nl.solve(_flow(), t=1.0, resume=path),
        lambda: read_pictures(path, progress=False),
        lambda: read_tokens("--keys", path),
    ):
        with pytest.raises(NlflowError):
            read()
    # One with such names that is whole is read, and nothing more.
    whole = inner / "whole"
    save_archive(whole, {"../up": np.ones(2), "/root": np.zeros(1)}, {"kind": "checkpoint"})
    assert set(load_archive(whole, "checkpoint")[0]) == {"../up", "/root"}
    assert sorted(tmp_path.rglob("*")) == sorted([*before, whole])


# --- memory and time -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bombs_are_refused_by_their_header(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of memory is measured as Linux tells it")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("NLFLOW_MEMORY_LIMIT", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) >= 45
    named = {"FileFormatError", "DamagedFileError", "MemoryLimitError"}
    others = {name: result for name, result in results.items() if result[0] not in named}
    pages = others.pop("tiff of 5000 pages")  # what they are is asked before any of them is read
    assert others == {}
    assert pages[0] == "InputError"
    assert "which does not say what its 5000 pages are" in pages[1]
    assert {name: result for name, result in results.items() if result[2] > REMEMBERED} == {}
    assert {name: result for name, result in results.items() if result[3] > 20} == {}
    assert results["model with vocab_size 1000000000"][0] == "MemoryLimitError"
    assert results["csv of 10^7 columns"][0] == "MemoryLimitError"
    assert "a strip or tile of 3221225472 bytes" in results["tiff of a strip of 3 GiB"][1]
    assert "strips" in results["tiff of 100000 x 100000"][1] or "declares" in results["tiff of 100000 x 100000"][1]


def test_empty_masks_of_large_images_are_no_bombs(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "mask.png"
    Image.new("L", (6000, 6000)).save(path, compress_level=9)
    assert files.read(path).data.nbytes > 900 * path.stat().st_size


def test_memory_limit_holds_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image.npy"
    np.save(path, np.zeros((600, 600)))
    files.read(path)
    read_tokens("--keys", path)
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1e6")
    for read in (lambda: files.read(path), lambda: read_tokens("--keys", path)):
        with pytest.raises(MemoryLimitError, match=r"image\.npy needs 2\.747 MiB"):
            read()


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array(["a", "bc"]),
        np.zeros(2, dtype=[("x", "f4"), ("y", "i2", (2,))]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.arange(2_000_000, dtype=np.float32),
    ],
    ids=["plain", "by-columns", "scalar", "empty", "text", "fields", "dates", "blocks"],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=["1.0", "2.0", "3.0"])
def test_arrays_are_read_as_numpy_reads_them(array: np.ndarray[Any, Any], version: tuple[int, int]) -> None:
    buffer = io.BytesIO(b"behind ")
    buffer.seek(7)
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=False)
    length = buffer.tell() - 7
    buffer.seek(7)
    found = read_array(buffer, length)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes(order="A") == array.tobytes(order="A")
    assert found.flags.writeable
    buffer.truncate(7 + length - 1)
    buffer.seek(7)
    with pytest.raises(ValueError, match=r"of which there are|fewer values|EOF" if array.size else "."):
        read_array(buffer, length - 1)


@pytest.mark.parametrize(
    ("descr", "shape", "words"),
    [
        ("'|O'", "(1,)", "Python objects"),
        ("[('a', '|O')]", "(1,)", "Python objects"),
        ("'<f8'", "(1000000000000,)", "80 bytes of values|of which there are 80"),
        ("'<f8'", "(-1,)", "shape"),
        ("'<f8'", "(True,)", "shape"),
        ("'<f8'", "(0, 99999999999999999999)", "dimensions"),
        ("'<f8'", f"({'1,' * 65})", "dimensions"),
        ("'<f8'", "[3]", "shape"),
        ("3", "(1,)", "."),
        ("'<f8'", "__import__('os')", "."),
        ("'<f8'", "(9**9**9,)", "."),
    ],
)
def test_headers_that_lie_are_refused(descr: str, shape: str, words: str) -> None:
    content = hostile.npy(descr, shape, bytes(80))
    with pytest.raises(ValueError, match=words):
        read_array(io.BytesIO(content), len(content))


# --- crafted checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"u": np.zeros((5, 1))},
        {"u": np.zeros((6, 2))},
        {"u": np.full((6, 1), np.nan)},
        {"u": np.zeros((6, 1), dtype=complex)},
        {"u": np.array(["a"])},
        {"u": None},
        {"probe": None},
        {"probe": np.array(["a"])},
        {"reached": np.zeros(9)},
        {"snapshots": None},
        {"energies": None},
        {"t": "soon"},
        {"t": 1e9},
        {"t": -1.0},
        {"t": None},
        {"steps": 1.5},
        {"steps": -3},
        {"memory": [1]},
        {"memory": {"h": "x"}},
        {"memory": {"h": float("inf")}},
        {"fingerprint": None},
    ],
    ids=lambda change: "-".join(str(getattr(v, "shape", v)) for pair in change.items() for v in pair),
)
def test_crafted_checkpoints_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint"
    nl.solve(_flow(), t_eval=[0.0, 0.5, 1.0], trackers=[nl.Checkpoint(path)])
    arrays, meta = load_archive(path, "checkpoint")
    nl.solve(_flow(), t_eval=[0.0, 0.5, 1.0], resume=path)
    for name, value in change.items():
        place = meta if name in meta else arrays
        place.pop(name)
        if value is not None:
            place[name] = value
    save_archive(path, arrays, meta)  # with the right checksum
    with pytest.raises(FileFormatError, match="checkpoint"):
        nl.solve(_flow(), t_eval=[0.0, 0.5, 1.0], resume=path)


# --- models that are not whole ---------------------------------------------------------------------------------------


def test_models_without_all_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    from safetensors.torch import load_file, save_file

    from nlflow.attention import load_model

    hostile.small_model(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, path, {"format": "pt"})
    load_model(tmp_path)  # as many are saved
    save_file({k: v for k, v in weights.items() if "query.weight" not in k}, path, {"format": "pt"})
    with pytest.raises(FileFormatError, match=r"got weights without encoder\.layer\.0\.attention\.self\.query\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        "[1]",
        "{",
        "[" * 9999,
        '{"image_mean": "x"}',
        '{"image_mean": [1, [2]]}',
        '{"image_mean": [NaN, 0, 0]}',
        '{"image_std": 0}',
        '{"image_std": [1, 2]}',
        '{"image_std": {}}',
    ],
    ids=range(9),
)
def test_hostile_settings_of_pictures_are_refused(tmp_path: Path, settings: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from nlflow.attention import image_inputs

    config = transformers.ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4, image_size=4, patch_size=2
    )
    (tmp_path / "preprocessor_config.json").write_text(settings)
    with pytest.raises(FileFormatError, match=r"preprocessor_config\.json: got"):
        image_inputs(transformers.ViTModel(config), tmp_path, np.zeros((4, 4, 3), np.uint8))
