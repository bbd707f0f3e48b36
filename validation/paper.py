"""What the paper reports, and what was repeated of it: one page, made from the records of trainings and claims.

    python -m validation.paper --trainings DIR [DIR ...] --claims DIR --trained DIR    keep it in docs/paper.json
    python -m validation.paper                                                         make docs/paper.md of that

The folders of trainings are ``--out`` of `validation.train_cifar10` and its like, that of claims ``--out`` of
`nonlocal validate`, that of models that others trained ``--out`` of `validation.trained_figures`. Figures of the paper
(arXiv 2312.00751) are written down here, beside what they would need; those of this project are in the record alone.
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
from validation.trained_figures import KIND as TRAINED
from validation.trained_figures import LONGEST, STOCK
from validation.training.cifar10 import Cifar10
from validation.training.record import RECORD, read_record
from validation.training.report import interval, number, summarize
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
    curves : tuple of (str, str)
        Quantities by depth of models that others trained, and by which word the arms begin that are beside the model
        as it is.
    spectra : tuple of str
        Of those models, layer by layer.
    """

    name: str
    subject: str
    reported: str
    needs: str = ""
    trainings: tuple[tuple[str, str], ...] = ()
    claims: tuple[str, ...] = ()
    curves: tuple[tuple[str, str], ...] = ()
    spectra: tuple[str, ...] = ()


