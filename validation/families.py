"""What terms and probes do in models of all families that the installed transformers has.

``python -m validation.families --out docs/families.json`` builds a tiny random model of each family and
records: how its attention was found, whether a term acts, whether it changes nothing at strength 0, whether generation
with a cache equals that without, whether the probe's P is what the model itself gives out; or why it is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention import attach, blocks, detach, probe
from nlflow.errors import InputError
from validation.tiny_inputs import inputs_of
from validation.tiny_models import build

SECONDS = 60  # for one family
ROUNDED = 1e-6  # relative: 16 roundings of float32, which some models make inside whatever they are given
LARGE = "too large"
KNOWN = {
    "align": "the text tower and its convolutions share one width of 640",
    "bark": "has no forward of its own",
    "efficientnet": "convolutions alone",
    "evolla": "AutoModel has no class for it",
    "glm_image_vqmodel": "has no forward of its own",
    "omdet-turbo": "needs timm",
    "uvdoc": "convolutions alone",
    "vibevoice": LARGE,
    "vibevoice_asr": LARGE,
    "vibevoice_acoustic_tokenizer": "convolutions alone",
    "vibevoice_acoustic_tokenizer_decoder": "convolutions alone",
    "vibevoice_acoustic_tokenizer_encoder": "convolutions alone",
    "voxtral_realtime_text": "AutoModel names a class that transformers does not export",
    "xlstm": "recurrent layers alone",
}
for tracker in ("edgetam_video", "sam2_video", "sam3_tracker_video", "sam3_video"):
    KNOWN[tracker] = "takes a session, no tensors"

RECORD = Path(__file__).parents[1] / "docs" / "families.json"


def outputs(model: nn.Module, given: dict[str, Any], **options: Any) -> list[Tensor]:
    """Return all tensors of floating-point numbers that a model gives out."""
    torch.manual_seed(2)
    with torch.no_grad():
        return tensors(model(**given, **options))


def tensors(found: Any) -> list[Tensor]:
    """Return the tensors of floating-point numbers in nested outputs."""
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    if hasattr(found, "get_seq_length"):  # a cache; layers of Mamba have no keys in it
        return []
    if isinstance(found, dict):
        found = found.values()
    if isinstance(found, list | tuple) or hasattr(found, "__iter__"):
        return [one for part in found for one in tensors(part)]
    return []


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all bits of two outputs are the same; NaN equals NaN."""
    return len(one) == len(other) and all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(one, other, strict=True)
    )


def look(kind: str) -> dict[str, Any]:
    """Return what was found out about one family."""
    row: dict[str, Any] = {"family": kind}
    if KNOWN.get(kind) == LARGE:
        return {**row, "status": "not built", "reason": LARGE}
    try:
        model = build(kind)
        given = inputs_of(model)
        stock = outputs(model, given)
    except Exception as error:
        return {**row, "status": "not built", "reason": known_reason(kind, error)}
    row["class"] = type(model).__name__
    try:
        found = blocks(model)
    except InputError as error:
        named = any("ttention" in type(one).__name__ for one in model.modules())
        return {**row, "status": "refused" if named else "no attention", "reason": short(error)}
    row["blocks"] = len(found)
    row["kinds"] = dict(Counter(block.kind for block in found))
    row["stacks"] = len({block.group for block in found})
    try:
        attach(model, fidelity=0.6)
    except InputError as error:
        return {**row, "status": "refused", "reason": short(error)}
    try:
        changed = outputs(model, given)
    except InputError as error:
        try:  # attach knows no input for this model, and has watched the first forward
            attach(build(kind), fidelity=0.6, inputs=given)
        except InputError as refused:
            return {**row, "status": "refused", "reason": short(refused), "given": sorted(given)}
        return {**row, "status": "failing forward", "reason": short(error)}
    row["status"] = "acts" if not same(changed, stock) else "no-op"
    row["detached"] = same(outputs(detach(model), given), stock)
    for base in ("sdpa", "eager"):
        row[base] = zero(kind, base)
    row["cached"], row["rounds"] = cached(kind)
    row["probe"] = probed(kind)
    return row


def known_reason(kind: str, error: Exception) -> str:
    """Return why a model was not built: what is known of it, the package that it needs, or the error."""
    if found := KNOWN.get(kind):
        return found
    needed = re.search(r"requires the (\w+) library", str(error))
    return f"needs {needed[1]}" if needed else short(error)


