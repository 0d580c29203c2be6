"""A table of blocks: checkpointed under the guard each computes what it does without."""

# ruff: noqa: N812, NPY002, S311  the global generators are what is tested
from __future__ import annotations

import functools
import random
import warnings
from typing import TYPE_CHECKING, Any

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
    """A linear layer and what a subclass does with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.setup()

    def setup(self) -> None:
        """Add what :meth:`use` needs."""

    def use(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x)).tanh()


class RunningMean(Block):
    running: Tensor

    def setup(self) -> None:
        self.register_buffer("running", torch.ones(C))

    def use(self, h: Tensor) -> Tensor:
        self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * self.running


class ReplacedBuffer(RunningMean):
    def use(self, h: Tensor) -> Tensor:
        self.running = 0.9 * self.running + h.detach().mean(0)
        return h * self.running


class ViewsOfABuffer(Block):
    statistics: Tensor

    def setup(self) -> None:
        self.register_buffer("statistics", torch.ones(2, C))
        self.mean, self.turned = self.statistics[0], self.statistics.t()

    def use(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * self.statistics[0] * self.turned[:, 0]


class Codebook(Block):
    codes: Tensor

    def setup(self) -> None:
        self.register_buffer("codes", torch.randn(8, C))

    def use(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        self.codes.data.index_add_(0, nearest, 0.1 * (h.detach() - quantized))
        return h * self.codes[nearest]


class Counter(Block):
    def setup(self) -> None:
        self.calls = 0

    def use(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class Hidden(Block):
    hidden: Tensor | None = None

    def use(self, h: Tensor) -> Tensor:
        h = h if self.hidden is None else h + self.hidden
        self.hidden = h.detach()
        return h


class WrittenAttribute(Block):
    def setup(self) -> None:
        self.total = torch.zeros(C)

    def use(self, h: Tensor) -> Tensor:
        self.total += h.detach().sum(0)
        return h * self.total


class States(Block):
    def setup(self) -> None:
        self.states: tuple[Tensor, ...] = ()

    def use(self, h: Tensor) -> Tensor:
        self.states = (*self.states[-1:], h.detach())
        return h * sum(self.states)


class CachedOnce(Block):
    def use(self, h: Tensor) -> Tensor:
        if not hasattr(self, "cached"):
            self.cached = h.detach().clone()
            return h * 2
        return h * self.cached


class OwnGenerator(Block):
    def setup(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def use(self, h: Tensor) -> Tensor:
        return h * torch.rand(C, generator=self.generator)


class OwnPython(Block):
    def setup(self) -> None:
        self.random = random.Random(3)

    def use(self, h: Tensor) -> Tensor:
        return h * self.random.random()


class OwnNumpy(Block):
    def setup(self) -> None:
        self.random = np.random.default_rng(3)
        self.old = np.random.RandomState(3)

    def use(self, h: Tensor) -> Tensor:
        return h * self.random.random() * self.old.rand()


class StochasticDepth(Block):
    def use(self, h: Tensor) -> Tensor:
        return h * (random.random() < 0.5) + h.sin() * random.random()


class Augmented(Block):
    def use(self, h: Tensor) -> Tensor:
        return h * float(np.random.rand()) + h * float(np.random.normal())


class Rrelu(Block):
    def use(self, h: Tensor) -> Tensor:
        return F.rrelu(h, training=self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x))


def _rrelu(h: Tensor) -> Tensor:
    return torch.rrelu(h, 0.1, 0.9, True)


class RreluBeside(Rrelu):
    def use(self, h: Tensor) -> Tensor:
        return _rrelu(h)


class RreluHeld(Rrelu):
    def setup(self) -> None:
        self.act = F.rrelu

    def use(self, h: Tensor) -> Tensor:
        return self.act(h, training=True)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(C, C, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


class MaxNorm(nn.Module):
    """Writes its weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, C, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.embedding(torch.arange(6))  # type: ignore[no-any-return]


