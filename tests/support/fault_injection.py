"""Make each operator of a training step fail in turn, try the batch again, compare every bit.

A :class:`Case` is a training of a few hundred parameters. :func:`count` runs it once for every
operator that PyTorch dispatches in its step; that operator raises, once before and once after it
has run. The failed block is run again within a :class:`Way` (of cleaning up), and all that a
training consists of is compared with a run that never failed.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard._torch import set_version

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
        names = [
            self.optimizer,
            self.implementation,
            "amp" if self.amp else "float32",
            "later" if self.later else "first",
            self.feature,
        ]
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
            torch.backends.cudnn.deterministic = True
        self.model = Net(case.feature).to(case.device)
        self.optimizers = list(_optimizers(case, self.model))
        self.schedulers = [
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
    flags = {} if case.implementation == "loop" else {case.implementation: True}
    parameters = list(model.parameters())
    if case.optimizer == "Muon":  # which takes matrices alone
        yield torch.optim.Muon([p for p in parameters if p.ndim == 2], **OPTIMIZERS["Muon"])  # type: ignore[attr-defined,unused-ignore]
        yield torch.optim.AdamW([p for p in parameters if p.ndim != 2], foreach=False)
        return
    if case.implementation == "loop":
        flags = {"foreach": False}
    groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
    yield getattr(torch.optim, case.optimizer)(groups, **OPTIMIZERS[case.optimizer], **flags)


# --- what a training consists of -------------------------------------------------------------


def state_of(training: Training) -> State:
    """Return all of it, by name."""
    found: State = {}
    for name, parameter in training.model.named_parameters():
        found[f"parameter {name}"] = bits(parameter)
        found[f"gradient {name}"] = bits(parameter.grad)
        found[f"requires_grad {name}"] = parameter.requires_grad
    for name, buffer in training.model.named_buffers():
        found[f"buffer {name}"] = bits(buffer)
    for name, module in training.model.named_modules():
        found[f"training {name}"] = module.training
    for number, optimizer in enumerate(training.optimizers):
        places = {
            parameter: place
            for place, parameter in enumerate(
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
        }
        found[f"optimizer {number}"] = {
            places[parameter]: bits(state) for parameter, state in optimizer.state.items()
        }
        found[f"param_groups {number}"] = [
            {key: bits(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        found[f"attributes of optimizer {number}"] = {
            name: bits(optimizer.__dict__.get(name, "absent"))
            for name in ("grad_scale", "found_inf", "_opt_called", "_step_count")
        }
    scaler = training.scaler
    found["scaler"] = bits([scaler.state_dict(), getattr(scaler, "_scale", None)])
    found["stages of the scaler"] = {
        number: (entry["stage"].name, bits(list(entry["found_inf_per_device"].values())))
        for number, optimizer in enumerate(training.optimizers)
        if (entry := getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer))) is not None
        and entry["stage"].name != "READY"
    }
    for number, scheduler in enumerate(training.schedulers):
        found[f"scheduler {number}"] = bits(scheduler.state_dict())
    if training.average is not None:
        found["average"] = bits(dict(training.average.state_dict()))
    found["random state of torch"] = bits(torch.get_rng_state())
    if training.case.device == "cuda":
        found["random state of the GPU"] = bits(torch.cuda.get_rng_state())
    found["random state of Python"] = random.getstate()
    found["random state of numpy"] = bits(list(np.random.get_state()))  # noqa: NPY002
    return found


def identity_of(training: Training) -> State:
    """Return which objects and which memory hold it; a rollback changes neither."""
    found: State = {}
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        found[f"object {name}"] = id(tensor)
        found[f"memory of {name}"] = tensor.data_ptr()
        found[f"version of {name}"] = tensor._version
        if tensor.grad is not None:
            found[f"gradient's object {name}"] = id(tensor.grad)
            found[f"gradient's memory {name}"] = tensor.grad.data_ptr()
    for number, optimizer in enumerate(training.optimizers):
        for place, state in enumerate(optimizer.state.values()):
            found[f"optimizer {number}, state {place}"] = {
                key: id(value) for key, value in state.items() if isinstance(value, torch.Tensor)
            }
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


def differences(found: State, *expected: State) -> list[str]:
    """Return the names of what equals none of the expected states."""
    names = [name for name in found if all(found[name] != each.get(name) for each in expected)]
    return names + [name for name in expected[-1] if name not in found]


# --- ways of cleaning up ---------------------------------------------------------------------

Way = Callable[[Training], AbstractContextManager[Any]]
"""Given a training, what each block of it is run within."""


def nothing(_: Training) -> AbstractContextManager[Any]:
    """Retry as it is: ``accelerate.find_executable_batch_size``, toma."""
    return nullcontext()


class _CleanUp:
    """A context manager, entered again and again, that calls a function if its block raises."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._clean_up = clean_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._clean_up()


def zero_grad(training: Training) -> AbstractContextManager[Any]:
    """The usual advice: drop the gradients."""

    def clean_up() -> None:
        for optimizer in training.optimizers:
            optimizer.zero_grad()

    return _CleanUp(clean_up)


def composer(training: Training) -> AbstractContextManager[Any]:
    """Drop the gradients, and let the scaler forget what stage it is at."""

    def clean_up() -> None:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return _CleanUp(clean_up)


