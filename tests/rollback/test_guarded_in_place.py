"""guarded(): an in-place operation that fails midway, lists of tensors, running statistics."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support import kinds
from support.kinds import Kind, named, state, values
from support.scopes import each_scope
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
            comparable = isinstance(outcome.result, torch.Tensor) and kind in kinds.STRIDED
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


FAR = torch.tensor([0, 1, 99])
# Beside the in-place variants of the OpInfo database, which test_out_sweep.py fails one by one.
PARTIAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_put_": lambda t: t.index_put_((FAR,), torch.tensor(-1.0)),
    "setitem": lambda t: t.__setitem__(FAR, -1.0),
    "scatter_": lambda t: t.scatter_(0, FAR, -1.0),
    "index_add out=": lambda t: torch.index_add(t, 0, FAR, -torch.ones(3), out=t),
    "aten.index_put_": lambda t: torch.ops.aten.index_put_(t, [FAR], torch.tensor(-1.0)),
    "aten.index_fill_.int_Scalar": lambda t: torch.ops.aten.index_fill_.int_Scalar(t, 0, FAR, -1.0),
    "index_put_ by name": lambda t: torch.index_put_(
        input=t, indices=[FAR], values=torch.tensor(-1.0)
    ),
    "apply_": lambda t: t.apply_(_fails_at_the_third()),
    "apply_ with a TypeError": lambda t: t.apply_(_fails_at_the_third(TypeError)),
    "apply_ with a callback in C": lambda t: t.apply_({1.0: 9.0, 10.0: 9.0}.get),
    "apply_ with an interrupt": lambda t: t.apply_(_fails_at_the_third(KeyboardInterrupt)),
    "map_ with a TypeError": lambda t: t.map_(torch.ones(4), _fails_at_the_third(TypeError)),
    "embedding with max_norm": lambda t: torch.nn.functional.embedding(
        FAR, t.view(4, 1), max_norm=0.5
    ),
}


def _fails_at_the_third(error: type[BaseException] = ValueError) -> Callable[..., float]:
    calls: list[Any] = []

    def function(*values: float) -> float:
        calls.append(values)
        if len(calls) == 3:
            raise error("the third")
        return -1.0

    return function


def _saved_for_backward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    saved = torch.tensor([10.0, 20.0, 30.0, 40.0])
    return weight, saved, (weight * saved).sum()


SCOPES: dict[str, Any] = {
    "torch": nullcontext(),
    "guarded": guarded(),
    "guarded with data": guarded(data=True),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_an_operation_that_fails_midway(name: str) -> None:
    """In a scope a later backward refuses what has changed, or nothing has, with ``data``."""
    torchs = outcome_of(lambda: PARTIAL[name](torch.ones(4))).error
    if torchs is None:
        pytest.skip("does not fail on this torch")
    for scope in ("guarded", "guarded with data"):
        weight, saved, loss = _saved_for_backward()
        before = state(saved)
        with SCOPES[scope]:
            ours = outcome_of(lambda: PARTIAL[name](saved)).error  # noqa: B023
        assert type(ours) is type(torchs)
        changed = differences(before, state(saved))
        if scope == "guarded" and "bytes" in changed:
            assert set(changed) == {"bytes", "version"}
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            assert weight.grad is None
        elif scope == "guarded with data":
            assert changed == {}
            loss.backward()
            assert weight.grad is not None
            assert weight.grad.tolist() == [10, 20, 30, 40]


WRITABLE = tuple(
    kind
    for kind in kinds.STRIDED
    if kind.name != "meta" and "Parameter" not in kind.name and not kind.kills
)
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    **PARTIAL,
    "in range": lambda t: t.__setitem__(0, 3),
    "copy_": lambda t: t.copy_(torch.ones(7, 7)),
    "masked_scatter_": lambda t: t.masked_scatter_(
        torch.ones(t.shape, dtype=torch.bool), torch.ones(1, dtype=t.dtype)
    ),
    "foreach": lambda t: torch._foreach_mul_([t, t], [torch.ones(()), torch.ones(7, 7)]),
    "unsqueeze_": lambda t: t.unsqueeze_(9),
}


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", **named(WRITABLE))
def test_each_kind_is_as_it_was_or_has_moved_its_version_on(kind: Kind, data: bool) -> None:
    for name, call in WRITES.items():
        twin, tensor = kind.make(), kind.make()
        before = state(tensor)
        with kind.scope():
            torchs = outcome_of(lambda: call(twin)).error  # noqa: B023
            with guarded(data=data):
                ours = outcome_of(lambda: call(tensor)).error  # noqa: B023
        assert type(ours) is type(torchs), name
        changed = differences(before, state(tensor))
        if ours is None:
            assert differences(values(twin), values(tensor)) == {}, name
        elif data:
            assert changed == {}, name
        else:
            assert set(changed) <= {"bytes", "version"}, name
            assert "bytes" not in changed or "version" in changed or before["version"] is None


def test_most_of_these_operations_spoil_a_gradient_silently_on_torch() -> None:
    silent = []
    for name, call in PARTIAL.items():
        weight, saved, loss = _saved_for_backward()
        if outcome_of(lambda: call(saved)).error is None or saved._version:  # noqa: B023
            continue
        loss.backward()
        assert weight.grad is not None
        if weight.grad.tolist() != [10, 20, 30, 40]:
            silent.append(name)
    assert len(silent) > len(PARTIAL) / 2, silent


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_what_is_no_callback_has_not_begun(name: str) -> None:
    _, saved, loss = _saved_for_backward()
    arguments = (3,) if name == "apply_" else (torch.ones(4), 3)
    with guarded(), pytest.raises(TypeError):
        getattr(saved, name)(*arguments)
    loss.backward()


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
Outputs = tuple[torch.Tensor, ...]


def _native(mean: torch.Tensor, var: torch.Tensor, outputs: Outputs) -> None:
    torch.native_batch_norm(NORMALIZED, None, None, mean, var, True, 0.1, 1e-5, out=outputs)


def _native_by_name(mean: torch.Tensor, var: torch.Tensor, outputs: Outputs) -> None:
    given: dict[str, Any] = {"running_mean": mean, "running_var": var, "training": True}
    torch.native_batch_norm(NORMALIZED, None, None, **given, momentum=0.1, eps=1e-5, out=outputs)


def _operator(mean: torch.Tensor, var: torch.Tensor, outputs: Outputs) -> None:
    named = dict(zip(("out", "save_mean", "save_invstd"), outputs, strict=True))
    operator = torch.ops.aten.native_batch_norm.out
    operator(NORMALIZED, None, None, mean, var, True, 0.1, 1e-5, **named)


def _update(mean: torch.Tensor, var: torch.Tensor, outputs: Outputs) -> None:
    # The overloads together: torch.ops.aten.batch_norm_update_stats.out is one of them.
    operator = torch.ops.aten.batch_norm_update_stats
    operator(NORMALIZED, mean, var, 0.1, out0=outputs[0], out1=outputs[1])


OF_STATISTICS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guarded": guarded,
    "guarded(data=True)": lambda: guarded(data=True),
    'install("out")': lambda: torchguard.install("out"),
}


@pytest.mark.parametrize("way", OF_STATISTICS)
@pytest.mark.parametrize("call", [_native, _native_by_name, _operator, _update])
def test_running_statistics_that_a_late_failure_leaves_written(
    way: str, call: Callable[..., None]
) -> None:
    """A call that does not fail gives what it gives on torch."""
    # The schema does not say that they are written; that outputs can't be is seen afterwards.
    if "install" in way and call in {_operator, _update}:
        pytest.skip("install() patches torch's functions, not torch.ops")

    def run(scope: AbstractContextManager[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, var = torch.zeros(3), torch.ones(3)
        outputs = torch.empty(0, dtype=torch.int32), torch.empty(0), torch.empty(0)
        saved = torch.ones(3, requires_grad=True) * mean
        with pytest.raises(RuntimeError), scope:
            call(mean, var, outputs)
        if not isinstance(scope, nullcontext):
            assert [each.numel() for each in outputs] == [0, 0, 0]
        return mean, var, saved.sum()

    def succeed(scope: AbstractContextManager[Any]) -> list[Any]:
        tensors = [torch.zeros(3), torch.ones(3), *(torch.empty(0) for _ in range(3))]
        with scope:
            call(*tensors[:2], tuple(tensors[2:]))
        return [(each.tolist(), each._version) for each in tensors]

    assert succeed(OF_STATISTICS[way]()) == succeed(nullcontext())
    mean, var, loss = run(nullcontext())
    assert mean.tolist() != [0, 0, 0], "this torch fails before it writes"
    mean, var, loss = run(OF_STATISTICS[way]())
    if way == "guarded(data=True)":
        assert (mean.tolist(), var.tolist()) == ([0, 0, 0], [1, 1, 1])
        assert mean._version == var._version == 0
        loss.backward()
    else:
        assert var._version > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
