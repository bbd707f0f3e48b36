"""The command ``nonlocal``, whose commands import their modules when they run."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from nlflow.backends.interrupts import delivered, leave, terminable
from nlflow.desk.options import refuse_idle, renewed
from nlflow.desk.terminal import (
    close_stdout,
    echo,
    ensure_streams,
    in_shell,
    mendable,
    nobody_reads,
    say,
    tell_of_compiling,
)

_Usage: Any = typer.BadParameter.__mro__[1]  # whatever is wrong with a command line; typer has no name for it
P = ParamSpec("P")
T = TypeVar("T")
Section = tuple[str, list[tuple[str, str]]]

_STORY = """Nonlocal gradient flows: remove noise from images and signals by averaging what is alike.

\b
  nonlocal denoise noisy.png out.png              estimate the noise, remove it
  nonlocal denoise noisy.png out.png --sigma 20   or tell it, in grey levels
  nonlocal denoise in.png out.png --compare a.pdf draw before and after
  nonlocal denoise photos denoised                all images of a folder
  nonlocal denoise ecg.csv out.csv --json         signals; report for programs
  nonlocal noise photo.jpg --figure noise.png     which noise a file has
  nonlocal explore noisy.png                      sliders, on a page in the browser
  nonlocal demo                                   noise added and removed again
  nonlocal study time-order                       measured rates beside the theory
  nonlocal study results/study.toml               repeat one to the bit
  nonlocal cite                                   BibTeX of it and of its theory
  nonlocal attention FOLDER --text "..."          layers of a trained transformer
  nonlocal validate --quick                       the theory, claim by claim
  nonlocal info                                   versions, threads, devices

Images are PNG, JPEG, TIFF, WebP, BMP or NPY files, signals WAV, CSV or NPY; `nonlocal denoise --help-all` names others.
Outputs appear complete or not at all, and replace others only if asked. Results go to stdout, progress and notes to
stderr. Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted, 141 nobody reads stdout, 143 terminated.
Demonstration and validation run on the CPU; denoise takes --set device=cuda, studies of tokens --device.
"""


def _reported(command: Callable[P, T], params: list[Any]) -> Callable[P, T]:
    """Turn the errors that a user can mend into one line on stderr and an exit code; `params` are the command's."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        ensure_streams()
        with terminable() as terminated:
            try:
                tell_of_compiling(quiet=bool(kwargs.get("quiet")))
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                echo(f"nonlocal: {'terminated' if terminated() else 'interrupted'}", err=True)
                raise typer.Exit(143 if terminated() else 130) from None  # 128 and the signal, as shells have it
            except typer.Exit as leave:
                if leave.exit_code == 130 and terminated():
                    raise typer.Exit(143) from None
                raise
            except Exception as error:
                if nobody_reads(error):
                    close_stdout()
                    raise typer.Exit(141) from None  # as of a program that SIGPIPE has ended
                message = mendable(error)
                if message is None:
                    raise
                if (misuse := _misuse(error, message, params, kwargs)) is not None:
                    raise misuse from None
                say("error", message)
                raise typer.Exit(1) from None

    return run


# What is held against what a file, a model or the machine has.
_HELD = {"flat", "text", "sigma", "noise", "axes", "channel_axis", "device", "host", "port"}


def _misuse(error: Exception, message: str, params: list[Any], given: dict[str, Any]) -> typer.BadParameter | None:
    """Return what is wrong with the value of an option that was given, unless a file is or holds what is wrong."""
    from nlflow.errors import InputError

    word, _, why = message.partition(": ")
    asked = word.lstrip("-").partition(" ")[0].replace("-", "_")  # of --write format: write
    for one in params if type(error) is InputError and asked not in _HELD else ():
        value = given.get(one.name)
        names = {one.name, *(name.lstrip("-").replace("-", "_") for name in one.opts)}
        if one.param_type_name != "option" or asked not in names or value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if not any(isinstance(part, Path) or (isinstance(part, str) and Path(part).exists()) for part in values):
            return typer.BadParameter(in_shell(why), param_hint=word if word.startswith("--") else one.opts[0])
    return None


