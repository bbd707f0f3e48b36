"""What `nonlocal attention --out` writes is what the explorer opens, head by head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nlflow.desk.commands import main as cli
from nlflow.desk.explorer.layers_view import example, read_layers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from nlflow.attention import attach, load_model, probe, token_inputs  # noqa: E402


def test_what_a_run_says_of_over_smoothing_is_no_result_of_why(tmp_path: Path) -> None:
    report = json.loads(example().content)
    (tmp_path / "result.json").write_text(json.dumps({**report, "findings": {"0": ["it does not over-smooth"]}}))
    assert read_layers(tmp_path / "result.json").kind == report["kind"]


@pytest.mark.slow
@pytest.mark.parametrize("spectra", [True, False])
@pytest.mark.sampled(1)
def test_attention_writes_what_is_opened(spectra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    wide = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**wide, vocab_size=13, max_position_embeddings=12)
    transformers.BertModel(config).save_pretrained("bert")
    np.save("ids.npy", np.array([[2, 5, 6, 7, 8, 3], [2, 9, 10, 5, 11, 3]]))
    words = ["attention", "bert", "--tokens", "ids.npy", "--neutreno", "0.5", "--out", "seen", "--quiet"]
    words += [] if spectra else ["--no-spectra"]
    done = CliRunner().invoke(cli.app, words, prog_name="nonlocal", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = read_layers("seen/result.json")
    assert (found.kind, found.tokens, found.fidelity) == ("BertModel", 6, 0.5)
    report = json.loads(Path("seen/result.json").read_text())
    assert (report["layers"], report["heads"], len(report["rows"])) == (2, 2, 6)  # the fields that there were before
    model = load_model("bert")
    inputs = token_inputs(model, np.load("ids.npy"))
    traces = [probe(model, inputs), probe(attach(model, fidelity=0.5), inputs)]
    for run, trace in zip(found.runs, traces, strict=True):
        rows = trace.rows(spectra=spectra)
        assert run.columns["cosine"].tolist() == [row["cosine"] for row in rows]
        for k, layer in enumerate(trace):
            assert run.heads["J"][k + 1] == pytest.approx(layer.quantities["energy"].mean(axis=0), rel=1e-12)
            if spectra:
                known = trace.spectra(k)
                assert run.heads["gap"][k + 1] == pytest.approx(known["gap"].mean(axis=0), rel=1e-12)
                assert run.heads["stable"][k + 1] == pytest.approx(known["stable_fidelity"].mean(axis=0), rel=1e-12)
                assert rows[k + 1]["gap"] == pytest.approx(run.heads["gap"][k + 1].mean(), rel=1e-12)
        assert ("gap" in run.heads) == spectra


@pytest.mark.slow
def test_the_example_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image
    from skimage import data

    monkeypatch.chdir(Path(__file__).parents[2])
    photograph = Image.fromarray(data.astronaut()[0:224, 110:334]).resize((32, 32), Image.Resampling.LANCZOS)
    photograph.save(tmp_path / "astronaut.png")
    words = ["attention", "validation/checkpoints/cifar10-softmax", "--image", str(tmp_path / "astronaut.png"),
             "--neutreno", "0.6", "--out", str(tmp_path / "probe"), "--quiet"]  # fmt: skip
    assert CliRunner().invoke(cli.app, words, prog_name="nonlocal", catch_exceptions=False).exit_code == 0
    found, stored = read_layers(tmp_path / "probe" / "result.json"), example()
    assert (found.model, found.kind, found.tokens) == (stored.model, stored.kind, stored.tokens)
    hidden = json.loads(Path("validation/checkpoints/cifar10-softmax/config.json").read_text())["hidden_size"]
    for run, kept in zip(found.runs, stored.runs, strict=True):
        assert (run.layers, run.fidelity) == (kept.layers, kept.fidelity)
        assert set(run.columns) == set(kept.columns)
        # Rounding times the operations of a sum over the features, in both parts of each layer, for two tokens.
        bound = 2 * np.finfo(np.float32).eps * hidden * 2 * len(run.layers)
        np.testing.assert_allclose(run.columns["cosine"], kept.columns["cosine"], rtol=0, atol=bound)
