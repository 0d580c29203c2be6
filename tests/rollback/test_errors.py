"""Every error torchguard raises itself names the argument, the actual shape and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import torchguard
from support.kinds import plain
from torchguard import InconsistentTensorError, TorchGuardError
from torchguard.errors import NonResizableStorageError, PatchConflictError

ARRAY: Any = np.ones(3)


MESSAGES: dict[str, Callable[[], Any]] = {
    "safe_resize_: tensor is of type ndarray, expected": lambda: torchguard.safe_resize_(ARRAY, 2),
    "safe_resize_as_: tensor is of type ndarray, expected a torch": (
        lambda: torchguard.safe_resize_as_(ARRAY, plain())
    ),
    "safe_resize_as_: tensor is of type NoneType, expected a torch": (
        lambda: torchguard.safe_resize_as_(None, plain())  # type: ignore[type-var]
    ),
    "safe_set_: tensor is of type ndarray": lambda: torchguard.safe_set_(ARRAY, plain()),
    r"rollback_on_error: objects\[1\] is of type int, expected a tensor, a module, an optimizer": (
        lambda: torchguard.rollback_on_error(plain(), 3)
    ),
    "rollback_on_error: there is nothing to restore": torchguard.rollback_on_error,
    "check_consistent: obj is of type int, expected a tensor, a module, an optimizer": (
        lambda: torchguard.check_consistent(3)
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_wrong_argument_is_named_with_what_was_expected(message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        MESSAGES[message]()


@pytest.mark.parametrize(
    "kind", [InconsistentTensorError, NonResizableStorageError, PatchConflictError]
)
def test_an_error_is_what_users_of_torch_catch(kind: type[Exception]) -> None:
    assert issubclass(kind, TorchGuardError)
    assert issubclass(kind, RuntimeError)
