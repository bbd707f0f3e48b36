"""The command `nonlocal attention`: models and inputs from files, the table, the folder, and how it fails."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

from nlflow import FileFormatError, InputError, NlflowWarning
from nlflow.desk.commands import attention_data
from nlflow.desk.files import read
from nlflow.errors import install_command

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5")

from nlflow.attention import (  # noqa: E402
    Retrieval,
    attach,
    explain,
    image_inputs,
    load_model,
    loading,
    neighbouring_passages,
    probe,
    text_inputs,
    token_inputs,
)
from nlflow.plotting import layers_figure  # noqa: E402
from tests import commands  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "layer", "is", "one", "step", "of", "flow", "."]
TEXT = "A layer is one step of a flow."
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text model, an image model, and files to give them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = transformers.BertConfig(**WIDE, vocab_size=len(WORDS), max_position_embeddings=12)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 and "embed" not in name:
                weights.mul_(15)
    model.save_pretrained(folder / "bert")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder / "bert")
    transformers.ViTModel(transformers.ViTConfig(**WIDE, image_size=8, patch_size=2)).save_pretrained(folder / "vit")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)).save(folder / "photo.png")
    np.save(folder / "ids.npy", np.array([[2, 5, 6, 7, 8, 3], [2, 9, 10, 5, 11, 3]]))
    np.save(folder / "x.npy", np.random.default_rng(1).normal(size=(6, 16)))
    return folder


@pytest.fixture
def folder(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return place


run, fails, misused = (partial(one, "attention") for one in (commands.run, commands.fails, commands.misused))


def test_models_of_two_sides(folder: Path) -> None:
    """The decoder of T5 gets the same tokens, moved on by one; CLIP needs a picture beside its text."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32}
    model = transformers.T5Model(transformers.T5Config(**sizes, vocab_size=20, decoder_start_token_id=0)).eval()
    model.save_pretrained("t5")
    report = json.loads(run("t5", "--tokens", folder / "ids.npy", "--json").stdout)
    ids = torch.from_numpy(np.load(folder / "ids.npy"))
    moved = torch.cat([torch.zeros(2, 1, dtype=ids.dtype), ids[:, :-1]], dim=1)
    rows = probe(load_model("t5"), {"input_ids": ids, "decoder_input_ids": moved}).rows()
    assert len(rows) == 6
    assert [row["cosine"] for row in report["rows"]] == [row["cosine"] for row in rows]
    np.save("x.npy", np.ones((6, 16)))
    assert "tokens: got embeddings for T5Model, which takes none alone" in fails("t5", "--tokens", "x.npy")
    both = {"text_config": WIDE | {"vocab_size": 20}, "vision_config": WIDE | {"image_size": 8, "patch_size": 2}}
    transformers.CLIPModel(transformers.CLIPConfig(**both, projection_dim=8)).save_pretrained("clip")
    refused = fails("clip", "--tokens", folder / "ids.npy")
    assert "MODEL: got CLIPModel, which compares texts with pictures and does not run on one of them" in refused


