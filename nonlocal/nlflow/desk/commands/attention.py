"""The command ``attention``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from nlflow.attention.probing.columns import COLUMNS, SPECTRA, Column
from nlflow.desk.options import AsJson, Quiet
from nlflow.desk.terminal import (
    check_installed,
    check_out,
    echo,
    json_text,
    print_json,
    read_tokens,
    say,
    shows_progress,
    warnings_kept,
)

BRIEF = """See how far each layer of a trained transformer moves its tokens, and what NeuTRENO's term changes.

MODEL is a folder with config.json and model.safetensors (as model.save_pretrained writes it), or the name of a model on
the Hugging Face hub. A row of the table is a layer: cosine is 1 where all tokens are alike.

\b
Examples:
  nonlocal attention ./all-MiniLM-L6-v2 --text "Nonlocal means averages what is alike."
  nonlocal attention ./all-MiniLM-L6-v2 --text "$(cat passage.txt)" --neutreno 0.6 --out probe
  nonlocal attention ./all-MiniLM-L6-v2 --why --texts my-documents --items 8
  nonlocal attention ./all-MiniLM-L6-v2 --sweep --texts my-documents --out swept
  nonlocal attention ./dinov2-small --report page.html --images pictures-by-class

`nonlocal attention --help-all` explains all columns and options. It needs pip install 'nlflow[attention]'.
"""

USUAL = ("text", "image", "tokens", "neutreno", "why", "sweep", "report", "texts", "out", "as_json", "quiet")

_HELP = """See how far each layer of a trained transformer moves its tokens, and what NeuTRENO's term changes.

MODEL is a folder with config.json and model.safetensors (as model.save_pretrained writes it), or the name of a model on
the Hugging Face hub. Weights that only pickle can read (.bin, .pt) are refused. It is run once on one input, twice with
--neutreno NUMBER: as loaded, and with the term in every layer but the first, without training; NUMBER is lambda~. The
averages P v become (P v + lambda~ v0) / (1 + lambda~), the semi-implicit form; with --explicit P v + lambda~ (v0 - v),
that of the paper, for models that are trained with it. A folder with attention.json, which names the terms that the
model was trained with, is loaded WITH these terms: the rows and the curve "as it is" have them.

\b
Columns, a row for the input and for each layer
{printed}

\b
Columns of table.csv (--out) and of --json alone
{others}

Padding and tokens that a mask hides are left out. gap, mixing and stable take O(N^3) time for each head, redundancy
O(N^2) up to 2048 tokens; --no-spectra leaves them out. With --out the table (table.csv), everything, head by head too
(result.json, which nonlocal explore --trace shows), and the figure (figure.png) are written to a folder. A warning
tells when --neutreno with --explicit is beyond the stable range (with spectra).

--sweep measures which cure helps the model at its task: the term in both forms, removal of similarity, centring,
FeatScale, AttnScale, temperature, LayerScale and another spectrum of W_V W_O, in all layers and in the last half, each
against the model as it is; a line tells beforehand how much it will compute. With --texts, encoders find the passage
that follows another among all followers (MRR, mean of the tokens as embedding), those of masked tokens tell these (each
line is a sequence), and decoders tell the next token (perplexity). With --images, the class of each picture is found
from those nearest to it, or by a linear map. With --sounds, a decoder of speech tells the tokens of what is said, or
with --metric words writes it down (word error rate; a gain is fewer errors). The intervals of the gain allow for the
number of settings: all of them contain their true gains together with probability of about 0.95, so that luck does not
choose the winner (bootstrap of the largest |t| over the items). It recommends the largest gain whose interval lies
above 0 as a whole, or says that none is seen to help. With --out tables (CSV) and result.json are written to the
folder.

