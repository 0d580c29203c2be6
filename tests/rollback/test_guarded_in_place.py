"""guarded(): an in-place operation that fails midway, lists of tensors, running statistics."""

from __future__ import annotations

import signal
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support import kinds
from support.kinds import Kind, named, state
from support.scopes import each_scope, is_on
from support.ways import differences, outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


@each_scope
@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_ordinary_operations_give_what_they_give_on_torch(
    kind: Kind, scope: Callable[[], AbstractContextManager[Any]]
) -> None:
    def work(t: torch.Tensor) -> list[Any]:
        calls: tuple[Callable[[], Any], ...] = (
            t.clone,
            lambda: t + t,
            lambda: t.add_(1),
            lambda: t.mul_(t),
            t.zero_,
            lambda: t.copy_(t.clone()),
            lambda: t.__setitem__(0, 1),
            lambda: torch.add(t, 1, out=torch.empty(0)),
            lambda: torch.mul(t, 2, out=t),
            t.squeeze_,
            lambda: t.unsqueeze_(0),
            t.detach_,
            lambda: t.fill_("x"),  # type: ignore[call-overload]
            lambda: t.index_fill_(0, torch.tensor([9]), 0),
            lambda: torch._foreach_add_([t], 1),
            lambda: torch._foreach_add_([t, t], [torch.ones(7, 7), torch.ones(9)]),
            lambda: torch.nn.functional.relu(t, inplace=True),
            lambda: t.data.numel() + 1,
        )
        found: list[Any] = []
        for call in calls:
            outcome = outcome_of(call)
            # torch itself gives an inference tensor a new shape before it refuses to.
            comparable = isinstance(outcome.result, torch.Tensor) and kind.plain
            shown = outcome.result.shape if comparable else None
            found.append((type(outcome.error), shown, outcome.result is t))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with kind.scope():
            torchs = work(kind.make())
        with kind.scope(), scope():
            ours = work(kind.make())
    assert ours == torchs


PARTIAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_put_": lambda t: t.index_put_((torch.tensor([0, 1, 99]),), torch.tensor(-1.0)),
    "setitem": lambda t: t.__setitem__(torch.tensor([0, 1, 99]), -1.0),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([0, 1, 99]), -torch.ones(3)),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 1, 99]), -torch.ones(3)),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 1, 99]), -1.0),
    "index_reduce_": lambda t: t.index_reduce_(0, torch.tensor([0, 1, 99]), -torch.ones(3), "prod"),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([0, 1, 99]), -1.0),
    "scatter_add_": lambda t: t.scatter_add_(0, torch.tensor([0, 1, 99]), -torch.ones(3)),
    "scatter_reduce_": lambda t: t.scatter_reduce_(
        0, torch.tensor([0, 1, 99]), -torch.ones(3), "sum"
    ),
    "put_": lambda t: t.put_(torch.tensor([0, 1, 99]), -torch.ones(3)),
    "masked_scatter_": lambda t: t.masked_scatter_(
        torch.tensor([True, True, True, False]), torch.tensor([-1.0])
    ),
    "index_add out=": lambda t: torch.index_add(
        t, 0, torch.tensor([0, 1, 99]), -torch.ones(3), out=t
    ),
    "aten.index_put_": lambda t: torch.ops.aten.index_put_(
        t, [torch.tensor([0, 1, 99])], torch.tensor(-1.0)
    ),
    "aten.index_fill_.int_Scalar": lambda t: torch.ops.aten.index_fill_.int_Scalar(
        t, 0, torch.tensor([0, 1, 99]), -1.0
    ),
    "apply_": lambda t: t.double().apply_(_fails_at_the_third()),
    "apply_ with a TypeError": lambda t: _apply(t, TypeError),
    "map_ with a TypeError": lambda t: _map(t, TypeError),
    "embedding with max_norm": lambda t: torch.nn.functional.embedding(
        torch.tensor([0, 1, 99]), t.view(4, 1), max_norm=0.5
    ),
}


def _fails_at_the_third(error: type[Exception] = ValueError) -> Callable[..., float]:
    calls: list[Any] = []

    def function(*values: float) -> float:
        calls.append(values)
        if len(calls) == 3:
            raise error("the third")
        return -1.0

    return function


def _apply(t: torch.Tensor, error: type[Exception]) -> Any:
    return t.apply_(_fails_at_the_third(error))


