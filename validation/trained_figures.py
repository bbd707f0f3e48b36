"""Figures of the literature on models that others trained: tokens by depth, J, redundancy, and spectra of W_V W_O.

    python -m validation.trained_figures dinov2 --model DIR --data DIR --out FOLDER
    python -m validation.trained_figures minilm --data DIR --out FOLDER      all-MiniLM-L6-v2 comes from its package
    python -m validation.trained_figures whisper --model DIR --sounds DIR --out FOLDER

Each writes ``NAME.json`` into the folder; `python -m validation.paper --trained FOLDER` puts it on the page. A model
is a folder that transformers reads, DIR of ``--data`` has cifar10-test.zip and wikitext-2/test.txt, that of
``--sounds`` files NAME.wav with NAME.txt. Terms are attached without training. A few CPU minutes each.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from nlflow.attention import attach, detach, explain, load_model, probe, survey
from nlflow.attention.probing.spectra import Products, spectrum_of
from nlflow.attention.probing.survey import mean_of
from nlflow.backends.threads import one_torch_thread
from nlflow.errors import InputError, NlflowWarning
from nlflow.store.storage import save_record

KIND = "figures of a trained model"
STOCK = "as it is"
LONGEST = 600  # tokens up to which the verdict about all heads of a layer is computed
CURVES = ("cosine", "J", "gradient", "t_sim", "rank")


def arms(explicit: float) -> dict[str, dict[str, Any] | None]:
    """Return the arguments of `attach` of each arm; `explicit` is the strength that the paper trains this kind with."""
    return {
        STOCK: None,
        f"term, explicit, λ̃ = {explicit:g}": {"fidelity": explicit, "semi_implicit": False},
        "term, semi-implicit, λ̃ = 0.4": {"fidelity": 0.4},
        "similarity removed, τ = 0.5": {"fidelity": 0.0, "cures": {"similarity-removal": 0.5}},
        "similarity removed, τ = 1": {"fidelity": 0.0, "cures": {"similarity-removal": 1.0}},
    }


# ---- models and what they are given


def dinov2(args: argparse.Namespace) -> tuple[Any, list[Any], dict[str, Any]]:
    from nlflow.attention import image_inputs
    from validation.training.data import read_pictures

    model = load_model(args.model)
    pictures = read_pictures(args.data / "cifar10-test.zip").some(args.items).images[: args.items]
    inputs = [image_inputs(model, args.model, one, size=224) for one in pictures]
    return model, inputs, {"name": "DINOv2 ViT-S/14", "inputs": "pictures of CIFAR-10, 224 x 224", "explicit": 0.6}


def minilm(args: argparse.Namespace) -> tuple[Any, list[Any], dict[str, Any]]:
    from nlflow.attention import neighbouring_passages, text_inputs
    from validation import networks
    from validation.claims.cure_of_trained import text_of

    folder = networks.minilm_folder() if args.model is None else args.model
    model = load_model(folder)
    pairs = neighbouring_passages([text_of(args.data)], words=64, pairs=args.items)
    inputs = [text_inputs(model, folder, first) for first, _ in pairs]
    return model, inputs, {"name": "all-MiniLM-L6-v2", "inputs": "passages of WikiText-2, 64 words", "explicit": 0.4}


def whisper(args: argparse.Namespace) -> tuple[Any, list[Any], dict[str, Any]]:
    from nlflow.desk.commands.attention_data import measured

    found = measured(
        str(args.model), texts=None, images=None, sounds=args.sounds, metric="transcripts", items=max(args.items, 10),
        words=1, size=None,
    )  # fmt: skip
    about = {"name": "Whisper tiny.en", "inputs": "spoken sentences, synthesized", "explicit": 0.4}
    return found.network, found.inputs[: args.items], about


MODELS: dict[str, Callable[[argparse.Namespace], tuple[Any, list[Any], dict[str, Any]]]] = {
    "dinov2": dinov2, "minilm": minilm, "whisper": whisper,
}  # fmt: skip


# ---- what is measured


def curves(model: Any, inputs: list[Any], given: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return by stack and quantity the means over inputs after each layer, from the input of the stack on, and errors.

    ``redundancy`` is that of a layer and the next one; NaN has become None.
    """
    if given is not None:
        attach(model, **given)
    try:
        rows = survey(model, inputs).rows()
        beside = redundancies(model, inputs) if given is None or "cures" not in given else {}
    finally:
        detach(model)
    stacks: dict[str, dict[str, Any]] = {}
    stack = ""
    for row in rows:
        stack = row["layer"].removesuffix(" input") if row["index"] == 0 else stack
        own = stacks.setdefault(stack, {name: {"mean": [], "error": []} for name in CURVES})
        for name in CURVES:
            for kind, key in (("mean", name), ("error", f"{name}_se")):
                own[name][kind].append(number(row.get(key, float("nan"))))
    for name, found in beside.items():
        stacks[name]["redundancy"] = found
    return stacks


