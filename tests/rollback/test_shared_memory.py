"""Tensors in shared memory that would have to grow: an error where torch ends the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.kinds import state
from support.ways import differences, ends_the_process, outcome_of
from torchguard import guarded, install
from torchguard.errors import NonResizableStorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")


def _shared(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor: torch.Tensor = torch.ones(4, dtype=dtype).share_memory_()
    return tensor


def _parameter() -> torch.Tensor:
    """What Hogwild training shares."""
    return torch.nn.Linear(2, 2, bias=False).share_memory().weight


class Subclass(torch.Tensor):
    pass


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _shared()


def _non_leaf() -> torch.Tensor:
    tensor: torch.Tensor = (torch.ones(4, requires_grad=True) * 1).share_memory_()
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": _shared,
    "Parameter": _parameter,
    "transposed Parameter": lambda: _parameter().t(),
    "subclass": lambda: _shared().as_subclass(Subclass),
    "conj view": lambda: _shared(torch.complex64).conj(),
    "neg view": lambda: _shared(torch.complex64).conj().imag,
    "inference": _inference,
    "non-leaf": _non_leaf,
}


def _like(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.full(size, 2, dtype=tensor.dtype)


OUT: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "add": lambda t, size: torch.add(_like(t, size), 1, out=t),
    "a tuple": lambda t, size: torch.max(
        _like(t.real if t.is_complex() else t, (*size, 3)), -1, out=(t, torch.empty(0).long())
    ),
}
ATEN: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "aten.add.out": lambda t, size: torch.ops.aten.add.out(_like(t, size), _like(t, size), out=t),
    "aten.set_": lambda t, size: torch.ops.aten.set_.source_Storage_storage_offset(
        t, t.untyped_storage(), 0, size, (1,) * len(size)
    ),
    "aten.set_, packet": lambda t, size: torch.ops.aten.set_(
        t, t.untyped_storage(), 0, size, (1,) * len(size)
    ),
    "aten.resize_": torch.ops.aten.resize_,
}
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "install": lambda: install("out"),
    "guarded": guarded,
    "guarded with data": lambda: guarded(data=True),
}
GROWS = (500,)


def _grow(kind: str) -> list[str]:
    """Try every operation in every scope; say what went wrong."""
    wrong = []
    for scope, make_scope in SCOPES.items():
        for name, call in (*OUT.items(), *(ATEN.items() if scope != "install" else ())):
            if kind == "conj view" and name == "a tuple":
                continue  # torch orders no complex numbers
            tensor = KINDS[kind]()
            before = state(tensor)
            with make_scope(), torch.no_grad():
                error = outcome_of(lambda: call(tensor, GROWS)).error  # noqa: B023
            changed = differences(before, state(tensor))
            if changed.pop("version", None):  # without data=True it may move on,
                changed.pop("grad_fn", None)  # and torch then makes another one for a view
            if changed or not isinstance(error, NonResizableStorageError):
                wrong.append(f"{scope}, {name}: {error!r}, {changed}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_growing_raises_and_changes_nothing(kind: str) -> None:
    assert not ends_the_process(lambda: _grow(kind))
    assert _grow(kind) == []


@pytest.mark.parametrize("kind", ["Parameter", "subclass", "neg view"])
def test_bare_torch_ends_the_process(kind: str) -> None:
    def grow() -> None:
        with torch.no_grad():
            OUT["add"](KINDS[kind](), GROWS)

    assert ends_the_process(grow)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_what_bare_torch_makes_of_it(kind: str, scope: str, grad: bool) -> None:
    """Same shape, smaller, an output that is an input, and an input that overlaps it."""
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "same shape": lambda t: torch.add(_like(t, t.shape), 1, out=t),
        "smaller": lambda t: torch.add(_like(t, (2,)), 1, out=t),
        "in place": lambda t: torch.mul(t, 3, out=t),
        "overlapping": lambda t: torch.add(t.view(-1)[1:], 1, out=t.view(-1)[:-1]),
        "detached": lambda t: torch.mul(t.detach(), 3, out=t),
        "wrong dtype": lambda t: torch.add(t, 1j, out=t),
    }
    for name, call in calls.items():
        outcomes = []
        for each in (None, scope):
            tensor = KINDS[kind]()
            with torch.no_grad():
                (tensor if not tensor.is_inference() else tensor.clone()).fill_(5)
            storage = tensor.untyped_storage()

            def run(tensor: torch.Tensor = tensor, each: str | None = each) -> Any:
                if each is None:
                    with torch.set_grad_enabled(grad):
                        return call(tensor)  # noqa: B023
                with SCOPES[each](), torch.set_grad_enabled(grad):
                    return call(tensor)  # noqa: B023

            outcome = outcome_of(run)
            assert tensor.untyped_storage() is storage, name
            shape = None if outcome.error else (tuple(tensor.shape), tensor.stride())
            values = None
            if outcome.error is None:
                values = tensor.detach().resolve_conj().resolve_neg().tolist()
                assert (outcome.result is tensor) is (name != "overlapping"), name
            version = None if tensor.is_inference() or outcome.error else tensor._version
            outcomes.append((type(outcome.error), shape, values, version))
        assert outcomes[0] == outcomes[1], name
