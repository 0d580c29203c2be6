"""rollback_on_error and snapshots: sparse and opaque layouts, wrappers of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import kinds
from support.kinds import Wrapper, plain, state
from support.ways import differences
from torchguard import rollback_on_error
from torchguard.state.tensors import capture

pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.mark.parametrize("data", [False, True])
def test_what_a_wrapper_held_before_is_in_it_again(data: bool) -> None:
    tensor = Replacing(plain())
    before = state(tensor)
    with pytest.raises(RuntimeError), rollback_on_error(tensor, data=data):
        tensor.add_(1)
    changed = differences(before, state(tensor))
    changed.pop("version", None)  # without a copy it moves on
    assert changed == {}


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
