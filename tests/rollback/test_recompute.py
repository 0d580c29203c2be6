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
        assert use is evaluated_before_backward
    if use is not in_sequence:
        assert equal(outcome(safe_checkpoint), expected)
    with torchguard.install("recompute"):
        assert equal(outcome(checkpoint), expected)
        assert equal(outcome(safe_checkpoint), expected)


def selected() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    "options",
    [{"context_fn": selected}, {"debug": True}, {"determinism_check": "none"},
     {"preserve_rng_state": True}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_checkpoint_are_its_own(options: dict[str, Any]) -> None:
    outcomes = []
    for call in (plainly, safe_checkpoint):
        step = Step(functools.partial(call, **options), False)
        step.call(step.one, step.x).sin().sum().backward()
        outcomes.append(step.results())
    assert all(map(torch.equal, *outcomes))


def test_keyword_arguments_reach_the_block() -> None:
    x = torch.ones(2, requires_grad=True)
    factor = torch.full((2,), 3.0)
    safe_checkpoint(lambda x, *, factor: (x * factor).sin(), x, factor=factor).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * torch.cos(torch.full((2,), 3.0)))


def test_a_gradient_penalty_inside_the_block() -> None:
    """Backward inside of the first run calls for the second run before the first has ended."""

    def block(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + slope  # type: ignore[no-any-return]

    outcomes = []
    for call in (plainly, safe_checkpoint):
        step = Step(call, False)
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


# ---- what was written between the two runs ----


@MODES
def test_a_parameter_written_before_backward_is_an_error(reentrant: bool) -> None:
    """As in autograd, with its words, the parameter's name and the block's."""
    model = make()
    x = torch.randn(5, 4, requires_grad=True)
    y = safe_checkpoint(model, x, use_reentrant=reentrant)
    with torch.no_grad():
        model[4].weight.mul_(2)
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    message = r"modified by an inplace operation.*4\.weight of Sequential.*version 2.*version 1"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()
    assert runs == []  # before anything was computed
    assert x.grad is None


@MODES
def test_without_the_guard_it_is_silent(reentrant: bool) -> None:
    model = make()
    y = checkpoint(model, torch.randn(5, 4, requires_grad=True), use_reentrant=reentrant)
    with torch.no_grad():
        model[4].weight.mul_(2)
    y.sum().backward()


def test_a_captured_tensor_written_before_backward_is_an_error() -> None:
    scale = torch.ones(4)
    x = torch.randn(5, 4, requires_grad=True)
    y = safe_checkpoint(lambda x: (x * scale).sin(), x)
    scale.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor that the function captured.*<lambda>"):
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


# ---- with the rest ----


def test_install_reaches_who_took_the_function_before_and_uninstall_undoes_it() -> None:
    module = torch.utils.checkpoint
    before = dict(vars(module)), dict(vars(module.CheckpointFunction))
    norm = nn.BatchNorm1d(4)
    x = torch.randn(5, 4, requires_grad=True)
    with torchguard.install("recompute") as installation:
        assert installation.names == ("recompute",)
        assert module.checkpoint is checkpoint  # what Dynamo knows by identity
        checkpoint(norm, x, use_reentrant=False).sum().backward()
        checkpoint(norm, x, use_reentrant=True).sum().backward()
    assert norm.num_batches_tracked == 2
    assert (dict(vars(module)), dict(vars(module.CheckpointFunction))) == before
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 4


@MODES
def test_a_step_that_fails_in_the_second_run_is_rolled_back(reentrant: bool) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    runs: list[int] = []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) % 2 == 0 and failing:
            raise torch.OutOfMemoryError("in the second run")
        return model(x)  # type: ignore[no-any-return]

    step = torchguard.transaction(model, optimizer)
    x = torch.randn(5, 4, requires_grad=True)
    with torchguard.install("recompute", "optimizer"):
        failing = False
        with step:
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
            optimizer.step()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        failing = True
        with pytest.raises(torch.OutOfMemoryError), step:
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        failing = False
        runs.clear()
        with step:
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
            optimizer.step()
    assert model[1].num_batches_tracked == 2


def test_what_has_no_elements_is_left_alone() -> None:
    """Fake tensors, the meta device, and lazy modules, which become others in their first run."""
    with torchguard.install("recompute"):
        with torch._subclasses.FakeTensorMode():
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(make(), x, use_reentrant=False).sum().backward()
        with torch.device("meta"):
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(make(), x, use_reentrant=False).sum().backward()
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        x = torch.ones(5, 4, requires_grad=True)
        for _ in range(2):
            checkpoint(lazy, x, use_reentrant=False).sum().backward()
    assert lazy[0].in_features == 4


def test_two_threads_leave_the_buffers_of_a_shared_module_in_it() -> None:
    norm = nn.BatchNorm1d(4)
    buffers = list(norm.buffers())

    def train() -> None:
        for _ in range(30):
            x = torch.randn(5, 4, requires_grad=True)
            safe_checkpoint(norm, x).sin().sum().backward()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(now is buffer for now, buffer in zip(norm.buffers(), buffers, strict=True))


def test_nothing_is_kept_alive_after_backward() -> None:
    model = make()
    copies: list[Any] = []

    class Watch(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            assert self.running_mean is not None
            copies.append(
                torch.multiprocessing.reductions.StorageWeakRef(self.running_mean.untyped_storage())
            )
            return super().forward(x)

    model[1] = Watch(4)
    x = torch.randn(5, 4, requires_grad=True)
    safe_checkpoint(model, x).sum().backward()
    first, second = copies
    assert not first.expired()  # the buffer
    assert second.expired()  # what stood in for it


# ---- compiled code ----


@pytest.mark.parametrize("name", ["torch's", "ours", "ours, installed"])
def test_inside_compile_it_is_dynamos_own(name: str, fresh_dynamo: None) -> None:
    """The same graph, and the same gradients, as without the guard."""

    def run(call: Any, guard: Any) -> tuple[list[str], list[Tensor]]:
        torch._dynamo.reset()
        graphs: list[str] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append("".join(m.code for m in graph.modules() if hasattr(m, "code")))
            return graph.forward

        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def function(x: Tensor) -> Tensor:
            return call(block, x.sin(), use_reentrant=False).cos()  # type: ignore[no-any-return]

        with guard:
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            for _ in range(2):
                compiled(torch.ones(5, 4, requires_grad=True)).sum().backward()
        return graphs, [p.grad for p in block.parameters() if p.grad is not None]

    graphs, gradients = run(checkpoint, contextlib.nullcontext())
    call = checkpoint if name == "torch's" else safe_checkpoint
    guard = contextlib.nullcontext() if name == "ours" else torchguard.install("recompute")
    now_graphs, now_gradients = run(call, guard)
    assert now_graphs == graphs
    assert len(graphs) == 1
    assert all(map(torch.equal, now_gradients, gradients))


def test_a_compiled_module_inside_a_checkpoint_counts_a_batch_once(fresh_dynamo: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415

    counter = CompileCounterWithBackend("aot_eager")
    model = make()
    compiled = torch.compile(model, backend=counter)
    with torchguard.install("recompute"):
        for _ in range(3):
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert model[1].num_batches_tracked == 3
    assert counter.frame_count == 1
