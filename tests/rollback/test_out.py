"""``out=`` under guarded("out"): a failure leaves the outputs as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from support.kinds import empty_locked, state
from support.ways import differences, outcome_of
from torchguard import guarded

pytestmark = pytest.mark.filterwarnings("ignore")


def growable() -> torch.Tensor:
    return torch.arange(9.0)[3:].view(2, 3).t()


def stuck() -> torch.Tensor:
    return empty_locked(torch.float32)


def stuck_long() -> torch.Tensor:
    return empty_locked(torch.int64)


MATRIX = torch.arange(1.0, 10).view(3, 3) + torch.eye(3)
FAR = torch.tensor([0, 99])
Failing = tuple[Callable[..., Any], tuple[Callable[[], torch.Tensor], ...]]
# Beside the operators of the OpInfo database, which test_out_sweep.py calls with outputs all stuck.
FAILING: dict[str, Failing] = {
    "sort, the second fails": (lambda *outs: torch.sort(MATRIX, out=outs), (growable, stuck_long)),
    "qr, the second fails": (lambda *outs: torch.linalg.qr(MATRIX, out=outs), (growable, stuck)),
    "tensordot by place": (lambda out: torch.tensordot(MATRIX, MATRIX, 1, out), (stuck,)),
    "index_select": (lambda out: torch.index_select(MATRIX, 0, FAR, out=out), (growable,)),
    "a singular matrix": (lambda out: torch.linalg.inv(torch.zeros(4, 4), out=out), (growable,)),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_call_that_fails_leaves_its_outputs_as_they_were(name: str) -> None:
    call, makes = FAILING[name]
    corrupted = []
    for scope in (nullcontext(), guarded("out")):
        outs = [make() for make in makes]
        before = [state(out) for out in outs]
        with scope:
            error = outcome_of(lambda: call(*outs)).error  # noqa: B023
        assert isinstance(error, (RuntimeError, IndexError))
        changed = [differences(old, state(out)) for old, out in zip(before, outs, strict=True)]
        for each in changed:
            if "version" in each:  # elements may have been written
                each.pop("version")
                each.pop("bytes", None)
        corrupted.append(any(changed))
    assert corrupted == [True, False], "or plain torch got it right: this proves nothing"


def test_a_failed_out_that_may_be_half_written_makes_backward_refuse() -> None:
    def backward() -> None:
        weight = torch.ones(3, requires_grad=True)
        saved = torch.tensor([1.0, 2, 3])
        product = (weight * saved).sum()
        with pytest.raises((RuntimeError, IndexError)):
            torch.index_select(torch.full((9,), 7.0), 0, torch.tensor([1, 2, 99]), out=saved)
        product.backward()

    backward()  # plain torch says nothing
    with guarded("out"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward()


def test_an_output_or_none_passes_by_name_and_by_place() -> None:
    with guarded("out"):
        assert torch.add(torch.ones(2), 1, out=None).tolist() == [2, 2]
        assert torch.tensordot(MATRIX, MATRIX, 1, None).shape == (3, 3)
        assert torch.norm(torch.ones(4), "fro", 0, False, None).item() == 2
        assert torch.arange(3, out=None).tolist() == [0, 1, 2]
        assert torch.zeros(2, 2, out=None).shape == (2, 2)
        out = torch.empty(3, 3)
        assert torch.tensordot(MATRIX, MATRIX, 1, out) is out
        # With any function mode on the stack, torch forgets this one's ``out``.
        assert torch.chain_matmul(torch.eye(3), torch.eye(3), out=out) is out
        assert out.tolist() == torch.eye(3).tolist()
