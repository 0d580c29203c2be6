"""Steps, optimizers and loads that fail halfway and leave the training in between."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import TorchDispatchMode

from torchguard.defects.probes import issues, memory_defect


class _Adam(Adam):
    """Adam without the decorators that import torch's compiler, which takes seconds."""

    add_param_group = inspect.unwrap(Adam.add_param_group)
    state_dict = inspect.unwrap(Adam.state_dict)
    load_state_dict = inspect.unwrap(Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(Adam.step))


class _SGD(SGD):
    add_param_group = inspect.unwrap(SGD.add_param_group)
    step = torch.no_grad()(inspect.unwrap(SGD.step))


_Protect = Callable[[list[nn.Module], list[Any], Any], contextlib.AbstractContextManager[Any]]


def _plain(*_: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _in_transaction(
    modules: list[nn.Module], optimizers: list[Any], scaler: Any
) -> contextlib.AbstractContextManager[Any]:
    from torchguard.transactions.api import transaction  # noqa: PLC0415  used where it guards

    return transaction(modules, optimizers, scaler)


_transaction_defect = partial(memory_defect, guards=("transaction",), guarded_with=_in_transaction)


def _parameter(values: Tensor, gradient: Tensor) -> Parameter:
    parameter = Parameter(values)
    parameter.grad = gradient
    return parameter


def _held_by_an_optimizer(weight: Parameter) -> torch.optim.Optimizer:
    # All that unscale_ reads of an optimizer; a real one would import torch's compiler here.
    return cast("torch.optim.Optimizer", SimpleNamespace(param_groups=[{"params": [weight]}]))


class _FailAt(TorchDispatchMode):
    """Raise instead of running an operator for the second time, as out of memory would."""

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator = operator
        self._calls = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += func.overloadpacket.__name__ == self._operator
        if self._calls == 2:  # noqa: PLR2004  the second
            raise RuntimeError("out of memory")
        return func(*args, **(kwargs or {}))


@_transaction_defect(
    "an optimizer step that raises midway has updated part of the parameters and moments",
    title="a failed step() has moved some parameters",
    advice="After a caught exception in step(), reload the model and the optimizer from a "
    "checkpoint instead of stepping again.",
    limits="A fused step is not copied; if it raises, the error says so: undo='copy'.",
)
def optimizer_partial(protect: _Protect = _plain) -> str | None:
    """Step over a sound parameter, then one whose rows share memory, which can't be written."""
    sound, unwritable = torch.zeros(3), torch.zeros(1).expand(3)
    parameters = [_parameter(each, torch.ones(3)) for each in (sound, unwritable)]
    optimizer = _Adam(parameters, lr=1.0)
    with contextlib.suppress(RuntimeError), protect([], [optimizer], None):
        optimizer.step()
        return None
    moved = sum(bool(parameter.detach().any()) for parameter in parameters)
    counted = sum(float(state.get("step", 0)) > 0 for state in optimizer.state.values())
    seen = f"step() raised: {moved} of 2 parameters moved, {counted} of 2 step counters advanced"
    return seen if moved or counted else None


def _load_guarded(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    torch.optim.Optimizer.load_state_dict(optimizer, state)  # as it is when the guard is on


_OLD, _NEW = 4, 64  # elements of the layer in the checkpoint and now


@memory_defect(
    "fused Adam on CPU writes past the end of moments loaded from a smaller layer",
    title="fused Adam writes past the end of its moments",
    guards=("load",),
    guarded_with=_load_guarded,
    advice="After load_state_dict, check that each state tensor but `step` has the shape of its "
    "parameter, or leave fused off on CPU.",
    limits="Moments that code puts into optimizer.state itself are not compared.",
)
def optimizer_state_shape(load: Callable[[Any, Any], Any] = _Adam.load_state_dict) -> str | None:
    """Resume with moments of the old size, each followed by memory that can be watched."""
    memory = {name: torch.zeros(_NEW) for name in ("exp_avg", "exp_avg_sq")}
    moments = {name: whole[:_OLD] for name, whole in memory.items()}
    with contextlib.suppress(RuntimeError, ValueError):
        optimizer = _Adam([_parameter(torch.zeros(_NEW), torch.ones(_NEW))], fused=True)
        state = {0: {"step": torch.tensor(1.0), **moments}}
        load(optimizer, {**optimizer.state_dict(), "state": state})
        optimizer.step()
    spoiled = sum(int(torch.count_nonzero(whole[_OLD:])) for whole in memory.values())
    return f"step() wrote {spoiled} floats past the end of its moments" if spoiled else None


@_transaction_defect(
    "a first step() that raises while it makes the state leaves half of it for ever",
    title="every step raises KeyError: 'exp_avg_sq'",
    advice="After a first step() that raised, call optimizer.state.clear() before the next.",
)
def optimizer_init_partial(protect: _Protect = _plain) -> str | None:
    """Let the first step run out of memory while it makes the state, then step again.

    Adam makes only a state that is empty: with ``step`` and ``exp_avg`` in it, no ``exp_avg_sq``.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L160
    """
    parameter = _parameter(torch.zeros(3), torch.ones(3))
    optimizer = _Adam([parameter], lr=1.0)
    with contextlib.suppress(RuntimeError), protect([], [optimizer], None), _FailAt("zeros_like"):
        optimizer.step()
    held = ", ".join(optimizer.state.get(parameter, {}))
    try:
        optimizer.step()
    except KeyError as error:
        return f"after a first step() that raised the state has {held}; the next: KeyError {error}"
    return None


@_transaction_defect(
    "a first GradScaler.scale() that raises leaves a scaler that refuses every step",
    title="GradScaler: _growth_tracker is None, for good",
    advice="After a first scale() that raised, make a new GradScaler.",
)
def scaler_init_partial(protect: _Protect = _plain) -> str | None:
    """Let GradScaler run out of memory between its two tensors, then train a step.

    ``_lazy_init_scale_growth_tracker`` makes ``_scale``, then ``_growth_tracker``; ``scale()``
    makes neither where ``_scale`` is there.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py#L169
    """
    scaler = torch.amp.GradScaler("cpu")
    weight = Parameter(torch.ones(1))
    optimizer = _held_by_an_optimizer(weight)
    with contextlib.suppress(RuntimeError), protect([], [], scaler), _FailAt("full"):
        scaler.scale(torch.ones(1))
    try:
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
    except AssertionError as error:
        return f"after a first scale() that raised: {str(error).partition('.')[0]}"
    return None


@memory_defect(
    "SGD(fused=True, momentum=...) uses uninitialised memory after a skipped first step",
    title="SGD(fused=True) uses uninitialized momentum",
    advice="With a GradScaler use SGD(foreach=True).",
)
def sgd_fused_skip() -> str | None:
    """Skip the first step of a fused SGD with momentum, as GradScaler does after an overflow.

    The momentum is ``empty_like``, which the kernel does not fill where ``found_inf`` is set.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    parameter = _parameter(torch.zeros(64), torch.zeros(64))
    optimizer: Any = _SGD([parameter], lr=1.0, momentum=0.9, fused=True)
    optimizer.grad_scale = torch.ones(())
    torch.use_deterministic_algorithms(True)  # empty_like then holds NaN, so chance has no part
    for found_inf in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
    moved = int((parameter != 0).sum())
    return f"{moved} of 64 weights with zero gradient moved after a skipped step" if moved else None


@memory_defect(
    "fused optimizers on CPU misread gradients that are expanded or transposed",
    title="fused step misreads a transposed gradient",
    advice="On a CPU use foreach=True, or set p.grad to a contiguous tensor (g.contiguous()).",
)
def fused_layout() -> str | None:
    """Step over an expanded gradient and over a transposed one: the kernels look at no strides.

    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/FusedSGDKernel.cpp
    On a GPU such tensors are refused: https://github.com/pytorch/pytorch/issues/106951
    """
    numbers = torch.arange(1.0, 7.0)  # what lies behind the expanded gradient is memory of ours
    gradients = {"expanded": numbers[:1].expand(2, 3), "transposed": numbers.view(3, 2).t()}
    wrong: list[str] = []
    for layout, gradient in gradients.items():
        parameter = _parameter(torch.zeros(2, 3), gradient)
        _SGD([parameter], lr=1.0, fused=True).step()
        count = int((parameter != -gradient).sum())
        if count:
            wrong.append(f"{count} of 6 with the gradient {layout}")
    return f"weights updated wrongly: {', '.join(wrong)}" if wrong else None


@memory_defect(
    "SGD(fused=True) on CPU does not update bfloat16 and float16 parameters",
    title="SGD(fused=True) never moves half parameters",
    upstream=issues(191763),
    advice="On a CPU use SGD(foreach=True) for parameters in bfloat16 or float16.",
)
def sgd_fused_half() -> str | None:
    """Step over bfloat16 weights: the kernel does not store whole vectors that it has computed."""
    gradient = torch.ones(64, dtype=torch.bfloat16)
    parameter = _parameter(torch.zeros_like(gradient), gradient)
    _SGD([parameter], lr=1.0, fused=True).step()
    stayed = int((parameter == 0).sum())
    return f"{stayed} of 64 bfloat16 weights did not move in step()" if stayed else None


def _run_out_of_memory(_gradient: Tensor) -> None:
    torch.empty(2**50)  # 4 PiB: no machine has them


@_transaction_defect(
    "a step retried after out of memory has doubled gradients and counts its batch twice",
    title="a step retried after OOM doubles its gradients",
    advice="Before the retry, call optimizer.zero_grad(), restore BatchNorm's buffers from a copy "
    "and make a new GradScaler from its state_dict().",
)
def oom_retry(protect: _Protect = _plain) -> str | None:
    """Let a backward run out of memory once, repeat the step and look at what is different."""
    norm, last = nn.BatchNorm1d(2), nn.Linear(2, 1)
    step = protect([norm, last], [SGD([*norm.parameters(), *last.parameters()])], None)
    for memory_runs_out in (True, False):
        inputs = torch.arange(8.0).reshape(4, 2).requires_grad_()
        if memory_runs_out:
            # Called at the end of the backward, when `last` and `norm` have their gradients.
            inputs.register_hook(_run_out_of_memory)
        with contextlib.suppress(RuntimeError), step:
            last(norm(inputs)).sum().backward()
    gradient, batches = float(last.bias.grad or 0), int(norm.num_batches_tracked or 0)
    if gradient == len(inputs) and batches == 1:
        return None
    return (
        f"after a retry: gradient {gradient:g}, right is 4; BatchNorm counted {batches} of 1 batch"
    )


@memory_defect(
    "load_state_dict(strict=True) that raises has overwritten every tensor that matched",
    title="a failed load_state_dict has changed weights",
    guards=("load",),
    advice="Compare names and shapes with model.state_dict() before loading, or load into a copy "
    "of the model.",
)
def load_partial() -> str | None:
    """Load a checkpoint whose last tensor has the wrong shape: torch raises after it has copied."""
    state = {"0.weight": torch.full((2, 2), 77.0), "1.weight": torch.full((9, 9), 77.0)}
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    before = model.get_parameter("0.weight").detach().clone()
    with contextlib.suppress(RuntimeError):
        model.load_state_dict(state, strict=True)
    spoiled = not torch.equal(model.get_parameter("0.weight"), before)
    return "load_state_dict raised, yet overwrote 1 weight" if spoiled else None
