"""What torchguard compares with computes overlapping lines right, without install()."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from torchguard import OverlapWarning

pytestmark = pytest.mark.filterwarnings("ignore::torchguard.OverlapWarning")


def subtracts(x: Any) -> Any:
    x -= x[:, :1]
    return x * 1


def shifts(x: Any) -> Any:
    x[:, 1:] = x[:, :-1]
    return x * 1


@pytest.mark.parametrize("function", [subtracts, shifts], ids=lambda each: each.__name__)
def test_verified_keeps_the_compiled_result_where_eager_alone_is_wrong(function: Any) -> None:
    torch.compiler.reset()
    checked = torchguard.verified(function, backend="aot_eager")
    expected = function(np.arange(24.0).reshape(4, 6))
    with pytest.warns(OverlapWarning) as caught:
        result = checked(torch.arange(24.0, dtype=torch.float64).reshape(4, 6))
    assert {each.filename for each in caught} == {__file__}
    assert np.array_equal(result.numpy(), expected)
    assert checked.stats().mismatched == 0
    assert checked.stats().graphs[0].runs == "aot_eager"


def test_where_both_are_wrong_the_right_one_runs() -> None:
    torch.compiler.reset()
    checked = torchguard.verified(shifts, backend="eager")
    with pytest.warns(torchguard.MiscompilationWarning):
        result = checked(torch.arange(24.0).reshape(4, 6))
    assert np.array_equal(result.numpy(), shifts(np.arange(24.0).reshape(4, 6)))


def test_the_padding_check_compares_with_the_truth() -> None:
    fast = torchguard.bucketed(
        dims={"x": {1: "t"}}, buckets=torchguard.Buckets([8, 16]), compile=False
    )(lambda x: subtracts(x * 1))
    x = torch.arange(15.0).reshape(3, 5)
    with torchguard.guarded("overlap"):
        assert fast(x).tolist() == [[0, 1, 2, 3, 4]] * 3