def zero(kind: str, base: str) -> Any:
    """Return whether strength 0 leaves all bits; None where the model has no such function."""
    try:
        model = build(kind, attn_implementation=base)
        given = inputs_of(model)
        stock = outputs(model, given)
    except Exception:
        return None
    try:
        return same(outputs(attach(model, fidelity=0.0), given), stock)
    except InputError as error:
        return short(error)


def cached(kind: str) -> tuple[Any, bool]:
    """Return the largest relative difference of generation with a cache, None where there is no cache, in float64.

    And whether the stock model rounds to float32 inside, as linear attention does, so that its own is not exact.
    """
    model = build(kind).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products have no float64
    given = inputs_of(model)
    if set(given) != {"input_ids"}:
        return None, False
    ids = given["input_ids"]

    def steps(many: bool) -> Tensor:
        with torch.no_grad():
            if not many:
                return model(input_ids=ids, use_cache=False).last_hidden_state[:, -3:]
            part, past = [], None
            for piece in (ids[:, :-3], ids[:, -3:-2], ids[:, -2:-1], ids[:, -1:]):
                out = model(input_ids=piece, past_key_values=past, use_cache=True)
                past = out.past_key_values
                part.append(out.last_hidden_state[:, -1:])
            return torch.cat(part[1:], 1)

    def difference() -> float:
        whole = steps(False)
        return float((steps(True) - whole).abs().max() / whole.abs().max())

    try:
        stock = difference()
    except Exception:
        return None, False
    if not stock < ROUNDED:
        return None, False  # the stock model has no exact cache: an encoder, or one that looks at the future
    try:
        attach(model, fidelity=0.6)
        found = difference()
    except InputError as error:
        return short(error), False
    if found < 1e-9 or stock >= 1e-9:
        return found, stock >= 1e-9
    detach(model)  # does the stock model round on other texts?
    for seed in range(9):
        ids = torch.randint(5, 46, ids.shape, generator=torch.Generator().manual_seed(seed))
        if difference() >= 1e-9:
            return found, True
    return found, False


def probed(kind: str) -> Any:
    """Return the largest difference of the probe's P from the attentions that the model gives out."""
    model = build(kind, attn_implementation="eager")
    given = inputs_of(model)
    try:
        torch.manual_seed(2)
        with torch.no_grad():
            out = model(**given, output_attentions=True)
    except Exception:
        return None
    try:
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modules that sum by themselves beside others
            trace = probe(model, given, keep_matrices=True)
    except InputError as error:
        return short(error)
    theirs = [
        one for name in out if "attention" in name and "cross" not in name and isinstance(out[name], tuple | list)
        for one in out[name] if isinstance(one, Tensor) and one.ndim == 4
    ]  # fmt: skip
    if not theirs:
        return None
    ours = [layer.matrices for layer in trace]
    # Some give out those of the last layer of a stage alone, and some those of cross-attention too: each of the fewer
    # ones is among the others.
    fewer, others = (theirs, ours) if len(theirs) <= len(ours) else (ours, theirs)
    found = [
        min(known) for one in fewer if (known := [off(one, other) for other in others if other.shape == one.shape])
    ]
    return max(found) if found else None


