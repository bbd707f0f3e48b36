"""The trainings of validation/: data, steps that can be resumed to the same bits, and what they report."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import math
import os
import signal
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from PIL import Image
from typer.testing import CliRunner

from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from nlflow.attention import load_model, load_terms, probe, text_inputs  # noqa: E402
from nlflow.desk.commands import main as cli  # noqa: E402
from nlflow.errors import FileFormatError, InputError, NlflowWarning  # noqa: E402
from nlflow.store.checkpoints import previous  # noqa: E402
from nlflow.store.storage import load_record  # noqa: E402
from validation import train_cifar10, train_scenes, train_text  # noqa: E402
from validation.training import loop  # noqa: E402
from validation.training.cifar10 import Cifar10, varied  # noqa: E402
from validation.training.command import run  # noqa: E402
from validation.training.data import read_characters, read_pictures  # noqa: E402
from validation.training.export import load_trained  # noqa: E402
from validation.training.loop import STATE, train  # noqa: E402
from validation.training.record import RECORD, read_record  # noqa: E402
from validation.training.report import SUMMARY, difference, summarize, table  # noqa: E402
from validation.training.scenes import CLASSES, draw_scenes, inside  # noqa: E402
from validation.training.segmentation import Scenes, mean_iou  # noqa: E402
from validation.training.start import Start  # noqa: E402
from validation.training.state import read_tensors, states  # noqa: E402
from validation.training.task import WEIGHTS  # noqa: E402
from validation.training.text import Text  # noqa: E402
from validation.training.variants import VARIANTS  # noqa: E402

SIDE = 8
CHECKPOINTS = Path(__file__).parents[2] / "validation" / "checkpoints"


def picture(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def write_zip(path: Path, count: int = 4, kind: str = "PNG", folder: str = "train/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(folder + "readme.txt", "not a picture")
        for number, name in enumerate(["frog", "cat", "ship"] * count):
            data = io.BytesIO()
            Image.fromarray(picture(number)).save(data, kind, quality=95)
            archive.writestr(f"{folder}{name}/{number:04}.{kind.lower()}", data.getvalue())
    return path


def write_text(path: Path, count: int = 3000) -> Path:
    words = np.random.default_rng(3).choice(["to ", "be ", "or ", "not\n", "that "], count // 3)
    path.write_text("".join(words)[:count], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in Cifar10.files:
        write_zip(folder / name, kind="JPEG")
    write_text(folder / Text.file)
    return folder


def make(kind: str, data: Path, **options: Any) -> Any:
    if kind == "scenes":
        return Scenes(size="tiny", **options)
    if kind == "text":
        return Text(read_characters(data / Text.file), size="tiny", **options)
    parts = (read_pictures(data / name, progress=False) for name in Cifar10.files)
    return Cifar10(*parts, size="tiny", **options)


def weights(folder: Path) -> dict[str, Any]:
    return read_tensors(folder / WEIGHTS)[0]


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


# ---- data


def test_pictures_of_a_zip_are_read_by_class(tmp_path: Path) -> None:
    found = read_pictures(write_zip(tmp_path / "some.zip"), progress=False)
    assert found.classes == ("cat", "frog", "ship")
    order = [number for kind in (1, 0, 2) for number in range(kind, 12, 3)]  # class by class, numbers in order
    np.testing.assert_array_equal(found.images, [picture(number) for number in order])
    np.testing.assert_array_equal(found.labels, np.repeat([0, 1, 2], 4))


def test_decoded_pictures_are_kept_for_the_same_zip_alone(tmp_path: Path) -> None:
    path, cache = write_zip(tmp_path / "some.zip", kind="JPEG"), tmp_path / "some.npz"
    first = read_pictures(path, cache, progress=False)
    size = path.stat().st_size
    path.write_bytes(b"x" * size)  # same name and size: it is not looked into again
    np.testing.assert_array_equal(read_pictures(path, cache, progress=False).images, first.images)
    write_zip(path, count=2)
    assert len(read_pictures(path, cache, progress=False).labels) == 6


@pytest.mark.parametrize("fault", ["missing", "no zip", "no pictures", "damaged", "sizes"])
def test_bad_archives(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "some.zip"
    if fault == "no zip":
        path.write_bytes(b"something else")
    elif fault != "missing":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "nothing")
            if fault == "damaged":
                archive.writestr("cat/1.jpg", b"\xff\xd8 not a picture")
            if fault == "sizes":
                for side in (4, 5):
                    data = io.BytesIO()
                    Image.new("RGB", (side, 4)).save(data, "PNG")
                    archive.writestr(f"cat/{side}.png", data.getvalue())
    words = {
        "missing": "got no file", "no zip": "got no zip", "no pictures": "without pictures", "damaged": "damaged",
        "sizes": "expected",
    }  # fmt: skip
    with pytest.raises(FileFormatError, match=words[fault]):
        read_pictures(path, progress=False)


def test_characters_of_a_text(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text.txt")
    text, found = path.read_text(encoding="utf-8"), read_characters(path)
    assert "".join(found.vocabulary[number] for number in [*found.train, *found.test]) == text
    assert len(found.train) == len(text) * 9 // 10
    with pytest.raises(FileFormatError, match="characters, expected"):
        read_characters(write_text(tmp_path / "short.txt", 90))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe" * 999)
    with pytest.raises(FileFormatError, match="UTF-8"):
        read_characters(tmp_path / "bytes.txt")


def test_shapes_of_scenes_have_their_areas() -> None:
    axis = (np.arange(1200) + 0.5) / 400 - 1.5
    u, v = np.meshgrid(axis, axis)
    areas = {"disc": 0.8 * math.pi, "box": 1.6**2, "triangle": 3 * math.sqrt(3) * 0.6**2, "stripes": 1.6**2}
    for name, area in areas.items():
        assert inside(CLASSES.index(name), u, v).mean() * 9 == pytest.approx(area, rel=2e-3)


def test_scenes_do_not_depend_on_their_number() -> None:
    images, labels = draw_scenes(40, 24, seed=5)
    few = draw_scenes(3, 24, seed=5)
    np.testing.assert_array_equal(few[0], images[:3])
    np.testing.assert_array_equal(few[1], labels[:3])
    assert not np.array_equal(draw_scenes(3, 24, seed=6)[0], images[:3])
    assert set(np.unique(labels)) == set(range(len(CLASSES)))
    assert images.dtype == np.uint8


def test_pictures_are_varied_by_mirrors_and_shifts() -> None:
    images = torch.from_numpy(np.stack([picture(number) for number in range(64)]))
    found = varied(images, np.random.default_rng(0)).numpy()
    seen = set()
    for plain, one in zip(images.numpy(), found, strict=True):
        wide = np.pad(plain, ((2, 2), (2, 2), (0, 0)), mode="reflect") / np.float32(127.5) - 1
        matches = [
            (down, right, turned)
            for down, right, turned in itertools.product(range(5), range(5), (False, True))
            if np.array_equal(
                wide[down : down + SIDE, right : right + SIDE][:, :: -1 if turned else 1].transpose(2, 0, 1), one
            )
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == set(range(5))
    assert {turned for _, _, turned in seen} == {False, True}


def test_mean_iou_is_that_of_sets() -> None:
    rng = np.random.default_rng(2)
    true, given = rng.integers(0, 4, 500), rng.integers(0, 3, 500)
    confusion = torch.zeros(5, 5, dtype=torch.int64)
    for one, other in zip(true, given, strict=True):
        confusion[one, other] += 1
    sets = [({*np.flatnonzero(true == k)}, {*np.flatnonzero(given == k)}) for k in range(4)]
    assert mean_iou(confusion) == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in sets]), rel=1e-12)


# ---- models and batches


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cifar10", "text", "scenes"])
def test_variants_begin_alike(kind: str, data: Path) -> None:
    task = make(kind, data, steps=2)
    stock = task.model(VARIANTS["softmax"], 4).state_dict()
    for name, variant in VARIANTS.items():
        if variant.kind and kind != "scenes":
            with pytest.raises(InputError, match=f"--variants: got {variant.kind}, which models of transformers have"):
                task.model(variant, 4)
            continue
        other = task.model(variant, 4).state_dict()
        assert all(torch.equal(other[key], stock[key]) for key in stock), name
        assert any(".feat." in key for key in other) == variant.feat_scale
    assert not same(task.model(VARIANTS["softmax"], 5).state_dict(), stock)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.kind])
@pytest.mark.sampled(2)
def test_other_terms_of_the_literature_are_trained_and_probed(name: str, tmp_path: Path) -> None:
    """Two steps and a trace, in which the averages of each layer are those of the model."""
    task = make("scenes", tmp_path, steps=2)
    model = task.model(VARIANTS[name], 4).eval()
    trace = task.trace(model)
    assert len(trace) == sum(1 for module in model.modules() if getattr(module, "kind", None) == name)
    assert all(np.isfinite(layer.quantities["mean_cosine"]).all() for layer in trace)
    heads = trace[0].heads
    assert heads == model.encoder.layers[0].attention.heads * (2 if name == "differential" else 1)
    record = train(task, name, 4, tmp_path / "run", progress=False)
    assert record["finished"]


def test_an_epoch_has_each_item_once(data: Path) -> None:
    task = make("cifar10", data, batch=4)
    assert task.plan.epoch == 3
    epochs = [torch.cat([task.chosen(1, step, 12) for step in range(first, first + 3)]) for first in (0, 3)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.slow
def test_batches_do_not_depend_on_history(data: Path) -> None:
    for kind in ("cifar10", "text", "scenes"):
        task = make(kind, data, batch=4)
        model = task.model(VARIANTS["softmax"], 0)
        with torch.no_grad():
            course = [float(task.loss(model, 0, step)) for step in range(5)]
            assert float(make(kind, data, batch=4).loss(model, 0, 4)) == course[4]
            assert float(task.loss(model, 0, 1)) == course[1]
            assert float(task.loss(model, 1, 1)) != course[1]


def test_text_losses_are_those_of_windows(data: Path) -> None:
    task = make("text", data)
    model = task.model(VARIANTS["neutreno"], 0).eval()
    with torch.no_grad():
        found = task.evaluate(model, whole=True)
        size = task.context
        starts = range(0, len(task.test) - size, size)
        lost = []
        for start in starts:
            logits = model(input_ids=task.test[None, start : start + size]).logits[0].double()
            expected = task.test[start + 1 : start + size + 1]
            lost += (logits.logsumexp(-1) - logits[torch.arange(size), expected]).tolist()
    assert len(starts) <= 32
    assert found["loss"] == pytest.approx(np.mean(lost), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(lost)), rel=1e-6)


def test_encoder_and_decoder_have_their_own_first_values(data: Path) -> None:
    task = make("scenes", data)
    plain, term = (task.model(VARIANTS[name], 0).eval() for name in ("softmax", "neutreno"))
    tokens = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    for name in ("encoder", "decoder"):
        for depth, alike in ((1, True), (2, False)):
            with torch.no_grad():
                states = []
                for model in (plain, term):
                    state, first = tokens, None
                    for layer in getattr(model, name).layers[:depth]:
                        state, first = layer(state, first)
                    states.append(state)
            assert torch.equal(*states) == alike
    with torch.no_grad():
        assert not torch.equal(plain(task.probed()), term(task.probed()))
        mixed = task.model(VARIANTS["neutreno"], 0).eval()  # the term in the decoder alone
        mixed.encoder = plain.encoder
        assert not torch.equal(plain(task.probed()), mixed(task.probed()))
        assert not torch.equal(term(task.probed()), mixed(task.probed()))
    trace = task.trace(term)
    assert [layer.stack for layer in trace] == ["encoder"] * 4 + ["decoder"] * 2
    layer = trace[4]
    weights = (layer.q.double() @ layer.k.double().transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    pairs = (layer.v.double()[..., :, None, :] - layer.v.double()[..., None, :, :]).square().sum(-1)
    expected = (weights * pairs).sum((-2, -1)) / 2 / layer.v.shape[-2]
    np.testing.assert_allclose(layer.quantities["energy"], expected.numpy(), rtol=1e-4)


def test_learning_rate_rises_and_falls(data: Path) -> None:
    task = make("text", data, steps=40, rate=0.01)
    optimizer, scheduler = loop._optimizer(task.model(VARIANTS["softmax"], 0), task.plan)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rise = [0.01 * part for part in (1 / 3, 2 / 3)]
    fall = [0.005 * (1 + math.cos(math.pi * step / 38)) for step in range(38)]
    np.testing.assert_allclose(rates, rise + fall, rtol=1e-6)
    decays = {group["weight_decay"]: {p.ndim for p in group["params"]} for group in optimizer.param_groups}
    assert decays == {0.1: {2}, 0.0: {1}}


# ---- trainings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("text", "neutreno-featscale"),
        pytest.param("cifar10", "neutreno", marks=pytest.mark.slow),
        pytest.param("scenes", "gaussian", marks=pytest.mark.slow),
    ],
)
def test_resumed_trainings_have_the_same_bits(kind: str, name: str, data: Path, tmp_path: Path) -> None:
    options = {"steps": 5, "batch": 4}
    whole = train(make(kind, data, **options), name, 3, tmp_path / "whole", progress=False)
    # Stopped within an epoch and (for the pictures, of three steps an epoch) after one.
    for until in (2, 3):
        part = train(
            make(kind, data, **options), name, 3, tmp_path / "parts", until=until, resume=until > 2, progress=False
        )
        assert not part["finished"]
        assert part["step"] == until
    resumed = train(make(kind, data, **options), name, 3, tmp_path / "parts", resume=True, progress=False)
    assert resumed["finished"]
    assert resumed["epochs"] == whole["epochs"]
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert not (tmp_path / "parts" / STATE).exists()
    again = train(make(kind, data, **options), name, 3, tmp_path / "again", progress=False)
    assert again["epochs"] == whole["epochs"]
    other = train(make(kind, data, **options), name, 4, tmp_path / "other", progress=False)
    assert other["epochs"][-1]["loss"] != whole["epochs"][-1]["loss"]


@pytest.mark.slow
def test_a_record_tells_each_epoch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make("cifar10", data, batch=4, epochs=2)
    plain, losses = task.loss, []

    def noted(model: Any, seed: int, step: int) -> Any:
        loss = plain(model, seed, step)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(task, "loss", noted)
    record = train(task, "symmetric-neutreno", 0, tmp_path, progress=False)
    assert record == read_record(tmp_path / RECORD, task.measure)
    assert [entry["step"] for entry in record["epochs"]] == [0, 3, 6]
    assert [entry["epoch"] for entry in record["epochs"]] == [0, 1, 2]
    assert record["settings"]["fidelity"] == 0.6
    found = [entry["training_loss"] for entry in record["epochs"]]
    assert found[0] is None
    assert found[1:] == pytest.approx([np.mean(losses[:3]), np.mean(losses[3:])], rel=1e-12)
    last = record["epochs"][-1]
    model = task.model(VARIANTS["symmetric-neutreno"], 0)
    model.load_state_dict(weights(tmp_path))
    with torch.no_grad():
        assert last["accuracy"] == task.evaluate(model.eval(), whole=True)["accuracy"]
    trace = probe(model, task.probed())
    assert len(trace) == 12
    assert last["layers"]["J"] == [pytest.approx(float(layer.quantities["energy"].mean())) for layer in trace]
    assert {layer.kernel for layer in trace} == {"symmetric"}


@pytest.mark.slow
def test_trainings_learn(tmp_path: Path, data: Path) -> None:
    for name in ("softmax", "neutreno"):
        record = train(make("text", data, steps=40, rate=5e-3), name, 0, tmp_path / name, progress=False)
        losses = [entry["loss"] for entry in record["epochs"]]
        assert losses[0] > 2.3  # of about twelve characters, all alike
        assert losses[-1] < 0.75 * losses[0]


def test_ctrl_c_waits_for_the_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"steps": 4, "batch": 4}
    whole = train(make("text", data, **options), "softmax", 0, tmp_path / "whole", progress=False)
    task = make("text", data, **options)
    plain = task.loss

    def interrupted(model: Any, seed: int, step: int) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(model, seed, step)

    monkeypatch.setattr(task, "loss", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(task, "softmax", 0, tmp_path / "cut", progress=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert states(tmp_path / "cut" / STATE).load(lambda *_: None)[1]["run"]["step"] == 2
    resumed = train(make("text", data, **options), "softmax", 0, tmp_path / "cut", resume=True, progress=False)
    assert resumed["epochs"] == whole["epochs"]
    assert (tmp_path / "cut" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_sigterm_keeps_what_there_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Text.loss

    def ended(self: Any, model: Any, seed: int, step: int) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, model, seed, step)

    call = ["--data", str(data), "--out", str(tmp_path), "--size", "tiny", "--steps", "3", "--variants", "softmax",
            "--seeds", "0", "--quiet"]  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Text, "loss", ended)
    assert train_text.main(call) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert "terminated; go on with --resume" in capsys.readouterr().err
    assert states(tmp_path / "softmax-seed0" / STATE).load(lambda *_: None)[1]["run"]["step"] == 2
    monkeypatch.setattr(Text, "loss", plain)
    assert train_text.main([*call, "--resume"]) == 0


@pytest.mark.slow
def test_a_training_that_diverges_is_said_to(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make("text", data, steps=50)
    plain = task.loss
    monkeypatch.setattr(task, "loss", lambda model, seed, step: plain(model, seed, step) * (math.nan if step else 1))
    record = train(task, "softmax", 0, tmp_path, progress=False)
    assert record["finished"]
    assert record["step"] == task.plan.epoch
    assert record["epochs"][-1]["diverged"]
    summary = summarize([record], "loss")["variants"]["softmax"]
    assert summary["seeds"] == []
    assert summary["diverged"] == 1


def test_trainings_do_not_overwrite_each_other(data: Path, tmp_path: Path) -> None:
    train(make("text", data, steps=3), "softmax", 0, tmp_path, until=1, progress=False)
    with pytest.raises(InputError, match="--resume"):
        train(make("text", data, steps=3), "softmax", 0, tmp_path, progress=False)
    with pytest.raises(InputError, match=r"other settings \(plan\)"):
        train(make("text", data, steps=4), "softmax", 0, tmp_path, resume=True, progress=False)
    (tmp_path / RECORD).unlink()
    with pytest.raises(FileFormatError, match=r"other settings \(seed\)"):
        train(make("text", data, steps=3), "softmax", 1, tmp_path, resume=True, progress=False)
    whole = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileFormatError, match="not a whole nlflow archive"):
        train(make("text", data, steps=3), "softmax", 0, tmp_path, resume=True, progress=False)
    previous(tmp_path / STATE).write_bytes(whole)
    with pytest.warns(NlflowWarning, match="the one before, is used"):
        train(make("text", data, steps=3), "softmax", 0, tmp_path, resume=True, progress=False)
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(FileFormatError, match="no record"):
        train(make("text", data, steps=3), "softmax", 0, tmp_path, resume=True, progress=False)


@pytest.mark.slow
def test_a_training_begins_with_trained_weights(data: Path, tmp_path: Path) -> None:
    """Softmax goes on as a copy of the trained model; with the term the same weights give another first loss."""
    begun = tmp_path / "begun"
    task = make("text", data, steps=3)
    for name in ("softmax", "featscale"):
        train(task, name, 1, begun / f"{name}-seed1", progress=False)
    trained = task.model(VARIANTS["softmax"], 1)
    trained.load_state_dict(weights(begun / "softmax-seed1"))
    with torch.no_grad():
        expected = task.evaluate(trained.eval(), whole=False)["loss"]
    records = {name: train(task, name, 1, tmp_path / name, start=Start(begun), progress=False)
               for name in ("softmax", "neutreno", "featscale")}  # fmt: skip
    first = {name: record["epochs"][0]["loss"] for name, record in records.items()}
    assert first["softmax"] == pytest.approx(expected, rel=1e-12)
    assert first["neutreno"] != first["softmax"]
    assert first["featscale"] == pytest.approx(expected, rel=1e-6)  # its parameters begin at 0
    about = records["softmax"]["settings"]["start"]
    assert (about["variant"], about["seed"], about["steps"]) == ("softmax", 1, 3)
    alone = train(task, "softmax", 1, tmp_path / "alone", start=Start(begun / "softmax-seed1"), progress=False)
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "softmax"))
    assert alone["epochs"] == records["softmax"]["epochs"]
    with pytest.raises(InputError, match=r"of other settings \(start\)"):  # no training goes on from other weights
        train(task, "softmax", 1, tmp_path / "softmax", resume=True, progress=False)
    with pytest.raises(InputError, match=r"--start: got .*seed2, which has no weights.safetensors"):
        train(task, "softmax", 2, tmp_path / "other", start=Start(begun), progress=False)
    with pytest.raises(InputError, match=r"a training of another task, expected a finished one of the task scenes"):
        train(make("scenes", data, steps=3), "softmax", 1, tmp_path / "other", start=Start(begun), progress=False)
    with pytest.raises(InputError, match=r"whose weights do not fit this attention"):
        train(task, "softmax", 1, tmp_path / "other", start=Start(begun / "featscale-seed1"), progress=False)


@pytest.mark.slow
def test_the_command_begins_with_trained_weights(data: Path, tmp_path: Path) -> None:
    """A third of the steps, by default, from the weights of each seed."""
    words = ["--data", str(data), "--size", "tiny", "--variants", "softmax", "--seeds", "0", "--quiet"]
    assert train_text.main([*words, "--out", str(tmp_path / "a"), "--steps", "2"]) == 0
    assert train_text.main([*words, "--out", str(tmp_path / "b"), "--start", str(tmp_path / "a")]) == 0
    record = read_record(tmp_path / "b" / "softmax-seed0" / RECORD, "loss")
    assert record["settings"]["start"]["steps"] == 2
    assert record["step"] == 48 // 3


# ---- reports


def record_of(variant: str, seed: int, accuracy: float, finished: bool = True) -> dict[str, Any]:
    layers = {name: [0.5, accuracy / 2] for name in ("cosine", "t_sim", "J")}
    last = {"accuracy": accuracy, "loss": 1.0, "training_loss": 1.0, "diverged": False, "layers": layers}
    return {"settings": {"variant": variant, "seed": seed}, "finished": finished, "epochs": [last]}


def test_differences_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    values, others = rng.normal(0.5, 0.1, 6), rng.normal(0.45, 0.1, 6)
    found = difference(values, others)
    test = scipy.stats.ttest_rel(values, others)
    assert found.mean == pytest.approx(np.mean(values - others), rel=1e-12)
    assert found.error == pytest.approx(scipy.stats.sem(values - others), rel=1e-12)
    assert found.p_value == pytest.approx(test.pvalue, rel=1e-10)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)), rel=1e-10)
    assert found.count == 6
    assert math.isnan(difference([1.0], [0.5]).error)
    assert difference([1.0], [0.5]).mean == 0.5


def test_summaries_pair_seeds() -> None:
    accuracy = {"softmax": [0.5, 0.4, 0.6], "neutreno": [0.55, 0.48], "gaussian": [0.3, 0.2, 0.1]}
    records = [record_of(name, seed, value) for name, row in accuracy.items() for seed, value in enumerate(row)]
    records += [record_of("gaussian-neutreno", 2, 0.4), record_of("neutreno", 2, 0.9, finished=False)]
    found = summarize(records, "accuracy")["variants"]
    assert found["neutreno"]["seeds"] == [0, 1]
    gap = found["neutreno"]["against"]["softmax"]["accuracy"]
    assert gap["mean"] == pytest.approx(0.065)
    assert gap["error"] == pytest.approx(scipy.stats.sem([0.05, 0.08]))
    assert found["softmax"]["mean"]["accuracy"]["error"] == pytest.approx(scipy.stats.sem(accuracy["softmax"]))
    assert found["softmax"]["against"] == {}
    assert found["neutreno"]["mean"]["mean_J"]["mean"] == pytest.approx(np.mean([0.3875, 0.37]))
    table_entry = found["gaussian-neutreno"]["against"]
    assert set(table_entry) == {"softmax", "gaussian"}
    assert table_entry["gaussian"]["accuracy"]["mean"] == pytest.approx(0.3)
    text = table(summarize(records, "accuracy"))
    low, high = scipy.stats.t.interval(0.95, 1, loc=0.065, scale=0.015)
    assert f"softmax +0.0650 ({low:+.4f} … {high:+.4f})" in text
    assert "gaussian +0.3000" in text


# ---- commands and models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "gaussian-neutreno", "neutreno-featscale"])
def test_exported_models_are_the_trained_ones(name: str, data: Path, tmp_path: Path) -> None:
    arguments = [
        "--data", str(data), "--out", str(tmp_path / "out"), "--variants", name, "--seeds", "2", "--size", "tiny",
        "--steps", "3", "--rate", "0.01", "--export", str(tmp_path / "models"), "--device", "cpu", "-q",
    ]  # fmt: skip
    assert train_text.main(arguments) == 0
    task = make("text", data, steps=3, rate=0.01)
    model = task.model(VARIANTS[name], 2).eval()
    model.load_state_dict(weights(tmp_path / "out" / f"{name}-seed2"))
    folder = tmp_path / "models" / f"text-{name}"
    given = task.probed()
    with torch.no_grad():
        expected = model(**given).logits
        assert torch.equal(load_trained(folder)(**given).logits, expected)
        plain = load_model(folder)
        hidden = (plain if name == "softmax" else load_terms(plain, folder))(**given)[0]
    # The body of the model and its terms, which the package loads.
    torch.testing.assert_close(hidden @ model.lm_head.weight.T, expected, atol=1e-5, rtol=0)
    about = json.loads((folder / "attention.json").read_text())
    assert about["result"]["loss"] > 0
    assert (about["attach"] is None) == (name == "softmax")


@pytest.mark.slow
def test_models_of_characters_are_exported_with_their_tokenizer(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--data", str(data), "--out", str(tmp_path / "out"), "--variants", "neutreno", "--seeds", "0", "--size", "tiny",
        "--steps", "2", "--export", str(tmp_path / "models"), "--device", "cpu", "-q",
    ]  # fmt: skip
    assert train_text.main(arguments) == 0
    folder = tmp_path / "models" / "text-neutreno"
    assert {path.name for path in folder.iterdir()} == {
        "attention.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    text = "to be  or\nnot that "
    vocabulary = sorted(set((data / Text.file).read_text()))
    model = load_model(folder)
    given = text_inputs(model, folder, text)
    assert given["input_ids"].tolist() == [[vocabulary.index(character) for character in text]]
    capfd.readouterr()

    def command(words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(cli.app, ["attention", str(folder), "--text", words, "--json"])
        assert done.exit_code == code, done.output
        return done

    report = json.loads(command(text).stdout)
    rows = probe(model, given).rows()
    assert (report["layers"], report["tokens"], report["warnings"]) == (6, len(text), [])
    assert [row["cosine"] for row in report["rows"]] == [row["cosine"] for row in rows]
    assert {row["fidelity"] for row in report["rows"]} == {0.4}
    assert "got 80 tokens, more than the 64 positions" in json.loads(command("to be or" * 10).stdout)["warnings"][0]
    assert "text: got 2 character(s), such as '!', that the tokenizer of" in command("to be?!", 1).stderr


def test_folders_without_a_trained_model(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no trained model"):
        load_trained(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="signals can be sent to a process on POSIX only")
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_interrupted_in_a_callback_at_the_end(
    number: str, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What LLVM's callbacks swallow is delivered again, at the latest when there is nothing left to do."""

    def strike(*_: Any) -> None:
        ctypes.CFUNCTYPE(None)(lambda: (os.kill(os.getpid(), getattr(signal, number)), time.sleep(0.002), None)[2])()

    def start_late(thread: threading.Thread) -> None:  # as on a busy machine
        start(thread)
        time.sleep(0.05)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start_late)
    monkeypatch.setattr("validation.training.command._run", strike)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("train", "trains", lambda *_: None, []) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == f"train: {word}; go on with --resume\n"


