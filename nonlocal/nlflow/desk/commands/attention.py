"""The command ``nonlocal attention``: what the layers of a trained transformer do to its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from nlflow.attention.probing.columns import COLUMNS, Column
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

`nonlocal attention --help-all` explains all columns and options. It needs pip install 'nlflow[attention]'.
"""

USUAL = ("text", "image", "tokens", "neutreno", "why", "sweep", "texts", "out", "as_json", "quiet")

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

Padding and tokens that a mask hides are left out. gap, mixing, stable and redundancy take O(N^3) time for each head;
--no-spectra leaves them out. With --out the table (table.csv), everything, head by head too (result.json, which
nonlocal explore --trace shows), and the figure (figure.png) are written to a folder. A warning tells when --neutreno
with --explicit is beyond the stable range.

--sweep measures which term helps the model at its task: strengths, layers and both forms, each against the model as it
is, on the texts of --texts; a line tells beforehand how much it will compute. Encoders find the passage that follows
another among all followers (MRR, mean of the tokens as embedding); decoders tell the next token (perplexity). The
intervals of the gain allow for the number of settings: all of them contain their true gains together with probability
0.95, so that luck does not choose the winner (bootstrap of the largest |t| over the items). It recommends the largest
gain whose interval lies above 0 as a whole, or says that none helps. With --out the table and result.json are written
to the folder.

