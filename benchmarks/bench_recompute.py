"""What the guard of activation checkpointing costs.

Each block of the net is checkpointed by itself. ``off-against-off`` shows what the machine alone
makes different. A GPU takes larger batches: its host has to keep up with it.

B batch, T time, D width, C channels, H height, W width of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Comparison, held_bytes, installed, measure
from benchmarks.models import Bottleneck
from benchmarks.program import Benchmark, Case, Results, Setting
from torchguard import uninstall

STEP = "net(batch).sum().backward(); net.zero_grad()"
guarded = installed("recompute")


class Checkpointed(nn.ModuleList):
    """Blocks one after the other, each of which backward runs a second time."""

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def transformer(count: int, sizes: tuple[int, int, int] = (768, 12, 3072)) -> list[nn.Module]:
    """Return blocks as large as those of BERT-base, which has 12, or of other sizes."""
    return [nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(count)]


def resnet(count: int) -> list[nn.Module]:
    """Return the first of the 16 blocks of a ResNet-50."""
    sizes = [64] * 3 + [128] * 4 + [256] * 6 + [512] * 3
    blocks: list[nn.Module] = []
    given = 64
    for before, size in zip([64, *sizes], sizes[:count], strict=False):
        blocks.append(Bottleneck(given, size, 1 if size == before else 2))
        given = 4 * size
    return blocks


Net = tuple[str, str, Callable[[], list[nn.Module]], tuple[int, ...]]


def nets(device: str, *, quick: bool) -> Iterator[Net]:
    """Yield what makes the blocks of each net, and its batch's shape: (B, T, D) or (B, C, H, W)."""
    large, tokens, size = (32, 256, 56) if device == "cuda" else (2, 64, 56)
    if quick:
        large, tokens, size = 2, 4, 8
    texts, images = (large, tokens, 768), (2 * large, 64, size, size)
    few = partial(transformer, 1 if quick else 12)
    yield "transformer", "transformer of 12 blocks, no buffers", few, texts
    yield "resnet", "ResNet-50, 156 buffers", partial(resnet, 1 if quick else 16), images
    yield "block", "a single block of width 8", partial(transformer, 1, (8, 1, 8)), (1, 1, 8)


def comparisons(device: str, *, quick: bool) -> Iterator[Comparison]:
    """Yield every row, in the order of the record."""
    for name, what, make, shape in nets(device, quick=quick):
        batch = torch.randn(shape, device=device, requires_grad=True)
        names: dict[str, Any] = {"net": Checkpointed(make()).to(device), "batch": batch}
        off = f"{what}, guard off both times"
        yield Comparison(f"{name}-off-against-off", off, names, STEP, STEP)
        on = f"{what}, guard on"
        yield Comparison(f"{name}-guard", on, names, STEP, STEP, guarded)


def memory(setting: Setting) -> Iterator[Case]:
    """Count what the guard holds between forward and backward, beside the bytes of buffers."""
    device = setting.device

    def held(make: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> dict[str, int]:
        net = Checkpointed(make()).to(device)
        batch = torch.randn(shape, device=device, requires_grad=True)
        net(batch).sum().backward()
        without = held_bytes(lambda: net(batch), device)
        with guarded():
            more = held_bytes(lambda: net(batch), device) - without
        return {"held": more, "buffers": sum(each.nbytes for each in net.buffers())}

    for name, _, make, shape in nets(device, quick=setting.quick):
        yield {"what": name}, partial(held, make, shape)


def run(setting: Setting) -> Results:
    """Measure the steps, and count the bytes."""
    uninstall()
    torch.manual_seed(0)
    made = comparisons(setting.device, quick=setting.quick)
    rows = measure(made, setting, block_seconds=0.5)
    return {"rows": rows, "memory": setting.collect(memory(setting), "memory")}


BENCHMARK = Benchmark(
    "recompute", "What does the guard of activation checkpointing cost?", run, rounds=9
)
