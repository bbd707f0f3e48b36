"""``python -m validation``: the same as ``nonlocal validate``."""

import sys

from nlflow.cli import app

app(["validate", *sys.argv[1:]], prog_name="nonlocal")
