"""rollback_on_error: after a block that fails, tensors are as they were before it."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import kinds
from support.compiled import Counting
from support.kinds import Kind, named, plain, state
from support.modes import DispatchMode
from support.ways import differences, ends_the_process, outcome_of
from torchguard import rollback_on_error
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kinds import State

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = pytest.mark.parametrize("data", [False, True])


class Planned(Exception):  # noqa: N818  raised by the tests, to be rolled back from
    """What the block raises."""


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shrinks": lambda t: t.resize_(0),
    "grows": lambda t: t.resize_(50),
    "another storage": lambda t: t.set_(torch.zeros(2, dtype=t.dtype)),  # type: ignore[call-overload]
    "nothing left": lambda t: t.set_(),  # type: ignore[call-overload]
    "other data": lambda t: setattr(t, "data", torch.zeros(7, dtype=t.dtype)),
    "squeezed": lambda t: t.unsqueeze_(0).squeeze_(),
    "a failed resize": lambda t: t.resize_(-3),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeroed": lambda t: t.zero_(),
    "added to": lambda t: t.add_(1),
    "one element": lambda t: t.view(-1).__setitem__(0, 0),
    "zeroed, then resized": lambda t: t.zero_().resize_(1),
}


def _before(tensor: torch.Tensor) -> State:
    if tensor.is_nested:
        return {"elements": [part.tolist() for part in tensor.unbind()]}
    found = state(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        # Other tests look whether it leads to the right gradient.
        found.pop("grad_fn")
    return found


def _changed_after(kind: Kind, change: Callable[[torch.Tensor], Any], *, data: bool) -> State:
    """Roll one change back, and say what it left."""
    tensor = kind.make()
    before = _before(tensor)
    with kind.scope(), pytest.raises(Planned), rollback_on_error(tensor, data=data):
        outcome_of(lambda: change(tensor))
        raise Planned
    return differences(before, _before(tensor))


@DATA
@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_brings_every_kind_back(kind: Kind, data: bool) -> None:
    """But sparse tensors, which are refused before the block runs."""
    wrong = []
    if kind.name.startswith("sparse"):
        with (
            pytest.raises(TypeError, match=r"objects\[0\]\['x'\] is a sparse tensor"),
            rollback_on_error({"x": kind.make()}, data=data),
        ):
            pytest.fail("the block runs")
        return
    for name, change in (CHANGES | WRITES if data else CHANGES).items():
        if (
            (kind.kills and name == "grows")
            or (kind.name == "wrapper" and name == "other data")
            or ("channels_last" in kind.name and name == "one element")
        ):
            continue
        # What a wrapper holds may be without memory if it is not put back rightly.
        assert kind.name != "wrapper" or not ends_the_process(
            lambda: _changed_after(kind, change, data=data)  # noqa: B023
        ), f"{name} ends the process"
        changed = _changed_after(kind, change, data=data)
        if not data:
            changed.pop("version", None)  # what succeeded inside has moved it on
            changed.pop("bytes", None)
        if not kind.has_metadata:
            if name in CHANGES:
                continue
            changed.pop("version", None)
        if changed:
            wrong.append(f"{name}: {changed}")
    assert wrong == []


@DATA
def test_a_block_that_succeeds_keeps_what_it_did_and_what_it_raises_is_let_through(
    data: bool,
) -> None:
    tensor = plain()
    with rollback_on_error(tensor, data=data):
        tensor.zero_().resize_(2)
    assert tensor.tolist() == [0, 0]
    for raised in (ValueError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        tensor = plain()
        with pytest.raises(type(raised)) as caught, rollback_on_error(tensor, data=data):
            tensor.resize_(100)
            raise raised
        assert caught.value is raised
        assert tensor.shape == (2, 3)


@DATA
def test_a_backward_of_what_was_saved_gives_the_right_gradient_or_none(data: bool) -> None:
    """With a copy the version comes back; without one it goes on counting."""
    weight = torch.ones(3, requires_grad=True)
    saved = torch.arange(3.0)
    loss = (weight * saved).sum()
    with pytest.raises(Planned), rollback_on_error(saved, data=data):
        saved.zero_().resize_(70)
        raise Planned
    if data:
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0, 1, 2]
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_requires_grad_and_the_graph_come_back() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    plain, leaf, inner = torch.ones(2), torch.ones(2, requires_grad=True), weight * 3
    with pytest.raises(Planned), rollback_on_error(plain, leaf, inner, data=True):
        plain.mul_(weight)
        leaf.requires_grad_(False)
        inner.mul_(weight).add_(1)
        raise Planned
    assert not plain.requires_grad
    assert plain.is_leaf
    assert plain.tolist() == [1, 1]
    assert leaf.requires_grad
    assert inner.tolist() == [3, 6]
    inner.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def _moved(module: torch.nn.Linear) -> None:
    module.weight.data = torch.empty(4, device="meta")  # some releases refuse it


@DATA
@pytest.mark.parametrize("change", [torch.nn.Module.half, _moved])
def test_parameters_given_other_data_are_what_they_were(
    data: bool, change: Callable[[Any], Any]
) -> None:
    """Of another dtype, or on another device."""
    module = torch.nn.Linear(2, 3)
    before = [state(parameter) for parameter in module.parameters()]
    with pytest.raises(Planned), rollback_on_error(module, data=data):
        outcome_of(lambda: change(module))
        raise Planned
    for old, parameter in zip(before, module.parameters(), strict=True):
        changed = differences(old, state(parameter))
        changed.pop("version", None)
        assert changed == {}


@DATA
def test_a_storage_emptied_inside_is_consistent_again(data: bool) -> None:
    tensor = plain()
    with pytest.raises(Planned), rollback_on_error(tensor, data=data):
        tensor.untyped_storage().resize_(0)
        raise Planned
    assert is_consistent(tensor)
    assert tensor.shape == (2, 3)
    assert not data or tensor.tolist() == plain().tolist()


def test_a_second_failure_does_not_hide_the_other_tensors() -> None:
    first, last = plain(), plain()

    class Hostile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    hostile = plain().as_subclass(Hostile)
    with pytest.raises(Planned), rollback_on_error(first, hostile, last, data=True):
        first.zero_()
        last.zero_()
        raise Planned
    assert first.tolist() == last.tolist() == plain().tolist()


@DATA
def test_may_be_nested_and_used_again_and_in_an_exit_stack(data: bool) -> None:
    tensor = plain()
    scope = rollback_on_error(tensor, data=data)
    for _ in range(2):
        with pytest.raises(Planned), ExitStack() as stack:
            stack.enter_context(scope)
            tensor.resize_(20)
            with pytest.raises(Planned), scope:
                tensor.resize_(30)
                raise Planned
            assert tensor.shape == (20,)
            raise Planned
        assert tensor.shape == (2, 3)


def test_modules_optimizers_and_containers() -> None:
    """Parameters, buffers, gradients and moments are as they were; None stays None."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    module[0].bias.grad = None
    table = [torch.zeros(2)]

    def state() -> list[object]:
        tensors = [*module.state_dict().values(), *table]
        tensors += [value for each in optimizer.state.values() for value in each.values()]
        gradients = [each.grad for each in module.parameters()]
        return [
            *(each.tolist() for each in tensors),
            *(g if g is None else g.tolist() for g in gradients),
        ]

    before, gradient = state(), module[0].weight.grad
    with pytest.raises(Planned), rollback_on_error(module, optimizer, {"t": table}, data=True):
        module(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        table[0].add_(1)
        assert state() != before
        raise Planned
    assert state() == before
    assert module[0].weight.grad is gradient


@DATA
@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_subclasses_see_nothing_of_it(data: bool, fails: bool) -> None:
    tensor, watched = plain(), plain().as_subclass(kinds.Watching)
    kinds.CALLS.clear()
    with DispatchMode() as mode, pytest.raises(Planned) if fails else warnings.catch_warnings():
        with rollback_on_error(tensor, watched, data=data):
            if fails:
                raise Planned
    assert mode.seen == []
    assert kinds.CALLS == []


@DATA
@pytest.mark.usefixtures("fresh_dynamo")
def test_is_nothing_to_a_compiled_function(data: bool) -> None:
    backend = Counting("eager")

    def function(x: torch.Tensor) -> torch.Tensor:
        with rollback_on_error(x, data=data):
            return x.add(1).mul(2)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert len(backend.graphs) == 1


def test_a_sparse_gradient_is_no_reason_to_refuse_a_model() -> None:
    net = torch.nn.Embedding(5, 3, sparse=True)
    net(torch.tensor([1, 2])).sum().backward()
    before = net.weight.grad
    with pytest.raises(ZeroDivisionError), rollback_on_error(net, data=True):
        net.weight.grad = None
        net.weight.data.zero_()
        raise ZeroDivisionError
    assert net.weight.grad is before
    assert net.weight.any()
