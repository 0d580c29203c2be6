"""A small training run, and everything of it that a step may change."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchguard
from support import small_training
from torchguard.transactions.step import Transaction


class Failure(Exception):  # noqa: N818  as pytest.raises(Failure) reads
    """What the tests raise."""


def fail(*_: Any) -> None:
    raise Failure


class Average:
    """An exponential moving average, as many write it: state_dict and load_state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for kept, parameter in zip(self.shadow, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept, loaded in zip(self.shadow, state["shadow"], strict=True):
            kept.copy_(loaded)


class Decay:
    """A schedule with a state of its own, which ``LambdaLR.state_dict`` saves too."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: int) -> float:
        self.calls += 1
        return float(0.9**self.calls)


KINDS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Training(small_training.Training):
    """With buffers of each kind, a part that is frozen, and what ``also=`` names."""

    model: Any

    def __init__(self, kind: str = "fused", **options: Any) -> None:
        super().__init__(small_training.Case("AdamW", kind, amp=True, feature="dropout"))
        self.teacher: Any = small_training.Net("plain")
        self.shadow = Average(self.model)
        self.model.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.model.register_buffer("scratch", torch.arange(4.0), persistent=False)
        self.model.register_buffer("rows", torch.arange(6.0).view(2, 3).t())
        self.model.register_buffer("none", None)
        (self.optimizer,) = self.optimizers
        self.decay = Decay()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.decay)
        self.schedulers = [self.scheduler]
        self.counter = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.step: Transaction = torchguard.transaction(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            scheduler=self.scheduler,
            also=(self.shadow, self.teacher, self.counter, self.generator),
            **options,
        )

    def forward_backward(self) -> None:
        self.backward(0)


def tensor_state(tensor: Tensor) -> Any:
    held = tensor.detach()
    return (
        id(tensor),
        tensor._version,
        tensor.requires_grad,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.untyped_storage()._cdata,
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        held.contiguous().view(-1).view(torch.uint8).tolist() if held.dim() else held.item(),
    )


_HAVE_ATTRIBUTES = (
    *(Training, Decay, nn.Module, torch.optim.Optimizer),
    *(torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler),
)


def fingerprint(training: Training) -> dict[str, Any]:
    """Everything that can be seen of a training, by name; objects by their identity."""
    found: dict[str, Any] = {"random": (torch.get_rng_state().tolist(), random.getstate())}
    waiting: list[tuple[str, Any]] = [
        ("training", training),
        ("numpy", np.random.get_state(legacy=False)),  # noqa: NPY002
    ]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        inside: Any = {}
        if isinstance(value, Tensor):
            found[name] = tensor_state(value)
            hooks = (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))
            inside = {"grad": value.grad, "hooks": [list(each or ()) for each in hooks]}
        elif isinstance(value, dict):
            found[name] = [key if isinstance(key, (str, int)) else id(key) for key in value]
            inside = dict(zip(found[name], value.values(), strict=True))
        elif isinstance(value, (list, tuple)):
            found[name] = len(value)
            inside = dict(enumerate(value))
        elif isinstance(value, _HAVE_ATTRIBUTES):
            found[name] = id(value)
            inside = {} if id(value) in seen else vars(value)
            seen.add(id(value))
        elif isinstance(value, Average):  # load_state_dict() writes the tensors
            found[name] = [each.tolist() for each in value.shadow]
        elif isinstance(value, torch.Generator):
            found[name] = value.get_state().tolist()
        elif isinstance(value, (int, float, str, set, np.ndarray)):
            found[name] = value.tolist() if isinstance(value, np.ndarray) else copy.copy(value)
        else:
            found[name] = id(value)
        waiting += [(f"{name}.{key}", each) for key, each in inside.items()]
    return found


def changed(training: Training, before: dict[str, Any]) -> list[str]:
    after = fingerprint(training)
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def begin(kind: str = "fused", **options: Any) -> Training:
    """A training after a step, with gradients of half a batch and a hook."""
    training = Training(kind, **options)
    training.model.head.register_forward_hook(lambda *_: None)
    with training.step:
        training.whole_step()
    training.model.second.bias.requires_grad_(False)
    training.forward_backward()
    return training