--report PAGE does the same, looks into the layers on some of the inputs, and writes one HTML page with the --name of
the model, the data and the date: whether it over-smooths (the cosine of tokens rises over the layers, and isotropy,
that of the mean tokens of two inputs, does not), what in the blocks makes tokens alike, what helps, figures and
numbers, and sentences that one may write about the model and those that one may not.

--why says what makes tokens alike: how much norms, the averages P (mixing), W_V W_O (projection), cross-attention and
the MLP of each layer change the cosine of tokens; the parts add up. Beside each stands its null: keys of other tokens
or random stochastic matrices for mixing, random weights of the same norms for the others. The second table says which
part grows faster in many layers like this one: what tokens share (smoothing) or what tells them apart (sharpening):

\b
{spectra}

Of --text, --image or --tokens, or of the passages
of --texts (--items of --words each), with standard errors in table.csv. --which leaves out the other tokens.

Needs pip install 'nlflow[attention]'.

\b
Examples:
  nonlocal attention ./all-MiniLM-L6-v2 --text "Nonlocal means averages what is alike."
  nonlocal attention ./all-MiniLM-L6-v2 --why --texts my-documents --items 8 --out why
  nonlocal attention ./all-MiniLM-L6-v2 --text "$(cat passage.txt)" --neutreno 0.6 --out probe
  nonlocal attention facebook/deit-tiny-patch16-224 --image photo.jpg --neutreno 0.6
  nonlocal attention ./gpt2 --tokens numbers.npy --json
  nonlocal attention ./all-MiniLM-L6-v2 --sweep --texts my-documents --out swept
  nonlocal attention ./dinov2-small --report page.html --images pictures.zip --size 98 --seconds 120
