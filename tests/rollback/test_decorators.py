"""``@no_recompile`` and ``@verified`` with and without parentheses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchguard import no_recompile, verified
from torchguard.errors import RecompileError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("decorate", [no_recompile, no_recompile()])
def test_no_recompile(decorate: Any) -> None:
    compile_: Any = torch.compile
    compiled = compile_(lambda x: 2 * x, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    warm = decorate(compiled)
    for _ in range(2):
        assert warm(torch.ones(3)).sum() == 6
    with pytest.raises(RecompileError, match=r"x of shape \(4,\)"):
        warm(torch.ones(4))
    compiled(torch.ones(4))
    assert warm(torch.ones(4)).sum() == 8


def test_verified() -> None:
    @verified
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    again = verified(lambda x: 2 * x, backend="aot_eager")
    assert double.__name__ == "double"
    assert again(torch.ones(3)).sum() == 6
    assert again.stats().verified == 1