QUANTITIES = {
    "cosine": "mean cosine of two tokens", "J": "J of the values, per token, mean of heads",
    "gradient": "cosine with the gradient of J, mean of heads", "t_sim": "share of the mean token",
    "rank": "participation rank", "redundancy": "cosine with the matrices of the next layer, mean of heads",
}  # fmt: skip
SPECTRA = {
    "omega": "largest eigenvalue ω of W_V W_O",
    "negative": "share of eigenvalues with Re ω < 0",
    "verdict": "what rules in many layers like this one",
    "rate": "|μ₂| of P, mean of heads (of random stochastic matrices)",
    "leading": "cosine of equal tokens and the first singular vector of P",
}
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
        "cosine between the update of a layer and the step of the gradient flow, whose queries are the keys",
        "0.973 and 0.964 for DeiT, 0.982 and 0.976 for DeiT with a symmetric kernel",
        "the trained models of Table 1",
        claims=("gradient-cosine", "asymmetric-attention", "sharpening-eigenvalue"),
        curves=(("gradient", "term"),),
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
        "models collapse at strengths above a limit a little over 1",
        _IMAGENET,
        claims=("stability-limit", "stability-of-fidelity"),
    ),
    Part(
        "Figures 1, 6, 7",
        "cosine between tokens, by depth",
        "about 0.9 in deep layers of DeiT, lower with the term",
        "the trained models of Tables 1 to 3",
        claims=("token-similarity", "neutreno-minilm", "convergence-to-constants"),
        curves=(("cosine", "term"),),
    ),
    Part(
        "Figure 3",
        "energy J of the values, by block",
        "larger with the term in deep blocks",
        "the trained models of Table 1",
        claims=("energy-by-block", "energy-balance"),
        curves=(("J", "term"),),
    ),
    Part(
        "Figure 5, G.2",
        "cosine between attention matrices of successive layers",
        "lower with the term",
        "the trained models of Table 1",
        claims=("head-redundancy",),
        curves=(("redundancy", "term"),),
    ),
    Part("G.4", "cost of the term", "hardly any time and memory", claims=("cost-of-the-term",)),
    Part(
        "Proposition 1, eq. 5 to 28",
        "the theory",
        "attention is a step of a gradient flow, which runs to a constant, and does not with the term",
        claims=("proposition-1", "attention-step", "gradient-steps", "constant-limits"),
    ),
    Part(
        "Dovonon, Bronstein, Kusner, TMLR 2025, arXiv 2401.04301",
        "whether trained models smooth, and the eigenvalues of W_V W_O that decide it",
        "similarity grows with depth in some trained models and not in others; the eigenvalues of W_V W_O say which",
        claims=("smoothing-verdicts",),
        curves=(("rank", ""),),
        spectra=("omega", "negative", "verdict"),
    ),
    Part(
        "Yu and Zhang, arXiv 2312.06182",
        "token similarity by depth, its linear rate, and its removal",
        "similarity t_sim rises at a linear rate, which the spectral gaps of the attention matrices give; "
        "x - τ mean(x) before a layer removes it",
        claims=("linear-rate",),
        curves=(("t_sim", "similarity"),),
        spectra=("rate", "leading"),
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


def of_trained(folder: Path) -> dict[str, Any]:
    """Return the figures of models that others trained in a folder, by the name of the file."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"--trained: got {folder} without records, expected what validation.trained_figures wrote")
    return {path.stem: load_record(path, TRAINED) for path in paths}


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
        "What arXiv 2312.00751 reports, except for Tables 5 to 7 and 9 to 12 and Figures 2 and 4, beside what was "
        "measured here. The trainings are small: they show a direction at most. ± is the standard error over seeds, "
        "or over inputs of models that others trained without the term. Brackets hold the 95 % interval of the mean "
        "difference of pairs with one seed.",
    ]
    if record.get("trained"):
        given = (f"{one['name']} ({one['count']} {one['inputs']})" for one in record["trained"].values())
        lines += ["", f"Models that others trained ran on these inputs: {'; '.join(given)}. Their rows give three "
                  "layers each, and after ± the largest standard error of all layers. Spectra of P of more than "
                  f"{LONGEST} tokens were not computed (–)."]  # fmt: skip
    for part in PARTS:
        size = f" (not repeated at that size, which needs {part.needs})" if part.needs else ""
        lines += ["", f"## {part.name}: {part.subject}", "", f"**The paper**: {part.reported}{size}."]
        lines += _table("training here | figure | softmax or without | with | difference |", _compared(part, record))
        for quantity, arm in part.curves:
            lines += _courses(quantity, arm, record)
        lines += _spectra(part, record)
        if part.claims:
            lines += ["", f"**Claims**: {'; '.join(_found(part, record))}."]
    return "\n".join(lines) + "\n"


def _table(head: str, rows: Iterable[str]) -> list[str]:
    rows = list(rows)
    return ["", f"| {head}", "|" + "---|" * head.replace("\\|", "").count("|"), *rows] if rows else []


def _stacks(record: dict[str, Any]) -> Iterable[tuple[dict[str, Any], str, str]]:
    """Yield of each model that others trained its record, its stacks, and what they are called."""
    for one in record.get("trained", {}).values():
        stacks = list(next(iter(one["arms"].values())))
        for stack in stacks:
            yield one, stack, one["name"] + (f", {stack}" if stacks[1:] else "")


def _courses(quantity: str, arm: str, record: dict[str, Any]) -> list[str]:
    begin = 0 if quantity in ("cosine", "t_sim", "rank") else 1  # before the first layer there are no heads
    heads: list[str] = []
    rows = []
    for one, stack, name in _stacks(record):
        cells: dict[str, str] = {}
        for label, found in one["arms"].items():
            if label == STOCK or (arm and label.startswith(arm)):
                cells[label] = _course(found[stack].get(quantity), begin if quantity != "redundancy" else 0)
        heads = heads or [label.rpartition(", ")[0] or label for label in cells]
        told = (f"{label.rpartition(', ')[2]}: {cell}" if label != STOCK else cell for label, cell in cells.items())
        rows.append(f"| {name} | {' | '.join(told)} |")
    first = "layer 1" if begin else "input"
    return _table(f"{QUANTITIES[quantity]}: {first}, middle, last | {' | '.join(heads)} |", rows)


def _course(own: dict[str, Any] | None, begin: int) -> str:
    """Return a quantity from a layer on, with its largest standard error."""
    if own is None:
        return "–"
    off = max((value for value in own["error"] if value is not None), default=None)
    return f"{_ends(own['mean'][begin:])} (± {_short(off)})"


def _ends(values: Sequence[Any]) -> str:
    """Return the first of some values, that in the middle and the last."""
    return ", ".join(_short(values[place]) for place in (0, len(values) // 2, len(values) - 1))


def _spectra(part: Part, record: dict[str, Any]) -> list[str]:
    rows = []
    for one, stack, name in _stacks(record):
        layers = [row for row in one["spectra"] if row["stack"] == stack]
        cells = (_ends([_of_layer(row, key) for row in layers]) for key in part.spectra)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    titles = (SPECTRA[key].replace("|", "\\|") for key in part.spectra)
    return _table(
        f"spectra on the first input: layer 1, middle, last | {' | '.join(titles)} |", rows if part.spectra else []
    )


def _of_layer(row: dict[str, Any], key: str) -> Any:
    """Return an entry of a layer's spectra: an eigenvalue with its imaginary part, a rate beside that of chance."""
    if key == "omega" and row.get("imaginary"):
        return f"{_short(row['omega'])} ± {_short(row['imaginary'])}i"
    if key == "rate" and row.get("rate") is not None:
        return f"{_short(row['rate'])} ({_short(row.get('rate_random'))})"
    return row.get(key)


def _short(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.3g}"


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
            without, gap = found["variants"][other], gaps.get(measure)
            fewer = f" ({len(without['seeds'])} seeds)" if without["seeds"] != entry["seeds"] else ""
            values = f"{other} {number(without['mean'][measure])}{fewer} | {number(entry['mean'][measure])}"
            change = f"{gap['mean']:+.4f}{interval(gap)}" if gap else "no seeds in common"
            yield f"| {size} | {measure.replace('_', ' ')} | {values} | {change} |"


def _found(part: Part, record: dict[str, Any]) -> Iterable[str]:
    for name in part.claims:
        found = record["claims"].get(name)
        if found is None:
            yield f"`{name}` (not run)"
            continue
        yield f"`{name}` ({found['title']}) {found['status']}{', quick' if found['quick'] else ''}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m validation.paper", description=__doc__.partition("\n")[0])
    parser.add_argument("--trainings", type=Path, nargs="+", default=[], metavar="DIR", help="their --out folders")
    parser.add_argument("--trained", type=Path, metavar="DIR", help="--out of validation.trained_figures")
    parser.add_argument("--claims", type=Path, metavar="DIR", help="--out of nonlocal validate")
    args = parser.parse_args(arguments)
    record = load_record(PLACE, KIND) if PLACE.exists() else {"trainings": {}, "claims": {}}
    if args.trainings or args.claims is not None or args.trained is not None:
        record["trainings"].update(gathered(args.trainings))
        if args.trained is not None:
            record["trained"] = record.get("trained", {}) | of_trained(args.trained)
        known = {claim.name for claim in all_claims()}
        found = {} if args.claims is None else of_claims(args.claims)
        record["claims"] = {name: one for name, one in {**record["claims"], **found}.items() if name in known}
        save_record(PLACE, KIND, record)
    text = page(record)
    write_atomic(PLACE.with_suffix(".md"), lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