--why says what makes tokens alike: how much norms, the averages P (mixing), W_V W_O (projection), cross-attention and
the MLP of each layer change the cosine of tokens; the parts add up. Beside each stands its null: keys of other tokens
or random stochastic matrices for mixing, random weights of the same norms for the others. The second table has the
eigenvalue of W_V W_O that is largest, that of random weights, and which part grows faster in many layers like this one:
what tokens share (smoothing) or what tells them apart (sharpening). Of --text, --image or --tokens, or of the passages
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
"""

_HELP_WIDTH = 120


def _explained(columns: Iterable[Column]) -> str:
    """Return a line, or several, for each column."""
    names = [_heading(one.name) for one in columns]
    width = max(map(len, names)) + 4
    texts = [fill(one.meaning, _HELP_WIDTH - width).split("\n") for one in columns]
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
)
_PRINTED = ("fidelity", "layer", *(one.name for one in COLUMNS if one.printed))


def inputs_of(model: Any, source: str, text: str | None, image: Path | None, tokens: Path | None) -> Any:
    """Return what a model is called with, of a text, a picture or tokens."""
    from nlflow.attention import image_inputs, text_inputs, token_inputs

    if text is not None:
        return text_inputs(model, source, text)
    if image is not None:
        from nlflow.desk.files import read

        media = read(image, kind="image")
        return image_inputs(model, source, media.data)
    return token_inputs(model, read_tokens("--tokens", tokens))


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
    texts: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Text for --sweep and --why: a file, or a folder of *.txt and *.md."),
    ] = None,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="For --sweep: retrieval, perplexity; auto: by the kind of model.")
    ] = "auto",
    strengths: Annotated[str, typer.Option(metavar="NUMBERS", help="For --sweep.")] = "0.2,0.4,0.6",
    items: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Most passages or blocks of text [default: 400, for --why 16]."),
    ] = None,
    words: Annotated[int, typer.Option(metavar="COUNT", help="Words of a passage of --texts.")] = 48,
    spectra: Annotated[bool, typer.Option("--spectra/--no-spectra", help="With what takes O(N^3) time.")] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for table, results and figure.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """See how far each layer of a trained transformer moves its tokens, and what NeuTRENO's term changes."""
    if sweep:
        if texts is None:
            raise typer.BadParameter("takes --texts; give them", param_hint="--sweep")
        check_out(out)
        check_installed("attention", "torch", "torch")
        _run_sweep(
            model, texts, metric=metric, strengths=strengths, items=400 if items is None else items, words=words,
            adapter=adapter, out=out,
            as_json=as_json, quiet=quiet,
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
    from nlflow.backends.machine import provenance
    from nlflow.studies.result import render_rows

    progress = shows_progress(quiet)
    with warnings_kept() as warned, quiet_library():
        network = load_model(model)
        inputs = inputs_of(network, model, text, image, tokens)
        known = None if adapter is None else Adapter(adapter)
        trace = probe(network, inputs, adapter=known)
        own = _own_fidelity(network)
        runs = {own: trace.rows(spectra=spectra, progress=progress)}
        heads = _by_head(own, trace, spectra)
        if neutreno is not None and neutreno != own:
            _tell_of_replaced_terms(network)
            if spectra and explicit:
                trace.check_fidelity(neutreno)
            attach(network, fidelity=neutreno, semi_implicit=not explicit, adapter=known)
            changed = probe(network, inputs, adapter=known)
            runs[neutreno] = changed.rows(spectra=spectra, progress=progress)
            heads += _by_head(neutreno, changed, spectra)
    for text in () if quiet else warned:
        say("warning", text)
    rows = [{"fidelity": value, **row} for value, found in runs.items() for row in found]
    first = trace[0]
    report = {
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
        "warnings": warned,
        "provenance": provenance(),
    }
    if out is not None:
        _save(out, report, runs, own)
    if as_json:
        print_json(report)
    elif not quiet:
        sequences = "" if first.items == 1 else f"{first.items} sequences of "
        echo(f"{trace.model}: {len(trace)} layers of {first.heads} heads, {sequences}{report['tokens']} tokens\n")
        echo(render_rows([{_heading(name): row[name] for name in _PRINTED if name in row} for row in rows]))
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
    """Warn where a comparison changes more than the fidelity."""
    from nlflow.attention.terms.neutreno import LayerTerms, TermOptions
    from nlflow.errors import NlflowWarning

    if any(isinstance(terms, LayerTerms) and terms.options != TermOptions() for terms in network.modules()):
        warnings.warn(
            "--neutreno: the terms that the model was trained with are more than a fidelity, and are replaced as a "
            "whole by the plain term with softmax",
            NlflowWarning,
            stacklevel=2,
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


# ---- --sweep: texts from files, a task by the kind of model, table and files

_METRICS = ("auto", "retrieval", "perplexity")
_ENDINGS = (".txt", ".md")
_MOST = 10**8  # bytes of text


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library's progress bars and notes about weights off the terminal for a while."""
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
    model: str,
    texts: Path,
    *,
    metric: str,
    strengths: str,
    items: int,
    words: int,
    adapter: str | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from nlflow.attention import Adapter, load_model, sweep
    from nlflow.attention.injection.inputs import tokenizer_of
    from nlflow.attention.sweeping import settings_of
    from nlflow.backends.machine import provenance
    from nlflow.errors import check_choice, check_integer

    check_choice("--metric", metric, _METRICS)
    check_integer("--items", items, minimum=10, hint="intervals need some")
    check_integer("--words", words, minimum=1)
    tried = _numbers(strengths)
    read = texts_of(texts)
    with warnings_kept() as warned, quiet_library():
        wanted = _kind(model) if metric == "auto" else metric
        network = load_model(model, head="language" if wanted == "perplexity" else None)
        task = _task(wanted, tokenizer_of("--sweep", model, ""), read, items, words)
        known = None if adapter is None else Adapter(adapter)
        if not quiet:
            for line in _plan(task, len(settings_of(network, strengths=tried, adapter=known)), items, words):
                echo(line, err=True)
        found = sweep(network, task, strengths=tried, adapter=known, progress=shows_progress(quiet))
    for text in () if quiet else warned:
        say("warning", text)
    report = {"model": model, **found.as_dict(), "warnings": warned, "provenance": provenance()}
    if out is not None:
        _save_sweep(out, found.rows, report)
    if as_json:
        print_json(report)
    elif not quiet:
        echo(f"{type(network).__name__}: {found.metric} {found.stock:.4g} as it is, {found.items} items\n")
        echo(found.table())
        echo(f"\n{found.verdict}")
        if found.best is not None:
            echo(f"attach(model, {', '.join(f'{name}={value!r}' for name, value in report['best'].items())})")
        if out is not None:
            echo(f"\nwritten: table.csv and result.json in {out}")


def _plan(task: Any, settings: int, items: int, words: int) -> Iterator[str]:
    """Yield what a sweep will compute, and why it has fewer items than were asked for."""
    pairs = hasattr(task, "pairs")
    count = len(task.pairs if pairs else task.blocks)
    kind = f"pairs of passages of {words} words" if pairs else f"blocks of {task.blocks.shape[1]} tokens"
    if count < items:
        yield f"--items {items}: the texts hold {count} {kind}, and all are taken; more text gives more"
    each = 2 * count if pairs else count
    yield (
        f"{settings} settings and the model as it is, {count} {kind} each: {(settings + 1) * each} "
        f"{'passages' if pairs else 'blocks'} to encode"
    )


def _numbers(text: str) -> list[float]:
    from nlflow.errors import InputError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--strengths: got {text!r}, expected numbers such as 0.2,0.4") from error


def texts_of(place: Path) -> list[str]:
    """Return the texts of a file, or of the files of a folder."""
    from nlflow.errors import FileFormatError, MemoryLimitError, format_bytes

    files = [place]
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    if not files or not files[0].is_file():
        raise FileFormatError(
            f"--texts: got {place}, expected a file of text, or a folder with files {', '.join(_ENDINGS)}"
        )
    if (size := sum(path.stat().st_size for path in files)) > _MOST:
        raise MemoryLimitError(
            f"--texts: got {format_bytes(size)} in {place}, expected at most {format_bytes(_MOST)}; give a part of it"
        )
    found = []
    for path in files:
        try:
            found.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise FileFormatError(f"--texts: got {path}, which is no text in UTF-8; convert it") from error
    return found


def _kind(model: str) -> str:
    from nlflow.attention.injection.blocks import transformers_library
    from nlflow.errors import InputError, shortened

    try:
        config = transformers_library().AutoConfig.from_pretrained(
            model, local_files_only=Path(model).exists(), trust_remote_code=False
        )
    except Exception as error:  # the library fails in many ways
        raise InputError(
            f"model: got {model!r}, whose config.json cannot be read ({shortened(error, 300)}); expected a folder or "
            "the name of a model on the hub; check the name"
        ) from error
    names = " ".join(getattr(config, "architectures", None) or ())
    return "perplexity" if "CausalLM" in names or "LMHead" in names else "retrieval"


def _task(kind: str, tokenizer: Any, texts: list[str], items: int, words: int) -> Any:
    from nlflow.attention import Perplexity, Retrieval, neighbouring_passages

    if kind == "perplexity":
        return Perplexity(tokenizer, texts, blocks=items)
    return Retrieval(tokenizer, neighbouring_passages(texts, words=words, pairs=items))


def _save_sweep(out: Path, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    from nlflow.store.atomic import make_folder, write_content
    from nlflow.store.encoding import plain
    from nlflow.studies.result import render_csv

    place = make_folder(out)
    write_content(place / "table.csv", render_csv(rows).encode())
    write_content(place / "result.json", (json_text(plain(report)) + "\n").encode())