@pytest.mark.slow
def test_commands_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (train_cifar10, train_text, train_scenes):
        name = module.__name__.split(".")[-1]
        out = tmp_path / name
        given = [] if module is train_scenes else ["--data", str(data)]
        arguments = [
            *given, "--out", str(out), "--size", "tiny", "--steps", "2", "--batch", "4", "--seeds", "0", "1",
            "--variants", "softmax", "neutreno", "--device", "cpu", "--threads", "1",
        ]  # fmt: skip
        assert module.main(arguments) == 0
        shown, progress = capsys.readouterr()
        assert "neutreno" in shown
        assert "step/s" in progress or "step" in progress
        summary = load_record(out / "summary.json", SUMMARY)
        gap = summary["variants"]["neutreno"]["against"]["softmax"][summary["measure"]]
        records = {
            (kind, seed): read_record(out / f"{kind}-seed{seed}" / RECORD, summary["measure"])["epochs"][-1]
            for kind in ("softmax", "neutreno")
            for seed in (0, 1)
        }
        gaps = [
            records["neutreno", seed][summary["measure"]] - records["softmax", seed][summary["measure"]]
            for seed in (0, 1)
        ]
        assert gap["mean"] == pytest.approx(np.mean(gaps), abs=1e-12)
        assert gap["count"] == 2
        assert module.main([*arguments, "-q"]) == 1
        assert "--resume" in capsys.readouterr().err
        assert module.main([*arguments, "-q", "--resume"]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "/nowhere"], "got no file"),
        (["--data", ".", "--steps", "0"], "--steps: got 0"),
        (["--data", ".", "--rate", "-1"], "--rate: got -1"),
        (["--data", ".", "--seeds", "-3"], "--seeds: got -3"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_cifar10.main([*arguments, "--out", str(tmp_path), "--device", "cpu"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="the trained pair is not part of this distribution")
def test_the_trained_pair() -> None:
    folders = {name: CHECKPOINTS / f"cifar10-{name}" for name in ("softmax", "neutreno")}
    about = {name: json.loads((folder / "attention.json").read_text()) for name, folder in folders.items()}
    training = {name: {**one["training"], "seconds": 0} for name, one in about.items()}
    assert training["neutreno"] == {**training["softmax"], "variant": "neutreno", "fidelity": 0.6}
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name, folder in folders.items():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
        model = load_trained(folder)
        trace = probe(model, {"pixel_values": pixels})
        assert len(trace) == 12
        assert about[name]["result"]["accuracy"] > 0.3
        with torch.no_grad():
            tokens = load_terms(load_model(folder), folder)
            hidden = tokens(pixel_values=pixels).last_hidden_state
            logits = model.classifier(hidden[:, 0])
            torch.testing.assert_close(logits, model(pixel_values=pixels).logits, atol=1e-5, rtol=1e-4)
