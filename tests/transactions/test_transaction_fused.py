"""A fused step that raises: which of its kernels have run is known, or the error says so."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchguard
from support.small_training import bits
from support.training import Failure

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "Adam, no beta": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.0), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD, lr 0": lambda p: torch.optim.SGD(p, lr=0.0, fused=True),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": torch.zeros_like,
    "one": torch.ones_like,
    "tiny": lambda p: torch.full_like(p, 1e-30),
    "nan": lambda p: torch.full_like(p, float("nan")),
}


class AfterKernel(TorchDispatchMode):
    """Raise after the n-th operator whose name begins so has run; with ``torn`` on a part only."""

    def __init__(self, name: str, number: int = 0, *, torn: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.left, self.torn = name, number, torn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = func.__name__.startswith(self.name)
        if here and self.left == 0 and self.torn:
            func(*[each[:2] if isinstance(each, list) else each for each in args], **kwargs)
            raise Failure
        result = func(*args, **(kwargs or {}))
        if here:
            self.left -= 1
            if self.left < 0:
                raise Failure
        return result


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    """Two groups, the second one with two dtypes: three kernels."""
    torch.manual_seed(seed)
    return [
        nn.Parameter(torch.randn(3, 2)),
        nn.Parameter(torch.randn(4)),
        nn.Parameter(torch.randn(2)),
        nn.Parameter(torch.randn(2).double()),
    ]


def made(name: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = parameters_of()
    return parameters, OPTIMIZERS[name]([{"params": parameters[:2]}, {"params": parameters[2:]}])


def set_gradients(parameters: list[nn.Parameter], gradient: str = "one") -> None:
    for parameter in parameters:
        parameter.grad = GRADIENTS[gradient](parameter.detach())


def everything(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Any:
    return bits([[each.detach() for each in parameters], optimizer.state_dict()["state"]])


def trained(name: str, gradient: str, steps: int) -> Any:
    """What that many steps of plain torch leave."""
    parameters, optimizer = made(name)
    for _ in range(steps):
        set_gradients(parameters, gradient)
        optimizer.step()
    return everything(parameters, optimizer)


@pytest.mark.parametrize("kernel", [0, 1, 2])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_that_ran_and_raises_is_distinguished_from_one_that_did_not(
    name: str, gradient: str, kernel: int
) -> None:
    """Also where it left every bit as it was: its step is counted all the same."""
    parameters, optimizer = made(name)
    step = torchguard.transaction([], optimizer)
    for number in range(3):
        set_gradients(parameters, gradient)
        if number == 1:
            with pytest.raises(Failure), step, AfterKernel("_fused_", kernel):
                optimizer.step()
            assert step.committed  # one of three kernels has run, so the step counts
        else:
            with step:
                optimizer.step()
    assert everything(parameters, optimizer) == trained(name, gradient, 3)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        *itertools.product(["AdamW", "Adagrad"], ["_fused_", "_foreach_add_", "_foreach_sub_"]),
        ("SGD, momentum", "_fused_"),  # it has no step counter
    ],
)
def test_a_step_that_overflowed_and_raises_changes_nothing(name: str, operator: str) -> None:
    """With found_inf the kernel runs and leaves everything as it was, step counters too."""
    for kernel in range(3):
        parameters, optimizer = made(name)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        step = torchguard.transaction([], optimizer, scaler)
        set_gradients(parameters)
        scaler.scale(torch.ones(()))
        with step:
            scaler.step(optimizer)
            scaler.update()
        before = everything(parameters, optimizer)
        set_gradients(parameters, "nan")
        fault = AfterKernel(operator, kernel)
        with contextlib.suppress(Failure), step, fault:
            scaler.step(optimizer)
        # The Adagrad of torch 2.6 does not say that its kernel reads found_inf, so the scaler
        # reads it and calls no step().
        assert fault.left < 0 or name == "Adagrad"
        assert everything(parameters, optimizer) == before
        assert step.committed == (fault.left >= 0)
        if step.committed:
            scaler.update()
        set_gradients(parameters, "nan")
        with step:
            scaler.step(optimizer)
            scaler.update()
        assert everything(parameters, optimizer) == before


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "Adagrad"])
def test_a_kernel_that_has_written_a_part_is_never_silent(name: str) -> None:
    parameters, optimizer = made(name)
    step = torchguard.transaction([], optimizer)
    set_gradients(parameters)
    with step:
        optimizer.step()
    with pytest.raises(torchguard.UnrecoverableStepError, match="within one of its fused kernels"):
        with step, AfterKernel("_fused_", torn=True):
            optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_of_the_optimizer_do_not_see_the_witnesses(name: str) -> None:
    """Nor does what comes after: the same parameters, state and attributes as without."""
    seen: list[list[Any]] = []
    for guarded in (False, True):
        parameters, optimizer = made(name)
        found: list[Any] = []

        def look(optimizer: Any, *_: Any, found: list[Any] = found) -> None:
            found.append([len(group["params"]) for group in optimizer.param_groups])
            found.append(bits(optimizer.state_dict()["state"]))

        optimizer.register_step_post_hook(look)
        step: Any = torchguard.transaction([], optimizer) if guarded else contextlib.nullcontext()
        for _ in range(2):
            set_gradients(parameters)
            with step:
                optimizer.step()
            found.append([sorted(vars(optimizer)), len(optimizer.state)])
        seen.append(found)
    assert seen[1] == seen[0]


def test_gradients_that_a_hook_has_taken_away_are_not_stepped() -> None:
    """The lists are those of the gradients that there are when the step begins."""
    ends = []
    for guarded in (False, True):
        parameters, optimizer = made("AdamW")
        step = torchguard.transaction([], optimizer)
        with step:
            set_gradients(parameters)
            optimizer.step()
        optimizer.register_step_pre_hook(lambda *_: setattr(parameters[0], "grad", None))  # noqa: B023
        fault: Any = AfterKernel("_fused_") if guarded else contextlib.nullcontext()
        with contextlib.suppress(Failure), step, fault:
            optimizer.step()
        assert step.committed
        ends.append(everything(parameters, optimizer))
    assert ends[1] == ends[0]


def move_to_the_other_group(_: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())
    optimizer.param_groups[1]["lr"] = 0.7


CHANGES: list[Callable[..., Any]] = [
    lambda p, o: o.param_groups[0].update(lr=0.5),
    lambda p, o: o.param_groups[0].update(amsgrad=True),
    lambda p, o: o.state[p[0]].update(exp_avg=torch.ones_like(p[0])),
    lambda p, o: setattr(p[1], "grad", None),
    lambda p, o: setattr(p[0], "grad", torch.ones(2, 3).cumsum(0).t()),
    lambda p, o: o.load_state_dict(o.state_dict()),
    lambda p, o: o.add_param_group({"params": [p.pop()]}),
    lambda p, o: setattr(p[0], "data", torch.ones(2, 3).cumsum(0).t()),
    move_to_the_other_group,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_reaches_the_kernel(change: Callable[..., Any]) -> None:
    """The lists of the last step are taken for the next one only where they are still right."""
    results = []
    for guarded in (False, True):
        parameters = parameters_of()
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=guarded)
        parameters.append(nn.Parameter(torch.ones(2)))  # of no group yet
        step = torchguard.transaction([], optimizer)
        for number in range(4):
            torch.manual_seed(number)
            for each in parameters:
                each.grad = torch.randn(each.shape, dtype=each.dtype)
            with step if guarded else contextlib.nullcontext():
                if number == 1:
                    for each in parameters[:4]:  # amsgrad itself can't begin in the middle
                        optimizer.state[each]["max_exp_avg_sq"] = torch.zeros_like(each)
                if number == 3:
                    change(parameters, optimizer)
                optimizer.step()
        results.append([each.detach().contiguous() for each in parameters])
    torch.testing.assert_close(results[1], results[0])
