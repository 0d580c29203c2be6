"""Trainings of a few hundred parameters, and all that each of them consists of, bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

State = dict[str, Any]
"""Everything a training consists of, by name, as values that ``==`` compares bit by bit."""


class InjectedError(RuntimeError):
    """What the chosen operator raises."""


class FailAt(TorchDispatchMode):
    """Count the operators, and raise at one of them, before or after it has run."""

    supports_higher_order_operators = True  # checkpointing under torch.compile is one

    def __init__(self, at: int | None = None, *, after: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        self._at = at
        self._after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = self.seen == self._at
        self.seen += 1
        if here and not self._after:
            raise InjectedError(f"before {func}")
        result = func(*args, **(kwargs or {}))
        if here:
            raise InjectedError(f"after {func}")
        return result


# --- the trainings ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "NAdam": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
    "Muon": {"lr": 0.01},
}
FEATURES = ("plain", "accumulation", "ema", "shared", "frozen", "dropout", "checkpoint")


def implementations(optimizer: str, device: str = "cpu") -> list[str]:
    """Return which of loop, foreach and fused an optimizer has on a device in this torch."""
    cls = getattr(torch.optim, optimizer, None)
    if cls is None:
        return []
    found = ["loop"]
    for flag in ("foreach", "fused"):
        parameter = nn.Parameter(torch.zeros(2, 2, device=device))
        try:
            cls([parameter], **OPTIMIZERS[optimizer], **{flag: True})
        except (TypeError, RuntimeError):
            continue
        found.append(flag)
    return found


@dataclass(frozen=True)
class Case:
    """One training: an optimizer, and what surrounds it."""

    optimizer: str
    implementation: str = "loop"
    amp: bool = False
    later: bool = False
    """Fail in a step that is not the first: the optimizer's state is there."""

    feature: str = "plain"
    device: str = "cpu"

    def __str__(self) -> str:
        names = [self.optimizer, self.implementation, "amp" if self.amp else "float32"]
        names += ["later" if self.later else "first", self.feature]
        return "-".join(names if self.device == "cpu" else [*names, self.device])


def every_case(device: str = "cpu") -> Iterator[Case]:
    """Return the whole product, as far as this torch has it."""
    for optimizer in OPTIMIZERS:
        for implementation in implementations(optimizer, device):
            for amp, later, feature in itertools.product((False, True), (False, True), FEATURES):
                yield Case(optimizer, implementation, amp, later, feature, device)


def covering(cases: Sequence[Case]) -> list[Case]:
    """Choose few cases in which each value meets each value of every other axis (pairwise)."""

    def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
        values = [(axis.name, getattr(case, axis.name)) for axis in dataclasses.fields(case)]
        return set(itertools.combinations(values, 2))

    left = set().union(*map(pairs, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


class Net(nn.Module):
    """Convolution, batch norm, linear layers; buffers of all kinds."""

    # B batch, C channels, H height, W width, F features

    calls: torch.Tensor

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.3 if feature in {"dropout", "checkpoint"} else 0.0)
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        if feature == "shared":
            self.second.weight = self.first.weight
        if feature == "frozen":
            for parameter in self.first.parameters():
                parameter.requires_grad_(False)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x_bf = torch.relu(self.norm(self.conv(x_bchw))).flatten(1)
        if self.feature == "checkpoint":
            x_bf = checkpoint(self.middle, x_bf, use_reentrant=False)
        else:
            x_bf = self.middle(x_bf)
        return self.head(x_bf)  # type: ignore[no-any-return]

    def middle(self, x_bf: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.dropout(torch.relu(self.first(x_bf)))))