def _map(t: torch.Tensor, error: type[Exception]) -> Any:
    return t.map_(torch.ones(4), _fails_at_the_third(error))


PARTIAL["apply_"] = lambda t: _apply(t, ValueError)


def _saved_for_backward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    saved = torch.tensor([10.0, 20.0, 30.0, 40.0])
    return weight, saved, (weight * saved).sum()


@pytest.mark.parametrize("name", PARTIAL)
class TestAnInPlaceOperationThatFailsMidway:
    def test_gives_a_wrong_gradient_on_torch(self, name: str) -> None:
        weight, saved, loss = _saved_for_backward()
        before = state(saved)
        error = outcome_of(lambda: PARTIAL[name](saved)).error
        if error is None:
            pytest.skip("does not fail on this torch")
        if set(differences(before, state(saved))) != {"bytes"}:
            pytest.skip("writes nothing before it fails on this torch, or moves the version on")
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() != [10, 20, 30, 40]

    def test_makes_backward_refuse_inside_guarded(self, name: str) -> None:
        weight, saved, loss = _saved_for_backward()
        before = state(saved)
        with guarded():
            error = outcome_of(lambda: PARTIAL[name](saved)).error
        if error is None:
            pytest.skip("does not fail on this torch")
        if "bytes" in differences(before, state(saved)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            assert weight.grad is None

    def test_is_undone_inside_guarded_with_data(self, name: str) -> None:
        weight, saved, loss = _saved_for_backward()
        before = state(saved)
        with guarded(data=True):
            error = outcome_of(lambda: PARTIAL[name](saved)).error
        if error is None:
            pytest.skip("does not fail on this torch")
        assert differences(before, state(saved)) == {}
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [10, 20, 30, 40]

    def test_raises_what_torch_raises(self, name: str) -> None:
        torchs = outcome_of(lambda: PARTIAL[name](torch.ones(4))).error
        for scope in (guarded(), guarded(data=True)):
            with scope:
                ours = outcome_of(lambda: PARTIAL[name](torch.ones(4))).error
            assert type(ours) is type(torchs)


def test_at_least_ten_of_these_operations_spoil_data_silently_on_torch() -> None:
    silent = []
    for name, call in PARTIAL.items():
        tensor = torch.tensor([10.0, 20.0, 30.0, 40.0])
        before = state(tensor)
        outcome = outcome_of(lambda: call(tensor))  # noqa: B023
        if outcome.error is not None and set(differences(before, state(tensor))) == {"bytes"}:
            silent.append(name)
    assert len(silent) >= 10, silent


def test_an_operation_refused_before_it_starts_does_not_spoil_a_later_backward() -> None:
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "a leaf that requires grad": lambda w: w.add_(1),
        "a view of a leaf that requires grad": lambda w: w.view(-1).add_(1),
        "a wrong type": lambda w: w.add_("one"),  # type: ignore[arg-type]
        "out= that requires grad": lambda w: torch.add(w, 1, out=w),
    }
    for name, call in refused.items():
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * weight).sum()
        with guarded():
            assert outcome_of(lambda: call(weight)).error is not None, name  # noqa: B023
        error = outcome_of(loss.backward).error
        assert error is None, f"{name}: {error}"


@each_scope
def test_an_interrupt_in_the_middle_is_undone(
    scope: Callable[[], AbstractContextManager[Any]],
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    tensor = torch.zeros(4, dtype=torch.float64)
    version = tensor._version
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with scope(), pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            tensor.apply_(_never_ends())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tensor._version > version or tensor.tolist() == [0, 0, 0, 0]
    assert not is_on()


def _never_ends() -> Callable[[float], float]:
    calls: list[float] = []

    def function(value: float) -> float:
        calls.append(value)
        while len(calls) > 2:
            pass
        return 9.0

    return function


LISTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "_foreach_add_": lambda ts: torch._foreach_add_(ts, [torch.ones(2), torch.ones(3)]),
    "_foreach_mul_": lambda ts: torch._foreach_mul_(ts, [torch.zeros(2), torch.ones(3)]),
    "_foreach_copy_": lambda ts: torch._foreach_copy_(ts, [torch.zeros(2), torch.ones(3)]),
}


