"""The page of the paper's tables: made from records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from nlflow.attention import survey
from nlflow.errors import InputError
from nlflow.store.storage import load_record, save_record
from tests.transformer_models import build, inputs
from validation import paper, trained_figures
from validation.claims import all_claims
from validation.training.variants import VARIANTS

LOSS = {"softmax": [2.0, 2.1, 2.2], "neutreno": [1.9, 2.0, 2.15]}


def trained(folder: Path, steps: int = 7, start: dict[str, Any] | None = None, losses: Any = None) -> Path:
    for name, values in (losses or LOSS).items():
        for seed, loss in values.items() if isinstance(values, dict) else enumerate(values):
            settings = {"task": "text", "size": "small", "plan": {"steps": steps, "batch": 4}, "model": {},
                        "variant": name, "seed": seed}  # fmt: skip
            epoch = {"epoch": 1.0, "step": steps, "training_loss": 2.0, "diverged": False, "loss": loss,
                     "layers": {"cosine": [0.5], "t_sim": [0.5], "J": [0.5]}}  # fmt: skip
            record = {"settings": settings | ({} if start is None else {"start": start}), "finished": True,
                      "step": steps, "seconds": 1.0, "torch": "2", "threads": 1, "epochs": [epoch]}  # fmt: skip
            (folder / f"{name}-seed{seed}").mkdir(parents=True)
            save_record(folder / f"{name}-seed{seed}" / "record.json", "record of a training", record)
    return folder


def results(folder: Path, status: str) -> Path:
    claim = {"name": "proposition-1", "title": "It holds", "status": status, "checks": []}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"quick": True, "claims": [claim]}))
    return folder


def test_what_is_kept_is_on_the_page() -> None:
    """The page in the repository is that of its record."""
    assert paper.PLACE.with_suffix(".md").read_text(encoding="utf-8") == paper.page(
        load_record(paper.PLACE, paper.KIND)
    )


def test_parts_name_what_there_is() -> None:
    known = {claim.name for claim in all_claims()}
    for part in paper.PARTS:
        assert set(part.claims) <= known
        assert {variant for _, variant in part.trainings} <= set(VARIANTS)
        assert {name.partition(",")[0] for name, _ in part.trainings} <= set(paper.MEASURES)


def test_figures_come_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "PLACE", tmp_path / "paper.json")
    adapted = trained(tmp_path / "b", 3, {"variant": "softmax", "seed": 0, "steps": 7, "sha256": ""})
    given = [
        "--trainings",
        str(trained(tmp_path / "a")),
        str(adapted),
        "--claims",
        str(results(tmp_path / "c", "pass")),
    ]
    paper.main(given)
    page = (tmp_path / "paper.md").read_text(encoding="utf-8")
    low, high = -0.0833 - 4.3027 * 0.016667, -0.0833 + 4.3027 * 0.016667  # Student's t with two degrees of freedom
    change = f"2.0167 ± 0.0726 | -0.0833 ({low:+.4f} … {high:+.4f}) |"
    assert f"characters of a text, neutreno: 7 steps of 4, 3 seeds | loss | softmax 2.1000 ± 0.0577 | {change}" in page
    assert "adapted, neutreno: 3 steps of 4, 3 seeds, after 7 of softmax" in page
    assert "**Claims**: `proposition-1` (It holds) pass, quick; `attention-step` (not run); " in page
    assert "| CIFAR-10, neutreno | not measured | | | |" in page
    paper.main(["--claims", str(results(tmp_path / "d", "fail"))])  # what was kept stays
    again = (tmp_path / "paper.md").read_text(encoding="utf-8")
    assert again == page.replace("(It holds) pass", "(It holds) fail")


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (
            {"softmax": {0: 2.0, 1: 2.2}, "neutreno": {2: 1.9}},
            "2.1000 ± 0.1000 (2 seeds) | 1.9000 | no seeds in common",
        ),
        ({"softmax": {0: 2.0}, "neutreno": {0: 1.9}}, "softmax 2.0000 | 1.9000 | -0.1000"),
    ],
)
def test_few_seeds(losses: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pairs there is no difference, and of one seed no error, from the record as from the trainings."""
    monkeypatch.setattr(paper, "PLACE", tmp_path / "paper.json")
    for given in (["--trainings", str(trained(tmp_path / "a", losses=losses))], []):
        paper.main(given)
        assert f"{told} |" in (tmp_path / "paper.md").read_text(encoding="utf-8")


def test_models_that_others_trained_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "PLACE", tmp_path / "paper.json")
    model, given = build("bart"), [inputs("bart", seed) for seed in range(2)]
    about = {"name": "Small", "inputs": "random tokens", "explicit": 0.5}
    monkeypatch.setitem(trained_figures.MODELS, "minilm", lambda args: (model, given, about))
    trained_figures.main(["minilm", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    paper.main(["--trained", str(tmp_path / "out")])
    page = (tmp_path / "paper.md").read_text(encoding="utf-8")
    rows = survey(model, given).rows()
    encoder = ", ".join(f"{rows[place]['cosine']:.3g}" for place in (0, 2, 3))  # first, middle and last of four states
    assert f"| Small, encoder | {encoder} (± {max(row['cosine_se'] for row in rows[:4]):.3g}) | λ̃ = 0.5: " in page
    energies = ", ".join(f"{row['J']:.3g}" for row in rows[1:4])  # of all three layers
    assert f"| Small, encoder | {energies} (± " in page
    head = "share of the mean token: input, middle, last | as it is | similarity removed | similarity removed |"
    for words in ("| as it is | term, explicit | term, semi-implicit |", head, "| Small, decoder | ", ") | τ = 1: ",
                  r"layer 1, middle, last | \|μ₂\| of P, mean of heads (of random stochastic matrices) |"):  # fmt: skip
        assert words in page
    record = load_record(tmp_path / "paper.json", paper.KIND)["trained"]["minilm"]
    assert len(record["arms"]["as it is"]["decoder"]["redundancy"]["mean"]) == 2
    assert [row["verdict"] in ("smoothing", "sharpening", "neither") for row in record["spectra"]] == [True] * 6


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--trainings: got .* expected folders with finished trainings"):
        paper.gathered([tmp_path])
    mixed = trained(tmp_path / "a")
    trained(tmp_path / "b", 9)
    (tmp_path / "b" / "softmax-seed0").rename(mixed / "softmax-seed9")
    with pytest.raises(InputError, match="with trainings of several settings"):
        paper.gathered([mixed])
    with pytest.raises(InputError, match=r"--claims: got .*results.json"):
        paper.of_claims(tmp_path)
    with pytest.raises(InputError, match=r"--trained: got .* without records"):
        paper.of_trained(tmp_path / "b")
    with pytest.raises(InputError, match="--model: got none for dinov2"):
        trained_figures.main(["dinov2"])