class Training:
    """Model, optimizers, scaler, scheduler and average of a case, and the blocks of its step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  what users draw from
        if case.device == "cuda":  # its convolutions may add up in another order otherwise
            torch.backends.cudnn.set_flags(_deterministic=True)  # also if torch has frozen them
        self.model = Net(case.feature).to(case.device)
        self.optimizers = list(_optimizers(case, self.model))
        self.schedulers: list[torch.optim.lr_scheduler.LRScheduler] = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.optimizers
        ]
        self.scaler = torch.amp.GradScaler(case.device, init_scale=8.0, enabled=case.amp)
        self.average = (
            AveragedModel(self.model, use_buffers=True) if case.feature == "ema" else None
        )
        self.batches = [
            (torch.randn(4, 2, 4, 4).to(case.device), torch.randint(3, (4,)).to(case.device))
            for _ in range(2)
        ]
        self.at_commit: State | None = None
        self.blocks: list[Callable[[], None]] = [self.whole_step]
        if case.feature == "accumulation":
            self.blocks = [self.accumulate, self.whole_step]
        if case.later:
            for block in self.blocks:
                block()

    def backward(self, number: int) -> None:
        x_bchw, y_b = self.batches[number]
        if self.case.feature == "dropout":  # data augmentation draws from all three
            x_bchw = x_bchw * random.random() + float(np.random.rand())  # noqa: NPY002, S311
        with torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.amp):
            loss = nn.functional.cross_entropy(self.model(x_bchw), y_b)
        self.scaler.scale(loss).backward()

    def accumulate(self) -> None:
        self.backward(1)

    def whole_step(self) -> None:
        self.backward(0)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        if self.at_commit is None and self.recording:
            self.at_commit = state_of(self)
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)

    recording = False


def _optimizers(case: Case, model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    loop = case.implementation == "loop"
    flags = {"foreach": False} if loop else {case.implementation: True}
    parameters = list(model.parameters())
    if case.optimizer == "Muon":  # which takes matrices alone
        yield torch.optim.Muon([p for p in parameters if p.ndim == 2], **OPTIMIZERS["Muon"])  # type: ignore[attr-defined,unused-ignore]
        yield torch.optim.AdamW([p for p in parameters if p.ndim != 2], foreach=False)
        return
    groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
    yield getattr(torch.optim, case.optimizer)(groups, **OPTIMIZERS[case.optimizer], **flags)


# --- what a training consists of -------------------------------------------------------------


def state_of(training: Training) -> State:
    """Return all of it, by name."""
    model, optimizers, scaler = training.model, training.optimizers, training.scaler
    places: dict[Any, int] = {
        parameter: place for place, parameter in enumerate(model.parameters())
    }
    named = dict(model.named_parameters())
    stages = getattr(scaler, "_per_optimizer_states", {})
    entries = [stages[id(each)] for each in optimizers if id(each) in stages]
    on_gpu = training.case.device == "cuda"
    tree: dict[str, Any] = {
        "parameter": named,
        "gradient": {name: parameter.grad for name, parameter in named.items()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in named.items()},
        "buffer": dict(model.named_buffers()),
        "training": {name: module.training for name, module in model.named_modules()},
        "optimizer": [{places[p]: state for p, state in o.state.items()} for o in optimizers],
        "param_groups": [
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in (each.param_groups for each in optimizers)
        ],
        "attributes of optimizer": [
            [vars(each).get(name, "absent") for name in _OF_THE_SCALER] for each in optimizers
        ],
        "scaler": [scaler.state_dict(), getattr(scaler, "_scale", None)],
        "stage of the scaler": [
            (entry["stage"].name, list(entry["found_inf_per_device"].values()))
            for entry in entries
            if entry["stage"].name != "READY"
        ],
        "scheduler": [each.state_dict() for each in training.schedulers],
        "average": {} if training.average is None else dict(training.average.state_dict()),
        "random state": {
            "of torch": torch.get_rng_state(),
            "of the GPU": torch.cuda.get_rng_state() if on_gpu else None,
            "of Python": random.getstate(),
            "of numpy": np.random.get_state(),  # noqa: NPY002
        },
    }
    return {
        f"{kind} {name}": bits(value)
        for kind, values in tree.items()
        for name, value in (values.items() if isinstance(values, dict) else enumerate(values))
    }


_OF_THE_SCALER = ("grad_scale", "found_inf", "_opt_called", "_step_count")


def identity_of(training: Training) -> State:
    """Return which objects and which memory hold it; a rollback changes neither."""
    found: State = {}
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        found[f"object {name}"] = (id(tensor), tensor.data_ptr(), tensor._version)
        if tensor.grad is not None:
            found[f"object of gradient {name}"] = (id(tensor.grad), tensor.grad.data_ptr())
    for number, optimizer in enumerate(training.optimizers):
        found[f"objects of optimizer {number}"] = [
            {key: id(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in optimizer.state.values()
        ]
    return found


def bits(value: Any) -> Any:
    """Return a value as something that ``==`` compares bit by bit."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        with torch.no_grad():
            array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
            return (str(array.dtype), array.shape, array.tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value if not isinstance(value, float) else value.hex()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the bits of a model and of the state of its optimizer."""
    return bits([model.state_dict(), optimizer.state_dict()["state"]])


def differences(found: State, *expected: State) -> list[str]:
    """Return the names of what equals none of the expected states."""
    names = [name for name in found if all(found[name] != each.get(name) for each in expected)]
    return names + [name for name in expected[-1] if name not in found]
