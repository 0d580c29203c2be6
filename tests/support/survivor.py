"""Runs a script that is killed at chosen moments, and runs out of memory in some micro-batches.

A moment is an event of a phase: an operator of PyTorch in ``forward``, ``backward`` or ``step``, or
a file of the script's folder that is opened, written, renamed or removed in ``save``. The model is
a class ``Model`` whose first argument is a part of a batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

Kill = tuple[str, int, int]
"""A phase, the number of its event, and a signal."""

PHASES = ("forward", "backward", "step", "save")
SHARE = 0.15
"""Of the micro-batches that run out of memory, each once in a process."""
LATEST = 400
"""The last operator at which memory runs out, of a micro-batch that has some 480."""


class _Events(TorchDispatchMode):
    """Counts what happens, and ends the process at the event that was chosen."""

    def __init__(self, kill: Kill | None, memory: int | None, folder: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kill, self.memory, self.folder = kill, memory, folder
        self.phase = ""
        self.counts: Counter[str] = Counter()
        self.left: int | None = None
        """Operators until memory runs out."""
        self.seen: set[bytes] = set()
        self.own = os.getpid()

    def happened(self, phase: str) -> None:
        if self.kill and self.kill[:2] == (phase, self.counts[phase]) and os.getpid() == self.own:
            os.kill(self.own, self.kill[2])
        self.counts[phase] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase:
            self.happened(self.phase)
        if self.left is not None and self.phase in {"forward", "backward"}:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.counts["out of memory"] += 1
                raise torch.OutOfMemoryError("out of memory, says the test")
        return func(*args, **(kwargs or {}))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        of_files = event in {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink"}
        if of_files and any(self.folder in str(each) for each in arguments[:2]):
            self.happened("save")

    def before_forward(self, module: Any, args: tuple[Any, ...]) -> None:
        if type(module).__name__ != "Model":
            return
        self.phase, self.left = "forward", None
        part = hashlib.sha256(args[0].numpy().tobytes() + str(self.memory).encode()).digest()
        draws = random.Random(part)  # noqa: S311  not for secrets
        if self.memory is not None and part not in self.seen and draws.random() < SHARE:
            self.left = draws.randrange(LATEST)
        self.seen.add(part)


def _run(script: Path, arguments: list[str], kill: Kill | None, memory: int | None) -> None:
    """Run a script; write how often each phase has had an event."""
    events = _Events(kill, memory, arguments[arguments.index("--folder") + 1])
    backward: Any = torch.Tensor.backward
    scaler: Any = torch.amp.GradScaler  # lets its scale grow within a few steps
    defaults = scaler.__init__.__defaults__
    scaler.__init__.__defaults__ = tuple(7 if each == 2000 else each for each in defaults)

    def counted(*given: Any, **options: Any) -> Any:
        events.phase = "backward"
        try:
            return backward(*given, **options)
        finally:
            events.phase = ""

    def after_forward(module: Any, *_: Any) -> None:
        if type(module).__name__ == "Model":
            events.phase = ""

    location_tag = torch.serialization.location_tag

    def saves(storage: Any) -> Any:  # a file is open, and has nothing in it
        events.happened("save")
        return location_tag(storage)

    torch.Tensor.backward = counted  # type: ignore[method-assign]
    torch.serialization.location_tag = saves
    register_module_forward_pre_hook(events.before_forward)
    register_module_forward_hook(after_forward)
    register_optimizer_step_pre_hook(lambda *_: setattr(events, "phase", "step"))
    register_optimizer_step_post_hook(lambda *_: setattr(events, "phase", ""))
    sys.addaudithook(events.audit)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with events:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.write(f"counts {json.dumps(events.counts)}\n")
        sys.stdout.flush()


class Outcome(NamedTuple):
    """How the processes of a run ended, and the first's lines by step and events by phase."""

    codes: list[int]
    lines: dict[int, str]
    counts: dict[str, int]


class Script:
    """A script that trains in a folder, in forks of this process."""

    def __init__(self, file: Path, run: Path, options: list[str], ranks: int) -> None:
        self.file, self.ranks = file, ranks
        self.arguments = ["--folder", str(run), *options]
        self.output = run.with_name(f"{run.name}.output")

    def run(self, kill: Kill | None = None, memory: int | None = None, dying: int = 0) -> Outcome:
        """Run it on all ranks; if one dies, the others are ended, as torchrun does."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        running = [
            self._start(rank, port, kill if rank == dying else None, memory)
            for rank in range(self.ranks)
        ]
        codes: dict[int, int] = {}
        while len(codes) < self.ranks:
            ended, status = os.wait()
            codes[ended] = os.waitstatus_to_exitcode(status)
            for each in running if codes[ended] else ():
                if each not in codes:
                    os.kill(each, signal.SIGKILL)
        lines, counts = {}, {}
        for line in self.output.read_text(encoding="utf-8").splitlines():
            first, _, rest = line.partition(" ")
            if first == "counts":
                counts = json.loads(rest)
            elif first.isdigit():
                lines[int(first)] = rest
        return Outcome([codes[each] for each in running], lines, counts)

    def _start(self, rank: int, port: str, kill: Kill | None, memory: int | None) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.ranks > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
                os.environ.update(WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1")
                os.environ.update(GLOO_SOCKET_IFNAME="lo")
            output = self.output if rank == 0 else os.devnull
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            _run(self.file, self.arguments, kill, memory)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  whatever it is
            traceback.print_exc()
        finally:
            os._exit(code)


def survive(
    script: Script, counts: dict[str, int], share: float, kills: int, seed: int, number: int
) -> dict[int, str]:
    """Kill it so often with a signal, each time some steps further on; then let it end.

    ``share`` is that of a whole run's events after which each process is dead. The lines of a step
    that is run again have to be the same.
    """
    draws = random.Random(seed)  # noqa: S311  not for secrets
    found: dict[int, str] = {}
    for place in range(kills + 1):
        phase, last = PHASES[place % len(PHASES)], place == kills
        kill = None if last else (phase, draws.randrange(int(counts[phase] * share)), number)
        dying = place % script.ranks
        outcome = script.run(kill, seed + place, dying)
        # A script that handles Ctrl-C ends with 130; before it can, with 1.
        expected = {0} if last else {-number} if number == signal.SIGKILL else {130, 1}
        assert outcome.codes[dying] in expected, (place, kill, outcome.codes)
        assert not last or not any(outcome.codes), outcome.codes
        for step, line in outcome.lines.items():
            assert found.setdefault(step, line) == line, (place, kill, step)
    assert outcome.counts["out of memory"]
    assert min(outcome.lines) > 1  # it was resumed
    return found
