"""What the guard of activation checkpointing costs.

    python benchmarks/bench_recompute.py --device cpu

Baseline: the same step in plain torch, in the same process, in the same rounds (see
``harness.py``): forward, second run and backward, each block of the net checkpointed by itself. The
step is the same with the guard off and on; ``off-against-off`` shows what the machine alone makes
different. A GPU takes larger batches: its host has to keep up with it.

B batch, T time, D width, C channels, H height, W width of an image.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.bench_transaction import held_bytes
from benchmarks.harness import Comparison, Scope, Side, Target, measure
from benchmarks.program import Benchmark, Results, Setting
from torchguard import install, uninstall

STEP = "net(batch).sum().backward(); net.zero_grad()"
NOT_TO_BE_SEEN = Target(1.01)
WHY = (
    "the states of Python's and numpy's generators are read before and after each first run, "
    "50 microseconds each; the modules of a block are looked through, and its buffers copied twice"
)
guarded: Scope = partial(install, "recompute", only_if_needed=False)


class Checkpointed(nn.Module):
    """Blocks one after the other, each of which backward runs a second time."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Bottleneck(nn.Module):
    """Three convolutions, as in ResNet-50."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, made, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.shortcut = nn.Sequential(
            nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
        )
        if given == made:
            self.shortcut = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut."""
        return torch.relu(self.path(x) + self.shortcut(x))


def transformer() -> Checkpointed:
    """Return 12 blocks of width 256."""
    return Checkpointed(
        [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(12)]
    )


def resnet() -> Checkpointed:
    """Return the 16 blocks of a ResNet-50."""
    blocks: list[nn.Module] = []
    given = 64
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for i in range(count):
            blocks.append(Bottleneck(given, width, 2 if stage and i == 0 else 1))
            given = 4 * width
    return Checkpointed(blocks)


Net = tuple[str, str, Callable[[], Checkpointed], tuple[int, ...]]


def nets(device: str, *, quick: bool) -> Iterator[Net]:
    """Yield the nets, each with the shape of its batch: (B, T, D) and (B, C, H, W)."""
    large, tokens, size = (32, 256, 56) if device == "cuda" else (2, 128, 16)
    if quick:
        large, tokens, size = 2, 4, 8
    yield "transformer", "transformer of 12 blocks, no buffers", transformer, (large, tokens, 256)
    yield "resnet", "ResNet-50, 156 buffers", resnet, (large, 64, size, size)


def comparisons(device: str, *, quick: bool) -> Iterator[Comparison]:
    """Yield every row, in the order of the record."""
    for name, what, make, shape in nets(device, quick=quick):
        batch = torch.randn(shape, device=device, requires_grad=True)
        names: dict[str, Any] = {"net": make().to(device), "batch": batch}
        for kind, scope in (("off-against-off", None), ("guard", guarded)):
            yield Comparison(
                id=f"{name}-{kind}",
                what=f"{what}, {'guard on' if scope else 'guard off both times'}",
                baseline=Side(STEP, names),
                guarded=Side(STEP, names, scope) if scope else Side(STEP, names),
                target=NOT_TO_BE_SEEN if scope else None,
                why=WHY,
            )


def memory(device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Count what the guard holds between forward and backward, beside the bytes of buffers."""
    for name, _, make, shape in nets(device, quick=quick):
        net, batch = make().to(device), torch.randn(shape, device=device, requires_grad=True)
        net(batch).sum().backward()
        without = held_bytes(lambda: net(batch), device)  # noqa: B023
        with guarded():
            held = held_bytes(lambda: net(batch), device) - without  # noqa: B023
        buffers = sum(each.nbytes for each in net.buffers())
        print(f"{name}: {held} bytes held, buffers {buffers}")
        yield {"what": name, "device": device, "held": held, "buffers": buffers}


def run(setting: Setting) -> Results:
    """Measure the steps, and count the bytes."""
    uninstall()
    torch.manual_seed(0)
    return {
        "rows": measure(
            comparisons(setting.device, quick=setting.quick), setting, block_seconds=0.5
        ),
        "memory": list(memory(setting.device, quick=setting.quick)),
    }


BENCHMARK = Benchmark(
    "recompute", "What does the guard of activation checkpointing cost?", run, rounds=25
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
