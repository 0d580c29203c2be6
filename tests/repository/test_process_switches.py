"""Nothing that user threads run changes a switch of the whole process."""

from __future__ import annotations

import ast
import contextlib
import threading
import warnings
from pathlib import Path

import torch

import torchguard

PACKAGE = Path(torchguard.__file__).parent
# What a thread would change for all others, and two threads for good: each restores what it found.
SWITCHES = {
    *("catch_warnings", "simplefilter", "filterwarnings", "resetwarnings", "set_warn_always"),
    *("redirect_stderr", "redirect_stdout", "setrecursionlimit", "setswitchinterval"),
    *("setLevel", "set_num_threads", "set_default_dtype", "set_default_device"),
    *("use_deterministic_algorithms", "set_deterministic_debug_mode"),
    "set_float32_matmul_precision",
    *("excepthook", "showwarning", "set_stance"),
}
STREAMS = {"stderr", "stdout"}
# Commands and probes are programs of their own, with one thread.
PROGRAMS = {"cli", "defects"}


def switches_in(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in SWITCHES:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [
                f"line {node.lineno}: {each.attr} ="
                for each in targets
                if isinstance(each, ast.Attribute) and each.attr in STREAMS
            ]
    return found


def test_no_file_has_one() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in PROGRAMS:
            switches = switches_in(path.read_text(encoding="utf-8"))
            if path.name == "symbolic_shapes.py":  # has one scope for all threads
                switches = [each for each in switches if "set_stance" not in each]
            found[path.name] = switches
    assert len(found) > 50
    assert {name: switches for name, switches in found.items() if switches} == {}


def test_the_switches_are_seen_by_the_test() -> None:
    program = "with warnings.catch_warnings():\n    sys.stderr = None\nlog.setLevel(3)"
    assert len(switches_in(program)) == 3


class Waits:
    """A state that two threads put back at the same time."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: object) -> None:
        self._both.wait()


def fail_in_a_step(both: threading.Barrier) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchguard.transaction(model, optimizer, also=(Waits(both),))
    for _ in range(20):
        with contextlib.suppress(KeyError), step:
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError


def test_two_threads_that_roll_back_at_once_leave_the_filters_alone() -> None:
    fail_in_a_step(threading.Barrier(1))  # what it imports has filters of its own
    before = list(warnings.filters)
    both = threading.Barrier(2, timeout=30)
    threads = [threading.Thread(target=fail_in_a_step, args=[both]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
    assert warnings.filters == before


def test_threads_that_refuse_to_compile_leave_the_stance_as_it_was() -> None:
    """Each scope of torch's set_stance restores what it found, the other thread's."""
    inside, left = threading.Event(), threading.Event()

    def first() -> None:
        with torchguard.no_recompile():
            inside.wait(20)
        left.set()

    def second() -> None:
        with torchguard.no_recompile():
            inside.set()
            left.wait(20)
            refused.append(fails())

    def fails() -> bool:
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        try:
            compiled(torch.ones(2))
        except RuntimeError:
            return True
        return False

    refused: list[bool] = []
    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
        if each is threads[0]:
            inside.wait(0.2)  # until it is in its scope
    for each in threads:
        each.join()
    assert refused == [True]
    assert not fails()