def test_table(folder: Path) -> None:
    lines = run(folder / "bert", "--text", TEXT).stdout.splitlines()
    assert lines[0] == "BertModel: 2 layers of 2 heads, 11 tokens"
    assert lines[2].split()[:4] == ["layer", "cosine", "t_sim", "rank"] or lines[2].startswith("fidelity")
    assert lines[6].startswith("encoder.layer.1.attention.self")
    assert lines[-2].startswith("the encoder may over-smooth or not: to tell takes three inputs or more; mean cosine")
    assert lines[-1].endswith("takes several: --why --texts PATH")
    model = load_model(folder / "bert")
    rows = probe(model, text_inputs(model, folder / "bert", TEXT)).rows()
    assert f"{rows[2]['cosine']:.5g}" in lines[6].split()
    assert f"{rows[2]['stable_least']:.5g}" in lines[6].split()
    assert f"{rows[0]['cosine']:.2f} before the first layer, {rows[2]['cosine']:.2f} after the last" in lines[-2]
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_before_and_after_in_a_folder(folder: Path) -> None:
    result = run(folder / "bert", "--text", TEXT, "--neutreno", "0.6", "--out", "seen")
    assert result.stdout.endswith("written: table.csv, result.json and figure.png in seen\n")
    names = {path.name for path in Path("seen").iterdir()}
    assert names == {"table.csv", "result.json", "figure.png"}
    report = json.loads(Path("seen/result.json").read_text())
    assert (report["kind"], report["layers"], report["heads"], report["tokens"]) == ("BertModel", 2, 2, 11)
    assert [row["fidelity"] for row in report["rows"]] == [0, 0, 0, 0.6, 0.6, 0.6]
    model = load_model(folder / "bert")
    inputs = text_inputs(model, folder / "bert", TEXT)
    plain = probe(model, inputs).rows()
    changed = probe(attach(model, fidelity=0.6), inputs).rows()
    for row, expected in zip(report["rows"], [*plain, *changed], strict=True):
        assert row["cosine"] == expected["cosine"]
    assert plain[2]["cosine"] != changed[2]["cosine"]
    table = Path("seen/table.csv").read_text().splitlines()
    assert table[0].startswith("fidelity,layer,index,cosine,")
    assert len(table) == 7
    with Image.open("seen/figure.png") as figure:
        assert figure.size[0] > 1000
    first = Path("seen/result.json").read_bytes()
    run(folder / "bert", "--text", TEXT, "--neutreno", "0.6", "--out", "seen", "--quiet")
    assert Path("seen/result.json").read_bytes() == first  # the same input, the same bits


def test_json_tokens_and_images(folder: Path) -> None:
    report = json.loads(run(folder / "bert", "--tokens", folder / "ids.npy", "--json", "--no-spectra").stdout)
    assert (report["sequences"], report["tokens"]) == (2, 6)
    assert "gap" not in report["rows"][1]
    report = json.loads(run(folder / "bert", "--tokens", folder / "x.npy", "--json").stdout)
    assert report["tokens"] == 6
    assert report["rows"][2]["redundancy"] is None  # after the last layer: JSON has no NaN
    report = json.loads(run(folder / "vit", "--image", folder / "photo.png", "--json").stdout)
    assert (report["kind"], report["tokens"]) == ("ViTModel", 17)


def test_pictures_are_those_that_people_see(tmp_path: Path) -> None:
    """A photograph lies as its camera did; Pillow makes grey levels above 255 white where it is asked for colours."""
    told = Image.Exif()
    told[0x0112] = 6  # turned clockwise
    place, pixels = tmp_path / "pictures", np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    for name in ("a", "b"):
        (place / name).mkdir(parents=True)
        Image.fromarray(pixels).save(place / name / "one.png", exif=told)
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for path in place.rglob("*.png"):
            archive.write(path, path.relative_to(place))
    for given in (place, tmp_path / "pictures.zip"):
        found, labels = attention_data._pictures(given, 2)
        assert labels == ["a", "b"]
        for one in (*found, attention_data.picture_of(place / "a" / "one.png")):
            np.testing.assert_array_equal(one, np.rot90(pixels, -1))
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(place / "b" / "one.png")
    with pytest.raises(FileFormatError, match=r"--images: got b/one\.png of uint16 samples, expected 8 bits"):
        attention_data._pictures(place, 2)
    (place / "a" / "one.png").write_bytes(b"no picture")
    with pytest.raises(FileFormatError, match=r"--images: got a/one\.png, which cannot be read"):
        attention_data._pictures(place, 2)


