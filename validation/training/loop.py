"""One training: steps, measurements, a state on disk from which it goes on as if nothing had happened."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from tqdm import tqdm

from nlflow.backends.interrupts import handling
from nlflow.errors import InputError
from nlflow.store.atomic import locked, make_folder
from nlflow.store.encoding import plain
from validation.training.record import RECORD, read_record, write_record
from validation.training.start import Start
from validation.training.state import finite, load_state, save_state, states, write_tensors
from validation.training.task import WEIGHTS, Plan, Task
from validation.training.variants import variant

__all__ = ["STATE", "train"]

STATE = "state.npz"
_EVERY = 60.0  # seconds between two states


def train(
    task: Task,
    name: str,
    seed: int,
    folder: Path,
    *,
    resume: bool = False,
    until: int | None = None,
    half: bool = False,
    every: float = _EVERY,
    start: Start | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train one variant with one seed, and return its record.

    Parameters
    ----------
    task : Task
    name : str
        Of the variant.
    seed : int
        Of the first weights, the order of the data and what is varied in it.
    folder : Path
        For ``record.json`` (one entry an epoch), ``state.npz`` and the one before it (removed at the end),
        ``weights.safetensors``.
    resume : bool
        Go on from the state that lies there, to the same bits on the same machine with as many threads. A finished
        training is not repeated. Without, the folder must have none.
    until : int, optional
        Stop after this step, with a state, as Ctrl-C does (which then raises `KeyboardInterrupt`).
    half : bool
        Matrix products in bfloat16 on a GPU.
    every : float
        Seconds between two states.
    start : Start, optional
        Trained weights to begin with, in the place of random ones.
    progress : bool
        Progress bar on stderr.

    Raises
    ------
    InputError
        If there is a training of other settings, or one at all without `resume`.
    FileFormatError
        For files that cannot be read or written.
    """
    with locked(make_folder(folder), "--out"):
        return _train(task, name, seed, folder, resume, until, half, every, start, progress)


