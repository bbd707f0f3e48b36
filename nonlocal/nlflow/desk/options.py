"""Options of commands."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nlflow.denoising.noise.names import WORDS, has_sigma, model_class

Quality = Literal["fast", "balanced", "best", "pixels"]
#: `nlflow.backends.devices.DEVICES`, as types need them.
DeviceName = Literal["auto", "cpu", "cuda", "mps", "cpu-tensors"]
#: Stands for stdin as an input, and for stdout as an output.
PIPE = "-"

Flat = Annotated[
    str | None,
    typer.Option(metavar="ROWS,COLUMNS", help="Measure the noise in a flat part of a picture: 20:84,300:400."),
]
Mask = Annotated[
    str | None, typer.Option(metavar="FILE|nan", help="Missing samples: not 0 in FILE, or those that are NaN.")
]
Axes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LETTERS|NAME=VALUE",
        help="How IN is read: axes and distances of a stack (ZYX, TYX, ZYX:5,1,1), kind=signal, channel-axis=0, "
        "first-column=keep [default: as the file says]. May be repeated.",
        show_default=False,
    ),
]
ArrayName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which array of an NPZ, MAT or HDF5 file, where there are several.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Report as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and --json.")]

#: From a former option to that which has taken its place, and how a value is written there.
FORMER = {
    "--stopping": ("--set", "stopping"), "--width": ("--set", "width"), "--patch-size": ("--set", "patch-size"),
    "--search-radius": ("--set", "search-radius"), "--fidelity": ("--set", "fidelity"), "--steps": ("--set", "steps"),
    "--max-memory": ("--set", "max-memory"), "--device": ("--set", "device"), "--gain": ("--set", "gain"),
    "--read-noise": ("--set", "read-noise"), "--offset": ("--set", "offset"), "--kind": ("--axes", "kind"),
    "--channel-axis": ("--axes", "channel-axis"), "--first-column": ("--axes", "first-column"),
    "--spacing": ("--axes", "spacing"), "--format": ("--write", "format"), "--video-quality": ("--write", "quality"),
    "--block": ("--write", "block"), "--jobs": ("--write", "workers"), "--scheduler": ("--write", "workers"),
}  # fmt: skip


def renewed(args: Iterable[str], known: set[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command without former options, and the values of these by name."""
    words, former, rest = list[str](), dict[str, str](), iter(args)
    for word in rest:
        if word == "--":
            words += [word, *rest]
            break
        option, equals, value = word.partition("=")
        new, name = FORMER.get(option, ("", ""))
        if new not in known or option in known:
            words.append(word)
            continue
        given = value if equals else next(rest, None)
        if given is None:
            raise typer.BadParameter(f"needs a value; it is now written {new} {name}=VALUE", param_hint=option)
        words += [new, f"{name}={given}"]
        former.setdefault(name, option)
    return words, former


# ---- finer settings, by their names


@dataclass(frozen=True)
class Setting:
    """How ``NAME=VALUE`` is read."""

    read: Callable[[str], Any]
    text: str = ""


