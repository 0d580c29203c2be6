"""capture and restore: what a tensor is besides its bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import Kind, named, plain, state
from ways import differences

from torchguard.rollback.metadata import bytes_needed, capture, restore

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_capture_reads_a_tensor_and_leaves_it_alone(kind: Kind) -> None:
    tensor = kind.make()
    before = state(tensor)
    kinds.CALLS.clear()
    saved = capture(tensor)
    assert kinds.CALLS == []
    assert differences(before, state(tensor)) == {}
    assert (saved is None) is not kind.has_metadata or kind.name == "nested jagged"
    if saved is not None and kind.has_metadata:
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
        assert saved is not None
        before = state(tensor)
        with kind.scope():
            with contextlib.suppress(RuntimeError):
                change(tensor)
            changed_anything += differences(before, state(tensor)) != {}
            kinds.CALLS.clear()
            restore(tensor, saved, version=saved.version)
        assert kinds.CALLS == []
        assert differences(before, state(tensor)) == {}
    assert changed_anything >= 1


def test_restore_sets_the_version_it_is_told_to() -> None:
    tensor = plain()
    saved = capture(tensor)
    assert saved is not None
    tensor.add_(1)
    restore(tensor, saved, version=tensor._version)
    assert tensor._version == 1
    restore(tensor, saved, version=41)
    assert tensor._version == 41


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
