"""What the paper reports, and what was repeated of it: one page, made from the records of trainings and claims.

    python -m validation.paper --trainings DIR [DIR ...] --claims DIR    keep what lies there in docs/paper.json
    python -m validation.paper                                           make docs/paper.md from docs/paper.json

The folders of trainings are ``--out`` of `validation.train_cifar10` and its like, that of claims ``--out`` of
`nonlocal validate`. Figures of the paper (arXiv 2312.00751) are written down here, beside what they would need; those
of this project are in the record alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlflow.errors import InputError
from nlflow.store.atomic import write_atomic
from nlflow.store.storage import load_record, save_record
from validation.claims import all_claims
from validation.training.cifar10 import Cifar10
from validation.training.record import RECORD, read_record
from validation.training.report import summarize
from validation.training.segmentation import Scenes
from validation.training.text import Text
from validation.training.variants import VARIANTS

KIND = "what was repeated of the paper"
PLACE = Path(__file__).parents[1] / "docs" / "paper.json"
MEASURES = {task.name: task.measure for task in (Cifar10, Text, Scenes)}
TITLES = {"cifar10": "CIFAR-10", "text": "characters of a text", "scenes": "drawn scenes"}


@dataclass(frozen=True)
class Part:
    """A table or figure of the paper.

    Attributes
    ----------
    name, subject : str
    reported : str
        What the paper says, in a few words.
    needs : str
        What a repetition at its size would need; empty where it was repeated as it is.
    trainings : tuple of (str, str)
        Trainings here, by name, and the variant that is compared; 'adapted' trainings began with trained weights.
    claims : tuple of str
    """

    name: str
    subject: str
    reported: str
    needs: str = ""
    trainings: tuple[tuple[str, str], ...] = ()
    claims: tuple[str, ...] = ()


_IMAGENET = "ImageNet-1k and several GPUs for days"
PARTS = (
    Part(
        "Table 1",
        "classification of ImageNet-1k by DeiT-tiny, trained anew and adapted",
        "top-1 accuracy 72.17 % with softmax, 73.01 % with the term, 73.23 % with FeatScale too; adaptation: a trained "
        "model is trained on with the term, for a third of its epochs",
        _IMAGENET,
        (("cifar10", "neutreno"), ("cifar10", "neutreno-featscale"), ("cifar10, adapted", "neutreno")),
        ("frequency-scaling", "cure-of-trained"),
    ),
    Part(
        "Table 2",
        "segmentation of ADE20K",
        "mean IoU at a single scale 35.72 % with softmax, 37.24 % with the term",
        "ADE20K, a backbone of Table 1 and GPUs",
        (("scenes", "neutreno"),),
    ),
    Part(
        "Table 3",
        "language model on WikiText-103",
        "test perplexity 34.29 with softmax, 33.70 with the term",
        "WikiText-103 and a GPU for days",
        (("text", "neutreno"), ("text, adapted", "neutreno")),
    ),
    Part(
        "Table 4",
        "cosine between the way of a layer and that of the gradient flow with keys for queries",
        "0.973 and 0.964 for DeiT, 0.982 and 0.976 for DeiT with a symmetric kernel",
        "the trained models of Table 1",
        claims=("gradient-cosine", "asymmetric-attention", "sharpening-eigenvalue"),
    ),
    Part(
        "Table 8",
        "a Gaussian kernel in the place of the exponential, CIFAR-10",
        "accuracy 75.89 % without the term, 76.75 % with it",
        "a GPU for hours",
        (("cifar10", "gaussian-neutreno"), ("scenes", "gaussian-neutreno")),
        ("kernel-attention",),
    ),
    Part(
        "Table 13",
        "which strengths can be trained",
        "models collapse from a strength a little above 1 on",
        _IMAGENET,
        claims=("stability-limit", "stability-of-fidelity"),
    ),
    Part(
        "Figures 1, 6, 7",
        "cosine between tokens, by depth",
        "about 0.9 in deep layers of DeiT, lower with the term",
        "the trained models of Tables 1 to 3",
        claims=("token-similarity", "neutreno-minilm", "convergence-to-constants"),
    ),
    Part(
        "Figure 3",
        "energy J of the values, by block",
        "larger with the term in deep blocks",
        "the trained models of Table 1",
        claims=("energy-by-block", "energy-balance"),
    ),
    Part(
        "Figure 5, G.2",
        "cosine between attention matrices of successive layers",
        "lower with the term",
        "the trained models of Table 1",
        claims=("head-redundancy",),
    ),
    Part("G.4", "cost of the term", "hardly any time and memory", claims=("cost-of-the-term",)),
    Part(
        "Proposition 1, eq. 5 to 28",
        "the theory",
        "attention is a step of a gradient flow, which runs to a constant, and does not with the term",
        claims=("proposition-1", "attention-step", "gradient-steps", "constant-limits"),
    ),
    Part(
        "After the paper",
        "other terms of the literature, on the same small model",
        "value residual (arXiv 2410.17897), I - P (arXiv 2602.09297), gated and differential attention, and Sinkhorn's "
        "normalization (arXiv 2110.11773) do not occur in it",
        trainings=tuple(("scenes", name) for name, one in VARIANTS.items() if one.kind),
        claims=("sinkhorn-attention",),
    ),
)


def gathered(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what trainings in folders say together, by the name of the task and whether they were adapted.

    Raises
    ------
    InputError
        For a folder without finished trainings, or with those of several settings.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        records = [read_record(path) for path in sorted(folder.glob(f"*/{RECORD}"))]
        records = [record for record in records if record["finished"]]
        if not records:
            raise InputError(f"--trainings: got {folder}, expected folders with finished trainings; train first")
        of_all = {name: records[0]["settings"][name] for name in ("task", "size", "plan", "model")}
        if any({name: record["settings"][name] for name in of_all} != of_all for record in records):
            raise InputError(f"--trainings: got {folder} with trainings of several settings, expected those of one run")
        start = records[0]["settings"].get("start")
        name = of_all["task"] + ("" if start is None else ", adapted")
        found[name] = {
            "settings": of_all,
            "start": None if start is None else {"variant": start["variant"], "steps": start["steps"]},
            **summarize(records, MEASURES[of_all["task"]]),
        }
    return found


def of_claims(folder: Path) -> dict[str, Any]:
    """Return the findings of claims in a folder, by name, without their details."""
    path = folder / "results.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            claim["name"]: {**{key: claim[key] for key in ("title", "status", "checks")}, "quick": content["quick"]}
            for claim in content["claims"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--claims: got {path} ({error}), expected what nonlocal validate --out wrote") from error


# ---- the page


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# The paper's tables and figures, repeated",
        "",
        "<!-- Made by `python -m validation.paper`; do not edit. -->",
        "",
        "What arXiv 2312.00751 reports, and what was repeated here, with its size and errors. All figures of this "
        "project come from records of trainings and claims. Trainings are small, on two cores of a CPU: they show a "
        "direction at most. ± is the standard error over seeds; brackets hold the mean of the differences in pairs of "
        "seeds at 95 %. Tables 5 to 7 and 9 to 12 and Figures 2 and 4 are not repeated.",
    ]
    for part in PARTS:
        lines += ["", f"## {part.name}: {part.subject}", "", f"**The paper**: {part.reported}."]
        if part.needs:
            lines += ["", f"**Not repeated at that size**: it needs {part.needs}."]
        lines += _table("training here | figure | softmax or without | with | difference |", _compared(part, record))
        lines += _table("claim | figure nearest to its tolerance | result |", _found(part, record))
    return "\n".join(lines) + "\n"


def _table(head: str, rows: Iterable[str]) -> list[str]:
    rows = list(rows)
    return ["", f"| {head}", "|" + "---|" * head.count("|"), *rows] if rows else []


def _compared(part: Part, record: dict[str, Any]) -> Iterable[str]:
    for name, variant in part.trainings:
        found = record["trainings"].get(name)
        task, comma, adapted = name.partition(",")
        described = TITLES[task] + comma + adapted
        entry = None if found is None else found["variants"].get(variant)
        if found is None or entry is None or not entry["seeds"]:
            yield f"| {described}, {variant} | not measured | | | |"
            continue
        plan, measure = found["settings"]["plan"], found["measure"]
        size = f"{described}, {variant}: {plan['steps']} steps of {plan['batch']}, {len(entry['seeds'])} seeds"
        if found["start"] is not None:
            size += f", after {found['start']['steps']} of {found['start']['variant']}"
        for other, gaps in entry["against"].items():
            without, gap = found["variants"][other]["mean"][measure], gaps[measure]
            values = f"{other} {_with_error(without)} | {_with_error(entry['mean'][measure])}"
            change = f"{gap['mean']:+.4f} ({gap['low']:+.4f} … {gap['high']:+.4f})"
            yield f"| {size} | {measure.replace('_', ' ')} | {values} | {change} |"


def _with_error(entry: dict[str, float]) -> str:
    return f"{entry['mean']:.4f} ± {entry['error']:.4f}"


def _found(part: Part, record: dict[str, Any]) -> Iterable[str]:
    for name in part.claims:
        found = record["claims"].get(name)
        if found is None:
            yield f"| `{name}` | | not run |"
            continue
        nearest = max(found["checks"], key=_strain, default=None)
        text = "" if nearest is None else f"{nearest['what']}: {nearest['relation']}".replace("|", "\\|")
        yield f"| `{name}`: {found['title']} | {text} | {found['status']}{', quick' if found['quick'] else ''} |"


def _strain(check: dict[str, Any]) -> float:
    """Return how near a figure is to failing; JSON has no number for what is beyond all."""
    return float("inf") if check["strain"] is None else float(check["strain"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m validation.paper", description=__doc__.partition("\n")[0])
    parser.add_argument("--trainings", type=Path, nargs="+", default=[], metavar="DIR", help="their --out folders")
    parser.add_argument("--claims", type=Path, metavar="DIR", help="--out of nonlocal validate")
    args = parser.parse_args(arguments)
    record = load_record(PLACE, KIND) if PLACE.exists() else {"trainings": {}, "claims": {}}
    if args.trainings or args.claims is not None:
        record["trainings"].update(gathered(args.trainings))
        known = {claim.name for claim in all_claims()}
        found = {} if args.claims is None else of_claims(args.claims)
        record["claims"] = {name: one for name, one in {**record["claims"], **found}.items() if name in known}
        save_record(PLACE, KIND, record)
    text = page(record)
    write_atomic(PLACE.with_suffix(".md"), lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