@pytest.mark.parametrize(("kind", "middle", "rounding"), [("uint8", 128, 5e-3), ("int16", 0, 2e-5), ("int32", 0, 1e-7)])
def test_sounds_lie_about_zero(tmp_path: Path, kind: str, middle: float, rounding: float) -> None:
    """Samples of 8 bits have no sign: silence is 128."""
    wave = 0.9 * np.sin(np.arange(800) / 7)
    wavfile.write(tmp_path / "a.wav", 16_000, np.round(middle + (np.iinfo(kind).max - middle) * wave).astype(kind))
    np.testing.assert_allclose(attention_data._samples(read(tmp_path / "a.wav", kind="signal")), wave, atol=rounding)


def test_beyond_the_stable_range(folder: Path) -> None:
    result = run(folder / "bert", "--text", TEXT, "--neutreno", "1.9", "--explicit")
    assert "nonlocal: warning: fidelity: got 1.9, which is beyond the stable range" in result.stderr
    assert "the least limit is" in result.stderr
    assert "warning" not in run(folder / "bert", "--text", TEXT, "--neutreno", "0").stderr
    assert run(folder / "bert", "--text", TEXT, "--neutreno", "1.9", "--explicit", "--quiet").output == ""
    semi = run(folder / "bert", "--text", TEXT, "--neutreno", "1.9", "--json")  # no limit
    assert semi.stderr == ""
    assert json.loads(semi.stdout)["form"] == "semi-implicit"
    assert "is a form of --neutreno" in run(folder / "bert", "--text", TEXT, "--explicit", code=2).stderr


