"""Writes at an index: wrong where an id occurs twice, right where it never does."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchguard import MiscompilationWarning, verified_backend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- ids that all differ in the first call


class _Overwriting(torch.autograd.Function):
    """Look rows up; the gradient of an id that occurs twice is that of its last occurrence."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, ids)
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, ids = ctx.saved_tensors
        return torch.zeros_like(weight).index_put((ids,), gradient), None


def _overwriting(_: Any, examples: list[Any]) -> Callable[..., Any]:
    """Compile ``weight[ids]``, wrongly, as torch 2.6 does for one thread on a CPU.

    https://github.com/pytorch/pytorch/issues/147848
    """
    place = [example.is_floating_point() for example in examples].index(True)
    lookup: Any = _Overwriting.apply
    return lambda *inputs: [lookup(inputs[place], inputs[1 - place])]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_gradient_that_is_wrong_for_an_id_that_occurs_twice_is_found_before_one_does(
    dtype: torch.dtype,
) -> None:
    def rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return weight[ids]

    compiled = torch.compile(rows, backend=verified_backend(_overwriting))
    weight = torch.randn(5, 2, requires_grad=True)
    with pytest.warns(MiscompilationWarning, match="gradient of input"):
        compiled(weight, torch.tensor([2, 0, 4], dtype=dtype))
    for ids in ([2, 0, 4], [3, 3, 1]):
        found = compiled(weight, torch.tensor(ids, dtype=dtype)).sum()
        expected = weight[torch.tensor(ids)].sum()
        for got, wanted in zip(
            *(torch.autograd.grad(e, weight) for e in (found, expected)), strict=True
        ):
            assert torch.equal(got, wanted)


def test_a_write_at_an_index_that_never_occurs_twice_raises_no_false_alarm() -> None:
    """Which of two values stays is undefined, and a backend may choose the other."""

    def permuted(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_put((order,), x)

    def last_first(graph: Any, _: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            return graph.forward(*(value.flip(0) for value in inputs))

        return run

    backend = verified_backend(last_first)
    compiled = torch.compile(permuted, backend=backend)
    x = torch.randn(3, 2, requires_grad=True)
    order = torch.tensor([2, 0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x, order), permuted(x, order))
    assert [graph.status for graph in backend.stats().graphs] == ["verified"]
