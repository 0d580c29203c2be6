"""transaction(): a training step that raises leaves the training as it was, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchguard
from support.training import (
    Failure,
    Training,
    begin,
    changed,
    fail,
    fingerprint,
)


def register_hook_of_state_dict(training: Training) -> None:
    training.model.head.register_state_dict_pre_hook(lambda *_: None)
    training.model.head.register_load_state_dict_post_hook(lambda *_: None)


def register_hook_of_gradient(training: Training) -> None:
    """One that runs twice if the block is tried again."""
    training.model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    training.model.frozen.requires_grad_(True)
    training.model.frozen.bias.register_post_accumulate_grad_hook(lambda _: None)


def unscale(training: Training) -> None:
    training.forward_backward()
    training.scaler.unscale_(training.optimizer)


CHANGES: dict[str, Callable[[Training], Any]] = {
    "forward": lambda t: t.model(torch.randn(4, 2, 4, 4)),
    "forward and backward": Training.forward_backward,
    "eval": lambda t: t.model.eval(),
    "freeze": lambda t: t.model.head.bias.requires_grad_(False),
    "an attribute": lambda t: setattr(t.model, "new", 1),
    "a buffer is written": lambda t: t.model.scratch.add_(1),
    "a strided buffer is written": lambda t: t.model.rows.add_(1),
    "a buffer is replaced": lambda t: setattr(t.model, "scratch", torch.ones(4)),
    "a buffer is resized": lambda t: t.model.scratch.resize_(2),
    "a buffer grows": lambda t: t.model.scratch.resize_(400),
    "a buffer is registered": lambda t: t.model.register_buffer("late", torch.zeros(2)),
    "a child is added": lambda t: t.model.add_module("late", nn.Linear(1, 1)),
    "a parameter has other memory": lambda t: setattr(t.model.head.bias, "data", torch.zeros(3)),
    "a hook is registered": lambda t: t.model.head.register_forward_hook(lambda *_: None),
    "a hook is removed": lambda t: t.model.head._forward_hooks.clear(),
    "a buffer that is not saved is registered": lambda t: t.model.register_buffer(
        "late", torch.zeros(2), persistent=False
    ),
    "a buffer is not saved any more": lambda t: t.model.register_buffer(
        "rows", t.model.rows, persistent=False
    ),
    "a hook of the state dict": register_hook_of_state_dict,
    "a hook of a gradient": register_hook_of_gradient,
    "a hook of the optimizer": lambda t: t.optimizer.register_step_post_hook(lambda *_: None),
    "learning rate": lambda t: t.optimizer.param_groups[0].update(lr=7.0),
    "a group is added": lambda t: t.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "a key of the state": lambda t: t.optimizer.state[t.model.head.bias].update(new=torch.zeros(3)),
    "zero_grad": lambda t: t.optimizer.zero_grad(),
    "zero_grad in place": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "unscale": unscale,
    "the scale": lambda t: t.scaler.update(3.0),
    "the schedule": lambda t: t.scheduler.step(),
    "the average": lambda t: t.shadow.update(t.teacher),
    "the teacher": lambda t: nn.init.ones_(t.teacher.head.weight),
    "a tensor": lambda t: t.counter.add_(1),
    "a generator": lambda t: torch.rand(1, generator=t.generator),
    "torch draws": lambda t: torch.rand(1),
    "Python draws": lambda t: random.random(),  # noqa: S311
    "Python draws a normal number": lambda t: random.gauss(0, 1),
    "numpy draws": lambda t: np.random.rand(),  # noqa: NPY002
    "numpy draws a normal number": lambda t: np.random.randn(),  # noqa: NPY002
}


@pytest.mark.parametrize("undo", ["auto", "copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_block_changes_is_as_it_was(change: str, undo: Any) -> None:
    """Each change alone, then an exception: nothing differs."""
    training = begin(undo=undo)
    before = fingerprint(training)
    error = Failure()
    with pytest.raises(Failure) as raised:
        with training.step:
            CHANGES[change](training)
            assert changed(training, before)
            raise error
    assert raised.value is error
    assert changed(training, before) == []
    with training.step:
        training.whole_step()


@pytest.mark.parametrize("torch_function", [True, False])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "state", "number"])
def test_what_was_replaced_by_its_equal_before_the_block_stays(
    kind: str, torch_function: bool
) -> None:
    """Two tensors of one element compare equal, and are two: what counts is identity."""
    model = nn.BatchNorm1d(1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=kind != "number", foreach=False)
    step = torchguard.transaction(model, optimizer)
    for _ in range(2):
        with step:
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    holders: dict[str, tuple[Any, str]] = {
        "buffer": (model._buffers, "num_batches_tracked"),
        "parameter": (model._parameters, "bias"),
        "state": (optimizer.state[model.weight], "step"),
        "number": (optimizer.state[model.weight], "step"),
    }
    holder, name = holders[kind]
    new = float(holder[name]) if kind == "number" else copy.deepcopy(holder[name])
    holder[name] = new
    with contextlib.nullcontext() if torch_function else torch._C.DisableTorchFunction():
        with pytest.raises(Failure), step:
            raise Failure
    assert holder[name] is new


@pytest.mark.parametrize("kind", ["loop", "foreach"])
def test_a_block_may_catch_what_the_step_raises_and_step_again(kind: str) -> None:
    plain_run, guarded = Training(kind), Training(kind)
    for training in (plain_run, guarded):
        torch.manual_seed(1)
        with training.step:
            training.model(torch.ones(4, 2, 4, 4)).sum().backward()
            if training is guarded:
                hook = training.optimizer.register_step_pre_hook(fail)
                with contextlib.suppress(Failure):
                    training.optimizer.step()
                hook.remove()
            training.optimizer.step()
    for one, other in zip(plain_run.model.parameters(), guarded.model.parameters(), strict=True):
        assert one.tolist() == other.tolist()


def test_a_weight_that_autocast_has_cast_is_cast_again() -> None:
    """The block casts a weight that it has changed; autocast would keep that cast."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchguard.transaction(model, optimizer, undo="copy")
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x).detach().clone()
        torch.clear_autocast_cache()
        with pytest.raises(Failure):
            with step:
                with torch.no_grad():
                    model.weight.add_(1)
                assert not torch.equal(model(x), expected)
                raise Failure
        assert torch.equal(model(x), expected)
