"""``python -m torchguard run``: installs guards, then runs a program as ``python`` would."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import types
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from torchguard.cli import DOCUMENTATION
from torchguard.cli.terminal import BOLD, DIM, Paint, folded

if TYPE_CHECKING:
    import argparse

    from torchguard.patching.guards import GuardName
    from torchguard.patching.install import Installation


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``run``."""
    parser = commands.add_parser(
        "run",
        usage="%(prog)s [-h] [--guards NAMES] (script.py | -m module) [arguments ...]",
        help="run a program with the guards on",
        description="Install guards, then run a script or a module.",
        epilog="Exit status: the program's own; 2 on bad usage. If a guard did something, a "
        "report on stderr says at the end what happened, where, and what to do. Workers "
        "forked or spawned by multiprocessing have the guards, interpreters started by "
        "subprocess do not.",
    )
    parser.add_argument(
        "--guards",
        metavar="NAMES",
        help="guards to install, separated by commas, as the doctor names them, or `all` "
        "(default: TORCHGUARD_GUARDS of the environment, else resize)",
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
    if options.module is None and not Path(arguments[0]).is_file():
        options.parser.error(f"can't open file {arguments[0]!r}")
    # Before the program is read: `from torch import add` in it has to find what is installed.
    _report_at_exit(install_everywhere(guards))
    run = _run_script if options.module is None else _run_module
    run(arguments)
    return 0


def _report_at_exit(installation: Installation) -> None:
    """Print what the guards did when the program ends; if nothing, at a terminal alone."""
    process = os.getpid()

    def report() -> None:
        # A child that the program forked has the counts of its parent.
        if os.getpid() == process:
            with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
                sys.stderr.write(_report(installation, sys.stderr))

    atexit.register(report)


def _report(installation: Installation, stream: TextIO) -> str:
    """Return what was guarded, what happened at which line, and what to do about it."""
    from torchguard._events import WHAT_TO_DO, events  # noqa: PLC0415 - imports torch, in seconds

    happened, paint = events(), Paint(stream)
    if not happened and not stream.isatty():
        return ""
    guarded = ", ".join(installation.names) or "nothing"
    times = sum(event.count for event in happened)
    found = f"{times} event{'s' * (times != 1)}" if happened else "nothing happened"
    lines = [paint(f"torchguard: {found} in this run; guarded: {guarded}", BOLD)]
    for name, reason in installation.skipped.items():
        lines.append(folded(f"  {name} is not on: {reason}", stream, hang=6))
    here = f"{Path.cwd()}{os.sep}"
    for event in happened:
        at = f" at {event.where.removeprefix(here)}" if event.where else ""
        lines.append(folded(f"  {event.count} x {event.kind}{at}", stream, hang=6))
        lines.append(folded(f"      {event.guard}: {event.message}", stream, hang=6))
        lines.append(folded(f"      what to do: {WHAT_TO_DO[event.kind]}", stream, hang=6))
    if happened:
        lines.append(paint(f"  more: {DOCUMENTATION}reference/events.html", DIM))
    return "\n".join((*lines, ""))


def _guards(options: argparse.Namespace) -> tuple[GuardName, ...]:
    if options.guards is None:
        return ()

    from torchguard.patching.guards import GUARDS  # noqa: PLC0415 - imports torch, in seconds

    guards = tuple(name.strip() for name in options.guards.split(","))
    unknown = [name for name in guards if name not in {*GUARDS, "all"}]
    if unknown:
        names = ", ".join(map(repr, unknown))
        options.parser.error(f"no guard called {names}; the guards are {', '.join(GUARDS)}, or all")
    return cast("tuple[GuardName, ...]", guards)


# ---- running the program ----
#
# The program is __main__: it finds its own arguments, folder and exit status, and its classes can
# be pickled. Workers that it forks or spawns with multiprocessing have the guards too.


def _run_script(arguments: list[str]) -> None:
    """Run a file: ``python script arguments``."""
    sys.argv = arguments
    path = Path(arguments[0]).absolute()
    # `python -P`, since 3.11, and `python -I` leave out the program's folder.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = str(path.resolve().parent)
    names = _new_main()
    names["__file__"] = str(path)
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), names)  # noqa: S102 - the point


def _run_module(arguments: list[str]) -> None:
    """Run a module, or a package with a ``__main__``: ``python -m name arguments``."""
    sys.argv = ["-m", *arguments[1:]]  # `python -m` shows this to packages imported on the way
    _new_main()
    # Private to Python; `python -m` itself calls it. runpy.run_module removes its __main__ again.
    # https://github.com/python/cpython/blob/v3.13.0/Lib/runpy.py#L173
    run: Any = vars(runpy)["_run_module_as_main"]
    run(arguments[0])


def _new_main() -> dict[str, Any]:
    """Give the program a ``__main__`` of its own, and return the names in it."""
    module = types.ModuleType("__main__")
    # For good: exit handlers and threads of the program still need their __main__. The results of
    # a spawned worker call it __mp_main__, as multiprocessing did when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module.__dict__


def install_everywhere(guards: tuple[GuardName, ...]) -> Installation:
    """Install the guards here, and in every process that multiprocessing spawns from here.

    What multiprocessing sends such a process first is a dictionary; an entry of that which
    installs when it is unpickled comes before the program's own imports.
    """
    from torchguard._environment import is_off  # noqa: PLC0415 - imports torch, in seconds
    from torchguard.patching.install import install  # noqa: PLC0415 - likewise

    installation = install(*guards)
    if is_off():
        return installation
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "torchguard": _InWorker(guards)}

    spawn.get_preparation_data = get_preparation_data
    return installation


@dataclass(frozen=True)
class _InWorker:
    """Unpickling it installs the guards."""

    guards: tuple[GuardName, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return install_everywhere, (self.guards,)
