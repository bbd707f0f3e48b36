"""The desk around the library."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command ``nonlocal``, or say how what it needs is installed."""
    if find_spec("typer") is None:
        from nlflow.errors import install_command

        sys.exit(f"nonlocal: error: the command line is not installed; {install_command('desk')}")
    from nlflow.desk.commands.main import main as run

    run()
