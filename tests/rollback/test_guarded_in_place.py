"""guarded(): an in-place operation that fails midway, lists of tensors, running statistics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support import kinds
from support.kinds import Kind, named, state, values
from support.ways import differences, outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


FAR = torch.tensor([0, 1, 99])
# Beside the in-place variants of the OpInfo database, which test_out_sweep.py fails one by one.
PARTIAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_put_": lambda t: t.index_put_((FAR,), torch.tensor(-1.0)),
    "setitem": lambda t: t.__setitem__(FAR, -1.0),
    "scatter_": lambda t: t.scatter_(0, FAR.view(-1, *(1,) * (t.dim() - 1)), -1.0),
    "index_add out=": lambda t: torch.index_add(t, 0, FAR, -torch.ones(3, *t.shape[1:]), out=t),
    "aten.index_put_": lambda t: torch.ops.aten.index_put_(t, [FAR], torch.tensor(-1.0)),
    "aten.index_fill_.int_Scalar": lambda t: torch.ops.aten.index_fill_.int_Scalar(t, 0, FAR, -1.0),
    "index_put_ by name": lambda t: torch.index_put_(
        input=t, indices=[FAR], values=torch.tensor(-1.0)
    ),
    "apply_": lambda t: t.apply_(_fails_at_the_third()),
    "apply_ with a TypeError": lambda t: t.apply_(_fails_at_the_third(TypeError)),
    "apply_ with a callback in C": lambda t: t.apply_({0.0: 9.0}.get),
    "apply_ with an interrupt": lambda t: t.apply_(_fails_at_the_third(KeyboardInterrupt)),
    "map_ with a TypeError": lambda t: t.map_(t.clone(), _fails_at_the_third(TypeError)),
    "embedding with max_norm": lambda t: torch.nn.functional.embedding(
        FAR, t.view(-1, 2), max_norm=0.5
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


WRITABLE = tuple(
    kind
    for kind in kinds.STRIDED
    if kind.name != "meta" and "Parameter" not in kind.name and not kind.kills
)


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


ORDINARY: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + t,
    "add_": lambda t: t.add_(1),
    "mul_ by itself": lambda t: t.mul_(t),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(t.clone()),
    "in range": lambda t: t.__setitem__(0, 1),
    "out= of another": lambda t: torch.add(t, 1, out=torch.empty(0)),
    "out= of itself": lambda t: torch.mul(t, 2, out=t),
    "squeeze_": lambda t: t.squeeze_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "detach_": lambda t: t.detach_(),
    "a string": lambda t: t.fill_("x"),  # type: ignore[call-overload]
    "a bad index": lambda t: t.index_fill_(0, torch.tensor([9]), 0),
    "a list": lambda t: torch._foreach_add_([t], 1),
    "a list of wrong shapes": lambda t: torch._foreach_add_(
        [t, t], [torch.ones(7, 7), torch.ones(9)]
    ),
    "relu": lambda t: torch.nn.functional.relu(t, inplace=True),
    "numel": lambda t: t.data.numel() + 1,
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    **ORDINARY,
    **PARTIAL,
    "copy_ of another shape": lambda t: t.copy_(torch.ones(7, 7)),
    "masked_scatter_": lambda t: t.masked_scatter_(
        torch.ones(t.shape, dtype=torch.bool), torch.ones(1, dtype=t.dtype)
    ),
    "foreach": lambda t: torch._foreach_mul_([t, t], [torch.ones(()), torch.ones(7, 7)]),
    "unsqueeze_ too far": lambda t: t.unsqueeze_(9),
}


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_each_kind_is_as_on_torch_or_as_it_was_or_has_moved_its_version_on(
    kind: Kind, data: bool
) -> None:
    half_written = set()
    for name, call in (WRITES if kind in WRITABLE else ORDINARY).items():
        twin, tensor = kind.make(), kind.make()
        before = state(tensor)
        with kind.scope():
            torchs = outcome_of(lambda: call(twin))  # noqa: B023
            with guarded(data=data):
                ours = outcome_of(lambda: call(tensor))  # noqa: B023
        assert type(ours.error) is type(torchs.error), name
        assert (ours.result is tensor) is (torchs.result is twin), name
        changed = differences(before, state(tensor))
        if ours.error is None:
            assert differences(values(twin), values(tensor)) == {}, name
        elif data:
            assert changed == {}, name
        elif kind in kinds.STRIDED:
            assert set(changed) <= {"bytes", "version"}, name
            assert "bytes" not in changed or "version" in changed or before["version"] is None
            half_written |= {name} if "bytes" in changed else set()
    if kind.name == "plain" and not data:
        assert half_written >= PARTIAL.keys()


def test_a_write_that_fails_midway_makes_backward_refuse() -> None:
    _, saved, loss = _saved_for_backward()
    with guarded(), pytest.raises(IndexError):
        saved[FAR] = -1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LISTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "_foreach_add_": lambda ts: torch._foreach_add_(ts, [torch.ones(2), torch.ones(3)]),
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
@pytest.mark.parametrize("call", [_native, _operator, _update])
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