def redundancies(model: Any, inputs: list[Any]) -> dict[str, Any]:
    """Return the cosine of attention matrices of layers that follow each other, by stack: means over inputs."""
    each: dict[str, list[Any]] = {}
    for one in inputs:
        trace = probe(model, one)
        found = trace.head_redundancy().mean(axis=(1, 2))
        stacks = [layer.stack for layer in trace]
        for stack in dict.fromkeys(stacks):
            own = [
                value for value, first, last in zip(found, stacks, stacks[1:], strict=False) if first == last == stack
            ]
            each.setdefault(stack, []).append(own)
    result = {}
    for stack, rows in each.items():
        means = [mean_of(column) for column in np.array(rows).T]
        result[stack] = {"mean": [number(one) for one, _ in means], "error": [number(one) for _, one in means]}
    return result


def number(value: Any) -> float | None:
    """Return a number as JSON has it."""
    return float(value) if np.isfinite(value) else None


def spectra(model: Any, inputs: list[Any]) -> list[dict[str, Any]]:
    """Return of each layer the leading eigenvalue of W_V W_O, what rules, and the rate |mu_2| of P, of one input."""
    cause = explain(model, inputs[:1], nulls=False)
    rows: list[dict[str, Any]] = []
    products: Products = {}
    for block in cause.blocks:
        row: dict[str, Any] = {"stack": block.stack, "index": block.index, "reason": block.reason}
        if block.maps is not None:
            operator, layer = block.maps.operator, block.maps.layer
            whole = np.linalg.eigvals(torch.einsum("hij,hjk->ik", operator.values, operator.output).cpu().numpy())
            first = whole[np.abs(whole).argmax()]
            row |= {"omega": float(first.real), "imaginary": abs(float(first.imag)), "scale": block.maps.scale,
                    "negative": float((whole.real < 0).mean()), "tokens": layer.q.shape[-2]}  # fmt: skip
            if layer.q.shape[-2] <= LONGEST:
                found = spectrum_of(block.name, block.maps, np.random.default_rng(0), products).row()
                row |= {key: number(value) if isinstance(value, float) else value for key, value in found.items()
                        if key in ("verdict", "smooth", "other", "layers", "rate", "rate_random", "leading",
                                   "omega_random", "heads", "heads_smoothing")}  # fmt: skip
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model and write its record."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.trained_figures", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("name", choices=sorted(MODELS))
    for option in ("model", "data", "sounds"):
        parser.add_argument(f"--{option}", type=Path, metavar="DIR")
    parser.add_argument("--items", type=int, default=12, help="inputs [default: 12]")
    parser.add_argument("--out", type=Path, default=Path("validation-output"), metavar="DIR")
    args = parser.parse_args(arguments)
    needed = {"dinov2": ("model", "data"), "minilm": ("data",), "whisper": ("model", "sounds")}[args.name]
    if lacking := [f"--{option}" for option in needed if getattr(args, option) is None]:
        raise InputError(f"{lacking[0]}: got none for {args.name}, expected a folder; add {lacking[0]} DIR")
    begin = process_time()
    with one_torch_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # of one input alone, whose spectra are told
        model, inputs, about = MODELS[args.name](args)
        found = {name: curves(model, inputs, given) for name, given in arms(about["explicit"]).items()}
        about |= {"count": len(inputs), "arms": found, "spectra": spectra(model, inputs)}
    about["seconds"] = process_time() - begin
    args.out.mkdir(parents=True, exist_ok=True)
    save_record(args.out / f"{args.name}.json", KIND, about)
    print(f"{args.out / args.name}.json: {about['seconds']:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
