"""A table of blocks: checkpointed under the guard each computes what it does without."""

# ruff: noqa: N812, NPY002, S311  the global generators are what is tested
from __future__ import annotations

import functools
import random
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard import safe_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

C = 4  # channels


class Block(nn.Module):
    """A linear layer, what a block holds beside it, and what it does with the output."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], held: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.use = use
        for name, make in held.items():
            if isinstance(make, Buffer):
                self.register_buffer(name, make())
            else:
                setattr(self, name, make())

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.linear(x))


class Buffer(functools.partial[Tensor]):
    """Makes a buffer, where another callable makes an attribute."""


def block(use: Callable[[Any, Tensor], Tensor], **held: Any) -> Callable[[], nn.Module]:
    return lambda: Block(lambda self, h: use(self, h).tanh(), held)


def running_mean(self: Any, h: Tensor) -> Tensor:
    self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h * self.running  # type: ignore[no-any-return]


def replaced_buffer(self: Any, h: Tensor) -> Tensor:
    self.running = 0.9 * self.running + h.detach().mean(0)
    return h * self.running  # type: ignore[no-any-return]


class ViewsOfABuffer(Block):
    statistics: Tensor

    def __init__(self) -> None:
        super().__init__(type(self).multiplied, {"statistics": Buffer(torch.ones, 2, C)})
        self.mean, self.turned = self.statistics[0], self.statistics.t()

    def multiplied(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return (h * self.statistics[0] * self.turned[:, 0]).tanh()


def counter(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    self.last = (*self.last[-1:], self.calls)
    return h * sum(self.last)  # type: ignore[no-any-return]


def hidden(self: Any, h: Tensor) -> Tensor:
    h = h if self.hidden is None else h + self.hidden
    self.hidden = h.detach()
    return h


def written_attribute(self: Any, h: Tensor) -> Tensor:
    self.total += h.detach().sum(0)
    return h * self.total  # type: ignore[no-any-return]


def written_in_a_tuple(self: Any, h: Tensor) -> Tensor:
    first, (second,) = self.state
    first.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    second += 1
    return h * first * second  # type: ignore[no-any-return]


class Pair(NamedTuple):
    mean: Tensor
    number: Tensor


def written_in_a_named_tuple(self: Any, h: Tensor) -> Tensor:
    self.pair.mean.add_(h.detach().mean(0))
    return h * self.pair.mean  # type: ignore[no-any-return]


def generators_in_containers(self: Any, h: Tensor) -> Tensor:
    generator, others = self.generators
    drawn = others["Python"].random() + others["numpy"][0].random()
    return h * torch.rand(C, generator=generator) * drawn  # type: ignore[no-any-return]


def cached_once(self: Any, h: Tensor) -> Tensor:
    if not hasattr(self, "cached"):
        self.cached = h.detach().clone()
        return h * 2
    return h * self.cached  # type: ignore[no-any-return]


def stochastic_depth(_: Any, h: Tensor) -> Tensor:
    # normal() keeps a second number for its next call, in another part of the state.
    return h * (random.random() < 0.5) + h.sin() * float(np.random.normal())


class Rrelu(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(super().forward(x), training=self.training)


def _rrelu(h: Tensor) -> Tensor:
    return torch.rrelu(h, 0.1, 0.9, True)


class RreluBeside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _rrelu(super().forward(x))


class RreluHeld(nn.Linear):
    def __init__(self) -> None:
        super().__init__(C, C)
        self.act = F.rrelu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x), training=True)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, C)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(C, C)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(C, C)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(C, C)),
    "running mean": block(running_mean, running=Buffer(torch.ones, C)),
    "replaced buffer": block(replaced_buffer, running=Buffer(torch.ones, C)),
    "views of a buffer": ViewsOfABuffer,
    "counter": block(counter, calls=int, last=tuple),
    "hidden state": block(hidden, hidden=lambda: None),
    "written attribute": block(written_attribute, total=lambda: torch.zeros(C)),
    "written in a tuple": block(
        written_in_a_tuple, state=lambda: (torch.ones(C), (torch.zeros(C),))
    ),
    "written in a named tuple": block(
        written_in_a_named_tuple, pair=lambda: Pair(torch.ones(C), torch.zeros(1))
    ),
    "generators in containers": block(
        generators_in_containers,
        generators=lambda: [
            torch.Generator().manual_seed(3),
            {"Python": random.Random(3), "numpy": (np.random.default_rng(3),)},
        ],
    ),
    "cached once": block(cached_once),
    "own generator": block(
        lambda self, h: h * torch.rand(C, generator=self.generator),
        generator=lambda: torch.Generator().manual_seed(3),
    ),
    "own Python": block(lambda self, h: h * self.own.random(), own=lambda: random.Random(3)),
    "own numpy": block(
        lambda self, h: h * self.own.random() * self.old.rand(),
        own=lambda: np.random.default_rng(3),
        old=lambda: np.random.RandomState(3),
    ),
    "stochastic depth": block(stochastic_depth),
    "rrelu": lambda: Rrelu(C, C),
    "rrelu beside": lambda: RreluBeside(C, C),
    "rrelu held": RreluHeld,
    "RReLU": lambda: nn.Sequential(nn.Linear(C, C), nn.RReLU()),
    # Writes its weight in each forward.
    "MaxNorm": block(
        lambda self, h: h * self.embedding(torch.arange(6)),
        embedding=lambda: nn.Embedding(6, C, max_norm=0.5),
    ),
    "LSTM": block(
        lambda self, h: self.rnn(h.unsqueeze(1))[0].squeeze(1),
        rnn=lambda: nn.LSTM(C, C, num_layers=2, dropout=0.3),
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(C, 2, 8, dropout=0.2),
}  # fmt: skip

RRELUS = {"RReLU", "rrelu", "rrelu beside", "rrelu held"}
RIGHT_WITHOUT = {"orthogonal", "MaxNorm", "LSTM", "TransformerEncoderLayer"}


def outcome(make: Callable[[], nn.Module], seed: int, call: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients, buffers and random numbers after two steps in which the block runs twice."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old parametrizations are deprecated
        block = make()
    gradients: list[Any] = []
    for _ in range(2):
        x = torch.randn(6, C, requires_grad=True)
        block.zero_grad()
        for scale in (1, 2):
            call(block, scale * x).sin().sum().backward()
        gradients += [x.grad, *(p.grad for p in block.parameters())]
    drawn = [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]
    attributes = [torch.tensor(float(getattr(block, "calls", 0)))]
    return [*gradients, *(b.clone() for b in block.buffers()), *drawn, *attributes]


def same(one: list[Tensor], other: list[Tensor], *, reentrant: bool) -> bool:
    """Bit for bit; the old mode runs without grad first, where torch may take another kernel."""
    rtol, atol = (1e-5, 1e-6) if reentrant else (0.0, 0.0)
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in zip(one, other, strict=True)
    )


def plainly(block: Any, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["recommended", "reentrant"])


@MODES
@pytest.mark.parametrize("name", BLOCKS)
def test_a_checkpointed_block_computes_what_it_computes_without(name: str, reentrant: bool) -> None:
    """Whether torch's function or ours is called, for a module and for a lambda."""

    def by(function: Any, f: Any, x: Tensor) -> Tensor:
        return function(f, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def by_lambda(f: Any, x: Tensor) -> Tensor:
        return by(checkpoint, lambda y: f(y), x)  # noqa: PLW0108

    torchs, ours = functools.partial(by, checkpoint), functools.partial(by, safe_checkpoint)
    differs_without = False
    for seed in range(2):
        expected = outcome(BLOCKS[name], seed, plainly)
        bare = outcome(BLOCKS[name], seed, torchs)
        differs_without |= not same(bare, expected, reentrant=reentrant)
        with torchguard.install("recompute"):
            found = [outcome(BLOCKS[name], seed, way) for way in (torchs, by_lambda)]
        found.append(outcome(BLOCKS[name], seed, ours))
        assert all(same(each, expected, reentrant=reentrant) for each in found)
    right = RIGHT_WITHOUT | (RRELUS if reentrant else set())
    assert differs_without is (name not in right), "the comparison above can fail"
