"""Decoders of six layers on the characters of a text: ``python -m validation.train_text --data DIR``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from validation.training.command import run
from validation.training.data import read_characters
from validation.training.text import Text


def make(args: argparse.Namespace, options: dict[str, Any], progress: bool) -> Text:
    return Text(read_characters(args.data / Text.file), **options)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Train a decoder of six layers (GPT-2) on the characters of a text, with other attention."
    return run("train_text", description, make, arguments, data=Text.file)


if __name__ == "__main__":
    sys.exit(main())