def _train(
    task: Task,
    name: str,
    seed: int,
    folder: Path,
    resume: bool,
    until: int | None,
    half: bool,
    every: float,
    start: Start | None,
    progress: bool,
) -> dict[str, Any]:
    about = {**task.settings(), "variant": name, "fidelity": task.fidelity if variant(name).term else 0.0, "seed": seed}
    about["bfloat16"] = half and task.device.type == "cuda"
    if start is not None:
        about["start"] = start.about(task, seed)
    before = _before(folder, about, resume, task.measure)
    if before is not None and before["finished"]:
        return before
    plan = task.plan
    model = task.model(variant(name), seed)
    if start is not None:
        start.load(model, seed)
    optimizer, scheduler = _optimizer(model, plan)
    run: dict[str, Any] = {"step": 0, "lost": 0.0, "seconds": 0.0, "epochs": []}
    kept = states(folder / STATE)

    def fits(arrays: Any, meta: dict[str, Any]) -> str | None:
        return _differing(meta.get("about"), about)

    if kept:
        run = load_state(kept, fits, model, optimizer, scheduler)["run"]
    else:
        run["epochs"].append(_measured(task, model, 0, None, whole=False))
    last = plan.steps if until is None else min(until, plan.steps)
    bar = tqdm(
        total=plan.steps, initial=run["step"], desc=f"{task.name} {name} {seed}", unit="step", leave=False,
        disable=not progress, mininterval=1.0,
    )  # fmt: skip
    # A sum on the device: a number asked of a GPU after each step would let it wait.
    lost = torch.tensor(run["lost"], dtype=torch.float64, device=task.device)
    started = saved = time.monotonic()
    spent = run["seconds"]

    def keep() -> None:
        run["seconds"], run["lost"] = spent + time.monotonic() - started, float(lost)
        save_state(kept, model, optimizer, scheduler, {"about": about, "run": run})

    finished = False
    with bar, _asked_to_stop() as asked:
        while run["step"] < last and not asked():
            lost += _step(task, model, optimizer, scheduler, seed, run["step"], about["bfloat16"])
            run["step"] += 1
            bar.update()
            if run["step"] % plan.epoch == 0 or run["step"] == plan.steps:
                steps = run["step"] % plan.epoch or plan.epoch
                whole = run["step"] == plan.steps
                run["epochs"].append(_measured(task, model, run["step"], float(lost) / steps, whole=whole))
                lost.zero_()
                bar.set_postfix_str(f"{task.measure} {run['epochs'][-1][task.measure]:.4f}")
                finished = whole or run["epochs"][-1]["diverged"]
                if finished:
                    break
                write_record(folder, about, {**run, "seconds": spent + time.monotonic() - started}, finished)
            if time.monotonic() - saved > every:
                keep()
                saved = time.monotonic()
        run["seconds"] = spent + time.monotonic() - started
        if finished:
            write_tensors(folder / WEIGHTS, model.state_dict(), {"about": about})
        else:
            keep()
        record = write_record(folder, about, run, finished)
        if finished:
            kept.remove()
        if asked():
            raise KeyboardInterrupt
    return record


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Keep Ctrl-C back until a step is whole, so that the state is one of a whole step; a second one does not wait."""
    asked = False

    def remember(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    with handling(signal.SIGINT, remember):
        yield lambda: asked


def _optimizer(model: nn.Module, plan: Plan) -> tuple[Any, Any]:
    """Return AdamW and its schedule: a linear start, then half a cosine."""
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in free if parameter.ndim >= 2], "weight_decay": plan.decay},
        {"params": [parameter for parameter in free if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=plan.rate, betas=(0.9, 0.95))
    start = max(1, round(plan.warmup * plan.steps))
    rising = LinearLR(optimizer, start_factor=1 / (start + 1), total_iters=start)
    falling = CosineAnnealingLR(optimizer, T_max=max(1, plan.steps - start))
    return optimizer, SequentialLR(optimizer, [rising, falling], milestones=[start])


def _step(task: Task, model: nn.Module, optimizer: Any, scheduler: Any, seed: int, step: int, half: bool) -> Tensor:
    """Take one step and return the loss before it."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
        loss = task.loss(model, seed, step)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), task.plan.clip)
    optimizer.step()
    scheduler.step()
    return loss.detach()


def _measured(task: Task, model: nn.Module, step: int, lost: float | None, *, whole: bool) -> dict[str, Any]:
    """Return the entry of an epoch: loss in training, figures of data not trained on, and what each layer does."""
    epoch = step / task.plan.epoch
    if not finite(model):
        empty = {"layers": {}, task.measure: math.nan}
        return {"epoch": epoch, "step": step, "training_loss": lost, "diverged": True, **empty}
    model.eval()
    with torch.no_grad():
        found = task.evaluate(model, whole=whole)
        layers = task.layers(model)
    return {
        "epoch": epoch,
        "step": step,
        "training_loss": lost,
        "diverged": False,
        "whole": whole,
        **found,
        "layers": layers,
    }


def _before(folder: Path, about: dict[str, Any], resume: bool, measure: str) -> dict[str, Any] | None:
    """Return the record of a training that lies in the folder, if it is the same."""
    there = (folder / RECORD).is_file()
    if (there or states(folder / STATE)) and not resume:
        raise InputError(
            f"--out: got {folder}, in which a training lies, expected none; pass --resume to go on with it, or another "
            "--out"
        )
    if not there:
        return None
    record = read_record(folder / RECORD, measure)
    _check_same(folder / RECORD, record["settings"], about)
    return record


def _check_same(path: Path, found: Any, about: dict[str, Any]) -> None:
    reason = _differing(found, about)
    if reason is not None:
        raise InputError(f"--out: got {path} {reason}")


def _differing(found: Any, about: dict[str, Any]) -> str | None:
    """Return in what settings differ from those of this training; None if in none."""
    wanted = plain(about)
    if found == wanted:
        return None
    others = found if isinstance(found, dict) else {}
    other = sorted(key for key in {*others, *wanted} if others.get(key) != wanted.get(key))
    return f"of other settings ({', '.join(other)}), expected the same; use another --out, or those of that training"
