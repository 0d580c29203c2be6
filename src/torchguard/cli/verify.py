"""``python -m torchguard verify``: whether checkpoints on the disk are whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchguard.cli import interrupted, write
from torchguard.cli.terminal import GREEN, RED, Paint, folded

if TYPE_CHECKING:
    import argparse

    from torchguard.checkpoint.whole import CheckpointCheck


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
        write(f"{_shown(found)}\n")
        status = max(status, int(not found))
    return status


def _shown(found: CheckpointCheck) -> str:
    """Return the verdict, colored, and below it what is wrong and what was not compared."""
    verdict, *lines = str(found).splitlines()
    verdict = Paint(sys.stdout)(folded(verdict, sys.stdout, hang=2), GREEN if found else RED)
    return "\n".join([verdict, *(folded(line, sys.stdout, hang=4) for line in lines)])


def _progress(done: int, total: int) -> None:
    shown = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if done < total else ""
    sys.stderr.write(f"\r\x1b[K{shown}")
    sys.stderr.flush()
