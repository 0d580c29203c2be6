"""rollback_on_error: sparse, quantized and other layouts, and callbacks in C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from support.kinds import plain, state
from support.ways import differences, outcome_of
from torchguard import _torch, guarded, rollback_on_error
from torchguard.rollback import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.filterwarnings("ignore")

DATA = pytest.mark.parametrize("data", [False, True])


class Planned(Exception):  # noqa: N818  raised by the tests, to be rolled back from
    """What the block raises."""


# --- layouts without metadata of their own


def _csr_that_cant_grow() -> torch.Tensor:
    pointers = torch.from_numpy(np.array([0, 1, 2]))
    return torch.sparse_csr_tensor(pointers, torch.tensor([0, 1]), torch.ones(2), (2, 2))


LARGER = torch.sparse_csr_tensor(torch.zeros(10, dtype=torch.int64), [], torch.empty(0), (9, 9))


@DATA
@pytest.mark.parametrize("name", ["resize_as_sparse_", "resize_as_"])
def test_a_failed_resize_leaves_the_row_pointers_of_csr(name: str, data: bool) -> None:
    bare, tensor = _csr_that_cant_grow(), _csr_that_cant_grow()
    assert outcome_of(lambda: getattr(bare, name)(LARGER)).error is not None
    pointers = bare.crow_indices()
    assert pointers.numel() * pointers.itemsize > pointers.untyped_storage().nbytes()
    before = state(tensor)
    with guarded(data=data):
        assert outcome_of(lambda: getattr(tensor, name)(LARGER)).error is not None
    assert differences(before, state(tensor)) == {}


FAILING: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "sparse COO": (
        lambda: torch.eye(3).to_sparse(),
        lambda t: t.mul_(torch.ones(4, 4).to_sparse()),
    ),
    "sparse CSR": (
        lambda: torch.eye(3).to_sparse_csr(),
        lambda t: t.copy_(torch.ones(3, 3).to_sparse_csr()),
    ),
    "mkldnn": (
        lambda: torch.ones(3, 3).to_mkldnn(),
        lambda t: t.add_(torch.ones(5, 5).to_mkldnn()),
    ),
    "meta": (
        lambda: torch.ones(3, device="meta"),
        lambda t: t.add_(torch.ones(5, device="meta")),
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_the_version_comes_back_with_the_data_of_every_layout(kind: str) -> None:
    make, fail = FAILING[kind]
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without mkldnn")
    tensor = make()
    version = tensor._version
    with guarded(data=True):
        assert outcome_of(lambda: fail(tensor)).error is not None
    assert tensor._version == version
    with pytest.raises(Planned), rollback_on_error(tensor, data=True):
        tensor.zero_()
        raise Planned
    assert tensor._version == version


def _float_zero_points() -> torch.Tensor:
    scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0.0, 1.0])
    return torch.quantize_per_channel(plain(), scales, zeros, 0, torch.quint8)


def test_a_tensor_that_torch_cant_clone_keeps_its_operations_and_its_data() -> None:
    with pytest.raises(RuntimeError, match="clone"):
        _float_zero_points().clone()
    for name in ("detach_", "squeeze_", "share_memory_", "requires_grad_"):
        with guarded(data=True):
            arguments = (False,) if name == "requires_grad_" else ()
            assert outcome_of(lambda: getattr(_float_zero_points(), name)(*arguments)).error is None  # noqa: B023
    tensor = _float_zero_points()
    before = bytes(tensor.untyped_storage().tolist())
    with pytest.raises(Planned), rollback_on_error(tensor, data=True):
        tensor.untyped_storage().copy_(torch.full((6,), 7, dtype=torch.uint8).untyped_storage())
        raise Planned
    assert bytes(tensor.untyped_storage().tolist()) == before


# --- callbacks


def test_a_callback_in_c_that_fails_midway_has_begun() -> None:
    weight = torch.ones(3, requires_grad=True)
    numbers = torch.tensor([1.0, 2.0, 3.0])
    loss = (weight * numbers).sum()
    with guarded(), pytest.raises(TypeError):
        numbers.apply_({1.0: 9.0}.get)
    assert numbers.tolist() != [1, 2, 3]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_what_is_no_callback_has_not_begun(name: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    numbers = torch.tensor([1.0, 2.0, 3.0])
    loss = (weight * numbers).sum()
    arguments = (3,) if name == "apply_" else (torch.ones(3), 3)
    with guarded(), pytest.raises(TypeError):
        getattr(numbers, name)(*arguments)
    loss.backward()


def test_a_callback_in_c_with_data_leaves_the_numbers() -> None:
    numbers = torch.tensor([1.0, 2.0, 3.0])
    with guarded(data=True), pytest.raises(TypeError):
        numbers.apply_({1.0: 9.0}.get)
    assert numbers.tolist() == [1, 2, 3]


def test_an_undo_that_is_interrupted_keeps_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter stays where the block's writes have moved it, not where the undo did."""
    interrupts = [KeyboardInterrupt]

    def set_version(tensor: torch.Tensor, version: int) -> None:
        if interrupts:
            raise interrupts.pop()
        _torch.set_version(tensor, version)

    monkeypatch.setattr(snapshot, "set_version", set_version)
    tensor = plain()
    written = 0
    with pytest.raises(KeyboardInterrupt), rollback_on_error(tensor):
        tensor.add_(1)
        tensor.unsqueeze_(0)
        written = tensor._version
        raise Planned
    assert not interrupts
    assert tensor.shape == plain().shape
    assert tensor._version == written
