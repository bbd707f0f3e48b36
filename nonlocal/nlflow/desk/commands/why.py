"""The option ``--why``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from nlflow.desk.terminal import echo, print_json, say, shows_progress, warnings_kept

_TABLES = {"table": "parts", "spectra": "spectra", "heads": "heads", "groups": "groups", "outliers": "outliers"}


def run_why(
    model: str,
    *,
    text: str | None,
    image: Path | None,
    tokens: Path | None,
    texts: Path | None,
    which: str,
    items: int,
    words: int,
    adapter: str | None,
    spectra: bool,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    if sum(value is not None for value in (text, image, tokens, texts)) != 1:
        raise typer.BadParameter("--why takes one of --text, --texts, --image and --tokens")
    from nlflow.attention import Adapter, explain, load_model
    from nlflow.attention.probing.columns import SPECTRA
    from nlflow.backends.machine import provenance
    from nlflow.desk.commands.attention import lines_of, quiet_library, save_tables
    from nlflow.studies.tables import render_rows

    progress = shows_progress(quiet)
    with warnings_kept() as warned, quiet_library():
        network = load_model(model)
        inputs = _inputs(network, model, text, image, tokens, texts, items, words)
        known = None if adapter is None else Adapter(adapter)
        found = explain(network, inputs, tokens=which, adapter=known, progress=progress)
        layers = found.spectra(progress=progress) if spectra else []
    for line in () if quiet else warned:
        say("warning", line)
    sentences = found.findings(layers)
    report: dict[str, Any] = {
        "model": model, "kind": found.model, "inputs": found.count, "tokens": found.tokens, "findings": sentences,
        "parts": found.rows(), "spectra": [layer.row() for layer in layers],
        "heads": [row for layer in layers for row in layer.head_rows()], "groups": found.group_rows(),
        "outliers": found.outlier_rows(), "warnings": warned, "provenance": provenance(),
    }  # fmt: skip
    if out is not None:
        save_tables(out, {name: report[key] for name, key in _TABLES.items()}, report)
    if as_json:
        print_json(report)
    elif not quiet:
        count = f"{found.count} input{'s' * (found.count != 1)}"
        echo(f"{found.model}: {count}, {found.tokens} tokens; parts of the change of the mean cosine\n")
        echo(render_rows(_printed(found)))
        if layers:
            echo("\nspectra of attention on the first input\n")
            echo(render_rows([layer.row() for layer in layers]))
            echo("\n" + lines_of(SPECTRA))
        echo("")
        for line in sentences:
            echo(line)
        if out is not None:
            echo(f"\nwritten: table.csv, spectra.csv, heads.csv, groups.csv, outliers.csv and result.json in {out}")


def _inputs(
    network: Any, model: str, text: str | None, image: Path | None, tokens: Path | None, texts: Path | None,
    items: int, words: int,
) -> list[Any]:  # fmt: skip
    from nlflow.attention import text_inputs
    from nlflow.attention.injection.everyday import gathered
    from nlflow.desk.commands.attention import inputs_of, runs_alone
    from nlflow.desk.commands.attention_data import texts_of
    from nlflow.errors import InputError, check_integer

    if texts is None:
        return [_marked(inputs_of(network, model, text, image, tokens), model, text is not None)]
    check_integer("--items", items, minimum=1)
    check_integer("--words", words, minimum=1)
    parts = [part.split() for part in texts_of(texts)]
    passages = [
        " ".join(part[first : first + words])
        for part in parts for first in range(0, len(part) - words + 1, words)
    ][:items]  # fmt: skip
    if not passages:
        raise InputError(f"--texts: got no passage of {words} words in {texts}, expected at least one; give more text")
    runs_alone(network, text_inputs(network, model, passages[0]))
    return gathered(_marked(text_inputs(network, model, passage), model, True) for passage in passages)


def _marked(inputs: Any, model: str, written: bool) -> Any:
    """Return the inputs with a mask of the special tokens that the tokenizer knows."""
    if not written:
        return inputs
    import torch

    from nlflow.attention.injection.inputs import tokenizer_of

    special = getattr(tokenizer_of("--why", model, ""), "all_special_ids", [])
    ids = inputs.get("input_ids")
    if not special or ids is None:
        return inputs
    return {**inputs, "special_tokens_mask": torch.isin(ids, torch.tensor(special))}


def _printed(found: Any) -> list[dict[str, Any]]:
    """Return the rows of the cosine without their errors, each null behind its part."""
    return [
        {name: value for name, value in row.items() if not name.endswith("_se") and name != "measure"}
        for row in found.rows("cosine")
    ]