"""

_HELP_WIDTH = 120
_TOLD = 3  # inputs from which over-smoothing is told


def _explained(columns: Iterable[Column]) -> str:
    return lines_of({_heading(one.name): one.meaning for one in columns})


def lines_of(meanings: Mapping[str, str]) -> str:
    names = list(meanings)
    width = max(map(len, names)) + 4
    texts = [fill(one, _HELP_WIDTH - width).split("\n") for one in meanings.values()]
    return "\n".join(
        f"  {name if number == 0 else '':<{width - 2}}{line}"
        for name, lines in zip(names, texts, strict=True)
        for number, line in enumerate(lines)
    )


def _heading(name: str) -> str:
    return name.removeprefix("stable_")


HELP = _HELP.format(
    printed=_explained([one for one in COLUMNS if one.printed]),
    others=_explained([one for one in COLUMNS if not one.printed]),
    spectra=lines_of(SPECTRA),
)
_PRINTED = ("fidelity", "layer", *(one.name for one in COLUMNS if one.printed))


def inputs_of(model: Any, source: str, text: str | None, image: Path | None, tokens: Path | None) -> Any:
    from nlflow.attention import image_inputs, text_inputs, token_inputs

    if text is not None:
        return runs_alone(model, text_inputs(model, source, text))
    if image is not None:
        from nlflow.desk.commands.attention_data import picture_of

        return runs_alone(model, image_inputs(model, source, picture_of(image)))
    return runs_alone(model, token_inputs(model, read_tokens("--tokens", tokens)))


def runs_alone(model: Any, inputs: Any) -> Any:
    """Return inputs of one kind, and refuse them for models that compare texts with pictures and need both."""
    from nlflow.attention.injection.inputs import side_by_side
    from nlflow.attention.probing.probe import call_of
    from nlflow.attention.threads import evaluating
    from nlflow.errors import InputError

    if not side_by_side(model):
        return inputs
    import torch

    call = call_of(model, inputs)
    try:
        with torch.no_grad(), evaluating(model):
            call()
    except Exception as error:
        raise InputError(
            f"MODEL: got {type(model).__name__}, which compares texts with pictures and does not run on one of them "
            f"({error}), expected a model of one; save its part for texts or for pictures alone, or call "
            "nlflow.attention.probe with both"
        ) from error
    return inputs


def attention(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name on the hub.", show_default=False)],
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="A text, for models of language.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="An 8-bit image, for models of vision.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token numbers (N), or embeddings (N, D), as .npy.")
    ] = None,
    neutreno: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Fidelity of NeuTRENO's term, to compare with.")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Class of the attention, or a pattern of names; by default it is found."),
    ] = None,
    explicit: Annotated[bool, typer.Option("--explicit", help="The explicit form of --neutreno.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Say which parts of each layer make tokens alike, and what spectra say.")
    ] = False,
    which: Annotated[
        str,
        typer.Option(metavar="GROUP", help="For --why: which tokens count: all, ordinary, patch, special, register."),
    ] = "all",
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure which term helps the model at its task.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write one HTML page: does it, why, and what helps.")
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="For --report: name of the model on the page. [default: of its folder]")
    ] = "",
    texts: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Text for a sweep and --why: a file, or a folder of *.txt and *.md."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Pictures for a sweep: a folder or ZIP, a folder for each class."),
    ] = None,
    sounds: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Speech for a sweep: NAME.wav with what is said in NAME.txt.")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="For a sweep: retrieval, perplexity, masked, neighbours, linear, transcripts, words; auto: by model.",
        ),
    ] = "auto",
    cure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=NUMBERS]",
            help="For a sweep: temperature=0.8,1.2; may be repeated. [default: all]",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="For a sweep: about how long it may take; fewer settings.")
    ] = None,
    items: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Most items of the data [default: 400, for --why 16]."),
    ] = None,
    words: Annotated[int, typer.Option(metavar="COUNT", help="Words of a passage of --texts.")] = 48,
    size: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="For a sweep: side of pictures, if not that of the model.")
    ] = None,
    spectra: Annotated[bool, typer.Option("--spectra/--no-spectra", help="With columns of O(N^3) time.")] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for table, results and figure.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """See `HELP`."""
    if sweep or report is not None:
        if sum(one is not None for one in (texts, images, sounds)) != 1:
            hint = "--sweep" if sweep else "--report"
            raise typer.BadParameter("takes one of --texts, --images and --sounds; give it", param_hint=hint)
        check_out(out)
        check_installed("attention", "torch", "torch")
        data = {"texts": texts, "images": images, "sounds": sounds, "metric": metric,
                "items": 400 if items is None else items, "words": words,
                "size": size}  # fmt: skip
        _run_sweep(
            model, data, page=report, name=name, cures=cure, seconds=seconds, adapter=adapter, out=out, as_json=as_json,
            quiet=quiet,
        )  # fmt: skip
        return
    if why:
        from nlflow.desk.commands.why import run_why

        check_out(out)
        check_installed("attention", "torch", "torch")
        run_why(
            model, text=text, image=image, tokens=tokens, texts=texts, which=which,
            items=16 if items is None else items, words=words, adapter=adapter, spectra=spectra, out=out,
            as_json=as_json, quiet=quiet,
        )  # fmt: skip
        return
    if sum(value is not None for value in (text, image, tokens)) != 1:
        raise typer.BadParameter("give one of --text, --image and --tokens")
    from nlflow.errors import check_number

    if neutreno is not None:
        check_number("--neutreno", neutreno, minimum=0)
    check_out(out)
    check_installed("attention", "torch", "torch")
    from nlflow.attention import Adapter, attach, load_model, probe
    from nlflow.attention.probing.survey import surveyed
    from nlflow.backends.machine import provenance
    from nlflow.studies.tables import render_rows

    progress = shows_progress(quiet)
    with warnings_kept() as warned, quiet_library():
        network = load_model(model)
        inputs = inputs_of(network, model, text, image, tokens)
        known = None if adapter is None else Adapter(adapter)
        trace = probe(network, inputs, adapter=known)
        own = _own_fidelity(network)
        runs = {own: trace.rows(spectra=spectra, progress=progress)}
        heads = _by_head(own, trace, spectra)
        findings = {own: surveyed(trace).findings()}
        if neutreno is not None and neutreno != own:
            _tell_of_replaced_terms(network)
            if spectra and explicit:
                trace.check_fidelity(neutreno)
            attach(network, fidelity=neutreno, semi_implicit=not explicit, adapter=known)
            changed = probe(network, inputs, adapter=known)
            runs[neutreno] = changed.rows(spectra=spectra, progress=progress)
            heads += _by_head(neutreno, changed, spectra)
            findings[neutreno] = surveyed(changed).findings()
    for text in () if quiet else warned:
        say("warning", text)
    rows = [{"fidelity": value, **row} for value, found in runs.items() for row in found]
    first = trace[0]
    told = {
        "model": model,
        "kind": trace.model,
        "layers": len(trace),
        "heads": first.heads,
        "tokens": int(first.tokens[0].sum()),
        "sequences": first.items,
        "fidelity": neutreno,
        "form": None if neutreno is None else "explicit" if explicit else "semi-implicit",
        "rows": rows,
        "by_head": heads,
        "findings": {f"{value:g}": sentences for value, sentences in findings.items()},
        "warnings": warned,
        "provenance": provenance(),
    }
    if out is not None:
        _save(out, told, runs, own)
    if as_json:
        print_json(told)
    elif not quiet:
        sequences = "" if first.items == 1 else f"{first.items} sequences of "
        echo(f"{trace.model}: {len(trace)} layers of {first.heads} heads, {sequences}{told['tokens']} tokens\n")
        echo(render_rows([{_heading(name): row[name] for name in _PRINTED if name in row} for row in rows]) + "\n")
        for value, sentences in findings.items():
            for sentence in sentences:
                echo(f"fidelity {value:g}: {sentence}" if neutreno is not None else sentence)
        if first.items < _TOLD:
            echo("whether inputs grow alike as well (isotropy) takes several: --why --texts PATH")
        if out is not None:
            echo(f"\nwritten: table.csv, result.json and figure.png in {out}")


def _by_head(fidelity: float, trace: Any, spectra: bool) -> list[dict[str, Any]]:
    """Return the figures of each layer's heads, lists of a number a head: means over the sequences that have one."""
    import numpy as np

    found = []
    for number, layer in enumerate(trace):
        values = layer.quantities | (trace.spectra(number) if spectra else {})  # spectra are known by now
        row: dict[str, Any] = {"fidelity": fidelity, "layer": layer.name}
        for column in COLUMNS:
            if not column.by_head or column.quantity not in values:
                continue
            each = values[column.quantity]
            count = (~np.isnan(each)).sum(axis=0)
            row[column.name] = np.where(count > 0, np.nansum(each, axis=0) / np.maximum(count, 1), np.nan).tolist()
        found.append(row)
    return found


