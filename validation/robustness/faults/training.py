"""A training with a state after every step, to be killed: ``python -m validation.robustness.faults.training FOLDER``.

Goes on from the state in the folder. What it trains is a tiny segmenter of drawn scenes, with the fidelity term.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nlflow.backends.interrupts import terminable
from validation.robustness.faults.program import program
from validation.training.loop import train
from validation.training.segmentation import Scenes

STEPS = 40


def main(folder: str) -> int:
    """Train, and return the exit status."""
    torch.set_num_threads(1)
    with terminable() as terminated:
        try:
            train(Scenes(size="tiny", steps=STEPS), "neutreno", 0, Path(folder) / "out", resume=True, every=0,
                  progress=False)  # fmt: skip
        except KeyboardInterrupt:
            return 143 if terminated() else 130
    return 0


if __name__ == "__main__":
    program(main)
