"""Inputs and outputs."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nlflow.desk.files import check_distinct, identity, missing, pictures_in, read_kind
from nlflow.desk.files import format_of as known
from nlflow.desk.foreign import leads_out
from nlflow.desk.formats import FORMATS, written_extension
from nlflow.desk.formats.content import is_table
from nlflow.desk.formats.media import READABLE, Writing
from nlflow.errors import FileFormatError, InputError

_SHOWN = 3  # names in a message
_TEXTS = (".txt", ".dat")  # which may be anything
_LAST_RATE = 51  # rate factor of a film


@dataclass(frozen=True)
class Job:
    """An input and its output."""

    # source, target: input and output.
    source: Path
    target: Path
    figure: Path | None  # the figure that is drawn as well
    beside: dict[str, Path]  # from an option to the file that it names for this input
    refused: str = ""  # why it cannot be done: a file that belongs to the input is not there, a name is taken; or empty
    free: frozenset[Path] = frozenset()  # outputs that must still not be there when they are complete

    def writing(self, writing: Writing) -> Writing:
        return writing.at(self.target, replaces=self.target not in self.free)


@dataclass(frozen=True)
class Plan:
    """All jobs."""

    jobs: tuple[Job, ...]  # in the order in which they are done
    folder: Path | None  # where the outputs of several inputs go; None for a single input with an output of its own
    notes: tuple[str, ...]  # what is left out, for the user


def plan(
    sources: Sequence[Path],
    target: str,
    *,
    figure: Path | None = None,
    beside: Mapping[str, Path | None],
    existing: str = "refuse",
    frames: bool = False,
    recursive: bool = False,
) -> Plan:
    """Pair inputs with outputs.

    `beside` names the file, or the folder of files, that belongs to the inputs by its option. With `frames` a single
    folder of pictures is one input.
    """
    for option, path in beside.items():
        if path is not None and not path.exists():
            raise FileFormatError(f"{option}: {missing(path)}")
    if recursive and not any(source.is_dir() and known(source) != "zarr" for source in sources):
        raise InputError(f"--recursive: got {', '.join(map(str, sources))}, expected a folder; leave it out")
    if frames and not recursive and len(sources) == 1 and sources[0].is_dir() and _holds_pictures(sources[0]):
        return _plan_frames(sources[0], Path(target), figure, beside, existing)
    places, several, notes = _expanded(sources, Path(target) if recursive else None)
    found = list(places)
    if frames and several and read_kind(found[0]) == "image":
        raise InputError(
            f"IN: got {len(found)} pictures with --axes, expected the folder of the frames alone, or stacks; name the "
            "folder, or leave --axes out"
        )
    one = not several and known(Path(target)) == "zarr"  # a folder that counts as a file
    like_folder = several or ((Path(target).is_dir() or target.endswith(("/", os.sep))) and not one)
    folder = Path(target) if like_folder else None
    if folder is None:
        if existing == "resume":
            if _there(Path(target)):
                raise InputError(f"OUT: got {target}, already there, and complete if nlflow has written it, expected "
                                 "a new name; choose another, or give --existing overwrite or skip")  # fmt: skip
            notes.append(f"{target}: what an unfinished run has done of a single file is not kept; it begins anew")
        jobs = [_job(found[0], Path(target), figure, beside)]
    else:
        _check_folder("OUT", folder, len(found))
        if figure is not None:
            _check_folder("--compare", figure, len(found))
        jobs = [
            _job(source, folder / _written(place), None if figure is None else figure / f"{place}.png", beside, place)
            for source, place in places.items()
        ]
        notes += _renamed(jobs)
    if folder is None:
        _check_names(jobs)
    else:
        jobs = _apart(jobs)
    jobs, more = _without_existing(jobs, existing)
    return Plan(tuple(jobs), folder, (*notes, *more))


def quality_misfit(jobs: Sequence[Job], quality: int | str) -> str:
    kinds = {known(job.target) or (known(pictures_in(job.source)[0]) if job.source.is_dir() else "") for job in jobs}
    if jobs and not kinds & {"video", "jpeg"}:
        return "is for an OUT that is a film (.mp4, .mkv, .mov, .webm, .avi) or JPEG; name one, or leave it out"
    if "video" in kinds and quality != "lossless" and int(quality) > _LAST_RATE:
        return f"got {quality}, expected lossless, or a whole number from 0 to {_LAST_RATE} for a film"
    if "jpeg" in kinds and (quality == "lossless" or int(quality) < 1):
        return f"got {quality}, expected a whole number from 1 to 100 for a JPEG file"
    return ""


def _holds_pictures(folder: Path) -> bool:
    """Return whether the files of a folder are pictures of one page, by the first of them."""
    found = pictures_in(folder)
    return bool(found) and read_kind(found[0]) == "image"


def _plan_frames(
    source: Path, target: Path, figure: Path | None, beside: Mapping[str, Path | None], existing: str
) -> Plan:
    """Return the plan of a folder whose pictures are one stack; OUT is a file, or a folder for such pictures."""
    if existing in ("resume", "skip"):
        raise InputError(f"--existing: got {existing} for a folder of frames, expected refuse or overwrite; they are "
                         "denoised together")  # fmt: skip
    job = Job(source, target, figure, {option: path for option, path in beside.items() if path is not None})
    _check_names([job])
    taken = [target] if target.is_file() else []
    if target.is_dir():
        taken = [target / path.name for path in pictures_in(source) if (target / path.name).exists()]
    if figure is not None and figure.is_file():
        taken.append(figure)
    if taken and existing == "refuse":
        raise InputError(f"OUT: got {taken[0]}, already there, expected a new name; choose another, or give --existing "
                         "overwrite")  # fmt: skip
    free = frozenset(path for path in (target, figure) if path is not None and existing == "refuse")
    return Plan((replace(job, free=free),), None, ())


def _written(place: Path) -> Path:
    """Return where the output of an input goes in the folder of outputs: to its place, in a format that is written."""
    return place.with_suffix(written_extension(place)) if _read_only(place) else place


def _read_only(path: Path) -> bool:
    return known(path) != "" and not FORMATS[known(path)].written


def _renamed(jobs: Sequence[Job]) -> list[str]:
    seen: dict[str, Job] = {}
    for job in jobs:
        if _read_only(job.source):
            seen.setdefault(known(job.source), job)
    return [f"{FORMATS[form].instead[0]}: outputs of such inputs are called {job.target.name} and so on"
            for form, job in seen.items()]  # fmt: skip


def _expanded(sources: Sequence[Path], target: Path | None) -> tuple[dict[Path, Path], bool, list[str]]:
    """Return the files meant and the place of each among the outputs, whether there may be several, and notes.

    With a target, which is the folder of outputs, folders inside folders are gone through.
    """
    found: dict[Path, Path] = {}
    notes: list[str] = []
    several = len(sources) > 1
    for source in sources:
        pattern = not os.path.lexists(source) and glob.has_magic(str(source))
        if not (pattern or source.is_dir()) or known(source) == "zarr":
            found.setdefault(source, Path(source.name))
            continue
        several = True
        # Path.glob takes no absolute patterns.
        entries = list(map(Path, glob.glob(str(source)))) if pattern else list(source.iterdir())  # noqa: PTH207
        if target is not None:
            entries = [path for entry in entries for path in _inside(entry, target, notes)]
        told = ""
        if not pattern:
            out = {path for path in entries if path.is_file() and leads_out(path, source)}
            entries = [path for path in entries if path not in out]
            if out:
                told = f"{len(out)} link(s) to files elsewhere are left out; name them as IN"
                notes.append(f"{source}: {told}")
        files = sorted(path for path in entries
                       if (path.is_file() or known(path) == "zarr") and not path.name.startswith("."))  # fmt: skip
        fitting = [path for path in files if known(path) and (path.suffix.lower() not in _TEXTS or is_table(path))]
        if not fitting:
            got = f"{source}, {'which matches' if pattern else 'a folder with'} {len(files) or 'no'} file(s)"
            expected = f"one that ends in {READABLE}"
            deeper = target is None and any(path.is_dir() for path in entries)
            remedy = "give --recursive for folders inside folders" if deeper else told or "check the name"
            raise FileFormatError(f"IN: got {got}, expected at least {expected}; {remedy}")
        if len(fitting) < len(files):
            notes.append(f"{source}: {len(files) - len(fitting)} file(s) of other formats are left out")
        for path in fitting:
            found.setdefault(path, Path(path.name) if pattern else path.relative_to(source))
    return found, several, notes


def _inside(entry: Path, target: Path, notes: list[str]) -> list[Path]:
    """Return the files of an entry of a folder, those of folders inside as well, but not of the folder of outputs.

    Links to folders are not followed, so that there is an end.
    """
    if not entry.is_dir() or known(entry) == "zarr":
        return [entry]
    if entry.name.startswith(".") or os.path.realpath(entry) == os.path.realpath(target):
        return []
    if entry.is_symlink():
        notes.append(f"{entry}: is a link to a folder, and is left out")
        return []
    return [path for inner in sorted(entry.iterdir()) for path in _inside(inner, target, notes)]


def _check_folder(option: str, folder: Path, count: int) -> None:
    names = (".pdf", ".svg") if option == "--compare" else ()
    named = known(folder) or folder.suffix.lower() in names
    got = "a file" if folder.exists() else "the name of a file" if named else ""
    if got and not folder.is_dir():
        raise FileFormatError(f"{option}: got {folder}, {got}, expected a folder for {count} input(s); name a folder")


def _job(
    source: Path, target: Path, figure: Path | None, beside: Mapping[str, Path | None], place: Path | None = None
) -> Job:
    paths, missing = {}, ""
    for option, path in beside.items():
        try:
            if path is not None:
                paths[option] = find_companion(option, path, source, place)
        except FileFormatError as error:  # raised when this job is done: the other inputs do not suffer from it
            missing = missing or str(error)
    return Job(source, target, figure, paths, missing)


def find_companion(option: str, path: Path, source: Path, place: Path | None = None) -> Path:
    """Return the file that belongs to `source`: `path`, or one in the folder `path`."""
    if not path.is_dir() or known(path) == "zarr":
        return path
    same = path / (place or source.name)
    if _there(same):
        return same
    alike = sorted(file for file in same.parent.glob("*") if file.stem == source.stem and known(file))
    if len(alike) == 1:
        return alike[0]
    got = f"{len(alike)} files called {source.stem}" if alike else f"no file called {source.name} or {source.stem}"
    where = f"the folder {same.parent} with {got}"
    raise FileFormatError(f"{option}: got {where}, expected one for {source}; add or rename it")


def _check_names(jobs: list[Job]) -> None:
    for job in jobs:
        check_distinct({"IN": job.source, **job.beside}, {"OUT": job.target, "--compare": job.figure})


def _apart(jobs: list[Job]) -> list[Job]:
    """Return the jobs of a folder, of which those are refused that have an output in common; the others are done.

    `InputError` is raised where there are no others, and for an output that would replace what is read.
    """
    read = {job.source: f"the input {job.source}" for job in jobs}
    read |= {path: f"{option} {path}" for job in jobs for option, path in job.beside.items()}
    inputs = {key: name for path, name in read.items() for key in identity(path)}
    outputs: dict[object, tuple[str, int]] = {}
    clashes: dict[int, str] = {}
    for number, job in enumerate(jobs):
        for option, path in (("OUT", job.target), ("--compare", job.figure)):
            name = f"{option} for {job.source}"
            for key in () if path is None else identity(path):
                if key in inputs:
                    raise InputError(_clash(name, path, inputs[key]))
                other, first = outputs.setdefault(key, (name, number))
                if other != name:
                    clashes.setdefault(number, _clash(name, path, other))
                    clashes.setdefault(first, _clash(other, path, name))
    if len(clashes) == len(jobs) > 0:
        raise InputError(clashes[len(jobs) - 1])
    return [replace(job, refused=clashes.get(number, job.refused)) for number, job in enumerate(jobs)]


def _clash(name: str, path: Path | None, other: str) -> str:
    return f"{name}: got {path}, the same file as {other}, expected another; choose a new name"


def _there(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and known(path) == "zarr")


def _without_existing(jobs: list[Job], existing: str) -> tuple[list[Job], list[str]]:
    outputs = [pair for job in jobs for pair in (("OUT", job.target), ("--compare", job.figure))]
    taken = [(name, path) for name, path in outputs if path is not None and _there(path)]
    if existing != "overwrite":
        free = frozenset(path for _, path in outputs if path is not None) - {path for _, path in taken}
        jobs = [replace(job, free=free) for job in jobs]
    if existing in ("overwrite", "resume") or not taken:
        return jobs, []
    if existing == "refuse":
        names = ", ".join(str(path) for _, path in taken[:_SHOWN])
        names += f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        raise InputError(
            f"{taken[0][0]}: got {names}, already there, expected new files; choose another name, or give "
            "--existing overwrite or --existing skip"
        )
    todo = [job for job in jobs if not _there(job.target)]
    return todo, [f"{len(jobs) - len(todo)} of {len(jobs)} output(s) are there already and stay as they are"]
