"""Which option acts on what: one table, by which an option that would have no effect is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

Words = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Options that act under a condition only.

    Attributes
    ----------
    options : str
        Their names as parameters of the command.
    acts : callable
        Gets the values of all parameters.
    why : str
        What is said of an option that is given where it does not act.
    """

    options: str
    acts: Callable[[Words], bool]
    why: str


def _on_this_machine(words: Words) -> bool:
    return words["scheduler"] in (None, "local")


_OF_MACHINE = Rule("jobs", _on_this_machine, "is for processes of this machine, got a --scheduler with workers of its "
                                             "own; leave one of them out")  # fmt: skip
_RULES: dict[str, tuple[Rule, ...]] = {
    "denoise": (
        Rule("scheduler jobs block", lambda words: words["target"].endswith(".zarr"),
             "is for an OUT that ends in .zarr; name one, or leave it out"),
        _OF_MACHINE,
        Rule("form", lambda words: words["target"] == "-", "is for - as OUT; leave it out, and end the name of OUT so"),
        Rule("width patch_size search_radius fidelity steps", lambda words: words["quality"] == "fast",
             "is for --quality fast; add that, or leave it out"),
    ),
    "noise": (
        Rule("existing", lambda words: words["figure"] is not None or words["save"] is not None,
             "is about what --figure and --save write; give one, or leave it out"),
    ),
    "attention": (
        Rule("texts metric strengths items words", lambda words: words["sweep"],
             "is for --sweep; add that, or leave it out"),
        Rule("text image tokens neutreno explicit spectra", lambda words: not words["sweep"],
             "is not for --sweep, which takes --texts; leave one of them out"),
        Rule("explicit", lambda words: words["neutreno"] is not None, "is a form of --neutreno; give both"),
    ),
    "explore": (
        Rule("clean axes spacing array", lambda words: words["file"] is not None, "belongs to a FILE; give one"),
    ),
    "study": (_OF_MACHINE,),
    "validate": (
        _OF_MACHINE,
        Rule("names quick out resume jobs scheduler data quiet", lambda words: not words["only_list"],
             "is for a run, which --list is not; leave one of them out"),
    ),
}  # fmt: skip


def refuse_idle(command: str, context: Any) -> None:
    """Raise `typer.BadParameter` for an option that somebody has given and that has no effect beside the others.

    Parameters
    ----------
    command : str
    context : typer.Context
        After the command line was parsed.
    """
    names = {param.name: param.opts[0] for param in context.command.params}
    for rule in _RULES.get(command, ()):
        for name in rule.options.split():
            source = context.get_parameter_source(name)
            given = source is not None and source.name != "DEFAULT"
            if given and not rule.acts(context.params):
                hint = names[name] if names[name].startswith("-") else name.upper()
                raise typer.BadParameter(rule.why, context, param_hint=hint)


def refuse_without_film(films: bool, coding: Any) -> None:
    """Raise `typer.BadParameter` for the quality of a film where no output is one."""
    if coding is not None and not films:
        raise typer.BadParameter(
            "is for an OUT that is a film (.mp4, .mkv, .mov, .webm, .avi); name one, or leave it out",
            param_hint="--video-quality",
        )
