"""Vision transformers of twelve layers on CIFAR-10: ``python -m validation.train_cifar10 --data DIR``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from validation.training.cifar10 import Cifar10
from validation.training.command import run
from validation.training.data import read_pictures


def make(args: argparse.Namespace, options: dict[str, Any], progress: bool) -> Cifar10:
    parts = (
        read_pictures(args.data / name, args.out / Path(name).with_suffix(".npz"), progress=progress)
        for name in Cifar10.files
    )
    return Cifar10(*parts, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Train a vision transformer of twelve layers (patches of 4 × 4) on CIFAR-10, with other attention."
    return run("train_cifar10", description, make, arguments, data=" and ".join(Cifar10.files))


if __name__ == "__main__":
    sys.exit(main())
