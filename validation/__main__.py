"""``python -m validation``: the same as ``nonlocal validate``."""

import sys

from nlflow.desk.commands.main import main

sys.argv.insert(1, "validate")
main()
