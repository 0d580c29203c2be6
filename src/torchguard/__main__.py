"""``python -m torchguard``: the command line."""

from __future__ import annotations

import argparse
import difflib
import sys

from torchguard._public import __version__
from torchguard.cli import DOCUMENTATION, demo, doctor, plan, run, status_of, verify

# None of them imports torch before it runs: `--help` has to be quick.
_COMMANDS = {
    "demo": demo,
    "doctor": doctor,
    "run": run,
    "plan": plan,
    "verify": verify,
}

_EXAMPLES = f"""examples:
  python -m torchguard demo                   six failures, with and without it
  python -m torchguard doctor                 known defects of your PyTorch
  python -m torchguard doctor resize-locked   all that is known about one
  python -m torchguard run --guards resize,out train.py --epochs 3
  python -m torchguard plan lengths.npy --buckets 8
  python -m torchguard verify checkpoint      is a checkpoint complete?
  python -m torchguard COMMAND --help         its options; of doctor, all names

documentation: {DOCUMENTATION}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; bad usage exits with 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m torchguard",
        description="Verifies compiled graphs against eager, and rolls back steps that fail.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchguard {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for command in _COMMANDS.values():
        command.add_parser(commands)
    wanted = arguments[0] if arguments else ""
    if wanted and not wanted.startswith("-") and wanted not in _COMMANDS:
        close = difflib.get_close_matches(wanted, _COMMANDS, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(_COMMANDS)}"
        parser.error(f"invalid choice: {wanted!r}; {meant}")
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):  # nothing was asked for
        parser.print_help()
        return 0
    if wanted == "run":
        status: int = options.command(options)  # status and errors are the program's
        return status
    return status_of(options.command, options)


if __name__ == "__main__":
    sys.exit(main())
