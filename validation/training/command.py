"""The command line that all trainings share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nlflow.backends.interrupts import delivered, terminable
from nlflow.desk.terminal import echo, mendable
from nlflow.errors import InputError
from nlflow.store.atomic import make_folder
from nlflow.studies.cases import Case, run_cases
from validation.training.export import export
from validation.training.loop import train
from validation.training.report import summarize, table, write_summary
from validation.training.start import Start
from validation.training.task import SIZES, Task
from validation.training.variants import DEFAULT, VARIANTS

__all__ = ["run"]

_SEEDS = {"tiny": (0, 1), "small": (0, 1, 2), "full": (0, 1, 2)}


def _parser(program: str, description: str, data: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m validation.{program}",
        description=description,
        epilog="Interrupted, it goes on with --resume to the same bits (CPU, as many threads). What is written to "
        "--out: a folder a training with record.json (figures after each epoch) and weights.safetensors, and "
        "summary.json with means and paired differences.",
    )
    add = parser.add_argument
    if data is not None:
        add("--data", type=Path, required=True, metavar="DIR", help=f"folder with {data}")
    add("--out", type=Path, default=Path("training-output") / program, metavar="DIR", help="results (%(default)s)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT), metavar="NAME",
        help=f"which attention: {', '.join(VARIANTS)}; by default {', '.join(DEFAULT)}")  # fmt: skip
    add("--seeds", nargs="+", type=int, metavar="N", help="by default 0 1 2, tiny 0 1")
    add("--size", choices=SIZES, default="small", help="of model and training; full is for a GPU (%(default)s)")
    add("--start", type=Path, metavar="DIR", help="begin with trained weights: the --out of finished trainings (each "
        "seed takes its own of softmax), or the folder of one; then a third of the epochs by default")  # fmt: skip
    add("--epochs", type=int, metavar="N", help="other than those of the size")
    add("--steps", type=int, metavar="N", help="in all, in the place of epochs")
    add("--batch", type=int, metavar="N")
    add("--rate", type=float, metavar="X", help="largest learning rate")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is the GPU if there is one")
    add("--bf16", action="store_true", help="products in bfloat16 on the GPU")
    add("--threads", type=int, metavar="N", help="of the CPU; results depend on it in the last digits")
    add("--resume", action="store_true", help="go on with what lies in --out; finished trainings are kept")
    if data is not None:
        add("--export", type=Path, metavar="DIR", help="write models of the first seed as folders of transformers")
    add("--quiet", "-q", action="store_true", help="no progress bar and no table")
    return parser


def run(
    program: str,
    description: str,
    make: Callable[[argparse.Namespace, dict[str, Any], bool], Task],
    arguments: Sequence[str] | None = None,
    *,
    data: str | None = None,
) -> int:
    """Train all variants with all seeds, and return the exit status: 130 after Ctrl-C and 143 after SIGTERM.

    Parameters
    ----------
    program, description : str
    make : callable
        ``make(args, options, progress)`` returns the task; options are keyword arguments of it.
    arguments : sequence of str, optional
        Those of the command line by default.
    data : str, optional
        What has to lie in the folder ``--data``; None for tasks that need none.
    """
    parser = _parser(program, description, data)
    args = parser.parse_args(arguments)
    with terminable() as terminated:
        try:
            with delivered():
                _run(args, make)
        except KeyboardInterrupt:
            echo(f"{program}: {'terminated' if terminated() else 'interrupted'}; go on with --resume", err=True)
            return 143 if terminated() else 130  # 128 and the signal, as shells have it
        except Exception as error:
            message = mendable(error)
            if message is None:
                raise
            echo(f"{program}: error: {message}", err=True)
            return 1
    return 0


def _run(args: argparse.Namespace, make: Callable[[argparse.Namespace, dict[str, Any], bool], Task]) -> None:
    if args.threads is not None:
        torch.set_num_threads(_positive("--threads", args.threads))
    for name in ("epochs", "steps", "batch"):
        if getattr(args, name) is not None:
            _positive(f"--{name}", getattr(args, name))
    if args.rate is not None and not 0 < args.rate < 1:
        raise InputError(f"--rate: got {args.rate}, expected a learning rate between 0 and 1, such as 0.001")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: got cuda, which torch does not find here; use --device cpu")
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # tensor cores, 10 bits of mantissa: enough for training
    seeds = list(dict.fromkeys(args.seeds if args.seeds is not None else _SEEDS[args.size]))
    if min(seeds) < 0:
        raise InputError(f"--seeds: got {min(seeds)}, expected numbers >= 0")
    make_folder(args.out)
    chosen = {name: getattr(args, name) for name in ("size", "epochs", "steps", "batch", "rate")}
    task = make(args, {**chosen, "device": device}, not args.quiet)
    start = None if args.start is None else Start(args.start)
    if start is not None and args.epochs is None and args.steps is None:
        task.plan = replace(task.plan, steps=-(-task.plan.steps // 3))
    one = partial(train, task, start=start, resume=args.resume, half=args.bf16, progress=not args.quiet)
    # All variants of one seed before the next: differences in pairs are known early.
    cases = [
        Case(folder.name, one, (name, seed, folder))
        for seed in seeds
        for name in dict.fromkeys(args.variants)
        for folder in [args.out / f"{name}-seed{seed}"]
    ]
    records = []
    for done in run_cases(cases):  # each training keeps its own record, after every epoch
        records.append(done.finding)
        write_summary(args.out, summarize(records, task.measure), task.settings())
        name, seed, folder = done.case.arguments
        if getattr(args, "export", None) is not None and seed == seeds[0]:
            export(task, done.finding, folder, args.export / f"{task.name}-{name}")
    if not args.quiet:
        echo(table(summarize(records, task.measure)))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InputError(f"{name}: got {value}, expected 1 or more")
    return value
