"""What ``nonlocal attention --sweep`` does: texts from files, a task by the kind of model, table and files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nlflow.desk.terminal import echo, json_text, print_json, say, shows_progress, warnings_kept

_METRICS = ("auto", "retrieval", "perplexity")
_ENDINGS = (".txt", ".md")
_MOST = 10**8  # bytes of text


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library's progress bars and notes about weights off the terminal for a while."""
    from nlflow.attention.injection.adapters import transformers_library
    from nlflow.attention.loading.models import no_bars

    logs = transformers_library().utils.logging
    verbosity = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logs.set_verbosity(verbosity)


def run_sweep(
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
    """Try terms on a model, and say which one helps it."""
    from nlflow.attention import Adapter, load_model, sweep
    from nlflow.attention.loading.inputs import tokenizer_of
    from nlflow.attention.sweeping.sweep import settings_of
    from nlflow.backends.machine import provenance
    from nlflow.errors import check_choice, check_integer

    check_choice("--metric", metric, _METRICS)
    check_integer("--items", items, minimum=10, hint="intervals need some")
    check_integer("--words", words, minimum=1)
    tried = _numbers(strengths)
    read = _texts(texts)
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
        _save(out, found.rows, report)
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


def _texts(place: Path) -> list[str]:
    """Return the texts of a file, or of the files of a folder in the order of their names."""
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
    """Return the metric of a model by what it was saved as."""
    from nlflow.attention.injection.adapters import transformers_library
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


def _save(out: Path, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Write table.csv and result.json, each complete or not at all."""
    from nlflow.store.atomic import make_folder, write_content
    from nlflow.store.encoding import plain
    from nlflow.studies.result import render_csv

    place = make_folder(out)
    write_content(place / "table.csv", render_csv(rows).encode())
    write_content(place / "result.json", (json_text(plain(report)) + "\n").encode())
