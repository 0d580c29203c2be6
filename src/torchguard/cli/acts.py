"""The acts of ``python -m torchguard demo``, each in a process of its own.

``python -m torchguard.cli.acts resize guarded`` prints whether something was lost, what there is
then, and the losses that are drawn.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchguard
from torchguard.transactions.step import Transaction

STEPS, FIRST, EVERY = 60, 5, 12
"""Steps of the training: how many, the first that runs out of memory, how many to the next one."""

_Found = tuple[bool, str, list[float]]


def resize(*, guarded: bool) -> _Found:
    """Resize a tensor over numpy's memory, which can't grow."""
    if guarded:
        torchguard.install("resize")
    t = torch.from_numpy(np.zeros(4, dtype=np.float32))
    with contextlib.suppress(RuntimeError):
        t.resize_(5, 5)
    lost = t.numel() > 4  # noqa: PLR2004 - as many as it has
    return lost, f"t has shape {tuple(t.shape)}, {4 * t.numel()} bytes in a memory of 16", []


def overlap(*, guarded: bool) -> _Found:
    """Subtract the first column from all, itself among them."""
    if guarded:
        torchguard.install("overlap")  # type: ignore[arg-type,unused-ignore]
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    want = (x - x[:, :1]).tolist()
    x -= x[:, :1]
    return x.tolist() != want, f"x is {x.tolist()}", []


def _history(counts: torch.Tensor) -> torch.Tensor:
    counts[0] = 1
    before = counts.clone()
    counts[1] = 2  # after the copy was taken
    return before


def compiled(*, guarded: bool) -> _Found:
    """Compile a function that writes again after it has taken a copy."""
    function: Any = torchguard.verified()(_history) if guarded else torch.compile(_history)
    found = function(torch.zeros(3)).tolist()
    return found != [1, 0, 0], f"before is {found}", []


def training(*, guarded: bool) -> _Found:
    """Train once without a failure and once with some."""
    plain, found = _losses(guarded=False, fails=False), _losses(guarded=guarded, fails=True)
    same = sum(a == b for a, b in zip(plain, found, strict=True))
    text = f"{same} of {STEPS} losses are those of a run with memory, the last is {found[-1]:.2g}"
    return found != plain, text, [*plain, *found]


def _losses(*, guarded: bool, fails: bool) -> list[float]:
    """Train for :data:`STEPS` steps, of which some run out of memory."""
    training, step = _made(guarded=guarded)
    return [_run(training, step, short=fails and n % EVERY == FIRST) for n in range(STEPS)]


def _made(*, guarded: bool) -> tuple[Any, Any]:
    """Return data, model and optimizer, and the transaction of its steps."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    y = x.square().mean(1, keepdim=True)
    layers = torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.9)
    step: Any = torchguard.transaction(model, optimizer) if guarded else contextlib.nullcontext()
    return (x, y, model, optimizer), step


def _run(training: Any, step: Any, *, short: bool, killed: bool = False) -> float:
    """Run a step of two parts, again if the second finds no memory; return the loss."""
    x, y, model, optimizer = training
    while True:
        with contextlib.suppress(RuntimeError), step:
            first = (model(x[:32]) - y[:32]).square().mean() / 2
            first.backward()
            if short:
                short = False
                torch.empty(2**50)  # RuntimeError: can't allocate memory
            if killed:
                os._exit(137)  # as SIGKILL does: nothing is cleaned up
            second = (model(x[32:]) - y[32:]).square().mean() / 2
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float((first + second).detach())


def survive(*, guarded: bool) -> _Found:
    """Train in processes that are killed one after the other, and once in one that is not."""
    torch.set_num_threads(1)  # a fork has no other threads
    fork: Any = multiprocessing.get_context("fork")
    made = _made(guarded=guarded)  # which imports what the first optimizer needs, once
    curves: list[dict[str, str]] = []
    for deaths in ((), (8, 26, 47)):
        with tempfile.TemporaryDirectory() as folder:
            for death in (*deaths, STEPS):
                arguments = *made, Path(folder), bool(deaths), death
                process = fork.Process(target=_resume, args=arguments)
                process.start()
                process.join()
            lines = Path(folder, "losses").read_text(encoding="utf-8").splitlines()
            curves.append(dict(line.split() for line in lines))
    plain, found = (list(each.values()) for each in curves)
    same = sum(a == b for a, b in zip(plain, found, strict=True))
    text = f"{same} of {STEPS} losses are those of a run that nothing stops"
    return found != plain, f"{text}, the last is {float(found[-1]):.2g}", []


def _resume(training: Any, step: Any, folder: Path, fails: bool, death: int) -> None:
    """Train from the newest checkpoint until the process is killed; save after every 10 steps."""
    guarded, parts, done = isinstance(step, Transaction), training[2:], 0
    path = folder / "newest" / "training.pt" if guarded else folder / "training.pt"
    if path.exists() and guarded:
        step.load_state_dict(torch.load(path))
        done = step.stats().commits
    elif path.exists():
        done, *states = torch.load(path)
        for each, state in zip(parts, states, strict=True):
            each.load_state_dict(state)
    while done < STEPS:
        loss = _run(training, step, short=fails and done % EVERY == FIRST, killed=done == death)
        with Path(folder, "losses").open("a", encoding="utf-8") as file:
            file.write(f"{done} {loss}\n")
        done += 1
        if done % 10 == 0 and guarded:
            with torchguard.checkpoint_folder(folder / "newest") as new:
                torchguard.save(step.state_dict(), new / "training.pt")
        elif done % 10 == 0:
            torch.save([done, *(each.state_dict() for each in parts)], path)


def save(*, guarded: bool) -> _Found:
    """Load what a process has left that was killed while it saved over a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save({"step": 1}, path)
        line = [sys.executable, "-m", "torchguard.cli.acts", "killed", _WORDS[guarded]]
        subprocess.run(line, check=False, cwd=folder, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
        with contextlib.suppress(Exception):
            return False, f"the file has step {torch.load(path)['step']}", []
        return True, f"the file has {path.stat().st_size} bytes, and no step loads", []


def killed(*, guarded: bool) -> _Found:
    """End this process in the middle of a save."""

    class Killed:
        def __reduce__(self) -> Any:
            os._exit(137)  # as SIGKILL does: nothing is cleaned up

    (torchguard.save if guarded else torch.save)({"step": 2, "then": Killed()}, "model.pt")
    return False, "", []


_WORDS = {False: "bare", True: "guarded"}
_ACTS: dict[str, Callable[..., _Found]] = {
    each.__name__: each for each in (resize, overlap, compiled, training, save, killed, survive)
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(_ACTS[sys.argv[1]](guarded=sys.argv[2] == _WORDS[True])) + "\n")