class Shaped(nn.Module):
    """A module on input of another shape, between two linear layers."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.module, self.last = nn.Linear(C, C), module, nn.Linear(C, C)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.module(h.reshape(self.shape)).reshape(h.shape))  # type: ignore[no-any-return]


def _shaped(kind: Any, shape: tuple[int, ...], *args: Any, **options: Any) -> Any:
    return lambda: Shaped(kind(*args, **options), shape)


_1D, _2D, _3D = (2, C, 3), (2, C, 3, 1), (2, C, 3, 1, 1)
_TRACKED = {"affine": True, "track_running_stats": True}
NORMS = {
    "BatchNorm1d": _shaped(nn.BatchNorm1d, _1D, C),
    "BatchNorm2d": _shaped(nn.BatchNorm2d, _2D, C),
    "BatchNorm3d": _shaped(nn.BatchNorm3d, _3D, C),
    "InstanceNorm1d": _shaped(nn.InstanceNorm1d, _1D, C, **_TRACKED),
    "InstanceNorm2d": _shaped(nn.InstanceNorm2d, _2D, C, **_TRACKED),
    "InstanceNorm3d": _shaped(nn.InstanceNorm3d, _3D, C, **_TRACKED),
    "LayerNorm": _shaped(nn.LayerNorm, (6, C), C),
    "RMSNorm": _shaped(nn.RMSNorm, (6, C), C),
    "GroupNorm": _shaped(nn.GroupNorm, _1D, 2, C),
    "LocalResponseNorm": _shaped(nn.LocalResponseNorm, _1D, 2),
    "CrossMapLRN2d": _shaped(nn.CrossMapLRN2d, _2D, 2),
}
DROPOUTS = {
    "Dropout": _shaped(nn.Dropout, (6, C), 0.4),
    "Dropout1d": _shaped(nn.Dropout1d, _1D, 0.4),
    "Dropout2d": _shaped(nn.Dropout2d, _2D, 0.4),
    "Dropout3d": _shaped(nn.Dropout3d, _3D, 0.4),
    "AlphaDropout": _shaped(nn.AlphaDropout, (6, C), 0.4),
    "FeatureAlphaDropout": _shaped(nn.FeatureAlphaDropout, _2D, 0.4),
}
PARAMETRIZED: dict[str, Any] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(C, C)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(C, C)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(C, C)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(C, C)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(C, C)),
}
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **NORMS,
    **DROPOUTS,
    **PARAMETRIZED,
    **{
        kind.__name__: kind
        for kind in (
            RunningMean, ReplacedBuffer, ViewsOfABuffer, Codebook, Counter, Hidden,
            WrittenAttribute, States, CachedOnce, OwnGenerator, OwnPython, OwnNumpy,
            StochasticDepth, Augmented, Rrelu, RreluBeside, RreluHeld, Attention, MaxNorm,
        )
    },
    **{kind.__name__: functools.partial(Recurrent, kind) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    "RReLU": lambda: nn.Sequential(nn.Linear(C, C), nn.RReLU()),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(C, 2, 8, dropout=0.2),
    "Linear": lambda: nn.Linear(C, C),
}  # fmt: skip

WRONG_WITHOUT = {
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d",
    "InstanceNorm3d", "spectral_norm", "old spectral_norm", "RunningMean", "ReplacedBuffer",
    "ViewsOfABuffer", "Codebook", "Counter", "Hidden", "WrittenAttribute", "States", "CachedOnce",
    "OwnGenerator", "OwnPython", "OwnNumpy", "StochasticDepth", "Augmented",
}  # fmt: skip
RRELUS = {"RReLU", "Rrelu", "RreluBeside", "RreluHeld"}


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
    ways: list[Callable[..., Tensor]] = [
        lambda f, x: checkpoint(f, x, use_reentrant=reentrant),
        lambda f, x: checkpoint(lambda y: f(y), x, use_reentrant=reentrant),  # noqa: PLW0108
    ]
    for seed in range(3):
        expected = outcome(BLOCKS[name], seed, plainly)
        with torchguard.install("recompute"):
            for way in ways:
                assert same(outcome(BLOCKS[name], seed, way), expected, reentrant=reentrant)
        ours = outcome(
            BLOCKS[name], seed, lambda f, x: safe_checkpoint(f, x, use_reentrant=reentrant)
        )
        assert same(ours, expected, reentrant=reentrant)


@MODES
def test_without_the_guard_these_blocks_differ(reentrant: bool) -> None:
    """The table above can fail: which rows it would fail in."""
    differ = {
        name
        for name, make in BLOCKS.items()
        for seed in range(3)
        if not same(
            outcome(make, seed, plainly),
            outcome(make, seed, lambda f, x: checkpoint(f, x, use_reentrant=reentrant)),
            reentrant=reentrant,
        )
    }
    assert differ == (WRONG_WITHOUT if reentrant else WRONG_WITHOUT | RRELUS)


def test_the_table_has_every_norm_and_dropout_of_torch() -> None:
    modules = torch.nn.modules
    kinds = {
        name
        for module in (modules.batchnorm, modules.instancenorm, modules.normalization,
                       modules.dropout)
        for name in module.__all__
    }  # fmt: skip
    # SyncBatchNorm runs on a GPU only, and a lazy one is another class from its first call on.
    kinds = {name for name in kinds if "Lazy" not in name} - {"SyncBatchNorm"}
    assert kinds == {*NORMS, *DROPOUTS}
    assert {*parametrizations.__all__} <= {*PARAMETRIZED}