class deep_copy:  # noqa: N801  one of the ways, and those are functions
    """The reference: copy everything on entry, put all of it back."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __enter__(self) -> None:
        t = self._training
        self._gradients = [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in t.model.parameters()
        ]
        self._tensors = [
            (tensor, tensor.detach().clone(), tensor._version) for tensor in _tensors_of(t)
        ]
        self._objects = [*t.optimizers, *t.schedulers, t.scaler]
        self._attributes = [_copied(each) for each in self._objects]
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._torch = torch.get_rng_state()
        on_gpu = t.case.device == "cuda"
        self._cuda = torch.cuda.get_rng_state() if on_gpu else None

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            return
        with torch.no_grad():
            for tensor, value, version in self._tensors:
                tensor.copy_(value)
                set_version(tensor, version)
            for parameter, gradient, values in self._gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)
        for each, attributes in zip(self._objects, self._attributes, strict=True):
            _put_back(each, attributes)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


def _tensors_of(training: Training) -> Iterator[torch.Tensor]:
    modules: list[nn.Module] = [training.model]
    if training.average is not None:
        modules.append(training.average)
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor))
    for each in (training.scaler.__dict__.get(n) for n in ("_scale", "_growth_tracker")):
        if each is not None:
            yield each


def _copied(owner: Any) -> dict[str, Any]:
    """Copy an object's attributes; tensors and what is not data stay the same objects."""
    found = dict(vars(owner))
    if isinstance(owner, torch.optim.Optimizer):
        found["state"] = {p: dict(state) for p, state in owner.state.items()}
        found["param_groups"] = [dict(group) for group in owner.param_groups]
    elif isinstance(owner, torch.amp.GradScaler):
        stages = found.get("_per_optimizer_states", {})
        found["_per_optimizer_states"] = {key: copy.copy(entry) for key, entry in stages.items()}
    else:
        found = {key: copy.copy(v) if isinstance(v, list) else v for key, v in found.items()}
    return found


def _put_back(owner: Any, attributes: dict[str, Any]) -> None:
    for name in set(vars(owner)) - set(attributes):
        delattr(owner, name)
    for name, value in attributes.items():
        if name == "state" and isinstance(owner, torch.optim.Optimizer):
            owner.state.clear()
            owner.state.update(value)
        elif name == "param_groups":
            for group, before in zip(owner.param_groups, value, strict=True):
                group.clear()
                group.update(before)
        elif name == "_per_optimizer_states":
            owner._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, value)
        else:
            setattr(owner, name, value)


def transaction(training: Training) -> AbstractContextManager[Any]:
    """``with step:``."""
    return torchguard.transaction(
        training.model,
        training.optimizers,
        training.scaler if training.case.amp else None,
        training.schedulers,
        also=() if training.average is None else (training.average,),
    )


# --- the proof -------------------------------------------------------------------------------


@dataclass
class Count:
    """How the fault points of a case, or of several, ended."""

    points: int = 0
    wrong: int = 0
    """The batch was tried again, no error, and something differs from the run without a fault."""

    stuck: int = 0
    """The batch was tried again, and raised once more."""

    not_restored: int = 0
    """Right after the failure something was not as before the block."""

    committed: int = 0
    """The step was done before the failure: it counts, and was not tried again."""

    examples: list[str] = field(default_factory=list)

    def __add__(self, other: Count) -> Count:
        numbers = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in dataclasses.fields(self)
        }
        return Count(**numbers)


@dataclass(frozen=True)
class Reference:
    """A run that never failed."""

    at_commit: State
    end: State
    operators: int


def reference(case: Case, way: Way = nothing) -> Reference:
    """Run a case without a fault, within a way of cleaning up, whose operators count too."""
    training = Training(case)
    guard = way(training)
    with FailAt() as counter:
        for block in training.blocks:
            with guard:
                block()
    end = state_of(training)
    training = Training(case)
    training.recording = True
    for block in training.blocks:
        block()
    assert training.at_commit is not None
    return Reference(training.at_commit, end, counter.seen)


def count(
    case: Case, way: Way, *, restores: bool = False, every: int = 1, offset: int = 0
) -> Count:
    """Fail at each operator, or at every so-many-th, before and after it; see how it ends.

    ``restores`` says that the way claims to leave everything as it was, which is then compared
    right after the failure too, with the objects and the memory it lies in.
    """
    plain, guarded = reference(case), reference(case, way)
    total = Count()
    if plain.end != guarded.end:
        total += Count(wrong=1, examples=[f"{case} without a fault: differs from plain code"])
    for at in range(offset % every, guarded.operators, every):
        for after in (False, True):
            total += _one_point(case, way, plain, FailAt(at, after=after), restores=restores)
    return total


def _one_point(case: Case, way: Way, plain: Reference, fault: FailAt, *, restores: bool) -> Count:
    training = Training(case)
    guard = way(training)
    result = Count(points=1)
    raised: list[InjectedError] = []
    for block in training.blocks:
        before = {**state_of(training), **identity_of(training)} if restores else {}
        try:
            with fault, guard:
                block()
        except InjectedError as error:
            raised.append(error)
            if getattr(guard, "committed", False):
                result.committed = 1
                continue
            if restores and (
                lost := differences(state_of(training) | identity_of(training), before)
            ):
                result.not_restored = 1
                result.examples.append(f"{case} {error}: not restored: {', '.join(lost)}")
            try:
                with guard:
                    block()
            except Exception as again:  # noqa: BLE001  whatever a broken state raises
                result.stuck = 1
                result.examples.append(f"{case} {error}: raised again: {again!r}")
                return result
    assert len(raised) == 1, f"{case}: the fault was swallowed, or there was none"
    expected = [plain.at_commit, plain.end] if result.committed else [plain.end]
    if lost := differences(state_of(training), *expected):
        result.wrong = 1
        result.examples.append(f"{case} {raised[0]}: differs: {', '.join(lost)}")
    elif result.committed:
        try:  # a scaler that was left between two stages refuses the next step
            with guard:
                training.whole_step()
        except Exception as again:  # noqa: BLE001  likewise
            result.stuck = 1
            result.examples.append(f"{case} {raised[0]}: the next step raised: {again!r}")
    return result
