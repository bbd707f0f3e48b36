"""What terms and probes do in models of all families that the installed transformers has.

``python -m validation.families --out docs/families.json`` builds a tiny random model of each family and
records: how its attention was found, whether a term acts, whether it changes nothing at strength 0, whether generation
with a cache equals that without, whether the probe's P is what the model itself gives out; or why it is refused.
"""

from __future__ import annotations

import argparse
import json
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention import attach, blocks, detach, probe
from nlflow.errors import InputError
from validation.tiny_inputs import inputs_of
from validation.tiny_models import LARGEST, build

SECONDS = 60  # for one family
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
    try:
        model = build(kind)
        given = inputs_of(model)
        stock = outputs(model, given)
    except Exception as error:
        return {**row, "status": "not built", "reason": short(error)}
    if sum(one.numel() for one in model.parameters()) > LARGEST:
        return {**row, "status": "not built", "reason": "too large"}
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
        return {**row, "status": "failing forward", "reason": short(error)}
    row["status"] = "acts" if not same(changed, stock) else "no-op"
    row["detached"] = same(outputs(detach(model), given), stock)
    for base in ("sdpa", "eager"):
        row[base] = zero(kind, base)
    row["cached"] = cached(kind)
    row["probe"] = probed(kind)
    return row


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


def cached(kind: str) -> Any:
    """Return the largest relative difference of generation with a cache, None where there is no cache, in float64."""
    model = build(kind).double()
    given = inputs_of(model)
    if set(given) != {"input_ids"}:
        return None
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

    try:
        off = float((steps(True) - steps(False)).abs().max())
    except Exception:
        return None
    if not off < 1e-9:
        return None  # the stock model has no exact cache: an encoder, or one that looks at the future
    try:
        attach(model, fidelity=0.6)
        return float((steps(True) - steps(False)).abs().max() / steps(False).abs().max())
    except InputError as error:
        return short(error)


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
    worst, used = 0.0, 0
    for one in theirs:  # some models give out those of the last layer of a stage alone
        ours = [layer.matrices for layer in trace if layer.matrices.shape == one.shape]
        # Some give out rows before the sink takes its share of them.
        ours += [found / found.sum(-1, keepdim=True) for found in ours]
        if ours:
            used += 1
            worst = max(worst, min(float((one - matrices).abs().max()) for matrices in ours))
    return worst if used else None


def page(rows: list[dict[str, Any]], version: str) -> str:
    """Return the page of families as Markdown, made from the record alone."""
    acting = [row for row in rows if row["status"] == "acts"]
    refused = [row for row in rows if row["status"] == "refused"]
    silent = [row for row in rows if row["status"] in ("no-op", "failing forward", "error")]
    others = [row["family"] for row in rows if row["status"] == "not built"]
    lines = [
        "# Families of transformers",
        "",
        "<!-- Made by `python -m validation.families --page`; do not edit. -->",
        "",
        f"What `attach` and `probe` do in tiny random models of all families of transformers {version}, without an "
        f"adapter. A term acts in {len(acting)}; {len(refused)} are refused by name when they are attached; "
        f"{len(silent)} do neither. {len(others)} were not built, since they need other packages, other inputs than "
        "one text, picture or sound, or sizes that the small model does not have.",
        "",
        "- **found**: the modules ask transformers' interface, sum between projections, or are torch's. The number is "
        "that of the blocks.",
        "- **0**: strength 0 leaves all bits of the output, with sdpa and eager; one of them where the family has one.",
        "- **cache**: largest relative difference of decoding with a cache and the term from the whole sequence, "
        "float64.",
        "- **probe**: largest difference of P from `output_attentions`, float32; *sums itself*: the probe needs "
        "`take=`.",
        "",
        "| family | found | 0 | cache | probe |",
        "|---|---|---|---|---|",
    ]
    for row in acting:
        found = ", ".join(f"{name} {count}" for name, count in row["kinds"].items())
        zero = " ".join(base for base in ("sdpa", "eager") if row[base] is True) or "-"
        seen = row["probe"]
        seen = "-" if seen is None else "sums itself" if isinstance(seen, str) else f"{seen:.0e}"
        past = "-" if row["cached"] is None else f"{row['cached']:.0e}"
        lines.append(f"| {row['family']} | {found} | {zero} | {past} | {seen} |")
    lines += ["", "## Refused", "", "| family | reason |", "|---|---|"]
    for row in refused + silent:
        reason = row["reason"].replace("|", "/").partition("; expected")[0]
        lines.append(f"| {row['family']} | {reason} |")
    lines += ["", "## Not built", "", ", ".join(others) + "."]
    return "\n".join(lines) + "\n"


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

        record = {"transformers": transformers.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
