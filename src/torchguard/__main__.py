"""``python -m torchguard``: the command line."""

from __future__ import annotations

import argparse
import sys

from torchguard._public import __version__
from torchguard.cli import write


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; bad usage exits with 2."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        write(f"torchguard {__version__}\n")  # without the commands, which import torch: seconds
        return 0

    from torchguard.cli import doctor, fuzz, plan, run, verify  # noqa: PLC0415

    parser = argparse.ArgumentParser(
        prog="python -m torchguard", description="A seat belt for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"torchguard {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for command in (doctor, run, plan, fuzz, verify):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):  # nothing was asked for
        parser.print_help()
        return 0
    status: int = options.command(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
