"""install("recompute") and safe_checkpoint(): what a second run finds, and what it leaves."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import torchguard
from torchguard import safe_checkpoint

MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["recommended", "reentrant"])


def make(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4)
    return nn.Sequential(*layers)


def plainly(function: Any, *args: Any, **_: Any) -> Any:
    return function(*args)


class Step:
    """Two blocks and an input, and how the blocks are called."""

    def __init__(self, call: Any, reentrant: bool) -> None:
        self.one, self.other = make(), make(1)
        self.x = torch.randn(5, 4, requires_grad=True)
        self.call = functools.partial(call, use_reentrant=reentrant)
        self.is_plain = call is plainly
        self.reentrant = reentrant

    def results(self) -> list[Tensor]:
        blocks = [self.one, self.other]
        parameters = [p for block in blocks for p in block.parameters()]
        gradients = [p.grad for p in (self.x, *parameters) if p.grad is not None]
        buffers = [buffer.double() for block in blocks for buffer in block.buffers()]
        return [*gradients, *buffers, torch.rand(2)]


def nested(step: Step) -> None:
    step.call(
        lambda x: step.call(step.other, step.call(step.one, x)).sin(), step.x
    ).sum().backward()


def backward_twice(step: Step) -> None:
    loss = step.call(step.one, step.x).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_in_the_order_of_forward(step: Step) -> None:
    losses = [step.call(step.one, scale * step.x).sin().sum() for scale in (1, 2)]
    for loss in losses:
        loss.backward()


def backward_in_another_thread(step: Step) -> None:
    loss = step.call(step.one, step.x).sin().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def under_autocast(step: Step) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = step.call(step.one, step.x)
    y.float().sin().sum().backward()


def evaluated_before_backward(step: Step) -> None:
    y = step.call(step.one, step.x)
    step.one.eval()
    y.sin().sum().backward()
    assert not step.one.training


def without_early_stop(step: Step) -> None:
    with set_checkpoint_early_stop(False):
        y = step.call(step.one, step.x)
    y.sin().sum().backward()


def in_sequence(step: Step) -> None:
    layers = [step.one, step.other, nn.Tanh()]
    if step.is_plain:
        y = nn.Sequential(*layers)(step.x)
    else:
        y = checkpoint_sequential(layers, 2, step.x, use_reentrant=step.reentrant)
    y.sin().sum().backward()


def without_grad(step: Step) -> None:
    with torch.no_grad():
        step.call(step.one, step.x)
    step.call(step.one, step.x).sum().backward()


def with_other_parameters(step: Step) -> None:
    outer = nn.Module()
    outer.one = step.one
    outer.forward = lambda x: step.call(step.one, x)
    named = outer.named_parameters()
    others = {name: (2 * p.detach()).requires_grad_() for name, p in named}
    torch.func.functional_call(outer, others, (step.x,)).sin().sum().backward()
    for name, parameter in outer.named_parameters():
        parameter.grad = others[name].grad


def buffer_replaced_before_backward(step: Step) -> None:
    step.one.eval()
    y = step.call(step.one, step.x)
    step.one[1].running_mean = step.one[1].running_mean + 3
    y.sin().sum().backward()


def tripled(*values: Any) -> Any:
    """Return what a hook returns: its last argument, an output or a tuple of inputs, tripled."""
    *_, last = values
    return tuple(3 * each for each in last) if isinstance(last, tuple) else 3 * last


def steered(_module: Any, _args: Any, _kwargs: Any, output: Tensor) -> Tensor:
    return output + 1


def hooks_and_a_forward_during_the_forward_only(step: Step) -> None:
    """Adapters that are switched on for a call, steering."""
    original = step.other[0].forward
    step.other[0].forward = lambda x: 3 * original(x)
    handles = [
        step.one[0].register_forward_hook(tripled),
        step.one[2].register_forward_pre_hook(tripled),
        step.one[4].register_forward_hook(steered, with_kwargs=True),
    ]
    y = step.call(lambda x: step.other[0](step.one(x)), step.x)
    for each in handles:
        each.remove()
    del step.other[0].forward
    y.sin().sum().backward()


def hooks_after_the_forward_only(step: Step) -> None:
    y = step.call(step.one, step.x)
    handle = step.one[0].register_forward_hook(tripled)
    y.sin().sum().backward()
    assert list(step.one[0]._forward_hooks.values()) == [tripled]
    handle.remove()
    assert not step.one[0]._forward_hooks


def a_hook_that_removes_itself(step: Step) -> None:
    def once(*values: Any) -> Any:
        handle.remove()
        return tripled(*values)

    handle = step.one[0].register_forward_hook(once)
    y = step.call(lambda x: step.one[0](step.one[0](x)).sin(), step.x)
    y.sin().sum().backward()
    assert not step.one[0]._forward_hooks


def a_child_replaced_during_the_forward_only(step: Step) -> None:
    child = step.one[0]
    step.one[0] = nn.Sequential(child, nn.Tanh())
    y = step.call(step.one, step.x)
    step.one[0] = child
    y.sin().sum().backward()


def raising_in_the_first_run(step: Step) -> None:
    def block(x: Tensor) -> Tensor:
        step.one(x)
        raise ValueError("first run")

    with pytest.raises(ValueError, match="first run"):
        step.call(block, step.x)
    step.call(step.one, step.x).sin().sum().backward()


@MODES
@pytest.mark.parametrize(
    "use",
    [
        nested, backward_twice, backward_in_the_order_of_forward, backward_in_another_thread,
        under_autocast, evaluated_before_backward, without_early_stop, in_sequence, without_grad,
        with_other_parameters, buffer_replaced_before_backward, raising_in_the_first_run,
        hooks_and_a_forward_during_the_forward_only, hooks_after_the_forward_only,
        a_hook_that_removes_itself, a_child_replaced_during_the_forward_only,
    ],
)  # fmt: skip
def test_each_use_computes_what_it_computes_without_checkpoint(use: Any, reentrant: bool) -> None:
    """Gradients, buffers, random numbers drawn afterwards; and torch alone gets them wrong."""

    def outcome(call: Any) -> list[Tensor]:
        step = Step(call, reentrant)
        use(step)
        return step.results()

    def equal(one: list[Tensor], other: list[Tensor]) -> bool:
        return len(one) == len(other) and all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True)
        )

    expected = outcome(plainly)
    try:
        assert not equal(outcome(checkpoint), expected)
    except torch.utils.checkpoint.CheckpointError:
        assert use in {evaluated_before_backward, a_child_replaced_during_the_forward_only}
    if use is not in_sequence:
        assert equal(outcome(safe_checkpoint), expected)
    with torchguard.install("recompute"):
        assert equal(outcome(checkpoint), expected)
        assert equal(outcome(safe_checkpoint), expected)


def selected() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def with_a_gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Backward inside of the first run calls for the second run before the first has ended."""
    h = model(x)
    (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h + slope  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [{"context_fn": selected}, {"debug": True}, {"determinism_check": "none"},
     {"preserve_rng_state": True}, {}],
    ids=lambda options: next(iter(options), "a gradient penalty"),
)  # fmt: skip
def test_options_of_checkpoint_are_its_own(options: dict[str, Any]) -> None:
    block: Any = nn.Module.__call__ if options else with_a_gradient_penalty
    outcomes = []
    for call in (plainly, safe_checkpoint):
        step = Step(functools.partial(call, **options), False)
        step.call(functools.partial(block, step.one), step.x).sin().sum().backward()
        outcomes.append(step.results())
    assert all(torch.allclose(a, b) for a, b in zip(*outcomes, strict=True))