def _tell_of_replaced_terms(network: Any) -> None:
    from nlflow.attention.terms.neutreno import LayerTerms, TermOptions
    from nlflow.errors import warn_caller

    if any(isinstance(terms, LayerTerms) and terms.options != TermOptions() for terms in network.modules()):
        warn_caller(
            "--neutreno: the terms that the model was trained with are more than a fidelity, and are replaced as a "
            "whole by the plain term with softmax",
        )


def _own_fidelity(network: Any) -> float:
    """Return the fidelity of the terms that a model was trained with, the mean of its layers; 0 without terms."""
    from nlflow.attention import fidelities

    own = list(fidelities(network).values())
    return sum(own) / len(own) if own else 0.0


def _save(out: Path, report: dict[str, Any], runs: dict[float, Any], own: float) -> None:
    from nlflow.plotting import layers_figure
    from nlflow.studies.result import save_results

    named = {"as it is" if value == own else f"NeuTRENO, λ̃ = {value:g}": rows for value, rows in runs.items()}
    title = f"{Path(report['model']).name or report['model']}, {report['tokens']} tokens"
    save_results(out, report["rows"], report, layers_figure(named, fidelity=report["fidelity"], title=title))


# ---- --sweep and --report


@contextmanager
def quiet_library() -> Iterator[None]:
    from nlflow.attention.injection.blocks import transformers_library
    from nlflow.attention.loading import no_bars

    logs = transformers_library().utils.logging
    verbosity = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logs.set_verbosity(verbosity)


