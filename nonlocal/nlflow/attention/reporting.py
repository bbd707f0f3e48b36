"""One page about a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nlflow._array import Brief
from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.blocks import Adapter, network_of
from nlflow.attention.injection.cures import CURES
from nlflow.attention.injection.everyday import gathered, inputs_of
from nlflow.attention.probing.cause import Cause, explain
from nlflow.attention.probing.findings import NAMES, beside_nulls, causes
from nlflow.attention.probing.parts import PARTS
from nlflow.attention.probing.spectra import LayerSpectrum, verdict_of
from nlflow.attention.probing.survey import Survey, check_several, survey
from nlflow.attention.sweeping.sweep import Sweep, price, sweep
from nlflow.backends.machine import provenance
from nlflow.errors import InputError, NlflowError, check_path, checked_call
from nlflow.store.atomic import write_content
from nlflow.store.encoding import plain
from nlflow.studies.tables import render_csv

_EXPLAINED = 8  # inputs by which parts are told, which takes the time of several runs
_MEASURE = "cosine"
_WORDS = (
    "P is the matrix of attention, whose rows are weights of averages; mixing is what it changes. W_V W_O maps a token "
    "to what attention adds for it. Norms are layer norms. Each part is a difference along one path through a block."
)
_DEFAULT = "semi-implicit, λ̃ = 0.4, all layers"  # of `attach`


@dataclass(frozen=True, eq=False, repr=False)
class Report(Brief):
    """What `report` found.

    Attributes
    ----------
    name : str
        Of the model.
    before, after : surveys
        Of the model as it is, and with a cure: the one that helps most, or the default of `attach` where none helps.
    cure : str
        Which that is.
    cause : result of `explain`, or None
    spectra : list of LayerSpectrum
        Of the blocks whose maps are known; see `Cause.spectra`.
    unexplained : str
        Why there is no cause; empty where there is one.
    sweep : result of `nlflow.attention.sweep`, or None without a task
    source : str
        What the inputs are, if told.
    date : str
        When the model was looked into, in UTC (ISO 8601).
    provenance : dict
        Versions and platform.
    """

    name: str
    before: Survey
    after: Survey
    cure: str
    cause: Cause | None
    spectra: list[LayerSpectrum]
    unexplained: str
    sweep: Sweep | None
    source: str = ""
    date: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> list[str]:
        """Return sentences about why tokens grow alike; none where there is no `cause`."""
        return [] if self.cause is None else causes(self.cause, self.spectra)

    def parts(self) -> dict[str, dict[str, float]]:
        """Return by stack what each part changes in the mean cosine over its blocks."""
        found: dict[str, dict[str, float]] = {}
        for block in () if self.cause is None else self.cause.blocks:
            own = found.setdefault(block.stack, {})
            for part in (part for part in PARTS if part in block.parts):
                value = block.part(part, _MEASURE)[0]
                own[part] = own.get(part, 0.0) + (0.0 if np.isnan(value) else value)
        return found

    def may(self) -> list[str]:
        """Return what one may write about the model."""
        found = [f"On {_inputs(self.before.count)} of {self.name}, {one}." for one in self.before.findings()]
        if self.cause is not None:
            found += [f"{_capital(one)} ({self.cause.count} of these inputs)." for one in causes(self.cause)]
        found += [f"{_capital(verdict_of(self.spectra))}."] if self.spectra else []
        growths = zip(self.before.growths(), self.after.growths(), self.before.shifts(self.after), strict=True)
        for old, new, (mean, low, high) in growths:
            way = "raises" if low > 0 else "lowers" if high < 0 else "is not seen to move"
            ends = f" ({mean:+.2g}, 95 % interval {low:+.2g} to {high:+.2g})"
            if np.isnan(low):
                way, ends = "moves", f" ({mean:+.2g}; an interval takes three inputs)"
            found.append(
                f"{_capital(self.cure)}, attached without training, {way} the mean cosine after the last layer of the "
                f"{old.stack}: {old.cosine[1]:.2f} without it, {new.cosine[1]:.2f} with it{ends} on these inputs."
            )
        if self.sweep is not None:
            found += _of_sweep(self.name, self.sweep)
        return found

    def may_not(self) -> list[tuple[str, str]]:
        """Return what one may not write about the model, each with the reason."""
        found = []
        for one in self.before.growths():
            which = f"{one.stack} of {self.name}"
            if one.alike:
                found.append((f"The {which} over-smooths, and is worse for it.",
                              "That tokens are alike is no loss by itself; only a task measures a loss."))  # fmt: skip
            else:
                found.append((f"The {which} does not over-smooth.",
                              "One measure was not seen to rise on these inputs. Others may, and other inputs "
                              "may."))  # fmt: skip
            if one.isotropy[1] > 0.5:
                found.append((f"The tokens of an input become one in the {which}.",
                              f"Inputs point the same way too (mean cosine {one.isotropy[1]:.2f} of two inputs): part "
                              "of the cosine is a direction that all tokens share, which says nothing of an "
                              "input."))  # fmt: skip
        for stack, parts in self.parts().items():
            largest = max(parts, key=lambda name: parts[name])
            if parts[largest] > 0:
                found.append((f"That tokens are alike in the {stack} of {self.name} comes of {NAMES[largest]}.",
                              "It is what raises the cosine most along one path. A cause would be shown by a training "
                              "without it."))  # fmt: skip
        if self.sweep is not None:
            cures = len({row["cure"] for row in self.sweep.rows})
            chosen = self.sweep.chosen
            if chosen is None:
                found.append((f"Nothing helps {self.name}.",
                              f"{len(self.sweep.rows)} settings of {cures} cures were tried, without training, at one "
                              f"task on {self.sweep.items} items."))  # fmt: skip
            else:
                found.append((f"{_capital(chosen['cure'])} makes {self.name} better.",
                              f"It raises one metric on {self.sweep.items} items, {chosen['worse']:.0%} of which get "
                              "worse. Confirm it on other items before you use it."))  # fmt: skip
            found.append((f"The term of NeuTRENO was tested on {self.name}.",
                          "It was made for models that are trained with it, and was attached to one that was "
                          "not."))  # fmt: skip
        return found

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return all rows by table."""
        tables = {"layers": self.before.rows(), "layers with the cure": self.after.rows()}
        if self.cause is not None:
            tables |= {"parts": self.cause.rows(), "groups of tokens": self.cause.group_rows(),
                       "outlier channels": self.cause.outlier_rows(),
                       "spectra": [one.row() for one in self.spectra]}  # fmt: skip
        if self.sweep is not None:
            tables["cures"] = [
                {**{k: v for k, v in row.items() if k != "bytes"}, "bytes": row["bytes"][0],
                 "bytes_a_token": row["bytes"][1]} for row in self.sweep.rows
            ]  # fmt: skip
        return {name: rows for name, rows in tables.items() if rows}

    def figures(self) -> dict[str, Any]:
        """Return figures by caption."""
        from nlflow.plotting import cures_figure, parts_figure, survey_figure

        found = {
            f"Layers of {self.name} on {_inputs(self.before.count)}, as it is and with {self.cure}: means with bands "
            "of 95 %. 1 in the first panel: all tokens of an input point the same way.":
                survey_figure({"as it is": self.before.rows(), self.cure: self.after.rows()})
        }  # fmt: skip
        of_stacks = self.parts()
        shown = [name for name in PARTS if any(name in parts for parts in of_stacks.values())]
        for stack in of_stacks:  # a part has one colour in the figures of all stacks
            assert self.cause is not None
            every = zip(self.cause.blocks, self.cause.rows(_MEASURE), strict=True)
            found[
                f"What each part of each block of the {stack} changes in the mean cosine of two tokens, mean over "
                f"{_inputs(self.cause.count)}; black: the change of the block with 1.96 standard errors on each side."
            ] = parts_figure([row for block, row in every if block.stack == stack], shown, measure="the mean cosine")
        if self.sweep is not None:
            found[
                f"Gain in {self.sweep.metric} of each setting beside the model as it is ({self.sweep.stock:.4g}), "
                f"{self.sweep.items} items. All intervals together hold with probability {self.sweep.level:.0%}."
            ] = cures_figure(self.sweep.rows, metric=self.sweep.metric)
        return found

    def html(self) -> str:
        """Return the report as a page of HTML."""
        from nlflow.plotting.page import download, page, picture, table, text

        pictures = [picture(figure, caption) for caption, figure in self.figures().items()]
        tables = self.tables()
        links = ", ".join(
            download(f"{name.replace(' ', '-')}.csv", render_csv(plain(rows)), f"{name} ({len(rows)} rows)")
            for name, rows in tables.items()
        )
        does, why, helps = self.answers()
        may = "".join(f"<li>{text(one)}</li>" for one in self.may())
        forbidden = "".join(
            f"<li>“{text(one)}” <span class='mute'>{text(why)}</span></li>" for one, why in self.may_not()
        )
        sections = [f"<h2>Do tokens grow alike?</h2><p>{text(does)}</p>{pictures[0]}"]
        told = "".join(f"<li>{text(one)}</li>" for one in self.findings())
        drawn = pictures[1 : 1 + len(self.parts())]
        told = f"<p>{text(why)}</p><p class='mute'>{text(_WORDS)}</p><ul>{told}</ul>{''.join(drawn)}"
        sections.append(f"<h2>Why?</h2>{told}")
        if self.sweep is None:
            sections.append(f"<h2>What helps?</h2><p>{text(helps)}</p>")
        else:
            columns = {"cure": "cure", "value": "number", "layers": "layers", "metric": self.sweep.metric,
                       "gain": "gain", "low": "from", "high": "to", "verdict": "verdict", "time": "times the seconds",
                       "kept": "bytes beside the model", "token": "bytes a token"}  # fmt: skip
            shown = [
                {**row, "kept": row["bytes"][0], "token": row["bytes"][1],
                 "verdict": "helps" if row["helps"] else "harms" if row["harms"] else "no difference seen"}
                for row in sorted(self.sweep.rows, key=lambda row: -row["gain"])
            ]  # fmt: skip
            more = "<p class='mute'>The five largest gains; the CSV has all.</p>" if shown[5:] else ""
            best = table(shown[:5], columns) + more
            left = "".join(f"<li>{text(name)}: {text(why)}</li>" for name, why in self.sweep.left_out.items())
            left = f"<p>Left out:</p><ul>{left}</ul>" if left else ""
            tried = [CURES[name] for name in dict.fromkeys(row["cure"] for row in self.sweep.rows)]
            about = table(
                [{"name": one.name, "changes": one.changes, "source": one.source} for one in tried],
                {"name": "cure", "changes": "what it changes", "source": "source"},
            )
            sections.append(f"<h2>What helps?</h2><p>{text(helps)}</p>{best}{pictures[-1]}{left}{about}")
        sections.append(f"<h2>What one may write about it</h2><ul>{may}</ul>")
        sections.append(f"<h2>What one may not write about it</h2><ul>{forbidden}</ul>")
        sections.append(f"<h2>Numbers</h2><p>As CSV: {links}.</p>")
        versions = ", ".join(f"{name} {version}" for name, version in self.provenance.get("versions", {}).items())
        body = (
            f"<h1>{text(self.name)}: do its tokens grow alike, why, and what helps</h1>"
            f"<ul>{''.join(f'<li>{text(one)}</li>' for one in self.answers(brief=True))}</ul>"
            f"<p class='mute'>{text(self._measured())} {text(versions)}</p>"
            + "".join(f"<section>{one}</section>" for one in sections)
        )
        return page(self.name, body)

    def _measured(self) -> str:
        """Return on what the page was measured."""
        found = f"{self.date}: " + (f"{self.source}; " if self.source else "") + _inputs(self.before.count)
        if self.cause is not None:
            counts = self.cause.blocks[0].points["before"].count
            tokens = f"{counts.min():g}" + (f" to {counts.max():g}" if counts.min() < counts.max() else "")
            found += f", parts on {self.cause.count} of them ({tokens} tokens)"
        return found + ("." if self.sweep is None else f"; {self.sweep.metric} on {self.sweep.items} items.")

    def answers(self, *, brief: bool = False) -> tuple[str, str, str]:
        """Do tokens grow alike, why, what helps; `brief`: without numbers of nulls."""
        told = [f"the {one.stack} {one.verdict}" for one in self.before.growths()] if brief else self.before.findings()
        does = " ".join(f"{_capital(one)}." for one in told)
        count = 0 if self.cause is None else self.cause.count
        why = " ".join(
            _shares(stack, parts, count, "" if brief else self._nulls(stack)) for stack, parts in self.parts().items()
        )
        why = why or f"Not told: {self.unexplained or 'no part of a block could be told apart'}."
        if self.sweep is None:
            helps = "Not measured: no task was given."
        else:
            helps = _capital(self.sweep.verdict) + "."
        return does, why, helps

    def _nulls(self, stack: str) -> str:
        return beside_nulls([one for one in self.cause.blocks if one.stack == stack]) if self.cause is not None else ""

    def as_dict(self) -> dict[str, Any]:
        """Sentences and tables for JSON."""
        found: dict[str, Any] = {
            "model": self.name, "source": self.source, "date": self.date, "answers": self.answers(),
            "cure": self.cure, "may": self.may(), "may_not": self.may_not(), "tables": self.tables(),
            "provenance": self.provenance, "sweep": None if self.sweep is None else self.sweep.as_dict(),
        }  # fmt: skip
        return dict(plain(found))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path."""
        place = check_path("path", path)
        write_content(place, self.html().encode())
        return place


@checked_call
def report(
    model: Any,
    inputs: Iterable[Any],
    task: Callable[[Any], Any] | None = None,
    *,
    cures: Sequence[str] | Mapping[str, Sequence[float]] | None = None,
    layers: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    seconds: float | None = None,
    name: str = "",
    source: str = "",
    adapter: Adapter | Sequence[Adapter] | None = None,
    progress: bool = False,
) -> Report:
    """Measure how alike the tokens of a model grow, and why, and try cures: everything for one page.

    Parameters
    ----------
    model : torch.nn.Module or pipeline
        As for `nlflow.attention.probe`, in evaluation mode, without terms; it is left as it was.
    inputs : iterable
        Texts, pictures, or batches that `probe` takes; intervals need at least three inputs.
    task : callable, optional
        As for `nlflow.attention.sweep`; without one the term of `attach` is the only cure that is tried.
    cures, layers
        As for `nlflow.attention.sweep`.
    seconds : float, optional
        About how long the sweep may take.
    name : str
        Of the model on the page; by default that of its class.
    source : str
        What the inputs are, for the page.
    adapter : Adapter or sequence of Adapter, optional
        Where the blocks are, for models in which they are not found.
    progress : bool
        Progress bars on stderr.

    Raises
    ------
    InputError
        As `survey` and `sweep` do.

    Examples
    --------
    >>> found = report(model, texts, Retrieval(tokenizer, neighbouring_passages(texts)))  # doctest: +SKIP
    >>> found.save("page.html")  # doctest: +SKIP
    """
    network = network_of(model)
    check_several(inputs)
    given = [inputs_of(model, one) for one in inputs]
    if not given:
        raise InputError("inputs: got no batch, expected at least one")
    batches = gathered(given)
    options: Any = {"adapter": adapter, "progress": progress}
    before = survey(network, batches, **options)
    cause, unexplained, spectra = None, "", []
    try:
        cause = explain(network, gathered(given[:_EXPLAINED]), **options)
        spectra = cause.spectra(progress=progress)
    except NlflowError as error:
        unexplained = str(error)
    found = None
    if task is not None:
        found = sweep(model, task, cures=cures, layers=layers, seconds=seconds, **options)
    chosen = None if found is None else found.chosen
    best: dict[str, Any] = {"adapter": adapter} if found is None or found.best is None else found.best
    label = _DEFAULT
    if chosen is not None:
        label = f"{chosen['cure']}, {CURES[chosen['cure']].parameter} = {chosen['value']:g}, layers {chosen['layers']}"
    attach(network, **best)
    try:
        after = survey(network, batches, **options)
    finally:
        detach(network)
    return Report(
        name or type(network).__name__, before, after, label, cause, spectra, unexplained, found, source,
        datetime.now(UTC).date().isoformat(), provenance(),
    )  # fmt: skip


# ---- sentences


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _inputs(count: int) -> str:
    return f"{count} input{'s' * (count != 1)}"


def _shares(stack: str, parts: Mapping[str, float], count: int, nulls: str) -> str:
    order = sorted(parts, key=lambda name: -abs(parts[name]))
    told = ", ".join(f"{NAMES[name]} {parts[name]:+.2f}" for name in order if abs(parts[name]) >= 0.005)
    return (
        f"{_capital(stack)}: of the change of {sum(parts.values()):+.2f} in the mean cosine over its blocks, on "
        f"{_inputs(count)}: {told or 'no part is beyond 0.005'}." + (f" {_capital(nulls)}." if nulls else "")
    )


def _of_sweep(name: str, found: Sweep) -> list[str]:
    cures = len({row["cure"] for row in found.rows})
    harms = sum(row["harms"] for row in found.rows)
    result = []
    if (row := found.chosen) is not None:
        result.append(
            f"At {found.metric} on {found.items} items, {row['cure']} with {CURES[row['cure']].parameter} = "
            f"{row['value']:g} in the layers {row['layers']} raises {name} from {found.stock:.4g} to "
            f"{row['metric']:.4g} (gain {row['gain']:.3g}, interval {row['low']:.3g} to {row['high']:.3g}, which holds "
            f"for all {len(found.rows)} settings together with probability {found.level:.0%}). {price(row)}."
        )
    else:
        most = max(row["high"] for row in found.rows)
        result.append(
            f"None of {len(found.rows)} settings of {cures} cures, attached without training, is seen to raise "
            f"{found.metric} of {name} ({found.stock:.4g}) on {found.items} items: no interval lies above 0. Together "
            f"they exclude a gain of the score beyond {most:.3g} for every setting, with probability {found.level:.0%}."
        )
    if harms:
        lower = "lowers it: its interval lies" if harms == 1 else "lower it: their intervals lie"
        result.append(f"{harms} of the {len(found.rows)} settings {lower} below 0.")
    return result
