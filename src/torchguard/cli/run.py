"""``python -m torchguard run``: installs guards, then runs a program as ``python`` would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import argparse

    from torchguard.patching.guards import GuardName


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``run``."""
    parser = commands.add_parser(
        "run",
        usage="%(prog)s [-h] [--guards NAMES] (script.py | -m module) [arguments ...]",
        help="run a program with the guards on",
        description="Install guards, then run a program as `python` would.",
        epilog="Exit status: the program's own; 2 on bad usage. If a guard did something, a "
        "summary on stderr says so at the end. Workers forked or spawned by "
        "multiprocessing have the guards, interpreters started by subprocess do not.",
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
    # Before the program is read: `from torch import add` in it has to find what is installed.
    install_everywhere(guards)
    _report_at_exit()
    program = run_script if options.module is None else run_module
    try:
        program(arguments[0], arguments[1:])
    except BaseException:
        hide_own_frames()
        raise
    return 0


def _report_at_exit() -> None:
    """Print what the guards did when the program ends; nothing if they did nothing."""
    from torchguard._events import summary  # noqa: PLC0415 - imports torch, in seconds

    process = os.getpid()

    def report() -> None:
        # A child that the program forked has the counts of its parent.
        if os.getpid() == process and (text := summary()):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
                sys.stderr.write(f"torchguard: during this run\n{text}\n")

    atexit.register(report)


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
# The program is __main__: it finds its own arguments, folder and exit status, its classes can be
# pickled, and its tracebacks start at its own first line. Workers that it forks or spawns with
# multiprocessing have the guards too. Other interpreters that it starts with subprocess do not.


def run_script(script: str, arguments: list[str]) -> None:
    """Run a file, or a folder or archive with a ``__main__.py``: ``python script arguments``."""
    sys.argv = [script, *arguments]
    # As python does for __file__: any ".." stays.
    # https://docs.python.org/3/whatsnew/3.9.html#other-language-changes
    path = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118 - pathlib drops "./"
    if pkgutil.get_importer(path) is not None:
        _set_first_path(path, also_if_safe=True)
        _execute_module("__main__", alter_argv=False)
        return
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {why}\n")
        sys.exit(2)
    _set_first_path(str(Path(path).resolve().parent))
    compiled = pkgutil.read_code(io.BytesIO(content))  # of a .pyc file
    code = compiled or compile(content, path, "exec", dont_inherit=True)
    names = _new_main()
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, names)  # noqa: S102 - running the program is the point


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module, or a package with a ``__main__``: ``python -m name arguments``."""
    sys.argv = ["-m", *arguments]  # what packages imported on the way see, as under `python -m`
    _execute_module(name, alter_argv=True)


def _execute_module(name: str, *, alter_argv: bool) -> None:
    """Run a module as the interpreter does: its own function knows what can't be run, and why."""
    _new_main()
    # Private to Python, and what `python -m` itself calls; runpy.run_module puts __main__ back.
    # https://github.com/python/cpython/blob/v3.13.0/Lib/runpy.py#L173
    run: Any = vars(runpy)["_run_module_as_main"]
    run(name, alter_argv)


def _new_main() -> dict[str, Any]:
    """Give the program a ``__main__`` of its own, and return the names in it."""
    module = types.ModuleType("__main__")
    names = module.__dict__
    loader = importlib.machinery.BuiltinImporter  # what packages imported on the way see
    names.update(__builtins__=builtins, __loader__=loader)
    if sys.version_info < (3, 14):  # later ones compute it when it is read (PEP 649)
        names["__annotations__"] = {}
    # For good: exit handlers and threads of the program still need their __main__. What a
    # spawned worker sends back names it __mp_main__, as multiprocessing did when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return names


def hide_own_frames() -> None:
    """Let the interpreter report what the program has raised, from the program's first line on."""
    hook = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        hook(kind, error.with_traceback(frames), frames)

    sys.excepthook = report


def _is_ours(file: str) -> bool:
    """Whether a frame belongs to torchguard, or to what runs ``python -m torchguard``."""
    if file.startswith("<frozen ") or file == runpy.__file__:
        return True
    return Path(file) in {Path(__file__), Path(__file__).parents[1] / "__main__.py"}


def _set_first_path(path: str, *, also_if_safe: bool = False) -> None:
    """Put the program's folder where ``python -m torchguard`` has put the current one."""
    # `python -P` has none since 3.11, and `python -I` never has.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = path
    elif also_if_safe:
        sys.path.insert(0, path)


def install_everywhere(guards: tuple[GuardName, ...]) -> None:
    """Install the guards here, and in every process that multiprocessing spawns from here.

    What multiprocessing sends such a process first is a dictionary; an entry of that which
    installs when it is unpickled comes before the program's own imports.
    """
    from torchguard.patching.environment import is_off  # noqa: PLC0415 - imports torch, in seconds
    from torchguard.patching.install import install  # noqa: PLC0415 - likewise

    install(*guards)
    if is_off():
        return
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "torchguard": _InWorker(guards)}

    spawn.get_preparation_data = get_preparation_data


@dataclass(frozen=True)
class _InWorker:
    """Unpickling it installs the guards."""

    guards: tuple[GuardName, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return install_everywhere, (self.guards,)
