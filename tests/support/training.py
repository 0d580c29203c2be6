"""A small training run, and everything of it that a step may change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchguard
from torchguard.transactions.step import Transaction


class Failure(Exception):  # noqa: N818  as pytest.raises(Failure) reads
    """What the tests raise."""


class Net(nn.Module):
    """Buffers of each kind, a parameter in two places, a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(32, 3)
        self.shared = nn.Linear(32, 3)
        self.shared.weight = self.head.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scratch: Tensor
        self.rows: Tensor
        self.register_buffer("scratch", torch.arange(4.0), persistent=False)
        self.register_buffer("rows", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("none", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.body(x)
        out: Tensor = self.frozen(self.head(hidden) + self.shared(hidden))
        return out


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


class Training:
    """A model and everything around it."""

    def __init__(self, kind: str = "fused", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, **KINDS[kind])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.decay = Decay()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.decay)
        self.average = Average(self.model)
        self.teacher = Net()
        self.counter = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.step: Transaction = torchguard.transaction(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            scheduler=self.scheduler,
            also=(self.average, self.teacher, self.counter, self.generator),
            **options,
        )

    def forward_backward(self) -> None:
        loss = self.model(torch.randn(4, 1, 6, 6, generator=self.generator)).square().mean()
        self.scaler.scale(loss).backward()

    def optimize(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update(self.model)
        self.optimizer.zero_grad()

    def whole_step(self) -> None:
        self.forward_backward()
        self.optimize()


def tensor_state(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    held = tensor.detach()
    return (
        id(tensor),
        tensor._version,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.untyped_storage()._cdata,
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        held.contiguous().view(-1).view(torch.uint8).tolist() if held.dim() else held.item(),
    )


def tree_state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_state(value)
    if isinstance(value, dict):
        return [
            (key if isinstance(key, (str, int)) else id(key), tree_state(v))
            for key, v in value.items()
        ]
    if isinstance(value, (list, tuple)):
        return [tree_state(each) for each in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return id(value)


def fingerprint(training: Training) -> dict[str, Any]:
    """Everything that can be seen of a training, by name."""
    found: dict[str, Any] = {}
    for name, parameter in (
        *training.model.named_parameters(),
        *training.teacher.named_parameters("t"),
    ):
        found[f"parameter {name}"] = tensor_state(parameter)
        found[f"gradient {name}"] = tensor_state(parameter.grad)
        found[f"requires_grad {name}"] = parameter.requires_grad
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[f"hooks {name}"] = [list(each or ()) for each in hooks]
    for name, module in (
        *training.model.named_modules(),
        *training.teacher.named_modules(prefix="t"),
    ):
        found[f"attributes {name}"] = {
            key: tree_state(value)
            for key, value in vars(module).items()
            if key not in {"_parameters"}
        }
        found[f"children {name}"] = [(key, id(each)) for key, each in module._modules.items()]
        found[f"parameters {name}"] = [(key, id(each)) for key, each in module._parameters.items()]
    found["optimizer"] = tree_state(
        {key: value for key, value in vars(training.optimizer).items() if key != "param_groups"}
    )
    found["groups"] = tree_state(training.optimizer.param_groups)
    found["scaler"] = tree_state(vars(training.scaler))
    found["scheduler"] = tree_state(vars(training.scheduler))
    found["decay"] = training.decay.calls
    found["average"] = [each.tolist() for each in training.average.shadow]
    found["counter"] = tensor_state(training.counter)
    found["generator"] = training.generator.get_state().tolist()
    found["random"] = (torch.get_rng_state().tolist(), random.getstate())
    found["numpy"] = np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    found["numpy place"] = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002
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
    training.model.shared.bias.requires_grad_(False)
    training.forward_backward()
    return training
