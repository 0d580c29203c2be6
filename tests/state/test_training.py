"""A training: each kind of its state is copied, changed by a step, and restored in place."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchguard.state.training import TrainingState


class Model(nn.Module):
    """Two layers with buffers, and attributes that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.count, self.seen, self.notes = 0, [1], {"last": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


class Program:
    """A training after its first step, with something of each kind in it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.extra, self.generator = torch.ones(3), torch.Generator().manual_seed(1)
        self.step()
        self.scheduler.step()
        self.model(torch.randn(4, 3)).sum().backward()
        self.state = TrainingState(
            (self.model,), (self.optimizer,), (self.scheduler,), (self.extra, self.generator)
        )

    def step(self) -> None:
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()

    def shown(self) -> str:
        """Write down all that there is; tensors with their memory, versions and flags."""
        model, optimizer = self.model, self.optimizer
        tensors = [*model.parameters(), *model.buffers(), self.extra, model.notes["last"]]
        held = [v for state in optimizer.state.values() for v in state.values()]
        gradients = [(id(p.grad), p.grad) for p in model.parameters()]
        lines: list[Any] = [
            [(id(t), t.data_ptr(), t.stride(), t.requires_grad, t._version, t) for t in tensors],
            [(id(t), t) for t in held],
            gradients,
            [(name, id(each)) for name, each in model.named_modules()],
            [(name, id(each)) for name, each in model.named_parameters()],
            [len(m._forward_hooks) for m in model.modules()],
            [len(p._backward_hooks or ()) for p in model.parameters()],
            (model.count, model.seen, sorted(vars(model)), [m.training for m in model.modules()]),
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            {k: v for k, v in vars(self.scheduler).items() if isinstance(v, (int, float, list))},
            [sorted(vars(p)) for p in model.parameters()],
            [torch.get_rng_state().tolist(), self.generator.get_state().tolist()],
            [random.getstate(), np.random.get_state(legacy=False)],  # noqa: NPY002 - numpy's global
        ]
        with torch.no_grad():
            return repr(lines)


@torch.no_grad()
def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def replace_memory(program: Program) -> None:
    program.model.layer.weight.data = torch.zeros(5, 5)


def add_layer(program: Program) -> None:
    program.model.layer, program.model.more = nn.Linear(3, 2), nn.Linear(1, 1)


CHANGES: dict[str, Callable[[Program], Any]] = {
    "a whole step": Program.step,
    "elements of a parameter": lambda p: write(p.model.layer.weight),
    "memory of a parameter": replace_memory,
    "requires_grad": lambda p: p.model.layer.weight.requires_grad_(False),
    "an attribute of a parameter": lambda p: setattr(p.model.layer.weight, "sample", 1),
    "a hook of a parameter": lambda p: p.model.layer.weight.register_hook(lambda g: g),
    "elements of a gradient": lambda p: write(p.model.layer.weight.grad),  # type: ignore[arg-type]
    "a gradient that is gone": lambda p: p.optimizer.zero_grad(),
    "buffers": lambda p: p.model(torch.randn(4, 3)),
    "a buffer that is not contiguous": lambda p: write(p.model.table),  # type: ignore[arg-type]
    "a buffer that is another": lambda p: setattr(p.model, "table", torch.zeros(1)),
    "a buffer that is gone": lambda p: delattr(p.model, "table"),
    "layers": add_layer,
    "a hook of a module": lambda p: p.model.register_forward_hook(lambda *_: None),
    "a number of a module": lambda p: setattr(p.model, "count", 5),
    "a new attribute": lambda p: setattr(p.model, "fresh", 5),
    "train and eval": lambda p: p.model.eval(),
    "learning rate": lambda p: p.optimizer.param_groups[0].update(lr=5.0, more=1),
    "parameters of a group": lambda p: p.optimizer.param_groups[0]["params"].pop(),
    "a moment": lambda p: write(p.optimizer.state[p.model.layer.weight]["exp_avg"]),
    "a moment that is another": lambda p: p.optimizer.state[p.model.layer.weight].update(
        exp_avg=torch.zeros(1)
    ),
    "state that is gone": lambda p: p.optimizer.state.clear(),
    "a scheduler": lambda p: p.scheduler.step(),
    "a tensor in also=": lambda p: write(p.extra),
    "a generator in also=": lambda p: torch.rand(1, generator=p.generator),
    "torch's random numbers": lambda _: torch.rand(1),
    "Python's random numbers": lambda _: random.random(),  # noqa: S311 - its global state
    "numpy's random numbers": lambda _: np.random.rand(),  # noqa: NPY002 - its global state
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", CHANGES)
def test_each_kind_is_copied_changed_and_restored(name: str) -> None:
    program = Program()
    before = program.shown()
    saved = program.state.capture(parameters=True)
    for _ in range(2):  # a snapshot may be restored several times
        CHANGES[name](program)
        assert program.shown() != before
        saved.restore()
        assert program.shown() == before


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("change", "spoil"),
    [
        (lambda o: o.param_groups[0].update(lr=0.5), lambda o: o.param_groups[0].update(lr=1.0)),
        (lambda o: o.param_groups[0].update(new=1), lambda o: o.param_groups[0].pop("new")),
        (lambda o: setattr(o, "renamed", o.__dict__.pop("mark")), lambda o: delattr(o, "renamed")),
        (lambda o: o.options["deep"].append(3), lambda o: o.options["deep"].clear()),
        (lambda o: o.options.move_to_end("first"), lambda o: o.options.move_to_end("deep")),
        (lambda o: o.param_groups[0]["params"].reverse(), lambda o: o.param_groups.pop()),
        (
            lambda o: o.add_param_group({"params": [torch.ones(1, requires_grad=True)]}),
            lambda o: o.param_groups[1].update(lr=9.0),
        ),
        (lambda o: setattr(o, "values", torch.ones(2)), lambda o: o.values.zero_()),
        (lambda o: setattr(o, "array", np.ones(2)), lambda o: o.array.fill(0)),
    ],
)
def test_what_changes_between_two_blocks_is_seen_in_the_second(
    change: Change, spoil: Change
) -> None:
    """A snapshot of an optimizer is kept as long as it is current."""
    parameters = [torch.tensor([value], requires_grad=True) for value in (1.0, 2.0)]
    optimizer: Any = torch.optim.SGD(parameters, 0.1)
    optimizer.options, optimizer.mark = OrderedDict(first=1, deep=[1, 2]), object()
    training = TrainingState((), (optimizer,), (), ())

    def now() -> str:
        shown = {key: value for key, value in vars(optimizer).items() if "hook" not in key}
        return repr(shown)

    for _ in range(2):
        assert training.snapshot_of(optimizer) is training.snapshot_of(optimizer)
    change(optimizer)
    before = now()
    for _ in range(2):  # the second time of what was kept after the first
        saved = training.capture()
        spoil(optimizer)
        assert now() != before
        saved.restore()
        assert now() == before
