"""``python -m torchguard fuzz``: random programs, compiled with the check, against eager."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import TYPE_CHECKING

from torchguard.cli import interrupted, positive_float, positive_int, write

if TYPE_CHECKING:
    from torchguard.verification.fuzz import Program


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``fuzz``."""
    parser = commands.add_parser(
        "fuzz",
        help="compile random programs with the check on and compare them with eager",
        description="Compile random programs of indexed and in-place assignment, check them as "
        "verified() does, and compare calls of each with eager: ten sizes from 2 to 300 rows.",
        epilog="Exit status: 0 when every program does what eager does, 1 when one does not, "
        "2 on bad usage.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first (default: 0)")
    parser.add_argument("--count", type=positive_int, default=100, metavar="N", help="default: 100")
    parser.add_argument("--minutes", type=positive_float, metavar="N", help="stop after this time")
    parser.add_argument(
        "--backend", default="inductor", metavar="NAME", help="what compiles (default: inductor)"
    )
    parser.add_argument(
        "--bare", action="store_true", help="without the check: which programs are compiled wrong?"
    )
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415 - only here does anything compile

    from torchguard import verified_backend  # noqa: PLC0415 - imports torch
    from torchguard.verification.fuzz import attempt, program  # noqa: PLC0415 - imports torch

    # Without exclude_tags it leaves out what torch calls debugging backends, eager among them.
    # An unknown name is refused here: later it would look like a program that is compiled wrong.
    if options.backend not in torch.compiler.list_backends(exclude_tags=()):
        options.parser.error(f"unknown torch.compile backend {options.backend!r}")
    checked = verified_backend(options.backend)
    backend = options.backend if options.bare else checked
    start, wrong, count = time.monotonic(), 0, 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report has them all
            for seed in range(options.seed, options.seed + options.count):
                if options.minutes and time.monotonic() - start > 60 * options.minutes:
                    break
                # Every program is a function of the same name and file, and Dynamo counts
                # recompilations by code object: none may count for the next one.
                torch.compiler.reset()
                made = program(seed)
                differences = attempt(made, lambda f: torch.compile(f, backend=backend))
                count += 1
                wrong += bool(differences)
                _show(made, differences, f"{count}/{options.count}")
    except KeyboardInterrupt:
        return interrupted("fuzz")
    report, told = checked.stats(), ", without the check"
    if not options.bare:
        told = (
            f" with the check; {report.mismatched} graphs were compiled wrong and replaced, "
            f"{report.unverified} could not be checked"
        )
    write(f"{count} programs: {wrong} wrong{told}\n")
    return 1 if wrong else 0


def _show(made: Program, wrong: list[str], position: str) -> None:
    verdict = "wrong" if wrong else "right"
    sys.stderr.write(f"[{position}] program {made.seed}: {verdict}\n")
    if wrong:
        differences = "".join(f"# {line}\n" for line in wrong)
        write(f"# program {made.seed}\n{differences}{made.source}\n")
