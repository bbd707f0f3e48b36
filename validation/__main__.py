"""``python -m validation``: the same as ``nonlocal validate``."""

import sys

from nlflow.cli import main

sys.argv.insert(1, "validate")
main()
