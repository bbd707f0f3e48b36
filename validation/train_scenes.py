"""Segmenters of drawn scenes, encoder and mask decoder: ``python -m validation.train_scenes``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from validation.training.command import run
from validation.training.segmentation import Scenes


def make(args: argparse.Namespace, options: dict[str, Any], progress: bool) -> Scenes:
    return Scenes(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Train a segmenter (encoder and mask decoder, each with its own v0) on drawn scenes."
    return run("train_scenes", description, make, arguments)


if __name__ == "__main__":
    sys.exit(main())
