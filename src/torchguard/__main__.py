"""``python -m torchguard``: the command line."""

from __future__ import annotations

import argparse
import sys

from torchguard import plan, run
from torchguard.doctor import command
from torchguard.fuzz import command as fuzz
from torchguard.version import __version__

_COMMANDS = (command.add_parser, run.add_parser, plan.add_parser, fuzz.add_parser)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; bad usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m torchguard", description="A seat belt for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"torchguard {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for add_parser in _COMMANDS:
        add_parser(commands)
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):  # nothing was asked for
        parser.print_help()
        return 0
    status: int = options.command(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
