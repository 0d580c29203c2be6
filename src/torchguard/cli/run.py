"""``python -m torchguard run``: installs guards, then runs a program as ``python`` would."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torchguard.patching import run
from torchguard.patching.guards import GUARDS, GuardName

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``run``."""
    parser = commands.add_parser(
        "run",
        usage="%(prog)s [-h] [--guards NAMES] (script.py | -m module) [arguments ...]",
        help="run a program with the guards on",
        description="Install guards, then run a program as `python` would.",
        epilog="Exit status: the program's own; 2 on bad usage. Workers forked or spawned by "
        "multiprocessing have the guards, interpreters started by subprocess do not.",
    )
    parser.add_argument(
        "--guards",
        metavar="NAMES",
        help=f"guards to install, separated by commas, of: {', '.join(GUARDS)} "
        "(default: what install() installs)",
    )
    # Everything after the program's name is the program's, whatever it looks like.
    parser.add_argument("-m", metavar="module", dest="module", nargs="...", help="run a module")
    parser.add_argument("program", nargs="...", help="the script to run and its arguments")
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    # A wrong name of a guard is bad usage, also where there is no program to run.
    guards = _guards(options)
    arguments = [*(options.module or []), *options.program]
    if options.module is None and arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments:
        options.parser.error("expected a script, or -m and a module, to run")
    # Before the program is read: `from torch import add` in it has to find what is installed.
    run.install_everywhere(guards)
    program = run.run_script if options.module is None else run.run_module
    try:
        program(arguments[0], arguments[1:])
    except BaseException:
        run.hide_own_frames()
        raise
    return 0


def _guards(options: argparse.Namespace) -> tuple[GuardName, ...]:
    if options.guards is None:
        return ()
    guards = tuple(name.strip() for name in options.guards.split(","))
    unknown = [name for name in guards if name not in GUARDS]
    if unknown:
        names = ", ".join(map(repr, unknown))
        options.parser.error(f"no guard called {names}; the guards are {', '.join(GUARDS)}")
    return cast("tuple[GuardName, ...]", guards)