class _Command(TyperCommand):
    """A command; one that has a short help shows all of it with ``--help-all``."""

    brief = ""
    usual: tuple[str, ...] = ()  # options in the short help
    sections: Callable[[], list[Section]] = list  # of the whole help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_filled(ctx, args)
        try:
            known = {name for param in self.params for name in param.opts}
            words, ctx.meta["former"] = renewed(args, known)
            return super().parse_args(ctx, words)
        except _Usage as error:  # a shell puts names of files in the place of patterns
            from nlflow.errors import visible

            error.message = visible(error.message.removeprefix("Value error, "))  # a word of pydantic
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless an option that was given would have no effect."""
        refuse_idle(self.name or "", ctx)
        return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        option = self.get_help_option(ctx)
        if not self.brief or option is None:
            return params
        more = copy.copy(option)
        more.name, more.opts, more.callback = "help_all", ["--help-all"], _show_all
        more.help = "Show all options, with more examples, and exit."
        return [*params[:-1], more, params[-1]]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not self.brief:
            self.format_all(ctx, formatter)
            return
        short = copy.copy(self)
        short.help = self.brief
        short.params = [one for one in self.params if one.name in self.usual or one.param_type_name == "argument"]
        super(_Command, short).format_help(ctx, formatter)

    def format_all(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for title, rows in type(self).sections():
            with formatter.section(title):
                formatter.write_dl(rows)


def _check_filled(ctx: Any, words: list[str]) -> None:
    """Refuse an empty word, which as a name of a file would be the working folder."""
    for before, word in zip([ctx.info_name, *words], words, strict=False):
        option = word.startswith("--") and word.endswith("=")
        if not word or option:
            place = word.removesuffix("=") if option else before
            told = (
                f"got an empty word after {place!r}, expected a name or a value; a variable of the shell may be empty"
            )
            raise typer.BadParameter(told, ctx)


def _show_all(ctx: Any, _: Any, wanted: bool) -> None:
    if wanted:
        formatter = ctx.make_formatter()
        ctx.command.format_all(ctx, formatter)
        echo(formatter.getvalue().rstrip("\n"))
        raise typer.Exit


class _FromTo(_Command):
    """A command with IN and OUT: of one name alone it says that OUT is missing, where the parser misses IN."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.message or error.param is None or error.param.name != "sources":
                raise
            name = self.make_parser(ctx).parse_args(args=given)[0].get("target")
            if not isinstance(name, str):
                raise
            told = f"got {name!r} alone, expected where to write too; add a name after it"
            raise typer.BadParameter(told, ctx, param_hint="OUT") from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from nlflow.backends.machine import version

        echo(f"nlflow {version()}")
        raise typer.Exit


#: From a command to the module that holds it, and its line in the list of commands; that of its help by default.
_COMMANDS = {
    "denoise": ("denoise", "Remove noise from images, signals, volumes and video."),
    "noise": ("noise", "Find out which noise a file has."),
    "demo": ("others", None),
    "study": ("study", "Measure rates of convergence beside the theory."),
    "attention": ("attention", "See what the layers of a transformer do."),
    "explore": ("others", "Try denoising, flows and layers on a page."),
    "cite": ("cite", "Print BibTeX of what was run."),
    "validate": ("others", "Run the statements of the theory."),
    "info": ("others", None),
}


class _Commands(TyperGroup):
    """The commands, each of which is loaded when it is run or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named first; where there is none, say what may be meant."""
        try:
            return super().resolve_command(ctx, args)
        except _Usage as error:
            from nlflow.errors import command, visible

            near = get_close_matches(args[0], _COMMANDS, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            meant = (
                f"; say {command('nonlocal', 'denoise', *args[:2])}" if args[0] and Path(args[0]).exists() else meant
            )
            error.message = f"got {visible(args[0])!r}, expected a command: {', '.join(_COMMANDS)}{meant}"
            raise

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in _COMMANDS:
            return None
        place, short = _COMMANDS[name]
        module = importlib.import_module(f"nlflow.desk.commands.{place}")
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        known = {"brief": getattr(module, "BRIEF", ""), "usual": getattr(module, "USUAL", ())}
        if hasattr(module, "sections"):
            known["sections"] = module.sections
        base = _FromTo if name == "denoise" else _Command
        text = getattr(module, f"{name.upper()}_HELP", None) or module.HELP
        params: list[Any] = []
        one.command(name, cls=type(base.__name__, (base,), known), help=text, short_help=short)(
            _reported(getattr(module, name), params)
        )
        found: Any = typer.main.get_command(one)
        params += found.params
        found.context_settings = dict(app.info.context_settings or {})
        return found


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=_STORY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in the texts are meant as such
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    ensure_streams()
    with terminable() as terminated:
        try:
            with delivered():
                _check_place()
                app(prog_name="nonlocal")
        except BaseException as ended:
            code = ended.code if isinstance(ended, SystemExit) else 130 * isinstance(ended, KeyboardInterrupt) or 1
            if code and terminated():  # whatever it met on its way out
                leave(143)
            if code == 130:
                leave(130)
            message = mendable(ended) if isinstance(ended, OSError) else None
            if message is None:
                raise
            say("error", message)
            sys.exit(1)


def _check_place() -> None:
    """Raise `OSError` where the working folder was removed: names begin there, and libraries ask for it."""
    try:
        Path.cwd()
    except OSError as error:
        raise OSError("the working folder is gone, expected one that is there; change to another with cd") from error


if __name__ == "__main__":
    main()
