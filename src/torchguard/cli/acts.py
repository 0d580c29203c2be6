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

STEPS = 60
FAILS = {5: "backward", 17: "step", 29: "backward", 41: "step", 53: "backward"}
"""The steps that run out of memory: between two backwards, or when one optimizer has stepped."""

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
    return found != plain, _compared(plain, found), [*plain, *found]


def _compared(plain: list[float], found: list[float]) -> str:
    same = sum(a == b for a, b in zip(plain, found, strict=True))
    without, mean = (sum(each[-10:]) / 10 for each in (plain, found))
    equal = f"{same} of {STEPS} losses equal those of a run without failures"
    return f"{equal}; the last ten average {mean:.4f}, without failures {without:.4f}"


def _losses(*, guarded: bool, fails: bool) -> list[float]:
    """Train for :data:`STEPS` steps, of which some run out of memory."""
    training, step = _made(guarded=guarded)
    return [_run(training, step, FAILS.get(n) if fails else None) for n in range(STEPS)]


def _made(*, guarded: bool) -> tuple[Any, Any]:
    """Return data, model and optimizers, and the transaction of their steps."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    y = x.square().mean(1, keepdim=True)
    layers = torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()
    body, head = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(body, head)
    optimizers = [
        torch.optim.SGD(body.parameters(), lr=0.12, momentum=0.9),
        torch.optim.AdamW(head.parameters(), lr=1e-2),
    ]
    step: Any = torchguard.transaction(model, optimizers) if guarded else contextlib.nullcontext()
    return (x, y, model, optimizers), step


def _run(training: Any, step: Any, fails: str | None, *, killed: bool = False) -> float:
    """Run a step of two micro-batches, again if it runs out of memory; return the loss.

    What PyTorch needs for a retry is here too: after a failure the gradients are cleared.
    """
    x, y, model, optimizers = training
    while True:
        try:
            with step:
                first = (model(x[:32]) - y[:32]).square().mean() / 2
                first.backward()
                if fails == "backward":
                    torch.empty(2**50)  # RuntimeError: can't allocate memory
                if killed:
                    os._exit(137)  # as SIGKILL does: nothing is cleaned up
                second = (model(x[32:]) - y[32:]).square().mean() / 2
                second.backward()
                optimizers[0].step()
                if fails == "step":
                    torch.empty(2**50)
                optimizers[1].step()
                return float((first + second).detach())
        except RuntimeError:
            fails = None
        finally:
            for optimizer in optimizers:
                optimizer.zero_grad()


def survive(*, guarded: bool) -> _Found:
    """Train in processes that are killed one after the other, and once in one that is not."""
    torch.set_num_threads(1)  # a fork has no other threads
    fork: Any = multiprocessing.get_context("fork")
    made = _made(guarded=guarded)  # which imports what the first optimizer needs, once
    curves: list[list[float]] = []
    for deaths in ((), (8, 26, 47)):
        with tempfile.TemporaryDirectory() as folder:
            for death in (*deaths, STEPS):
                arguments = *made, Path(folder), bool(deaths), death
                process = fork.Process(target=_resume, args=arguments)
                process.start()
                process.join()
            lines = Path(folder, "losses").read_text(encoding="utf-8").splitlines()
            newest = dict(line.split() for line in lines)  # a step that is run again counts once
            curves.append([float(loss) for loss in newest.values()])
    return curves[0] != curves[1], _compared(*curves), []


def _resume(training: Any, step: Any, folder: Path, fails: bool, death: int) -> None:
    """Train from the newest checkpoint until the process is killed; save after every 10 steps."""
    guarded, done = isinstance(step, Transaction), 0
    _, _, model, optimizers = training
    parts = [model, *optimizers]
    path = folder / "newest" / "training.pt" if guarded else folder / "training.pt"
    if path.exists() and guarded:
        step.load_state_dict(torch.load(path))
        done = step.stats().commits
    elif path.exists():
        done, random, *states = torch.load(path)
        for each, state in zip(parts, states, strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(random)
    while done < STEPS:
        loss = _run(training, step, FAILS.get(done) if fails else None, killed=done == death)
        with Path(folder, "losses").open("a", encoding="utf-8") as file:
            file.write(f"{done} {loss}\n")
        done += 1
        if done % 10 == 0 and guarded:
            with torchguard.checkpoint_folder(folder / "newest") as new:
                torchguard.save(step.state_dict(), new / "training.pt")
        elif done % 10 == 0:
            states = [each.state_dict() for each in parts]
            torch.save([done, torch.get_rng_state(), *states], folder / "new.pt")
            (folder / "new.pt").replace(path)  # a kill leaves the old file or the new one


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