@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_fails_midway(name: str, inference: bool) -> None:
    mode = torch.inference_mode if inference else nullcontext
    with mode():
        torchs = outcome_of(lambda: LISTS[name]([torch.ones(2), torch.ones(2)])).error
        for scope, copies in ((guarded(), False), (guarded(data=True), True)):
            tensors = [torch.ones(2), torch.ones(2)]
            before = [state(tensor) for tensor in tensors]
            with scope:
                ours = outcome_of(lambda: LISTS[name](tensors)).error  # noqa: B023
            assert type(ours) is type(torchs)
            for old, tensor in zip(before, tensors, strict=True):
                changed = differences(old, state(tensor))
                if copies:
                    assert changed == {}
                elif not inference and "bytes" in changed:
                    assert "version" in changed


NORMALIZED = torch.arange(12.0).reshape(4, 3)


SCALING = (True, 0.1, 1e-5)  # training, momentum, epsilon


def _wrong_outputs() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.int32), torch.empty(0), torch.empty(0)]


def _native(mean: torch.Tensor, var: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    torch.native_batch_norm(NORMALIZED, None, None, mean, var, *SCALING, out=tuple(outputs))


def _native_by_name(mean: torch.Tensor, var: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    named: dict[str, Any] = {
        "running_mean": mean,
        "running_var": var,
        "training": True,
        "momentum": 0.1,
    }
    torch.native_batch_norm(NORMALIZED, None, None, **named, eps=1e-5, out=tuple(outputs))


def _operator(mean: torch.Tensor, var: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    named = dict(zip(("out", "save_mean", "save_invstd"), outputs, strict=True))
    operator = torch.ops.aten.native_batch_norm.out
    operator(NORMALIZED, None, None, mean, var, *SCALING, **named)


def _update(mean: torch.Tensor, var: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    # The overloads together: torch.ops.aten.batch_norm_update_stats.out is one of them.
    operator = torch.ops.aten.batch_norm_update_stats
    operator(NORMALIZED, mean, var, 0.1, out0=outputs[0], out1=outputs[1])


@pytest.mark.parametrize(
    ("way", "call"),
    [
        *(("guarded", call) for call in (_native, _native_by_name, _operator, _update)),
        *(("guarded(data=True)", call) for call in (_native, _native_by_name, _operator, _update)),
        # It patches torch's functions, not torch.ops.
        *(('install("out")', call) for call in (_native, _native_by_name)),
    ],
)
def test_running_statistics_that_a_late_failure_leaves_written(
    way: str, call: Callable[..., None]
) -> None:
    # The schema does not say that they are written; that outputs can't be is seen afterwards.
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "guarded": guarded,
        "guarded(data=True)": lambda: guarded(data=True),
        'install("out")': lambda: torchguard.install("out"),
    }
    mean, var = torch.zeros(3), torch.ones(3)
    with pytest.raises(RuntimeError):
        call(mean, var, _wrong_outputs())
    assert mean.tolist() != [0, 0, 0], "this torch fails before it writes"
    mean, var, outputs = torch.zeros(3), torch.ones(3), _wrong_outputs()
    saved = torch.ones(3, requires_grad=True) * mean
    versions = mean._version, var._version
    with pytest.raises(RuntimeError), scopes[way]():
        call(mean, var, outputs)
    assert [each.numel() for each in outputs] == [0, 0, 0]
    if way == "guarded(data=True)":
        assert (mean.tolist(), var.tolist()) == ([0, 0, 0], [1, 1, 1])
        assert (mean._version, var._version) == versions
    else:
        assert mean._version > versions[0]
        assert var._version > versions[1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_calls_that_do_not_fail(training: bool) -> None:
    def called(function: Callable[..., Any]) -> tuple[Any, ...]:
        mean, var = torch.zeros(3), torch.ones(3)
        outputs = [torch.empty(0) for _ in range(3)]
        arguments = (NORMALIZED, None, None, mean, var, training, 0.1, 1e-5)
        function(*arguments, out=tuple(outputs))
        return *(each.tolist() for each in (mean, var, *outputs)), mean._version, var._version

    expected = called(torch.native_batch_norm)
    scopes: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
        guarded,
        lambda: guarded(data=True),
        lambda: torchguard.install("out"),
    )
    for scope in scopes:
        with scope():
            assert called(torch.native_batch_norm) == expected
