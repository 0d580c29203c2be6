"""Nothing here holds a weak reference to a parameter, with which swap_tensors refuses it."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchguard

X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def stepped(net: nn.Module, *, fail: bool = False, **options: Any) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step = torchguard.transaction(net, optimizer, **options)
    with contextlib.suppress(ValueError), step:
        net(X).sum().backward()
        if fail:
            raise ValueError
        optimizer.step()
        optimizer.zero_grad()
    return step


def trained(function: Any) -> Any:
    for _ in range(2):
        function(X).sum().backward()
    return function


def rolled_back(net: nn.Module) -> None:
    with contextlib.suppress(ValueError), torchguard.rollback_on_error(net, data=True):
        net(X).sum().backward()
        raise ValueError


def recomputed(net: nn.Module) -> None:
    torchguard.safe_checkpoint(net, X, use_reentrant=False).sum().backward()


USES: dict[str, Callable[[nn.Module], Any]] = {
    "transaction": stepped,
    "transaction that failed": lambda net: stepped(net, fail=True),
    "transaction with copies": lambda net: stepped(net, undo="copy"),
    "transaction with a gate": lambda net: stepped(net, skip_nonfinite=True),
    "transaction, also=": lambda net: stepped(net, also=list(net.parameters())),
    "verified": lambda net: trained(torchguard.verified(backend="aot_eager")(net)),
    "verified function": lambda net: trained(
        torchguard.verified(lambda x: net(x) * 1, backend="aot_eager")
    ),
    "verified, against Python": lambda net: trained(
        torchguard.verified(net, backend="eager", against="python")
    ),
    "rollback_on_error": rolled_back,
    "safe_checkpoint": recomputed,
}

SWAPS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda net: net.to(torch.float64),
    "load": lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}),
}


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@functools.cache
def _torch_holds_weak_references() -> bool:
    """Whether compiled code does, or what 2.15 leaves in the graph that is checked: a limit."""
    net = Net()
    torch.compile(net, backend="eager")(torch.ones(2, 3))
    return torch.__version__ >= "2.15" or any(map(weakref.getweakrefcount, net.parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.usefixtures("swapping")
def test_parameters_can_be_swapped_while_a_guard_lives(
    use: Callable[[nn.Module], Any],
    swap: Callable[[nn.Module], Any],
    request: pytest.FixtureRequest,
) -> None:
    torch._dynamo.reset()
    if "verified" in request.node.name and _torch_holds_weak_references():
        pytest.skip("what this torch makes of a parameter holds a weak reference to it")
    net = Net()
    kept = use(net)
    gc.collect()
    assert not any(map(weakref.getweakrefcount, net.parameters()))
    swap(net)
    del kept