def _parse_bytes(text: str) -> int:
    """Return a size such as ``2GiB``, ``500 MB`` or ``1e9`` in bytes."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", str(text), re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    base = 1000 if found and (found[3] or "").lower() == "b" else 1024
    unit = (found[2] or "").lower() if found else ""
    size = number * base ** ("kmgt".index(unit) + 1 if unit else 0)
    if not 1 <= size < 2**63:
        raise ValueError(f"got {text!r}, expected a number of bytes such as 2000000000, 2GiB or 500MB")
    return int(size)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"got {text!r}, expected a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"got {text!r}, expected a whole number") from None


def _of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"got {text!r}, expected one of {', '.join(words)}")
        return text

    return read


def _distances(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"got {text!r}, expected positive numbers with commas between them, such as 0.5,0.2,0.2")
    return numbers


def _coding(text: str) -> int | str:
    if text == "lossless":
        return text
    if not (text.isascii() and text.isdecimal() and int(text) <= 100):
        raise ValueError(f"got {text!r}, expected lossless, or a whole number from 0 to 51 (films) or 1 to 100 (JPEG)")
    return int(text)


_OF_COUNTS = {
    "gain": Setting(_number, "of --noise poisson: units of the file per count"),
    "read_noise": Setting(_number, "of --noise poisson: Gaussian noise beside that of counts, in the file's units"),
    "offset": Setting(_number, "of --noise poisson: what the file holds for no counts"),
}


def settings() -> dict[str, Setting]:
    from nlflow.denoising.options import Options

    readers: dict[str, Callable[[str], Any]] = {"int": _whole, "float": _number, "str": str}
    found = {
        one.name: Setting(readers[str(one.type).partition(" ")[0]])
        for one in fields(Options)
        if one.name not in ("strength", "separate")
    }
    return found | {"max_memory": Setting(_parse_bytes)} | _OF_COUNTS


READINGS = {
    "axes": Setting(str),
    "spacing": Setting(_distances),
    "kind": Setting(_of("image", "signal")),
    "channel_axis": Setting(_whole),
    "first_column": Setting(_of("keep", "denoise")),
}
WRITINGS = {
    "format": Setting(str, "of - as OUT: png, tif, npy, ... [that of IN]"),
    "quality": Setting(_coding, "of a film: lossless, or a rate factor from 0 (best) to 51 [12]; of JPEG: 1 to 100 "
                                "[about that of IN, or 95]"),
    "block": Setting(_whole, "of an OUT of zarr: side of the blocks [1024 for fast, or 2048; of volumes 256 or 192]"),
    "workers": Setting(str, "of an OUT of zarr: how many local processes, or the ADDRESS of a Dask scheduler [all "
                            "cores]"),
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What was given."""

    option: str
    values: dict[str, Any]
    former: Mapping[str, str]

    def hint(self, name: str) -> str:
        shown = name.replace("_", "-")
        return self.former.get(shown, f"{self.option} {shown}")

    def refuse(self, name: str, why: str) -> typer.BadParameter:
        return typer.BadParameter(why, param_hint=self.hint(name))


def given(option: str, texts: Iterable[str] | None, known: Mapping[str, Setting], former: Mapping[str, str]) -> Given:
    found = Given(option, {}, former)
    for text in texts or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or not equals:
            names = ", ".join(one.replace("_", "-") for one in known)
            raise typer.BadParameter(f"got {text!r}, expected NAME=VALUE with a NAME of {names}", param_hint=option)
        if name == "workers" and name in found.values and "local" in (value, found.values[name]):
            value = value if found.values[name] == "local" else found.values[name]  # local is where the others are
        elif name == "workers" and name in found.values:
            raise found.refuse(name, "is said twice, as a number of processes of this machine and as a scheduler with "
                                     "workers of its own; leave one of them out")  # fmt: skip
        try:
            found.values[name] = known[name].read(value)
        except ValueError as error:
            raise found.refuse(name, str(error)) from None
    return found


def parse_axes(texts: Iterable[str] | None, former: Mapping[str, str]) -> dict[str, Any]:
    named = []
    for text in texts or ():
        letters, _, distances = text.partition(":")
        if "=" in text:
            named.append(text)
            continue
        named += [f"axes={letters}"] if letters or not distances else []
        named += [f"spacing={distances}"] if ":" in text else []
    return given("--axes", named, READINGS, former).values


def as_words(reading: Mapping[str, Any]) -> list[str]:
    distances = "" if reading.get("spacing") is None else ":" + ",".join(map(repr, reading["spacing"]))
    layout = f"{reading.get('axes') or ''}{distances}"
    words = ["--axes", layout] if layout else []
    for name in ("kind", "channel_axis", "first_column"):
        if reading.get(name) is not None:
            words += ["--axes", f"{name.replace('_', '-')}={reading[name]}"]
    return [*words, "--array", reading["array"]] if reading.get("array") else words