def _run_sweep(
    model: str, data: dict[str, Any], *, page: Path | None, name: str, cures: list[str] | None,
    seconds: float | None, adapter: str | None, out: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    from nlflow.attention import Adapter, report, sweep
    from nlflow.attention.sweeping.sweep import settings_of
    from nlflow.backends.machine import provenance
    from nlflow.desk.commands.attention_data import measured, plan

    tried = _cures(cures)
    with warnings_kept() as warned, quiet_library():
        given = measured(model, **data)
        known = None if adapter is None else Adapter(adapter)
        if not quiet:
            settings = settings_of(given.network, cures=tried, adapter=known)
            for line in plan(given, len(settings), data["items"], bounded=seconds is not None):
                echo(line, err=True)
        options: Any = {
            "cures": tried, "adapter": known, "progress": shows_progress(quiet), "seconds": seconds,
        }  # fmt: skip
        if page is not None:
            name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
            place = next(str(data[one]) for one in ("texts", "images", "sounds") if data[one] is not None)
            source = f"{place}, {given.held} {given.kind}"
            made = report(given.network, given.inputs, given.task, name=name, source=source, **options)
            found = made.sweep
        else:
            found = sweep(given.network, given.task, **options)
    for text in () if quiet else warned:
        say("warning", text)
    assert found is not None
    told = {"model": model, **found.as_dict(), "warnings": warned, "provenance": provenance()}
    if page is not None:
        made.save(page)
        told |= {"report": str(page), "answers": made.answers(), "may": made.may(), "may_not": made.may_not()}
    if out is not None:
        save_tables(out, made.tables() if page is not None else {"table": found.rows}, told)
    if as_json:
        print_json(told)
    elif not quiet:
        if page is not None:
            for answer in made.answers()[:2]:
                echo(answer)
        echo(f"{type(given.network).__name__}: {found.metric} {found.stock:.4g} as it is, {found.items} items\n")
        echo(found.table())
        echo(f"\n{found.verdict}")
        for name, why in found.left_out.items():
            echo(f"left out: {name}: {why}")
        if found.best is not None:
            echo(f"attach(model, {', '.join(f'{name}={value!r}' for name, value in found.best.items())})")
        if page is not None:
            echo(f"\nwritten: {page}")
        if out is not None:
            echo(f"\nwritten: tables (CSV) and result.json in {out}")


def _cures(words: list[str] | None) -> Any:
    """Return the cures that --cure names, with their numbers where it tells them; None without any."""
    from nlflow.attention import CURES
    from nlflow.errors import InputError, check_choice

    found: dict[str, Any] = {}
    for word in words or ():
        name, _, numbers = word.partition("=")
        cure = CURES[check_choice("--cure", name, tuple(CURES))]
        try:
            found[name] = [float(part) for part in numbers.split(",")] if numbers else list(cure.values)
        except ValueError as error:
            raise InputError(f"--cure: got {word!r}, expected numbers such as {name}=0.2,0.4") from error
    return found or None


def save_tables(out: Path, tables: dict[str, list[dict[str, Any]]], report: dict[str, Any]) -> None:
    from nlflow.store.encoding import plain
    from nlflow.studies.result import write_files
    from nlflow.studies.tables import render_csv

    files = {f"{name.replace(' ', '-')}.csv": render_csv(rows).encode() for name, rows in tables.items()}
    write_files(out, {**files, "result.json": (json_text(plain(report)) + "\n").encode()})
