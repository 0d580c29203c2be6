"""A long training run in which things keep failing: nothing may be lost, and nothing may leak.

    python benchmarks/soak.py --steps 2000

Two runs train the same model on the same batches. In one of them something fails at every
step and is caught, as a retry loop would: resizes of tensors in NumPy's and in shared memory,
allocations that are too large, ``out=`` of the wrong size, half-done index writes, sequences
longer than the largest bucket, exceptions in forward and backward hooks. Afterwards both have
the same parameters, bit for bit, no tensor of the process is inconsistent, and memory has not
grown. Then threads install, uninstall, resize and enter ``guarded()`` at random; afterwards torch
is as it was. Exit status 0 if all of this holds, 1 if not.

``--without-guards`` shows that the check can fail.

Shapes: B sequences, T positions, D features.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torchguard
from benchmarks.attributes import attributes_of_torch
from torchguard import Buckets
from torchguard.rollback.consistency import is_consistent

BUCKETS = Buckets([8, 16, 32])
FEATURES = 16
HUGE = 2**58  # elements: no machine has the memory
GROWTH_ALLOWED = 32 << 20  # bytes; allocators keep some of what they had at the peak
_PATIENCE = 1.0  # seconds between two lines of progress

Failure = Callable[["Training", random.Random], None]


class Injected(Exception):  # noqa: N818  a hook's own failure, not an error of this program
    """What a failing hook raises."""


class Model(nn.Module):
    """Two linear layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        hidden: torch.Tensor = self.head(torch.relu(self.norm(self.embed(x))))
        return hidden


@dataclass
class Training:
    """One of the two runs."""

    model: Model = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    kept: list[torch.Tensor] = field(default_factory=list)
    """Tensors that failures were tried on; their shapes must still be true at the end."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batch(self, step: int) -> torch.Tensor:
        """Return (B, T, D), the same for the same step in both runs."""
        generator = torch.Generator().manual_seed(step)
        length = int(torch.randint(1, BUCKETS.sizes[-1] + 1, (), generator=generator))
        return torch.randn(4, length, FEATURES, generator=generator)

    def step(self, step: int) -> None:
        """Train on one batch, padded to its bucket."""
        x = self.batch(step)
        padded, length = torchguard.pad_to_bucket(x, 1, BUCKETS)
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        predicted = torchguard.unpad(self.model(padded), 1, length)
        (predicted - x.roll(1, 1)).square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        """Return parameters, gradients and moments: whatever a failure could have reached."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*self.model.parameters(), *gradients, *moments]


@contextlib.contextmanager
def failing(*errors: type[BaseException]) -> Iterator[None]:
    """Insist that the block fails in one of these ways."""
    try:
        yield
    except errors:
        return
    raise AssertionError("what was to fail has not failed")


def resize_numpy(training: Training, random: random.Random) -> None:
    """Grow a tensor over NumPy's memory."""
    tensor = torch.from_numpy(np.zeros(random.randint(1, 9)))
    training.kept.append(tensor)
    with failing(RuntimeError):
        tensor.resize_(random.randint(10, 99), 3)


def resize_shared(training: Training, random: random.Random) -> None:
    """Grow a tensor in shared memory; plain torch ends the process."""
    tensor = torch.zeros(random.randint(1, 9)).share_memory_()
    training.kept.append(tensor)
    with failing(torchguard.errors.NonResizableStorageError):
        tensor.resize_(10_000)


def no_memory(training: Training, random: random.Random) -> None:
    """Ask for more memory than there is, for a parameter, a gradient or a moment."""
    tensor = random.choice(training.parameters())
    with failing(RuntimeError), torch.no_grad():
        tensor.data.resize_(HUGE)
    with failing(RuntimeError), torch.no_grad():
        tensor.resize_(HUGE)


def swapped_storage(training: Training, random: random.Random) -> None:
    """Give a parameter another storage that is too small for it."""
    tensor = random.choice(training.parameters())
    small = torch.from_numpy(np.zeros(1, dtype=np.float32)).untyped_storage()
    with failing(RuntimeError), torch.no_grad():
        tensor.set_(small, 0, (50, 50), (50, 1))


def out_too_small(training: Training, random: random.Random) -> None:
    """Write into an output that can't grow."""
    out = torch.from_numpy(np.zeros(0, dtype=np.float32))
    training.kept.append(out)
    with failing(RuntimeError):
        torch.add(torch.ones(random.randint(1, 50)), 1, out=out)


def half_an_index_write(training: Training, random: random.Random) -> None:
    """Write good rows of a parameter before a bad one."""
    tensor = random.choice([p for p in training.parameters() if p.dim() == 2])  # noqa: PLR2004
    with torchguard.guarded(data=True), torch.no_grad(), failing(IndexError):
        tensor[[0, 1, tensor.shape[0]]] = 9.0


def overflow(training: Training, random: random.Random) -> None:
    """Bring a sequence that no bucket holds."""
    del training
    with failing(ValueError):
        torchguard.pad_to_bucket(torch.zeros(1, random.randint(33, 99)), 1, BUCKETS)


