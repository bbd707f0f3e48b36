"""Running a study."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nlflow._array import underflowing
from nlflow.backends.devices import CPU, Device
from nlflow.backends.machine import provenance
from nlflow.backends.progress import bar
from nlflow.backends.threads import blas_limited, one_loop_thread
from nlflow.errors import (
    FileFormatError,
    InputError,
    MemoryLimitError,
    NlflowError,
    NumericalError,
    check_choice,
    check_flag,
    check_generator,
    check_integer,
    shortened,
)
from nlflow.store.atomic import locked, make_folder
from nlflow.store.encoding import decode, digest, encode, misfit
from nlflow.store.identity import describe
from nlflow.store.records import Records, program
from nlflow.store.storage import load_record, save_record
from nlflow.studies.cases import Case, Done, run_cases
from nlflow.studies.contract import Kind, Options, Row, Setting, in_words
from nlflow.studies.equilibrium import EquilibriumStudy
from nlflow.studies.mixing import Mixing
from nlflow.studies.monte_carlo import MonteCarlo
from nlflow.studies.options import read_options
from nlflow.studies.replay import is_study_file, read_study
from nlflow.studies.result import StudyResult
from nlflow.studies.samples import Samples
from nlflow.studies.settings import extent, make_settings
from nlflow.studies.space_order import SpaceOrder
from nlflow.studies.stability import Stability
from nlflow.studies.time_order import TimeOrder

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (TimeOrder(), SpaceOrder(), MonteCarlo(), Samples(), Mixing(), EquilibriumStudy(), Stability())
}
"""The kinds of study by name."""

_STUDY, _CASE = "study", "case of a study"
_ADVICE = "ask for the same study, or choose another folder"


@underflowing
def run_study(
    kind: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = 1,
    scheduler: str | None = None,
    progress: bool = False,
    rng: int | np.random.Generator | None = 0,
    **options: Any,
) -> StudyResult:
    """Measure a rate of convergence, or a limit, and compare it with what the theory says.

    Parameters
    ----------
    kind : str or path
        ``time-order``: the order of integrators in the step. ``space-order``: the order in N of the averages of a grid
        against the continuum. ``monte-carlo``: the same for random nodes, or for tokens drawn from given ones.
        ``samples``: the error of attention to n normal tokens against its limit. ``mixing``: how fast the chain of an
        affinity approaches its limit. ``equilibrium``: diversity of the equilibrium beside its bounds, and the rate of
        convergence to it. ``stability``: growth of perturbations under NeuTRENO steps.
        Or the path of the ``study.toml`` of an earlier study, to repeat it: ``provenance['repeated']`` says whether the
        results have the same bits. Functions and objects of one's own have to be given again.
    out : path, optional
        A folder in which each case is kept as soon as it is done. A later call with the same options computes the
        cases that are missing there, with the same versions on the same kind of processor.
    jobs : int or None
        Number of processes; 1 for this one alone, -1 for all cores, None for what `joblib.parallel_config` says.
    scheduler : str, optional
        Address of a scheduler of Dask whose workers measure the cases, or ``'local'`` for a cluster of `jobs` processes
        on this machine.
    progress : bool
        Progress bar on stderr.
    rng : int or Generator
        Seed, from which each case gets a stream of its own.
    **options
        Lists or single values of ``kernel`` (`Kernel` or text such as ``'gaussian:width=0.1'``), ``nodes`` (along each
        axis of a grid; sample sizes for ``monte-carlo`` and ``samples``), ``dimension`` (1, 2; without a continuum also
        more), ``boundary``, ``channels``, ``fidelity``, ``metric``, ``integrator``, as far as the kind has them; every
        combination is a case. An ``integrator`` of one's own is a function that returns it for a step.
        One value of: ``domain`` in place of nodes, dimension and boundary; ``start``, the signal, an array or a
        function of node positions (N, m); ``keys``, ``queries`` and ``values``, arrays with a row for each token, for
        kernels that compare features; ``t`` (time-order); ``seeds``, the number of draws (with sample sizes);
        ``laziness``, the distance ``eps`` and the first node or law ``origin`` (mixing); ``device``, for kernels that
        compare features: ``cpu`` (default), ``cuda``, ``auto`` or ``cpu-tensors``; ``dtype`` (time-order, stability):
        ``float64`` or ``float32``. ``dt`` (time-order) is a list of three steps or more.

    Returns
    -------
    StudyResult

    Raises
    ------
    InputError
        For options that the kind does not have, unusable values, fewer than three sizes to fit a line through, and a
        device that is not there or does not take the kernel.
    NumericalError
        If a case has no result, such as an integration that fails.
    MemoryLimitError
        For arrays that do not fit into the memory or the device.
    FileFormatError
        For a file that is no ``study.toml`` of this version's format; if `out` holds another study, one of other
        versions or of another processor, or numbers that no study measures.
    WorkerError
        If worker processes die again and again; finished cases are kept in `out`.

    Warns
    -----
    NlflowWarning
        If the file of a case is damaged or holds something else; the case is computed again.

    Examples
    --------
    >>> from nlflow import run_study
    >>> result = run_study("time-order", nodes=16, integrator="euler", metric="degree", fidelity=0.5)
    >>> [round(fit.slope, 1) for fit in result.fits], result.fits[0].passed
    ([1.0], True)
    """
    check_flag("progress", progress)
    if is_study_file(kind):
        return _repeat(kind, options, out=out, jobs=jobs, scheduler=scheduler, progress=progress, rng=rng)
    study = KINDS[check_choice("kind", kind, tuple(KINDS))]
    drawn = check_generator(rng)
    seed = int(rng) if isinstance(rng, int | np.integer) else int(drawn.integers(2**63))
    workers = None if jobs is None else check_integer("jobs", jobs, minimum=-1, hint="-1 takes all cores")
    if workers == 0:
        workers = check_integer("jobs", jobs, minimum=1, hint="-1 takes all cores")
    chosen = read_options(study, options)
    described: dict[str, Any] = {**describe(chosen), "rng": seed}
    cases, labels = _cases(study, chosen, described, seed)
    device = chosen.get("device", CPU)
    with nullcontext() if out is None else locked(make_folder(out), "out"):
        keeper = None if out is None else _open_folder(out, study, described, labels, device)
        done = _measured(cases, keeper, study.name, workers, scheduler, progress)
    table = [row for case in cases for row in done[case.name].finding]
    read = sum(one.read for one in done.values())
    known = provenance(device.name, seed)
    known = {**known, "cases": {"computed": len(cases) - read, "read": read}}
    try:
        fits = study.fits(table, chosen)
    except (ValueError, ArithmeticError) as error:
        if keeper is None or not read or isinstance(error, NlflowError):
            raise
        # Of the right case, columns and types, with numbers that no measurement has: nothing that a study wrote.
        raise FileFormatError(
            f"{keeper.folder}: got cases with numbers that no study measures ({error}), expected files as a study "
            "wrote them; remove them"
        ) from error
    # As given, in the form that was checked; a device is a name before it is chosen.
    given = {name: value if name == "device" else chosen[name] for name, value in options.items() if value is not None}
    return StudyResult(study.name, table, fits, described, known, study, given)


def _repeat(kind: Any, given: Options, *, rng: Any, **how: Any) -> StudyResult:
    """Run the study of a file again, and say in the provenance whether it gave the same bits."""
    recipe = read_study(kind)
    check_choice(f"{recipe.path}: study", recipe.kind, tuple(KINDS))
    if rng != 0:
        raise InputError(
            f"rng: got it beside {recipe.path}, which says the seed; leave it out, or run the study by its kind"
        )
    options = recipe.with_own(given)
    try:
        read_options(KINDS[recipe.kind], options)
    except InputError as error:
        raise InputError(f"{recipe.path}: {error}") from error
    result = run_study(recipe.kind, rng=recipe.seed, **how, **options)
    return replace(result, provenance={**result.provenance, "repeated": recipe.compare(result.rows, given)})


def _cases(study: Kind, chosen: Options, described: dict[str, Any], seed: int) -> tuple[list[Case], dict[str, Row]]:
    """Return the cases of a study, and their labels in plain data by the names of their records."""
    # The options are part of the name: a case of another study is never taken for one of this.
    whole = digest(encode([study.name, described]))
    settings = make_settings(study, chosen)
    cases, labels = [], {}
    for number, stream in enumerate(np.random.SeedSequence(seed).spawn(len(settings))):
        setting = settings[number]
        name = f"{number:04d}-{digest(encode([whole, number, setting.label]))[:12]}"
        cases.append(Case(name, _execute, (study.name, setting, stream)))
        labels[name] = decode(encode(setting.label))
    return cases, labels


def _measured(
    cases: list[Case],
    keeper: Records[list[Row]] | None,
    title: str,
    jobs: int | None,
    scheduler: str | None,
    progress: bool,
) -> dict[str, Done]:
    shown = bar(total=len(cases), desc=title, unit="case", progress=progress)
    # One thread for linear algebra until all are done: cases that are threads of this process share its number.
    with (
        shown,
        blas_limited(),
        # Closed, so that Ctrl-C ends the rest.
        closing(run_cases(cases, keeper, jobs=jobs, scheduler=scheduler, bar=shown)) as results,
    ):
        return {done.case.name: done for done in results}


def _execute(kind: str, setting: Setting, seed: np.random.SeedSequence) -> list[Row]:
    """Measure one case, in this process or in another; return its rows, in plain types, with its label."""
    # The bits of a matrix product depend on the number of its threads; and what takes time here is many small steps,
    # in which threads only wait for each other. Cases run side by side instead.
    try:
        device = setting.options.get("device", CPU)
        alone = device.guarded(*extent(setting.options)) if device.tensors else nullcontext()
        with one_loop_thread(), blas_limited(), alone:
            measured = KINDS[kind].measure(setting.options, seed)
    except (InputError, MemoryLimitError, NumericalError) as error:
        # One of many cases: the message would not tell which.
        raise type(error)(f"{error} [in the case {in_words(setting.label)}]") from error
    # As they come back from a file: plain types, floats to the last bit.
    rows: list[Row] = decode(encode([{**setting.label, **row} for row in measured]))
    return rows


# ---- the folder of a study


def _open_folder(
    path: str | os.PathLike[str], kind: Kind, options: dict[str, Any], labels: Mapping[str, Row], device: Device
) -> Records[list[Row]]:
    """Return the records of a study's cases, in a folder that holds this very study or none yet.

    ``study.json`` says which study it is, ``cases`` holds a record for each case that is done. Options and labels (by
    the names of the records) are plain data.
    """
    for name, value in options.items():
        if re.search(r" at 0x[0-9a-f]+", encode(value)):
            raise InputError(
                f"{name}: got an object that only its place in memory tells from others, so a later run could not "
                "know it again; give a function or a dataclass, or leave out= away"
            )
    folder = make_folder(path)
    cases, head = make_folder(folder / "cases"), folder / "study.json"
    # What computes a case decides its bits: a study is not continued by another program, or on another processor.
    content = {"study": kind.name, "program": program(device), "options": options}
    if head.exists():
        _compare(head, content)
    elif any(cases.glob("*.json")):
        raise FileFormatError(
            f"{folder}: got cases without a study.json, expected both; restore it, or choose another folder"
        )
    else:
        save_record(head, _STUDY, content)

    def unpack(name: str, content: Any) -> list[Row]:
        trouble = misfit(content, {"case": dict, "rows": list}) or _foreign(content["rows"], labels[name], kind)
        if trouble is not None:
            raise ValueError(trouble)
        rows: list[Row] = content["rows"]
        return rows

    return Records(cases, _CASE, lambda name, rows: {"case": labels[name], "rows": rows}, unpack)


def _compare(head: Path, content: dict[str, Any]) -> None:
    found = load_record(head, _STUDY)
    if encode(found) == encode(content):
        return
    trouble = misfit(found, {"study": str, "program": dict, "options": dict})
    if trouble is not None:
        raise FileFormatError(f"{head}: got {trouble}; it does not describe a study: restore it, or {_ADVICE}")
    there, here = ({"study": one["study"], **one["program"], **one["options"]} for one in (found, content))
    for name in dict.fromkeys([*there, *here]):
        if encode(there.get(name)) != encode(here.get(name)):
            raise FileFormatError(
                f"{head.parent}: holds another study: {name} is {shortened(encode(there.get(name)), 120)} there and "
                f"{shortened(encode(here.get(name)), 120)} here; {_ADVICE}"
            )


def _foreign(rows: list[Any], label: Row, kind: Kind) -> str | None:
    """Return why `rows` are not measurements of a case, its label before the columns of its kind; None if they are."""
    if not rows:
        return "no rows"
    whole = {**{name: type(value) for name, value in label.items()}, **kind.columns}
    for row in rows:
        trouble = misfit(row, whole)
        if trouble is None and encode({name: row[name] for name in label}) != encode(label):
            trouble = "another case"
        if trouble is not None:
            return f"{trouble} in a row"
    return None
