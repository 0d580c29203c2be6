"""transaction(skip_nonfinite=True): a step that is not finite changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchguard
from support.fault_injection import bits

INFINITY, NAN = float("inf"), float("nan")
FUSED = {
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
}


class HostReads(TorchDispatchMode):
    """Collect the operators that wait for the device: ``item()``, ``if tensor:``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def training(name: str, **flags: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    options = FUSED.get(name, {"lr": 0.1})
    optimizer = getattr(torch.optim, name)(model.parameters(), **options, **flags)
    return model, optimizer, torchguard.transaction(model, optimizer, skip_nonfinite=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, scale: float = 1.0
) -> None:
    with step:
        (model(torch.randn(4, 3)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(bits([model.state_dict(), optimizer.state_dict()["state"]]))


@pytest.mark.parametrize("scale", [NAN, INFINITY])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", FUSED)
class TestFused:
    def test_skips_without_a_host_read(self, name: str, scale: float, first: bool) -> None:
        model, optimizer, step = training(name, fused=True)
        if not first:
            train(model, optimizer, step)
        before = everything(model, optimizer)
        reads = HostReads()
        with reads:
            train(model, optimizer, step, scale)
        # The Adagrad of torch 2.6 does not say that its kernel reads found_inf, so the host does.
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        assert len(reads.found) == (0 if on_device else 1)
        assert on_device or name == "Adagrad"
        assert ("the host waits for the device" in step.guarantee) != on_device
        now = everything(model, optimizer)
        if first:  # its state is made, as a step that is taken makes it, and holds zeros
            assert now[0] == before[0]
            assert all(
                not value.any() or name == "SGD" or key == "sum"
                for state in optimizer.state.values()
                for key, value in state.items()
            )
        else:
            assert now == before
        assert step.stats().skipped == 1
        assert not hasattr(optimizer, "found_inf")

    def test_goes_on_as_if_the_batch_had_not_been(
        self, name: str, scale: float, first: bool
    ) -> None:
        plain, guarded = training(name, fused=True), training(name, fused=True)
        for model, optimizer, step in (plain, guarded):
            torch.manual_seed(1)
            for number in range(3):
                if number == (0 if first else 1) and step is guarded[2]:
                    state = torch.get_rng_state()
                    train(model, optimizer, step, scale)
                    torch.set_rng_state(state)
                train(model, optimizer, step)
        assert everything(*plain[:2]) == everything(*guarded[:2])


@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "AdamW"])
@pytest.mark.parametrize("foreach", [True, False])
def test_others_are_skipped_by_a_host_read_and_the_guarantee_says_so(
    name: str, foreach: bool
) -> None:
    model, optimizer, step = training(name, foreach=foreach)
    train(model, optimizer, step)
    before = everything(model, optimizer)
    reads = HostReads()
    with reads:
        train(model, optimizer, step, NAN)
    assert len(reads.found) > 0
    assert everything(model, optimizer) == before
    assert "the host waits for the device" in step.guarantee
    assert "the host waits" not in training("AdamW", fused=True)[2].guarantee


def test_the_gradients_of_a_skipped_step_are_there_after_it() -> None:
    model, optimizer, step = training("AdamW", foreach=False)
    with step:
        (model(torch.randn(4, 3)).mean() * NAN).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        assert all(
            p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True)
        )


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": False}])
def test_a_skipped_step_that_fails_afterwards_is_undone(flags: dict[str, bool]) -> None:
    model, optimizer, step = training("AdamW", **flags)
    train(model, optimizer, step)
    before = everything(model, optimizer)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError), step:
        (model(torch.randn(4, 3)).mean() * NAN).backward()
        optimizer.step()
    handle.remove()
    assert everything(model, optimizer)[0] == before[0]
    assert not hasattr(optimizer, "found_inf")
    train(model, optimizer, step)


def test_finite_steps_equal_the_plain_loop() -> None:
    plain, guarded = training("AdamW", fused=True), training("AdamW", fused=True)
    for (model, optimizer, step), used in ((plain, None), (guarded, guarded[2])):
        torch.manual_seed(1)
        for _ in range(3):
            if used is None:
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                train(model, optimizer, step)
    assert everything(*plain[:2]) == everything(*guarded[:2])
    assert guarded[2].stats().skipped == 0


def test_large_gradients_are_finite() -> None:
    model, optimizer, step = training("AdamW", fused=True)
    before = everything(model, optimizer)
    with step:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e38)  # the sum of squares overflows
        optimizer.step()
    assert everything(model, optimizer) != before
    assert step.stats().skipped == 0


def test_a_loss_that_is_not_finite_is_enough_in_run() -> None:
    model, optimizer, step = training("AdamW", fused=True)
    before = everything(model, optimizer)[0]
    step.run(lambda x: model(x).mean() + INFINITY, torch.randn(4, 3))  # its gradient is finite
    assert everything(model, optimizer)[0] == before
    assert step.stats().skipped == 1
    step.run(lambda x: model(x).mean(), torch.randn(4, 3))
    assert step.stats().skipped == 1


def test_a_buffer_that_is_not_contiguous_goes_back_too() -> None:
    model, optimizer, _ = training("AdamW", fused=True)
    model.register_buffer("odd", torch.zeros(2, 3).t())
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    with step:
        model.get_buffer("odd").add_(1)
        (model(torch.randn(4, 3)).mean() * NAN).backward()
        optimizer.step()
    assert not model.get_buffer("odd").any()


def test_a_scaler_that_skips_by_itself_is_refused() -> None:
    model, optimizer, _ = training("AdamW", fused=True)
    with pytest.raises(ValueError, match="skip_nonfinite=True with a GradScaler"):
        torchguard.transaction(model, optimizer, torch.amp.GradScaler("cpu"), skip_nonfinite=True)
