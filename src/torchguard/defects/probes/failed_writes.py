"""Operations that fail halfway: a resize without its memory, a result that is partly written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import torch
from torch import Tensor

import torchguard
from torchguard.defects.probes import issues, memory_defect, share

_Call = Callable[[Tensor], object]
_Scope = Callable[[Tensor], AbstractContextManager[object]]
"""What a call that writes to a tensor is made in."""


def _rolled_back(tensor: Tensor) -> AbstractContextManager[object]:
    return torchguard.rollback_on_error(tensor, data=True)


def _growable() -> Tensor:
    return torch.arange(4.0)


def _locked() -> Tensor:
    return torch.from_numpy(np.arange(4, dtype=np.float32))


# Name, the tensor before, the call that can't succeed.
_CASES: tuple[tuple[str, Callable[[], Tensor], _Call], ...] = (
    ("resize_", _locked, lambda t: t.resize_(5, 5)),
    ("resize_as_", _locked, lambda t: t.resize_as_(torch.ones(5, 5))),
    ("set_", _growable, lambda t: t.set_(_locked().untyped_storage(), 0, (5, 5), (5, 1))),
    ("out=", _locked, lambda t: torch.neg(torch.ones(5, 5), out=t)),
    ("too large", _growable, lambda t: t.resize_(2**50)),  # 4 PiB: no machine has them
    ("overflow", _growable, lambda t: t.resize_(2**40, 2**40)),
)


def _metadata(t: Tensor) -> tuple[object, ...]:
    storage = t.untyped_storage()
    return (t.shape, t.stride(), t.storage_offset(), storage.data_ptr(), storage.nbytes())


def _is_spoiled(make: Callable[[], Tensor], call: _Call) -> bool:
    t = make()
    values, before = t.tolist(), _metadata(t)
    try:
        call(t)
    except (RuntimeError, ValueError, MemoryError):
        # Values are read only where the metadata came back: reading a spoiled tensor may crash.
        return _metadata(t) != before or t.tolist() != values
    return False


@memory_defect(
    "a failed resize_, resize_as_, set_ or out= leaves a shape without memory behind it",
    title="a failed resize_ leaves a shape without memory",
    upstream=issues(170298),
    guards=("resize", "out"),
)
def resize_locked() -> str | None:
    """Let each call fail once and compare the tensor with what it was."""
    spoiled = [name for name, make, call in _CASES if _is_spoiled(make, call)]
    return f"failed and spoiled: {', '.join(spoiled)}" if spoiled else None


@memory_defect(
    "resize_ of a tensor in shared memory calls a null allocator: the process dies",
    title="resize_ in shared memory: Segmentation fault",
    guards=("resize",),
)
def resize_shared() -> str | None:
    """Grow a shared tensor; a process that survives must have an intact tensor.

    Another defect with the same null allocator: https://github.com/pytorch/pytorch/issues/184748
    """
    t = torch.ones(4)
    share(t)
    try:
        t.resize_(1000)
    except RuntimeError:
        if t.shape != (4,) or t.tolist() != [1.0] * 4:
            return f"resize_ failed, yet the shape is {tuple(t.shape)}"
        return None
    held = t.untyped_storage().nbytes()
    return f"{t.nbytes} bytes described, {held} held" if t.nbytes > held else None


@memory_defect(
    "after storage.resize_(0) any access to the tensor reads memory that is gone",
    title="reads freed memory after storage.resize_(0)",
    upstream=issues(171676),
    guards=("check_consistent",),
    guarded_with=torchguard.check_consistent,
    only_detects=True,
    limits="the access itself still reads that memory: check before it, where a storage may shrink",
)
def storage_shrunk(check: Callable[[Tensor], object] = lambda _: None) -> str | None:
    """Read a tensor whose storage was shrunk to nothing: a null pointer."""
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    try:
        check(t)
        total = t.sum().item()
    except RuntimeError:
        return None
    held = t.untyped_storage().nbytes()
    return f"summed {t.nbytes} bytes of {held} to {total}" if t.nbytes > held else None


# Three rows: row 9 is out of range everywhere.
_ROWS = torch.arange(9.0).reshape(3, 3)
_BAD_ROW = torch.tensor([0, 1, 9])
_BAD_ROWS = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 9]])

# Name, the call that can't succeed; each result would be (3, 3).
_OUT_CASES: tuple[tuple[str, _Call], ...] = (
    ("index_select", lambda out: torch.index_select(_ROWS, 0, _BAD_ROW, out=out)),
    ("gather", lambda out: torch.gather(_ROWS, 0, _BAD_ROWS, out=out)),
    ("take", lambda out: torch.take(_ROWS, _BAD_ROWS, out=out)),
    ("scatter", lambda out: torch.scatter(_ROWS, 0, _BAD_ROWS, _ROWS, out=out)),
    ("index_add", lambda out: torch.index_add(_ROWS, 0, _BAD_ROW, _ROWS, out=out)),
    ("linalg.inv", lambda out: torch.linalg.inv(torch.zeros(3, 3), out=out)),
)


def _damage_of(out: Tensor, call: _Call, scope: _Scope) -> str | None:
    shape, values = out.shape, out.tolist()
    try:
        with scope(out):
            call(out)
    except (RuntimeError, IndexError, ValueError):
        if out.shape != shape:
            return f"{tuple(shape)} became {tuple(out.shape)}"
        if out.tolist() != values:
            return "data overwritten"
    return None


@memory_defect(
    "a failing out= call leaves out resized or filled with garbage",
    title="a failed out= call leaves garbage in out",
    guards=("rollback_on_error",),
    guarded_with=_rolled_back,
    limits='install("out") restores shape and storage for every call, and leaves what was written, '
    "with the version counter moved on",
)
def out_garbage(scope: _Scope = nullcontext) -> str | None:
    """Let each call fail once into an empty ``out`` and once into one that holds data."""
    damaged: dict[str, str] = {}
    for name, call in _OUT_CASES:
        # 77 is no result of any of these calls.
        for out in (torch.empty(0), torch.full((3, 3), 77.0)):
            damage = _damage_of(out, call, scope)
            if damage is not None:
                damaged.setdefault(name, damage)
    if not damaged:
        return None
    name, damage = next(iter(damaged.items()))
    return f"{len(damaged)} of {len(_OUT_CASES)} failing calls spoiled out; {name}: {damage}"


_BAD = torch.tensor([0, 9])  # row 0 exists, row 9 does not
_NEW = torch.tensor([50.0, 60.0])
_EVERYWHERE = torch.ones(4, dtype=torch.bool)  # 4 places for the 2 new values


# Name, the call that can't succeed.
_WRITES: tuple[tuple[str, _Call], ...] = (
    ("index_copy_", lambda t: t.index_copy_(0, _BAD, _NEW)),
    ("index_add_", lambda t: t.index_add_(0, _BAD, _NEW)),
    ("index_put_", lambda t: t.index_put_((_BAD,), _NEW)),
    ("scatter_", lambda t: t.scatter_(0, _BAD, _NEW)),
    ("put_", lambda t: t.put_(_BAD, _NEW)),
    ("masked_scatter_", lambda t: t.masked_scatter_(_EVERYWHERE, _NEW)),
)


def _gradient_error(call: _Call, scope: _Scope) -> float:
    """Return how wrong the gradient of w * t is when ``call`` fails before the backward."""
    t = torch.arange(1.0, 5.0)
    w = torch.ones(4, requires_grad=True)
    right = t.clone()  # d(w * t).sum() / dw is t as it was in the forward
    loss = (w * t).sum()
    with suppress(RuntimeError, IndexError), scope(t):
        call(t)
        return 0.0
    with suppress(RuntimeError):  # autograd noticed that t was modified
        (gradient,) = torch.autograd.grad(loss, w)
        return (gradient - right).abs().max().item()
    return 0.0


@memory_defect(
    "an indexed write that raises has written part of its rows; backward uses them",
    title="a failed x[i] = v has written some rows",
    guards=("rollback_on_error",),
    guarded_with=_rolled_back,
)
def index_partial(scope: _Scope = nullcontext) -> str | None:
    """Let each write fail between a forward and its backward and look at the gradient."""
    errors = {name: _gradient_error(call, scope) for name, call in _WRITES}
    wrong = [name for name, error in errors.items() if error > 0]
    if not wrong:
        return None
    off = f"{wrong[0]} by {errors[wrong[0]]:g}"
    return f"{len(wrong)} of {len(_WRITES)} failed writes: wrong gradient; {off}, no message"
