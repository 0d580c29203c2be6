"""``python -m torchguard verify``: whether checkpoints on the disk are whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchguard.cli import interrupted, write

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``verify``."""
    parser = commands.add_parser(
        "verify",
        help="check whether checkpoints are whole, and name the damaged file",
        description="Read checkpoints and compare them with their manifest or checksums: folders "
        "(torch.distributed.checkpoint, checkpoint_folder), .pt and .safetensors files. The "
        ".metadata of torch.distributed.checkpoint is unpickled, which can run code: verify files "
        "that you trust.",
        epilog="Exit status: 0 whole, 1 not whole, 2 bad usage or nothing there.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file or a folder")
    parser.set_defaults(command=_main)


def _main(options: argparse.Namespace) -> int:
    from torchguard import verify_checkpoint  # noqa: PLC0415 - imports torch

    status, shown = 0, {"progress": _progress} if sys.stderr.isatty() else {}
    for path in options.paths:
        try:
            found = verify_checkpoint(path, **shown)
        except FileNotFoundError as error:
            sys.stderr.write(f"{error}\n")
            status = 2
            continue
        except KeyboardInterrupt:
            return interrupted("verify")
        write(f"{found}\n")
        status = max(status, int(not found))
    return status


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"\r{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" + "\n" * (done == total))