def described(known: Mapping[str, Setting]) -> list[tuple[str, str]]:
    from nlflow.denoising.options import OPTIONS, Options

    texts: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(Options.__doc__ or "").splitlines():  # none where docstrings were stripped
        if line and not line.startswith(" "):
            name, _, kind = line.partition(" : ")
            words = re.findall("'([^']+)'", kind)
            texts[name] = f"{' or '.join(words)}:" if kind and words else ""
        elif line:
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip().replace("``", "")
    rows = []
    for name, one in known.items():
        text = one.text or texts.get(name, "").partition(". ")[0].rstrip(".")
        default = OPTIONS.get(name)
        rows.append((name.replace("_", "-"), text + (f" [{default}]" if default is not None else "")))
    return rows


def noise_of(word: str, level: Any, strength: float | None, settings: Given) -> Any:
    counts = {name: settings.values[name] for name in _OF_COUNTS if name in settings.values}
    if counts and word != "poisson":
        raise settings.refuse(next(iter(counts)), "is a property of counts; give --noise poisson too")
    if word == "gaussian":
        raise typer.BadParameter("got gaussian, which is now called white; say --noise white", param_hint="--noise")
    if strength is not None and not has_sigma(word):
        raise typer.BadParameter("is not for counts, whose noise follows from them; leave it out",
                                 param_hint="--strength")  # fmt: skip
    if word in WORDS:
        model = {"sigma" if name == "read_noise" else name: value for name, value in counts.items()}
        return model_class(WORDS[word].kind)(**model) if model else word
    if not (word.lower().endswith(".json") or Path(word).exists()):
        raise typer.BadParameter(
            f"got {word!r}, expected {', '.join(WORDS)} or a file that nonlocal noise --save has written",
            param_hint="--noise",
        )
    if level is not None:
        raise typer.BadParameter(f"is said by the model in {word} already; leave one of them out", param_hint="--sigma")
    from nlflow.denoising.noise import load_noise

    loaded = load_noise(word)
    if strength is not None and not loaded.scalable:
        raise typer.BadParameter(f"is not for counts, of which {word} holds a model; leave it out",
                                 param_hint="--strength")  # fmt: skip
    return loaded


def options_of(quality: str, strength: float | None, settings: Given) -> Any:
    from nlflow.denoising.options import Options
    from nlflow.errors import InputError

    words: dict[str, Any] = {name: value for name, value in settings.values.items() if name not in _OF_COUNTS}
    words |= {} if strength is None else {"strength": strength}
    try:
        options = Options(**words)
        options.check(quality)
    except InputError as error:
        name, _, why = str(error).partition(": ")
        if name == "strength":
            raise typer.BadParameter(why, param_hint="--strength") from None
        raise settings.refuse(name, why) from None
    return options


def check_device(device: str, hint: str = "--device") -> None:
    from nlflow.backends.devices import choose_device
    from nlflow.errors import InputError

    try:
        choose_device(device)
    except InputError as error:
        raise typer.BadParameter(str(error).removeprefix("device: "), param_hint=hint) from None


def split_sigma(text: str | None) -> tuple[float | list[float] | None, Path | None]:
    if text is None or text == "auto":
        return None, None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        path = Path(text)
        if not text or not (path.suffix or path.exists()):
            raise typer.BadParameter(
                f"got {text!r}, expected a number, numbers with commas between them, a file, or auto",
                param_hint="--sigma",
            ) from None
        return None, path
    if not all(0 <= number < math.inf for number in numbers):
        raise typer.BadParameter(f"got {text}, expected a number >= 0, or numbers with commas between them",
                                 param_hint="--sigma")  # fmt: skip
    return (numbers[0] if len(numbers) == 1 else numbers), None


