"""A long training in which something fails at every step: nothing is lost, and nothing leaks.

Shapes: B rows, D features.
"""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchguard
from torchguard.rollback.consistency import is_consistent

FEATURES = 16
HUGE = 2**58  # elements: no machine has the memory
GROWTH_ALLOWED = 32 << 20  # bytes; allocators keep some of what they had at the peak


class InjectedError(Exception):
    """What a failing hook raises."""


class Training:
    """A model, its optimizer, and the tensors that failures were tried on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)
        self.model = nn.Sequential(self.embed, nn.LayerNorm(32), nn.ReLU(), self.head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.kept: list[torch.Tensor] = []

    def step(self, step: int) -> None:
        """Train on a batch (B, D) that is the same for the same step of every training."""
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        (self.model(x) - x.roll(1, 0)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters, gradients and moments: whatever a failure could have reached."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*self.model.parameters(), *gradients, *moments]


Failure = Callable[[Training, random.Random], None]


def resize_numpy(training: Training, choose: random.Random) -> None:
    """Grow a tensor over NumPy's memory."""
    tensor = torch.from_numpy(np.zeros(choose.randint(1, 9)))
    training.kept.append(tensor)
    with pytest.raises(RuntimeError):
        tensor.resize_(choose.randint(10, 99), 3)


def resize_shared(training: Training, choose: random.Random) -> None:
    """Grow a tensor in shared memory; plain torch ends the process."""
    tensor = torch.zeros(choose.randint(1, 9)).share_memory_()
    training.kept.append(tensor)
    with pytest.raises(RuntimeError):
        tensor.resize_(10_000)


def no_memory(training: Training, choose: random.Random) -> None:
    """Ask for more memory than there is, for a parameter, a gradient or a moment."""
    tensor = choose.choice(training.tensors())
    with pytest.raises(RuntimeError), torch.no_grad():
        tensor.data.resize_(HUGE)
    with pytest.raises(RuntimeError), torch.no_grad():
        tensor.resize_(HUGE)


def swapped_storage(training: Training, choose: random.Random) -> None:
    """Give a parameter another storage that is too small for it."""
    tensor = choose.choice(training.tensors())
    small = torch.from_numpy(np.zeros(1, dtype=np.float32)).untyped_storage()
    with pytest.raises(RuntimeError), torch.no_grad():
        tensor.set_(small, 0, (50, 50), (50, 1))


def out_too_small(training: Training, choose: random.Random) -> None:
    """Write into an output that can't grow."""
    out = torch.from_numpy(np.zeros(0, dtype=np.float32))
    training.kept.append(out)
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(choose.randint(1, 50)), 1, out=out)


def half_an_index_write(training: Training, choose: random.Random) -> None:
    """Write good rows of a parameter before a bad one."""
    tensor = choose.choice([each for each in training.tensors() if each.dim() == 2])
    with torchguard.guarded(data=True), torch.no_grad(), pytest.raises(IndexError):
        tensor[[0, 1, tensor.shape[0]]] = 9.0


def hook(training: Training, choose: random.Random) -> None:
    """Raise in the middle of a forward or a backward; the step is tried again afterwards."""

    def raises(*_: object) -> None:
        raise InjectedError

    module = choose.choice([training.embed, training.head])
    if choose.random() < 0.5:
        handle = module.register_forward_hook(raises)
    else:
        handle = module.register_full_backward_hook(raises)
    with pytest.raises(InjectedError):
        training.model(torch.randn(2, FEATURES, requires_grad=True)).sum().backward()
    handle.remove()
    # What a caught exception in backward leaves is the caller's to clear, as ever.
    training.optimizer.zero_grad()


FAILURES: tuple[Failure, ...] = (
    resize_numpy, out_too_small, half_an_index_write, hook, resize_shared, no_memory,
    swapped_storage,
)  # fmt: skip


def resident() -> int:
    """Return the bytes of memory the process has in use; the peak where that can't be read."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(steps: int, failures: tuple[Failure, ...]) -> tuple[Training, int]:
    """Train with a failure before each step, each in turn; return by how much memory grew, too."""
    training, choose, before = Training(), random.Random(0), 0  # noqa: S311
    for step in range(steps):
        if failures:
            failures[step % len(failures)](training, choose)
        training.step(step)
        if step == steps // 4:  # everything is loaded and warm
            before = resident()
    return training, resident() - before


def inconsistent(training: Training) -> list[torch.Size]:
    tensors = [*training.kept, *training.tensors()]
    return [each.shape for each in tensors if not is_consistent(each)]


@pytest.mark.slow
def test_a_training_in_which_every_step_fails_once_ends_as_one_without_failures() -> None:
    clean, _ = train(160, ())
    with torchguard.install("resize", "out"):
        failed, growth = train(160, FAILURES)
    expected, found = clean.model.state_dict(), failed.model.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert inconsistent(failed) == []
    assert growth < GROWTH_ALLOWED


def at_random(seed: int, rounds: int, wrong: list[str]) -> None:
    """Do what one thread of the storm does; add to ``wrong`` what should not be."""
    choose = random.Random(seed)  # noqa: S311
    try:
        for _ in range(rounds):
            tensor = torch.from_numpy(np.zeros(4))
            way = choose.choice(["resize", "resize and out", "guarded", "helper", "uninstall"])
            with contextlib.suppress(RuntimeError):
                if way == "helper":
                    torchguard.safe_resize_(tensor, 5, 5)
                elif way == "uninstall":
                    # Takes "out" away from whoever has it; their resizes do not need it.
                    torchguard.install("out", only_if_needed=False)
                    torchguard.uninstall("out")
                    torchguard.safe_resize_(tensor, 5, 5)
                elif way == "guarded":
                    with torchguard.guarded():
                        tensor.resize_(5, 5)
                else:
                    with torchguard.install(*way.split(" and ")):  # type: ignore[arg-type]
                        tensor.resize_(5, 5)
                wrong.append(f"{way} did not fail")
            if tensor.shape != (4,):
                wrong.append(f"{way} left {tuple(tensor.shape)}")
    except BaseException as error:  # noqa: BLE001  reported by the main thread
        wrong.append(f"thread {seed}: {error!r}")


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads interrupt each other far more often than they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_that_install_uninstall_and_enter_scopes_leave_torch_as_it_was() -> None:
    """The fixture ``no_residue`` compares torch with what it was."""
    wrong: list[str] = []
    workers = [threading.Thread(target=at_random, args=(seed, 40, wrong)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert torchguard.installed() == ()
    # The proof that no guard is left: plain torch does again what it does.
    tensor = torch.from_numpy(np.zeros(4))
    with pytest.raises(RuntimeError):
        tensor.resize_(5, 5)
    assert not is_consistent(tensor)
    torchguard.repair_(tensor)
