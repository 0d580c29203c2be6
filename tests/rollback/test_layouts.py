"""guarded() and rollback_on_error: sparse, quantized and other layouts, wrappers of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import kinds
from support.kinds import Wrapper, plain, state
from support.ways import differences
from torchguard import guarded, rollback_on_error
from torchguard.state.tensors import capture

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")


# --- layouts that are made of other tensors: whoever takes a snapshot takes one of their parts


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
    "a wrapper that replaces": (lambda: Replacing(plain()), lambda t: t.add_(1)),
}
CALLERS: dict[str, Callable[[torch.Tensor], AbstractContextManager[Any]]] = {
    "guarded": lambda _: guarded(),
    "rollback_on_error": rollback_on_error,
    "rollback_on_error with data": lambda t: rollback_on_error(t, data=True),
}


@pytest.mark.parametrize(
    ("failing", "caller"),
    [
        (failing, caller)
        for failing in FAILING
        for caller in CALLERS
        if caller != "guarded" or "resize" in failing
    ],
)
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


def test_the_elements_of_a_sparse_tensor_can_be_restored_again_and_again() -> None:
    """For loads and isolated runs; what a program passes to rollback_on_error is refused."""
    for kind in (kind for kind in kinds.SPECIAL if kind.name.startswith("sparse")):
        tensor = kind.make()
        before, version = tensor.to_dense().tolist(), tensor._version
        saved = capture(tensor, data=True)
        for change in (torch.Tensor.zero_, torch.Tensor.zero_, lambda t: t.mul_(3)):
            change(tensor)
            assert tensor._version != version
            saved.restore()
            assert (tensor.to_dense().tolist(), tensor._version) == (before, version), kind.name


def test_the_version_comes_back_with_the_data_of_an_opaque_layout() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without mkldnn")
    tensor = torch.eye(3).to_mkldnn()
    version = tensor._version
    with pytest.raises(ZeroDivisionError), rollback_on_error(tensor, data=True):
        tensor.zero_()
        raise ZeroDivisionError
    assert tensor._version == version
