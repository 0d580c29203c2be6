"""Every error torchguard raises itself names the argument, the actual shape and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from support.kinds import plain
from torchguard import InconsistentTensorError, TorchGuardError
from torchguard.errors import NonResizableStorageError, PatchConflictError

pytestmark = pytest.mark.filterwarnings("ignore")


def shared() -> torch.Tensor:
    return torch.ones(2, 3).share_memory_()  # type: ignore[no-any-return]


def _installed_resize() -> Any:
    with torchguard.install():
        return shared().resize_(100)


def _guarded_out() -> Any:
    with torchguard.guarded():
        return torch.add(torch.ones(100), 1, out=shared())


ARRAY: Any = np.ones(3)
Case = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
SHARED: dict[str, Callable[[], Any]] = {
    "safe_resize_": lambda: torchguard.safe_resize_(shared(), 100),
    "safe_resize_as_": lambda: torchguard.safe_resize_as_(shared(), torch.ones(100)),
    "safe_set_": lambda: torchguard.safe_set_(shared(), shared().untyped_storage(), 0, (100,)),
    "resize_": _installed_resize,
    "out=": _guarded_out,
}
NO_TENSOR: dict[str, Callable[[], Any]] = {
    "safe_resize_": lambda: torchguard.safe_resize_(ARRAY, 2),
    "safe_resize_as_": lambda: torchguard.safe_resize_as_(ARRAY, plain()),
    "safe_set_": lambda: torchguard.safe_set_(ARRAY, plain()),
    "repair_": lambda: torchguard.repair_(ARRAY),
}
CASES: dict[str, Case] = {
    **{
        f"{name} of shared memory": (
            call,
            NonResizableStorageError,
            (name, "(2, 3)", "400 bytes", "24 bytes", "share_memory_()"),
        )
        for name, call in SHARED.items()
    },
    **{
        f"{name} of an array": (call, TypeError, (name, "tensor", "ndarray", "torch.Tensor"))
        for name, call in NO_TENSOR.items()
    },
    "rollback_on_error of a number": (
        lambda: torchguard.rollback_on_error(plain(), 3),
        TypeError,
        ("rollback_on_error", "objects[1]", "int", "tensor", "module"),
    ),
    "rollback_on_error of nothing": (
        torchguard.rollback_on_error,
        TypeError,
        ("rollback_on_error", "nothing to put back"),
    ),
    "check_consistent of a number": (
        lambda: torchguard.check_consistent(3),
        TypeError,
        ("check_consistent", "obj", "int", "a tensor, a module, an optimizer"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_says_what_is_wrong_and_what_to_do(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert missing == [], str(caught.value)


@pytest.mark.parametrize(
    "kind", [InconsistentTensorError, NonResizableStorageError, PatchConflictError]
)
def test_an_error_is_what_users_of_torch_catch(kind: type[Exception]) -> None:
    assert issubclass(kind, TorchGuardError)
    assert issubclass(kind, RuntimeError)
