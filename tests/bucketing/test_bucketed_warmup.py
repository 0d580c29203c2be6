"""warmup(): the largest first, and what it leaves is compiled and proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.bucketed import Noting, in_time
from torchguard import PaddingLeakError

EAGER: Any = {"compile": {"backend": "eager"}}


class TestWhatDoesNotFit:
    @staticmethod
    def hungry(x: torch.Tensor, most: int) -> torch.Tensor:
        """A function for which the allocator has no memory from some size on."""
        room = torch.empty((1 if x.shape[1] <= most else 1 << 48, 1))
        return x * 2 + 0 * room.shape[1]

    def test_raises(self) -> None:
        wrapped = in_time(self.hungry, **EAGER)
        with pytest.raises(RuntimeError, match="allocate"):
            wrapped.warmup(torch.ones(2, 5), 8)


class TestWhatIsProven:
    @staticmethod
    def counted(function: Any, **options: Any) -> tuple[Any, list[tuple[int, ...]]]:
        """Return a bucketed function, and the shape of each of its eager runs."""
        noting = Noting(function)
        options = {"buckets": [4, 8, 16], "compile": False, **options}
        return in_time(noting, **options), noting.shapes

    @pytest.mark.parametrize("example", [3, 7, 16])
    def test_no_call_is_checked_after_it(self, example: int) -> None:
        wrapped, runs = self.counted(lambda x: x.cumsum(1))
        wrapped.warmup(torch.randn(2, example))
        assert wrapped.stats().proven == ((4,), (8,), (16,))
        assert "padding is proven for 4, 8, 16" in str(wrapped.stats())
        for length in range(2, 17):
            runs.clear()
            x = torch.randn(2, length)
            torch.testing.assert_close(wrapped(x), x.cumsum(1))
            assert len(runs) == 1, length

    def test_sizes_of_outputs_are_derived_where_nothing_is_checked(self) -> None:
        wrapped, runs = self.counted(lambda x: x[:, ::2], check_padding="never")
        wrapped.warmup(torch.randn(2, 5))
        runs.clear()
        assert wrapped(torch.randn(2, 7)).shape == (2, 4)
        assert len(runs) == 1
        assert wrapped.stats().proven == ()

    def test_a_leak_is_a_warning_and_an_exact_fit_runs(self) -> None:
        wrapped, _ = self.counted(lambda x: x.mean(1))
        with pytest.warns(UserWarning, match=r"padding changes .* Found by warmup\(\)"):
            wrapped.warmup(torch.randn(2, 5))
        x = torch.randn(2, 8)
        torch.testing.assert_close(wrapped(x), x.mean(1))
        with pytest.raises(PaddingLeakError):
            wrapped(torch.randn(2, 7))
