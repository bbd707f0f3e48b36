"""What `nonlocal attention --out` writes is what the explorer opens, head by head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nlflow.commands import main as cli
from nlflow.explorer.layers_view import read_layers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from nlflow.attention import attach, load_model, probe, token_inputs  # noqa: E402


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