def test_sweep(folder: Path) -> None:
    words = " ".join(np.random.default_rng(0).choice(WORDS[5:], 400))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(words)
    Path("texts/b.md").write_text(f"# A heading\n{words[::-1]}")
    Path("texts/c.bin").write_bytes(b"\xff")
    cures = ("--cure", "semi-implicit=0.2,0.4", "--cure", "temperature=0.8")
    arguments = ("--sweep", "--texts", "texts", *cures, "--words", 6, "--items", 20)
    result = run(folder / "bert", *arguments, "--out", "swept")
    assert result.stdout.startswith("BertModel: MRR 0.")
    assert "as it is, 20 items" in result.stdout
    assert "none is seen to help: 4 settings" in result.stdout or "recommended: " in result.stdout
    assert result.stdout.endswith("written: tables (CSV) and result.json in swept\n")
    plan = "4 settings and the model as it is, 20 pairs of passages of 6 words each"
    assert plan in result.stderr
    assert "--items" not in result.stderr
    report = json.loads(Path("swept/result.json").read_text())
    assert {path.name for path in Path("swept").iterdir()} == {"table.csv", "result.json"}
    # Two layers: all that can have a term are the last half.
    assert [(row["cure"], row["layers"], row["value"]) for row in report["rows"]] == [
        ("semi-implicit", "all", 0.2),
        ("semi-implicit", "all", 0.4),
        ("temperature", "all", 0.8),
        ("temperature", "last half", 0.8),
    ]
    model = load_model(folder / "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    texts = [Path("texts/a.txt").read_text(), Path("texts/b.md").read_text()]
    task = Retrieval(tokenizer, neighbouring_passages(texts, words=6, pairs=20))
    assert report["stock"] == pytest.approx(np.mean(task(model)), rel=1e-9)
    decoder = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(WORDS), n_positions=160,
                                      bos_token_id=2, eos_token_id=3)  # fmt: skip
    transformers.GPT2LMHeadModel(decoder).save_pretrained("gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("gpt2", name).write_bytes((folder / "bert" / name).read_bytes())
    Path("long.txt").write_text((words + " ") * 4)
    result = run("gpt2", "--sweep", "--texts", "long.txt", "--cure", "explicit=0.4", "--json")
    assert "--items 400: the data hold 12 blocks of 128 tokens, and all are taken" in result.stderr
    assert "1 settings and the model as it is, 12 blocks of 128 tokens each" in result.stderr
    report = json.loads(result.stdout)
    assert report["metric"] == "perplexity"
    assert report["items"] == 12
    assert len(WORDS) / 2 < report["stock"] < 2 * len(WORDS)


@pytest.mark.slow
def test_sweeps_that_cannot_be_run(folder: Path) -> None:
    bert = folder / "bert"
    Path("empty").mkdir()
    Path("few.txt").write_text("a layer is one step")
    Path("latin.txt").write_bytes(b"\xe9")
    assert "takes one of --texts, --images and --sounds" in run(bert, "--sweep", code=2).stderr
    assert "is for --sweep" in run(bert, "--text", TEXT, "--texts", "few.txt", code=2).stderr
    assert "is not for --sweep" in run(bert, "--sweep", "--texts", "few.txt", "--neutreno", 1, code=2).stderr
    assert "--texts: got none.txt, expected a file of text" in fails(bert, "--sweep", "--texts", "none.txt")
    assert "--texts: got empty, expected a file of text" in fails(bert, "--sweep", "--texts", "empty")
    assert "--texts: got latin.txt, which is no text in UTF-8" in fails(bert, "--sweep", "--texts", "latin.txt")
    assert "texts: got 0 pair(s) of passages" in fails(bert, "--sweep", "--texts", "few.txt")
    few = ("--sweep", "--texts", "few.txt")
    assert "--cure: got 'explicit=0.2,x', expected numbers" in misused(bert, *few, "--cure", "explicit=0.2,x")
    assert "--cure: got 'heat', expected one of 'semi-implicit'" in misused(bert, *few, "--cure", "heat")
    assert "--metric: got 'speed', expected one of" in misused(bert, *few, "--metric", "speed")
    assert "--items: got 3, expected an integer >= 10" in misused(bert, *few, "--items", 3)
    assert "--images: got none for the metric neighbours" in fails(folder / "vit", *few)
    Path("pictures/one").mkdir(parents=True)
    assert "--images: got 0 folder(s) with pictures" in fails(folder / "vit", "--sweep", "--images", "pictures")
    assert "--sounds: got 0 sounds" in fails(bert, "--sweep", "--sounds", "pictures", "--metric", "transcripts")


@pytest.mark.slow
def test_long_texts_are_cut(folder: Path) -> None:
    result = run(folder / "bert", "--text", TEXT * 3, "--json")
    assert "got 29 tokens, more than the 12 positions of the model; the first 12 are used" in result.stderr
    assert json.loads(result.stdout)["tokens"] == 12
    model = load_model(folder / "bert")
    with pytest.warns(NlflowWarning, match="got 29 tokens"):
        ids = text_inputs(model, folder / "bert", TEXT * 3)["input_ids"]
    assert ids.shape == (1, 12)
    assert ids[0, -1] == WORDS.index("[SEP]")


def test_inputs_of_models(folder: Path) -> None:
    model = load_model(folder / "vit")
    assert not model.training
    grey = np.full((5, 7), 51, np.uint8)
    pixels = image_inputs(model, folder / "vit", grey)["pixel_values"]
    assert pixels.shape == (1, 3, 8, 8)
    torch.testing.assert_close(pixels, torch.full((1, 3, 8, 8), (0.2 - 0.5) / 0.5))
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4]}
    Path("preprocessor_config.json").write_text(json.dumps(settings))
    pixels = image_inputs(model, Path(), grey)["pixel_values"]
    torch.testing.assert_close(pixels[0, :, 0, 0], torch.tensor([0.1, 0.0, -0.025]))
    bert = load_model(folder / "bert")
    assert token_inputs(bert, np.arange(5))["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert token_inputs(bert, np.ones((2, 3, 16), np.float32))["inputs_embeds"].shape == (2, 3, 16)
    words = text_inputs(bert, folder / "bert", TEXT)
    assert words["input_ids"][0].tolist() == [2, 5, 6, 7, 8, 9, 10, 5, 11, 12, 3]


def test_weights_that_cannot_be_used(folder: Path) -> None:
    config = (folder / "bert" / "config.json").read_text()
    assert "got no such folder" in fails("no/such/folder", "--text", TEXT)
    Path("empty").mkdir()
    assert "got no config.json in it" in fails("empty", "--text", TEXT)
    Path("empty/config.json").write_text(config)
    assert "got no weights in it, expected model.safetensors" in fails("empty", "--text", TEXT)
    Path("empty/pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    message = fails("empty", "--text", TEXT)
    assert "only pickle can read (pytorch_model.bin)" in message
    assert "torch.load(..., weights_only=True)" in message
    assert "save_pretrained(folder)" in message
    assert "only pickle can read" in fails("empty/pytorch_model.bin", "--text", TEXT)
    assert not Path("harm").exists()
    Path("empty/model.safetensors").write_bytes(b"damaged")
    assert "got a folder that cannot be loaded" in fails("empty", "--text", TEXT)
    Path("empty/config.json").write_text("{")
    assert "got a folder that cannot be loaded" in fails("empty", "--text", TEXT)
    Path("a.safetensors").write_bytes(b"")
    assert "name the folder that holds it" in fails("a.safetensors", "--text", TEXT)
    Path("file").write_bytes(b"")
    assert "got a file, expected a folder" in fails("file", "--text", TEXT)


def test_a_name_that_the_hub_does_not_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        assert kwargs["use_safetensors"]
        assert not kwargs["local_files_only"]
        raise OSError("nobody/nothing is not a valid model identifier")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    monkeypatch.setattr(loading, "hub_silence", lambda source: "")
    assert "model: got 'nobody/nothing', which the hub does not give" in fails("nobody/nothing", "--text", TEXT)


def test_a_hub_that_does_not_answer_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def silent(url: str, **words: Any) -> None:
        asked.append(url)
        raise ConnectionError("nobody there")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    told = fails("nobody/nothing", "--text", TEXT)
    assert "which is no folder here and not in the cache, and the hub does not answer (nobody there)" in told
    assert "nonlocal attention --help" in told
    assert [url.endswith("/nobody/nothing/resolve/main/config.json") for url in asked] == [True]


def test_names_that_look_like_folders_are_not_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(source: object) -> str:
        raise AssertionError(source)

    monkeypatch.setattr(loading, "hub_silence", never)
    Path("mine").mkdir()
    for name in ("./model", "../model", "/nowhere/model", "~/model", "a/b/c", "model/", "mine/model", ".\\model"):
        assert "got no such folder, expected one with config.json" in fails(name, "--text", TEXT)


@pytest.mark.slow
def test_inputs_that_cannot_be_used(folder: Path) -> None:
    bert = folder / "bert"
    values: dict[str, Any] = {
        "nan": np.full((4, 16), np.nan), "narrow": np.ones((4, 15)), "flat": np.ones(16), "unknown": np.array([1, 99]),
        "long": np.ones((13, 16)), "cube": np.ones((2, 2, 2, 16)), "ids": np.ones((2, 2, 2), int),
    }  # fmt: skip
    for name, array in values.items():
        np.save(f"{name}.npy", array)
    assert "tokens: got 64 NaN or infinite value(s)" in fails(bert, "--tokens", "nan.npy")
    assert "expected (N, 16) or (B, N, 16)" in fails(bert, "--tokens", "narrow.npy")
    assert "tokens: got 1 dimension(s)" in fails(bert, "--tokens", "flat.npy")
    assert "tokens: got numbers from 1 to 99, expected integers in [0, 13)" in fails(bert, "--tokens", "unknown.npy")
    assert "tokens: got 13, expected at most 12" in fails(bert, "--tokens", "long.npy")
    assert "tokens: got 4 dimension(s)" in fails(bert, "--tokens", "cube.npy")
    assert "tokens: got whole numbers of shape (2, 2, 2)" in fails(bert, "--tokens", "ids.npy")
    assert "expected an .npy file" in fails(bert, "--tokens", "missing.npy")
    assert "image: got an image for BertModel" in fails(bert, "--image", folder / "photo.png")
    assert "which has no tokenizer" in fails(folder / "vit", "--text", TEXT)
    assert "got embeddings for ViTModel" in fails(folder / "vit", "--tokens", folder / "x.npy")
    assert "no such file" in fails(folder / "vit", "--image", "missing.png")
    assert "text: got ' ', expected some words" in fails(bert, "--text", " ")
    assert "--neutreno: got -1.0" in misused(bert, "--text", TEXT, "--neutreno", "-1")
    Path("file").write_bytes(b"")
    assert "--out: got file, which is a file" in fails(bert, "--text", TEXT, "--out", "file")
    assert "give one of --text, --image and --tokens" in run(bert, code=2).stderr
    run(bert, "--text", TEXT, "--image", "x.png", code=2)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save("deep.png")
    assert "image: got uint16 of shape (4, 4), expected uint8" in fails(folder / "vit", "--image", "deep.png")


@pytest.mark.slow
def test_a_tokenizer_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    """The library makes one up, to which every text is unknown words (BERT) or nothing (GPT-2)."""
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=9, n_positions=12)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    load_model(folder / "bert").save_pretrained(tmp_path / "bert")
    Path("texts.txt").write_text(TEXT)
    for name in ("bert", "gpt"):
        for words in (("--text", TEXT), ("--sweep", "--texts", "texts.txt")):
            error = fails(tmp_path / name, *words)
            assert f"{words[-2][2:]}: got {tmp_path / name}, which has no tokenizer (there is no " in error
            assert "save it there with tokenizer.save_pretrained" in error
    assert "knows no word, expected words of its vocabulary" in fails(folder / "bert", "--text", "other words")
    with pytest.raises(InputError, match=r"^inputs\[1\]: got a text of which the tokenizer of .* knows no word"):
        probe(load_model(folder / "bert"), [TEXT, "other words"])


@pytest.mark.slow
def test_without_torch(folder: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from nlflow.desk.commands.main import main; main()"
    command = [sys.executable, "-c", code, "attention", str(folder / "bert"), "--text", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == (
        f"nonlocal: error: attention: needs torch, which is not installed; {install_command('attention')}\n"
    )


def test_help() -> None:
    text = run("--help-all").stdout
    for word in ("MODEL", "--text", "--image", "--tokens", "--neutreno", "--no-spectra", "--out", "--json", "--quiet"):
        assert word in text
    for column in ("cosine", "t_sim", "rank", "gradient", "share", "gap", "mixing", "stable", "least", "redundancy"):
        assert f"\n    {column}" in text or f"\n  {column}" in text


def test_figure() -> None:
    rows = [{"index": 0, "cosine": 0.1}, {"index": 1, "cosine": 0.2, "J": 3.0}, {"index": 0, "cosine": 0.3},
            {"index": 1, "cosine": 0.5, "J": 2.0}]  # fmt: skip
    figure = layers_figure({"run": rows}, fidelity=0.6, title="$x")
    cosine, energy, gap, stable = figure.axes
    lines = [line for line in cosine.lines if len(line.get_xdata()) == 2 and line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in lines] == [[0.1, 0.2], [0.3, 0.5]]  # two stacks, two lines
    assert [text.get_text() for text in gap.texts] == ["not computed"]
    assert not energy.texts
    assert any(list(line.get_ydata()) == [0.6, 0.6] for line in stable.lines)
    for runs in ({}, {"run": []}):
        with pytest.raises(InputError, match="runs: got none"):
            layers_figure(runs)


def test_loading_draws_no_bar_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = importlib.import_module("transformers").utils.logging
    assert logs.is_progress_bar_enabled()
    load_model(folder / "bert")
    assert capfd.readouterr() == ("", "")
    assert logs.is_progress_bar_enabled()  # as it was
    with pytest.raises(FileFormatError):
        load_model(folder)
    assert logs.is_progress_bar_enabled()


def test_loading_refuses_in_words() -> None:
    with pytest.raises(FileFormatError, match=r"weights\.pt: got weights that only pickle can read"):
        load_model("weights.pt")


@pytest.mark.slow
def test_a_folder_tells_what_terms_its_model_was_trained_with(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.ViTConfig(**WIDE, image_size=8, patch_size=2)
    stock = transformers.ViTForImageClassification(config).eval()
    stock.save_pretrained(tmp_path)
    trained = attach(stock, fidelity=0.7, learned=True, semi_implicit=False, feat_scale=True)
    with torch.no_grad():
        for name, weights in trained.named_parameters():
            if "neutreno" in name:
                weights.add_(0.3)
    state = {name: tensor for name, tensor in trained.state_dict().items() if ".neutreno." in name}
    save_file(state, tmp_path / "terms.safetensors")
    settings = tmp_path / "attention.json"
    settings.write_text(
        json.dumps({"format": 1, "attach": {"fidelity": 0.7, "learned": True, "feat_scale": True}, "result": {}})
    )
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = trained.vit(pixels).last_hidden_state
        got = load_model(tmp_path)(pixels).last_hidden_state
    assert torch.equal(got, expected)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "dark.png")
    report = json.loads(run(tmp_path, "--image", tmp_path / "dark.png", "--neutreno", 0, "--json").stdout)
    assert any("are replaced as a whole" in note for note in report["warnings"])
    assert sorted({row["fidelity"] for row in report["rows"]}) == [0.0, pytest.approx(0.7 * np.exp(0.3), rel=1e-6)]
    settings.write_text(json.dumps({"format": 1, "attach": None}))
    with pytest.raises(FileFormatError, match=r"attention.json: got terms .* terms.safetensors has .*neutreno"):
        load_model(tmp_path)
    for text, words in (
        ('{"format": 2, "attach": null}', "format 2, this version reads 1"),
        ('{"format": 1, "attach": {"strength": 3}}', "got an argument 'strength'"),
        ('{"format": 1, "attach": {"fidelity": -1}}', "fidelity: got -1, expected"),
        ('{"format": 1}', "KeyError"),
        ("[]", "TypeError"),
        ("{", "JSONDecodeError"),
        (
            '{"format": 1, "attach": {"attn_scale": true, "learned": true, "feat_scale": true}}',
            "does not have .*attn_we",
        ),
    ):
        settings.write_text(text)
        with pytest.raises(FileFormatError, match=f"attention.json: got terms that .*{words}.* remove the file"):
            load_model(tmp_path)


def test_why(folder: Path) -> None:
    words = " ".join(np.random.default_rng(0).choice(WORDS[5:], 60))
    Path("long.txt").write_text(words)
    arguments = (folder / "bert", "--why", "--texts", "long.txt", "--words", 6, "--items", 5, "--which", "ordinary")
    result = run(*arguments, "--out", "why")
    assert result.stdout.startswith("BertModel: 5 inputs, ordinary tokens; parts of the change of the mean cosine")
    assert "the attention of 2 layers, each repeated by itself, without MLP" in result.stdout
    names = {path.name for path in Path("why").iterdir()}
    assert names == {f"{name}.csv" for name in ("table", "spectra", "heads", "groups", "outliers")} | {"result.json"}
    report = json.loads(Path("why/result.json").read_text())
    model = load_model(folder / "bert")
    inputs = []
    for first in range(0, 30, 6):
        given = text_inputs(model, folder / "bert", " ".join(words.split()[first : first + 6]))
        inputs.append({**given, "special_tokens_mask": given["input_ids"] < 5})
    expected = explain(model, inputs, tokens="ordinary").rows()
    # The command runs them in one batch: sums of float32 in another order.
    mixing = [[row["mixing"] for row in rows] for rows in (report["parts"], expected)]
    np.testing.assert_allclose(*mixing, rtol=1e-4, atol=1e-5)
    assert report["groups"][0]["count"] == 2
    assert report["findings"][0] in result.stdout
    assert re.match("the encoder .*over-smooth.*(isotropy).* before the first layer, .* after", report["findings"][0])
    assert "\n  doubt " in result.stdout  # each column of the spectra is explained


def test_why_of_one_input(folder: Path) -> None:
    result = run(folder / "vit", "--why", "--image", folder / "photo.png", "--which", "patch", "--no-spectra", "--json")
    report = json.loads(result.stdout)
    assert (report["tokens"], report["inputs"], report["spectra"]) == ("patch", 1, [])
    assert "got one input" in result.stderr
    assert report["parts"][0]["change_se"] is None
    assert "takes one of --text, --texts, --image and --tokens" in run(folder / "vit", "--why", code=2).stderr
    assert "is for --why" in run(folder / "bert", "--text", TEXT, "--which", "patch", code=2).stderr
    assert "is not for --why" in run(folder / "bert", "--why", "--text", TEXT, "--neutreno", 1, code=2).stderr
    assert "expected one of 'all', 'special', 'ordinary'" in fails(
        folder / "bert", "--why", "--text", TEXT, "--which", "patch"
    )
    Path("few.txt").write_text("a layer")
    assert "got no passage of 48 words" in fails(folder / "bert", "--why", "--texts", "few.txt")


BAD: list[tuple[tuple[Any, ...], str]] = [
    (("bert", "--why", "--tokens", "one.npy"), "1 of 1 token count by 'all', expected at least 2"),
    (("bert", "--report", "page.html", "--texts", "few.txt"), "got 0 pair"),
    (("packed", "--why", "--tokens", "ids.npy"), "of type I8, which are quantised or packed"),
    (("bert", "--why", "--text", "[SEP] [MASK]", "--which", "ordinary"), "all its tokens are special"),
    (("bert", "--why", "--texts", "special.txt", "--words", 6, "--which", "ordinary"), "all its tokens are special"),
    (("bert", "--why", "--text", TEXT, "--which", "register"), "tokens: got 'register', expected one of"),
    (("packed", "--sweep", "--texts", "few.txt"), "has no tokenizer"),
    (("bert", "--sweep", "--texts", "few.txt"), "got 0 pair"),
    (("bert", "--report", "page.html", "--texts", "special.txt", "--metric", "masked"), "without cls.predictions.bias"),
    (("vit", "--report", "page.html", "--images", "few.txt"), "--images: got few.txt"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), [*BAD[:2], *(pytest.param(*one, marks=pytest.mark.slow) for one in BAD[2:])]
)
def test_why_sweep_and_report_name_what_cannot_be_told(folder: Path, arguments: tuple[Any, ...], words: str) -> None:
    """Each in one line, without a trace, and without a page that is half written."""
    np.save("one.npy", np.array([[5]]))
    np.save("ids.npy", np.load(folder / "ids.npy"))
    Path("few.txt").write_text(" ".join(WORDS[5:]) * 2)
    Path("special.txt").write_text("[CLS] [SEP] [MASK]\n" * 12)
    if arguments[0] == "packed" and not (packed := folder / "packed").exists():
        model = transformers.BertModel(transformers.BertConfig(**WIDE, vocab_size=len(WORDS)))
        model.save_pretrained(packed)
        state = safetensors.load_file(packed / "model.safetensors")
        name = "encoder.layer.1.attention.self.value.weight"
        state[name] = torch.randint(-99, 99, state[name].shape, dtype=torch.int8)
        safetensors.save_file(state, packed / "model.safetensors", metadata={"format": "pt"})
    assert words in fails(folder / arguments[0], *arguments[1:])
    assert not Path("page.html").exists()
