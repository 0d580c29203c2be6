"""Every error torchguard raises itself names the argument, the actual shape and what to do."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchguard
from support.kinds import locked, plain
from support.ways import outcome_of
from torchguard import InconsistentTensorError, TorchGuardError
from torchguard.errors import NonResizableStorageError, PatchConflictError
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")


def shared() -> torch.Tensor:
    return torch.ones(2, 3).share_memory_()  # type: ignore[no-any-return]


def corrupt() -> torch.Tensor:
    tensor = locked([1.0, 2.0])
    outcome_of(lambda: tensor.resize_(5, 5))
    return tensor


def _guarded_out() -> Any:
    with torchguard.guarded():
        return torch.add(torch.ones(100), 1, out=shared())


def _installed_resize() -> Any:
    with torchguard.install():
        return shared().resize_(100)


def _corrupt_csr() -> torch.Tensor:
    csr = plain().to_sparse_csr()
    csr.values().untyped_storage().resize_(0)
    return csr


def _patched_on_top() -> None:
    installation = torchguard.install()
    ours = torch.Tensor.resize_
    torch.Tensor.resize_ = lambda *_: None  # type: ignore[assignment, method-assign]
    try:
        installation.uninstall()
    finally:
        torch.Tensor.resize_ = ours  # type: ignore[method-assign]
        installation.uninstall()


CASES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "safe_resize_ of shared memory": (
        lambda: torchguard.safe_resize_(shared(), 100),
        NonResizableStorageError,
        ("safe_resize_", "(2, 3)", "400 bytes", "24 bytes", "share_memory_()"),
    ),
    "safe_resize_as_ of shared memory": (
        lambda: torchguard.safe_resize_as_(shared(), torch.ones(100)),
        NonResizableStorageError,
        ("safe_resize_as_", "(2, 3)", "400 bytes", "24 bytes", "share_memory_()"),
    ),
    "safe_set_ to shared memory": (
        lambda: torchguard.safe_set_(torch.ones(5), shared().untyped_storage(), 0, (100,)),
        NonResizableStorageError,
        ("safe_set_", "400 bytes", "24 bytes", "share_memory_()"),
    ),
    "resize_ of shared memory under install": (
        _installed_resize,
        NonResizableStorageError,
        ("resize_", "(2, 3)", "400 bytes", "24 bytes", "share_memory_()"),
    ),
    "out= in shared memory": (
        _guarded_out,
        NonResizableStorageError,
        ("out=", "(2, 3)", "400 bytes", "24 bytes", "share_memory_()"),
    ),
    "safe_resize_ of an array": (
        lambda: torchguard.safe_resize_(np.ones(3), 2),  # type: ignore[type-var]
        TypeError,
        ("safe_resize_", "tensor", "ndarray", "torch.Tensor"),
    ),
    "safe_resize_as_ of an array": (
        lambda: torchguard.safe_resize_as_(np.ones(3), plain()),  # type: ignore[type-var]
        TypeError,
        ("safe_resize_as_", "tensor", "ndarray", "torch.Tensor"),
    ),
    "safe_set_ of an array": (
        lambda: torchguard.safe_set_(np.ones(3), plain()),  # type: ignore[type-var]
        TypeError,
        ("safe_set_", "tensor", "ndarray", "torch.Tensor"),
    ),
    "rollback_on_error of a number": (
        lambda: torchguard.rollback_on_error(plain(), 3),
        TypeError,
        ("rollback_on_error", "objects[1]", "int", "tensor", "module"),
    ),
    "is_consistent of a module": (
        lambda: is_consistent(torch.nn.ReLU()),  # type: ignore[arg-type]
        TypeError,
        ("is_consistent", "tensor", "ReLU", "torchguard.check_consistent"),
    ),
    "repair_ of a list": (
        lambda: torchguard.repair_([plain()]),  # type: ignore[arg-type]
        TypeError,
        ("tensor", "list", "torch.Tensor"),
    ),
    "check_consistent of a number": (
        lambda: torchguard.check_consistent(3),
        TypeError,
        ("check_consistent", "obj", "int", "a tensor, a module, an optimizer"),
    ),
    "check_consistent of a corrupt tensor": (
        lambda: torchguard.check_consistent({"w": corrupt()}),
        InconsistentTensorError,
        ("obj['w']", "(5, 5)", "(5, 1)", "200 bytes", "holds 16", "torchguard.repair_()"),
    ),
    "repair_ of a sparse tensor": (
        lambda: torchguard.repair_(_corrupt_csr()),
        InconsistentTensorError,
        ("tensor", "values()", "torch.sparse_csr", "torchguard.repair_()"),
    ),
    "install of an unknown guard": (
        lambda: torchguard.install("rezise"),  # type: ignore[arg-type]
        ValueError,
        ("install", "'rezise'", "did you mean 'resize'", "out, overlap"),
    ),
    "original of a path elsewhere": (
        lambda: torchguard.get_original("numpy.add"),
        ValueError,
        ("original", "'numpy.add'", "torch.Tensor.resize_"),
    ),
    "uninstall below another patch": (
        _patched_on_top,
        PatchConflictError,
        ("torch.Tensor.resize_", "undo that patch first", "torchguard.uninstall()"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_says_what_is_wrong_and_what_to_do(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert missing == [], str(caught.value)


def test_every_error_of_the_package_is_a_torchguard_error_and_what_torch_users_catch() -> None:
    for kind in (InconsistentTensorError, NonResizableStorageError, PatchConflictError):
        assert issubclass(kind, TorchGuardError)
        assert issubclass(kind, RuntimeError)


def test_every_error_raised_in_the_guards_is_tested_here() -> None:
    """A new ``raise`` with a text in these files needs a case above."""
    folder = Path(inspect.getfile(torchguard)).parent / "rollback"
    raised = 0
    for name in ("consistency", "resize", "block", "operation", "scope"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        raised += sum(
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "")
            in {"TypeError", "ValueError", "InconsistentTensorError", "NonResizableStorageError"}
            for node in ast.walk(tree)
        )
    # is_consistent, check_consistent, require_container (of it and of rollback_on_error),
    # rollback_on_error (test_rollback.py has its case),
    # repair_ (2), _require_tensor, cannot_grow,
    # guarded (2; test_guarded.py and test_decorators.py have their cases)
    assert raised == 10