@MODES
def test_a_second_run_that_raises_leaves_the_module_as_it_was(reentrant: bool) -> None:
    model = make()
    runs = []

    def block(x: Tensor) -> Tensor:
        y = model(x)
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("second run")
        return y.sin()  # type: ignore[no-any-return]

    x = torch.randn(5, 4, requires_grad=True)
    y = safe_checkpoint(block, x, use_reentrant=reentrant)
    after_forward = [(buffer, buffer.clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="second run"):
        y.sum().backward()
    for now, (buffer, values) in zip(model.buffers(), after_forward, strict=True):
        assert now is buffer
        assert torch.equal(now, values)
    assert torch.equal(torch.get_rng_state(), state)


@MODES
def test_buffers_are_swapped_and_not_written(reentrant: bool) -> None:
    """What others have saved of a buffer keeps its version: their backward goes through."""
    norm = nn.BatchNorm1d(4)
    x = torch.randn(5, 4, requires_grad=True)
    y = safe_checkpoint(norm, x, use_reentrant=reentrant)
    mean = norm.running_mean
    assert mean is not None
    weight = torch.ones(4, requires_grad=True)
    other = (weight * mean).sum()
    version = mean._version
    y.sin().sum().backward()
    assert norm.running_mean is mean
    assert mean._version == version
    other.backward()


@MODES
def test_a_parameter_written_before_backward_is_an_error(reentrant: bool) -> None:
    """As in autograd, with its words, the parameter's name and the block's; torch is silent."""
    model = make()
    x = torch.randn(5, 4, requires_grad=True)
    bare = checkpoint(model, torch.randn(5, 4, requires_grad=True), use_reentrant=reentrant)
    y = safe_checkpoint(model, x, use_reentrant=reentrant)
    with torch.no_grad():
        model[4].weight.mul_(2)
    bare.sum().backward()
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    message = r"modified by an inplace operation.*4\.weight of Sequential.*version 2.*version 1"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()
    assert runs == []  # before anything was computed
    assert x.grad is None


def test_a_captured_tensor_written_before_backward_is_an_error() -> None:
    scale = torch.ones(4)
    x = torch.randn(5, 4, requires_grad=True)
    y = safe_checkpoint(lambda x: (x * scale).sin(), x)
    scale.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor that the function captured.*<lambda>"):
        y.sum().backward()


def test_a_tensor_given_by_name_and_written_before_backward_is_an_error() -> None:
    """One that is given by position torch saves as an input."""
    for call in (safe_checkpoint, checkpoint):
        x, mask = torch.ones(2, requires_grad=True), torch.ones(2)
        with torchguard.install("recompute") if call is checkpoint else contextlib.nullcontext():
            y = call(lambda x, *, mask: (x**2 * mask).sin(), x, mask=mask, use_reentrant=False)
            y.sum().backward(retain_graph=True)
            assert torch.equal(x.grad, 2 * torch.ones(2).cos())  # type: ignore[arg-type]
            mask.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_layers_stepped_while_backward_goes_on_raise_nothing() -> None:
    """An optimizer step in backward writes the layers whose gradient is complete.

    Each block is a lambda that reaches the whole model, and uses one layer of it.
    """

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(make(seed) for seed in range(3))

        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        torch.manual_seed(0)
        for _ in range(2):
            y = torch.randn(5, 4, requires_grad=True)
            for i in range(3):
                y = call(lambda x, i=i: layers[i](x), y)
            y.sin().sum().backward()
        return [p.detach() for p in layers.parameters()]

    for one, other in zip(run(plainly), run(safe_checkpoint), strict=True):
        assert torch.equal(one, other)
