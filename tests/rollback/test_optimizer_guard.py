"""install("optimizer"): a step() that raises has changed nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchguard
from support.small_training import FailAt, InjectedError
from torchguard.transactions import hooks

KINDS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "fused, transposed": {"fused": True},
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
    "Adam with amsgrad": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
}


def made(name: str, kind: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two groups, the second with two dtypes: three kernels."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    parameters += [nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2).double())]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    optimizer: torch.optim.Optimizer = OPTIMIZERS[name](groups, **KINDS[kind])
    return parameters, optimizer


def give_gradients(parameters: list[nn.Parameter], seed: int, kind: str) -> None:
    """Transposed ones the fused kernels are given as copies."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if "transposed" in kind and gradient.dim() == 2:
            gradient = gradient.t().contiguous().t()
        parameter.grad = gradient


def seen(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[object]:
    found: list[object] = [each.detach().tolist() for each in parameters]
    states = optimizer.state.values()
    found += [{k: v.tolist() if torch.is_tensor(v) else v for k, v in s.items()} for s in states]
    return found


def plain(name: str, kind: str, steps: int) -> list[object]:
    parameters, optimizer = made(name, kind)
    for seed in range(steps):
        give_gradients(parameters, seed, "contiguous")
        optimizer.step()
    return seen(parameters, optimizer)


@pytest.mark.parametrize("failing", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_operator_of_a_step_fails_in_turn(name: str, kind: str, failing: int) -> None:
    """Wherever the step raises, it has happened wholly or not at all; the next ones go on."""
    before, after, last = (plain(name, kind, steps) for steps in (failing, failing + 1, 3))
    outcomes = []
    for place in itertools.count():
        with torchguard.install("optimizer"):
            parameters, optimizer = made(name, kind)
            if failing:
                give_gradients(parameters, 0, kind)
                optimizer.step()
            give_gradients(parameters, failing, kind)
            gradients = [each.grad for each in parameters]
            try:
                with FailAt(place):
                    optimizer.step()
            except InjectedError:
                now = seen(parameters, optimizer)
            else:
                break  # the step has fewer operators
            assert now in (before, after), f"operator {place}"
            assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
            outcomes.append("nothing" if now == before else "whole")
            for seed in range(failing if now == before else failing + 1, 3):
                give_gradients(parameters, seed, kind)
                optimizer.step()
        assert seen(parameters, optimizer) == last, f"operator {place}"
    assert outcomes[0] == "nothing"
    # Three kernels: once the first has run the others are run after it. The last operator of any
    # step is the profiler's, which comes after it.
    assert (outcomes.count("whole") > 1) == ("fused" in kind)


def test_optimizers_made_before_and_after_are_guarded_until_uninstall() -> None:
    """A class of one's own too; after uninstall() a step is torch's again."""

    class Own(torch.optim.SGD):
        """Hooked when its first instance is made."""

    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1).expand(3))]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    before = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    with torchguard.install("optimizer"):
        after = Own(parameters, lr=1.0, foreach=False)
        for optimizer in (before, after):
            with pytest.raises(RuntimeError, match="single memory location"):
                optimizer.step()
            assert parameters[0].tolist() == [0, 0, 0]
    for optimizer in (before, after):
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert parameters[0].tolist() == [-2, -2, -2]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(64), r"(?s)exp_avg of param_groups.*torch\.Size\(\[4\]\)"),
        (torch.zeros(1).expand(64), "share memory"),
    ],
    ids=["moments of another shape", "an expanded parameter"],
)
def test_a_fused_kernel_that_would_write_past_memory_is_refused(
    parameter: torch.Tensor, message: str
) -> None:
    parameter = nn.Parameter(parameter)
    parameter.grad = torch.ones(64)
    optimizer = torch.optim.Adam([parameter], fused=True)
    if "exp_avg" in message:
        moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    with torchguard.install("optimizer"):
        with pytest.raises(torchguard.errors.OptimizerStateError, match=message):
            optimizer.step()
    assert parameter.tolist() == [0] * 64


def test_copies_that_are_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs as torch runs it, and a warning says so once."""
    monkeypatch.setenv(hooks.MAX_BYTES, "1")
    parameters, optimizer = made("SGD", "loop")
    give_gradients(parameters, 0, "loop")
    with torchguard.install("optimizer"):
        with pytest.warns(RuntimeWarning, match=hooks.MAX_BYTES):
            optimizer.step()
        optimizer.step()


def test_a_hook_of_other_code_stays() -> None:
    calls: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        with torchguard.install("optimizer"):
            plain("SGD", "loop", 1)
        plain("SGD", "loop", 1)
    finally:
        handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_recorded_step_is_the_same_graph(mode: Any) -> None:
    def step(start: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient
        torch.optim.SGD([parameter], lr=0.1, foreach=False).step()
        return parameter.detach()

    def recorded() -> str:
        graph: Any = make_fx(step, tracing_mode=mode)(torch.ones(3), torch.ones(3))
        return str(graph.code)

    bare = recorded()
    with torchguard.install("optimizer"):
        assert recorded() == bare


def test_a_closure_of_lbfgs_fails_and_the_step_has_changed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(failing: int) -> list[float]:
        weight, calls = nn.Parameter(torch.tensor([3.0, -2.0])), itertools.count(1)
        optimizer = torch.optim.LBFGS([weight], lr=0.1)

        def closure() -> Any:
            if next(calls) == failing:
                raise InjectedError
            optimizer.zero_grad()
            loss = (weight**4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        before = seen([weight], optimizer)
        if failing:
            with pytest.raises(InjectedError):
                optimizer.step(closure)
            assert seen([weight], optimizer) == before
        optimizer.step(closure)
        return weight.tolist()

    expected = train(0)
    with torchguard.install("optimizer"):
        assert train(failing=25) == expected
        monkeypatch.setenv(hooks.MAX_BYTES, "1000")  # two vectors for each of 100 steps: 1624
        with pytest.warns(RuntimeWarning, match="LBFGS.step.. is not undone"):
            train(0)