def split_flat(text: str | None) -> tuple[slice, slice] | None:
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+):(\d+)\s*,\s*(\d+):(\d+)\s*", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(
            f"got {text!r}, expected rows and columns of a flat part as first:end,first:end, such as 20:84,300:400",
            param_hint="--flat",
        )
    top, bottom, left, right = (int(number) for number in found.groups())
    return slice(top, bottom), slice(left, right)


# ---- options that would have no effect


@dataclass(frozen=True)
class Rule:
    """Options that act under a condition only, and the message for other cases."""

    options: str
    acts: Callable[[Mapping[str, Any]], bool]
    why: str


_OF_MACHINE = Rule("jobs", lambda words: words["scheduler"] in (None, "local"),
                   "is for processes of this machine, got a --scheduler with workers of its own; leave one of them "
                   "out")  # fmt: skip
_PRINTED = Rule("verbose", lambda words: not (words["quiet"] or words["as_json"]),
                "is for the printed report; leave it out, or --quiet and --json")  # fmt: skip
_RULES: dict[str, tuple[Rule, ...]] = {
    "denoise": (_PRINTED,),
    "noise": (
        _PRINTED,
        Rule("existing", lambda words: words["figure"] is not None or words["save"] is not None,
             "is about what --figure and --save write; give one, or leave it out"),
    ),
    "attention": (
        Rule("images sounds metric cure seconds size",
             lambda words: words["sweep"] or words["report"] is not None,
             "is for --sweep and --report; add one of them, or leave it out"),
        Rule("texts items words", lambda words: words["sweep"] or words["why"] or words["report"] is not None,
             "is for --sweep, --why and --report; add one of them, or leave it out"),
        Rule("words", lambda words: words["texts"] is not None, "is about --texts; give them, or leave it out"),
        Rule("size", lambda words: words["images"] is not None, "is about --images; give them, or leave it out"),
        Rule("items", lambda words: any(words[name] is not None for name in ("texts", "images", "sounds")),
             "is about --texts, --images and --sounds; give one of them, or leave it out"),
        Rule("name", lambda words: words["report"] is not None, "is for --report; add that, or leave it out"),
        Rule("which", lambda words: words["why"], "is for --why; add that, or leave it out"),
        Rule("why", lambda words: not words["sweep"] and words["report"] is None,
             "is not for --sweep and --report; leave one of them out"),
        Rule("neutreno explicit", lambda words: not words["why"], "is not for --why; leave one of them out"),
        Rule("text image tokens neutreno explicit spectra",
             lambda words: not words["sweep"] and words["report"] is None,
             "is not for --sweep and --report, which take --texts, --images or --sounds; leave one of them out"),
        Rule("explicit", lambda words: words["neutreno"] is not None, "is a form of --neutreno; give both"),
    ),
    "explore": (
        Rule("clean axes array", lambda words: words["file"] is not None, "belongs to a FILE; give one"),
    ),
    "study": (
        _OF_MACHINE,
        Rule("form width style", lambda words: words["out"] is not None,
             "is about the figure that --out DIR writes; give a folder, or leave it out"),
        Rule("kernel nodes dimension boundary channels fidelity metric integrator dt laziness seeds seed queries keys "
             "values device dtype", lambda words: not words["kind"].endswith(".toml"),
             "belongs to a KIND: the file says what its study is; leave it out, or run the study by its KIND"),
    ),
    "validate": (
        _OF_MACHINE,
        Rule("names quick out resume jobs scheduler data quiet", lambda words: not words["only_list"],
             "is for a run, which --list is not; leave one of them out"),
    ),
}  # fmt: skip


def refuse_idle(command: str, context: Any) -> None:
    names = {param.name: param.opts[0] for param in context.command.params}
    for rule in _RULES.get(command, ()):
        for name in rule.options.split():
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT" and not rule.acts(context.params):
                hint = names[name] if names[name].startswith("-") else name.upper()
                raise typer.BadParameter(rule.why, context, param_hint=hint)
