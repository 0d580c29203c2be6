"""capture and Snapshot.restore: every layout, with and without elements."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import kinds
from support.kinds import Kind, Wrapper, named, plain, state
from support.ways import differences
from torchguard import guarded, rollback_on_error
from torchguard.rollback.snapshot import bytes_needed, capture

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_capture_reads_a_tensor_and_leaves_it_alone(kind: Kind) -> None:
    tensor = kind.make()
    before = state(tensor)
    kinds.CALLS.clear()
    saved = capture(tensor)
    assert kinds.CALLS == []
    assert differences(before, state(tensor)) == {}
    assert (saved.storage is None) is not kind.has_metadata or kind.name == "nested jagged"
    if kind.has_metadata:
        assert saved.size == before["shape"]
        assert saved.stride == before["stride"]
        assert saved.storage_offset == before["offset"]
        assert saved.storage is before["storage"].held
        assert saved.nbytes == before["nbytes"]
        assert saved.version == before["version"]


@pytest.mark.parametrize("kind", **named(tuple(k for k in kinds.STRIDED if not k.kills)))
def test_restore_undoes_everything_metadata_is(kind: Kind) -> None:
    changes: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda t: t.resize_(0),
        lambda t: t.set_(torch.zeros(3, dtype=t.dtype, device=t.device)),  # type: ignore[call-overload]
        lambda t: t.resize_(40),
        lambda t: t.resize_(-1),
    )
    changed_anything = 0
    for change in changes:
        tensor = kind.make()
        saved = capture(tensor)
        before = state(tensor)
        with kind.scope():
            with contextlib.suppress(RuntimeError):
                change(tensor)
            changed_anything += differences(before, state(tensor)) != {}
            kinds.CALLS.clear()
            saved.restore()
        assert kinds.CALLS == []
        assert differences(before, state(tensor)) == {}
    assert changed_anything >= 1


def test_restore_sets_the_version_that_is_passed() -> None:
    tensor = plain()
    saved = capture(tensor)
    tensor.add_(1)
    saved.restore(tensor._version)
    assert tensor._version == 1
    saved.restore(41)
    assert tensor._version == 41


# --- layouts that are made of other tensors: whoever takes a snapshot takes one of their parts


def _coo_that_cant_grow() -> torch.Tensor:
    values = torch.from_numpy(np.arange(4.0).reshape(2, 2))
    return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (3, 2), is_coalesced=True)


def _csr_that_cant_grow() -> torch.Tensor:
    pointers = torch.from_numpy(np.array([0, 1, 2]))
    return torch.sparse_csr_tensor(pointers, torch.tensor([0, 1]), torch.ones(2), (2, 2))


def _other_coo() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.ones(3, 9), (9, 9))


def _larger_csr() -> torch.Tensor:
    rows = torch.zeros(10, dtype=torch.int64)
    return torch.sparse_csr_tensor(rows, torch.empty(0), torch.empty(0), (9, 9))


class Replacing(Wrapper):
    """A wrapper whose operators that write give it another tensor in place of the one it holds."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            args[0].wrapped = args[0].wrapped * 2
            raise RuntimeError("too late")
        return super().__torch_dispatch__(func, types, args, kwargs)


FAILING: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "COO sparse_resize_": (_coo_that_cant_grow, lambda t: t.sparse_resize_((5, 7), 1, 1)),
    "COO copy_": (_coo_that_cant_grow, lambda t: t.copy_(_other_coo())),
    "COO resize_as_sparse_": (_coo_that_cant_grow, lambda t: t.resize_as_sparse_(_other_coo())),
    "CSR resize_as_sparse_": (_csr_that_cant_grow, lambda t: t.resize_as_sparse_(_larger_csr())),
    "CSR resize_": (_csr_that_cant_grow, lambda t: t.resize_(9, 9)),
    "a wrapper that replaces": (lambda: Replacing(plain()), lambda t: t.add_(1)),
}
CALLERS: dict[str, Callable[[torch.Tensor], AbstractContextManager[Any]]] = {
    "guarded": lambda _: guarded(),
    "guarded with data": lambda _: guarded(data=True),
    "rollback_on_error": rollback_on_error,
    "rollback_on_error with data": lambda t: rollback_on_error(t, data=True),
}


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("caller", CALLERS)
def test_no_caller_forgets_a_layout(failing: str, caller: str) -> None:
    make, fail = FAILING[failing]
    bare, tensor = make(), make()
    untouched = state(bare)
    with pytest.raises(RuntimeError):
        fail(bare)
    assert differences(untouched, state(bare)).keys() - {"version"}, "plain torch changes it"
    before = state(tensor)
    with pytest.raises(RuntimeError), CALLERS[caller](tensor):
        fail(tensor)
    after = state(tensor)
    for found in (before, after):  # without a copy it moves on, and that of the parts with it
        for each in (found, *found.get("parts", ())):
            if isinstance(each, dict):
                each.pop("version")
    assert differences(before, after) == {}


def test_a_snapshot_of_a_sparse_tensor_can_be_restored_again_and_again() -> None:
    for kind in (kind for kind in kinds.SPECIAL if kind.name.startswith("sparse")):
        tensor = kind.make()
        before = state(tensor)
        saved = capture(tensor, data=True)
        for change in (torch.Tensor.zero_, torch.Tensor.zero_, lambda t: t.mul_(3)):
            change(tensor)
            assert differences(before, state(tensor)), kind.name
            saved.restore()
            assert differences(before, state(tensor)) == {}, kind.name


def test_a_wrapper_of_a_sparse_tensor_has_its_parts_parts_back() -> None:
    class Outer(Wrapper):
        pass

    inner = _coo_that_cant_grow()
    outer = Outer(plain())
    outer.wrapped = inner
    saved, before = capture(outer), state(inner)
    with pytest.raises(RuntimeError):
        inner.sparse_resize_((5, 7), 1, 1)
    assert differences(before, state(inner))
    saved.restore()
    assert differences(before, state(inner)) == {}


@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.integers(0, 5), min_size=len(size), max_size=len(size)),
            st.integers(0, 6),
            st.sampled_from([torch.uint8, torch.float16, torch.float64, torch.complex128]),
        )
    )
)
def test_bytes_needed_is_what_torch_makes_a_storage_hold(
    case: tuple[list[int], list[int], int, torch.dtype],
) -> None:
    size, stride, offset, dtype = case
    tensor = torch.empty(0, dtype=dtype)
    needed = bytes_needed(tuple(size), tuple(stride), offset, tensor.itemsize)
    tensor.set_(torch.empty(0, dtype=dtype).untyped_storage(), offset, tuple(size), tuple(stride))
    assert tensor.untyped_storage().nbytes() == needed