def off(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two matrices, one of which may be without the share of a sink."""
    seen = (one.sum(-1, keepdim=True) > 0) & (other.sum(-1, keepdim=True) > 0)  # rows of padding mean nothing
    rows = [(a, b / b.sum(-1, keepdim=True)) for a, b in ((one, other), (other, one))]
    return min(float((a - b).abs().masked_fill(~seen, 0).max()) for a, b in ((one, other), *rows))


#: Why a family is refused, by words of the message.
REASONS = {
    "no attention is found": "its attention is not found",
    "are not both known": "the projections of values and of the output are not both known",
    "which sums by itself": "its attention is not one average for each token",
    "without a cache: reduced keys": "there are fewer or more keys than queries",
    "each belong to several tokens": "a value belongs to several tokens",
}


def page(rows: list[dict[str, Any]], version: str) -> str:
    """Return the page of families as Markdown, made from the record alone."""
    of = {status: [row for row in rows if row["status"] == status] for status in ("acts", "refused", "no attention")}
    acting, refused = of["acts"], of["refused"]
    silent = [row for row in rows if row["status"] in ("no-op", "failing forward", "error")]
    others = [row for row in rows if row["status"] == "not built"]
    exact = [row["cached"] for row in acting if row["cached"] is not None and not row["rounds"]]
    rounded = [row["cached"] for row in acting if row["cached"] is not None and row["rounds"]]
    seen = [row["probe"] for row in acting if isinstance(row["probe"], float)]
    summing = [row for row in acting if set(row["kinds"]) == {"sums"}]
    mixed = [row for row in acting if "sums" in row["kinds"] and row not in summing]
    asking = [row for row in acting if "sums" not in row["kinds"]]
    lines = [
        "# Families of transformers",
        "",
        "<!-- Made by `python -m validation.families --page`; do not edit. -->",
        "",
        f"What `attach` and `probe` do, without an adapter, in a tiny random model of each family that `AutoModel` of "
        f"transformers {version} names: a term acts in {len(acting)}, {len(refused)} are refused, "
        f"{len(of['no attention'])} have no attention, {len(others)} were not built.",
        "",
        "Where a term acts, strength 0 leaves all bits of the output, decoding with a cache gives what the whole "
        f"sequence gives ({len(exact)} families to {_most(exact)} in float64, {len(rounded)} that round to float32 to "
        f"{_most(rounded)}), and P of `probe` is that of `output_attentions` ({len(seen)} families to {_most(seen)} "
        "in float32).",
    ]
    lines += ["", "## A term acts", "", *_listed("Attention is found by transformers' interface or torch's module",
                                                  asking)]  # fmt: skip
    lines += _listed("Modules compute averages themselves, and `probe` needs `take=`", summing)
    lines += _listed("Some modules do, which `probe` leaves out without `take=`", mixed)
    when = "`attach` refuses these, those with \\* only where it gets `inputs=` or when the model runs."
    lines += ["## Refused", "", when, ""]
    for reason, found in _grouped(refused, lambda row: next((REASONS[one] for one in REASONS if one in row["reason"]),
                                                            "for a reason of its own")):  # fmt: skip
        lines += _listed(reason[0].upper() + reason[1:], found)
    if silent:
        lines += ["## Neither", "", *_listed("A term does nothing, or fails", silent)]
    lines += ["## Without attention", "", *_listed("", of["no attention"]), "## Not built", ""]
    grouped = _grouped(others, lambda row: _why(row["reason"]))
    for reason, found in grouped:
        lines += _listed(reason[0].upper() + reason[1:], found if found[1:] else [])
    alone = [f"{found[0]['family']} ({reason})" for reason, found in grouped if not found[1:]]
    lines += [f"For reasons of their own: {', '.join(alone)}."] if alone else []
    return "\n".join(lines).rstrip() + "\n"


def _most(values: list[float]) -> str:
    return f"{max(values, default=0.0):.0e}"


def _listed(head: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return a paragraph of the names of families."""
    names = ", ".join(row["family"] + ("\\*" if "given" in row else "") for row in rows)
    return [f"{head}: {names}." if head else f"{names}.", ""] if rows else []


def _grouped(rows: list[dict[str, Any]], by: Callable[[dict[str, Any]], str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return rows by a reason, the most frequent one first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(by(row), []).append(row)
    return sorted(found.items(), key=lambda one: -len(one[1]))


def _why(reason: str) -> str:
    """Return why a model was not built; errors have no reason of their own, and stand together."""
    return "the tiny model raises an error" if re.match(r"\w+Error: ", reason) else reason


def short(error: BaseException) -> str:
    """Return the beginning of a message, on one line."""
    text = " ".join(f"{'' if isinstance(error, InputError) else type(error).__name__ + ': '}{error}".split())
    return text[:300]


class Late(BaseException):
    """A family takes too long; no module between may catch it."""


def late(*_: Any) -> None:
    raise Late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--page", action="store_true", help="make docs/families.md from docs/families.json, and end")
    arguments = parser.parse_args()
    if arguments.page:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        RECORD.with_suffix(".md").write_text(page(record["rows"], record["transformers"]), encoding="utf-8")
        return
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    rows = []
    for kind in arguments.families or list(MODEL_MAPPING_NAMES):
        signal.alarm(SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(look(kind))
        except Late:
            rows.append({"family": kind, "status": "not built", "reason": f"took more than {SECONDS} seconds"})
        except Exception as error:  # what is unforeseen is a row of its own, and fails the test
            rows.append({"family": kind, "status": "error", "reason": short(error)})
        finally:
            signal.alarm(0)
        print(json.dumps(rows[-1]), flush=True)
    print(Counter(row["status"] for row in rows))
    if arguments.out:
        import transformers

        done = {row["family"]: row for row in rows}
        if arguments.families and arguments.out.exists():  # the rows of the others stay
            kept = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]
            rows = [done.get(row["family"], row) for row in kept]
        record = {"transformers": transformers.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