def hook(training: Training, random: random.Random) -> None:
    """Raise in the middle of a forward or a backward; the step is tried again afterwards."""

    def raises(*_: object) -> None:
        raise Injected

    module = random.choice([training.model.embed, training.model.head])
    if random.random() < 0.5:  # noqa: PLR2004
        handle = module.register_forward_hook(raises)
    else:
        handle = module.register_full_backward_hook(raises)
    try:
        with failing(Injected):
            x = torch.randn(2, 8, FEATURES, requires_grad=True)
            training.model(x).sum().backward()
    finally:
        handle.remove()
        # What a caught exception in backward leaves is the caller's to clear, as ever.
        training.optimizer.zero_grad()


FAILURES: tuple[Failure, ...] = (
    resize_numpy,
    resize_shared,
    no_memory,
    swapped_storage,
    out_too_small,
    half_an_index_write,
    overflow,
    hook,
)
# Without a guard these end the process, or what they spoil can't be used any more.
ENDS_THE_PROCESS = (resize_shared, no_memory, swapped_storage)


def inconsistent() -> list[torch.Tensor]:
    """Return every inconsistent tensor of the process."""
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    return [each for each in tensors if not is_consistent(each)]


def resident() -> int:
    """Return the bytes of memory the process has in use; the peak where that can't be read."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(steps: int, failures: tuple[Failure, ...], seed: int = 0) -> tuple[Training, list[int]]:
    """Train with one failure before each step; return the memory in use along the way too."""
    training, choose = Training(), random.Random(seed)  # noqa: S311  no secret
    memory, shown, counts = [], time.monotonic(), Counter[str]()
    for step in range(steps):
        if failures:
            failure = choose.choice(failures)
            failure(training, choose)
            counts[failure.__name__] += 1
        training.step(step)
        if len(training.kept) > 64:  # noqa: PLR2004  the newest are enough to look at
            torchguard.check_consistent(training.kept)
            del training.kept[:32]
        if step % max(steps // 8, 1) == 0:
            gc.collect()
            memory.append(resident())
        if sys.stderr.isatty() and time.monotonic() - shown > _PATIENCE:
            shown = time.monotonic()
            sys.stderr.write(f"\r{step + 1} of {steps} steps")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 32 + "\r")
    if failures:
        print("caught: " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts)))
    return training, memory


def at_random(seed: int, rounds: int, wrong: list[str]) -> None:
    """Do what one thread of the storm does; add to ``wrong`` what should not be."""
    choose = random.Random(seed)  # noqa: S311  no secret
    try:
        for _ in range(rounds):
            tensor = torch.from_numpy(np.zeros(4))
            way = choose.choice(["resize", "resize and out", "guarded", "helper", "uninstall"])
            with failing(RuntimeError):
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
            if not is_consistent(tensor):
                wrong.append(f"{way} left {tuple(tensor.shape)}")
    except BaseException as error:  # noqa: BLE001  reported by the main thread
        wrong.append(f"thread {seed}: {error!r}")


def storm(threads: int, rounds: int) -> list[str]:
    """Install, uninstall, resize and enter scopes in many threads at random; say what is wrong."""
    wrong: list[str] = []
    before = attributes_of_torch()
    workers = [
        threading.Thread(target=at_random, args=(seed, rounds, wrong)) for seed in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if torchguard.installed():
        wrong.append(f"still installed: {torchguard.installed()}")
    after = attributes_of_torch()
    changed = [path for path in before | after if before.get(path) is not after.get(path)]
    wrong += [f"{path} is not what it was" for path in changed]
    # The proof that no guard is left: plain torch does again what it does.
    tensor = torch.from_numpy(np.zeros(4))
    with failing(RuntimeError):
        tensor.resize_(5, 5)
    if is_consistent(tensor):
        wrong.append("a resize is still guarded")
    torchguard.repair_(tensor)
    return wrong


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200, help="of each thread")
    parser.add_argument("--without-guards", action="store_true", help="show that this can fail")
    options = parser.parse_args()

    wrong: list[str] = []
    clean, _ = train(options.steps, ())
    if options.without_guards:
        survivable = tuple(each for each in FAILURES if each not in ENDS_THE_PROCESS)
        failed, memory = train(options.steps, survivable)
    else:
        with torchguard.install("resize", "out"):
            failed, memory = train(options.steps, FAILURES)
    for (name, value), other in zip(
        clean.model.state_dict().items(), failed.model.state_dict().values(), strict=True
    ):
        if not torch.equal(value, other):
            wrong.append(f"{name} differs from the run without failures")
    wrong += [f"inconsistent: {tuple(tensor.shape)}" for tensor in inconsistent()]
    # The first reading comes before everything is loaded and warm.
    growth = memory[-1] - memory[1]
    if growth > GROWTH_ALLOWED:
        wrong.append(f"memory grew by {growth >> 20} MiB over the run")
    if not options.without_guards:
        wrong += storm(options.threads, options.rounds)
        print(f"{options.threads} threads, {options.rounds} rounds each")
    print(f"{options.steps} steps; memory {growth / 2**20:+.1f} MiB after the first eighth")
    for line in wrong[:10]:
        print("WRONG: " + line)
    print("something was lost" if wrong else "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
