"""Rollback on a GPU. Every test runs on the CPU too, where it can, so that it is known to work.

What fails must fail on the host: a bad index in a CUDA kernel ends the context, and nothing can be
undone then.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils import dlpack

from support.gpu import each_device, little_memory, out_of_memory
from support.kinds import state
from support.ways import Way, differences, each_way, outcome_of
from torchguard import guarded, rollback_on_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kinds import State


def whole(tensor: torch.Tensor) -> State:
    """All that a tensor is, with what its storage holds: from a GPU too."""
    held = None
    if tensor.is_cuda:
        torch.cuda.synchronize()
        held = bytes(tensor.untyped_storage().cpu().tolist())
    return {**state(tensor), "held": held}


def locked(device: str) -> torch.Tensor:
    """Four numbers in memory that belongs to another library, so the storage can't grow."""
    return dlpack.from_dlpack(torch.arange(4.0, device=device))


OUT_OF_MEMORY: dict[str, Callable[[Way, torch.Tensor, int], Any]] = {
    "resize_": lambda way, t, n: way.resize_(t, n),
    "resize_as_": lambda way, t, n: way.resize_as_(t, torch.empty(1, device=t.device).expand(n)),
    "set_": lambda way, t, n: way.set_(t, t.untyped_storage(), 0, (n,), (1,)),
}


@each_device
@each_way
@pytest.mark.parametrize("call", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_memory_that_really_runs_out_changes_nothing(
    call: Callable[[Way, torch.Tensor, int], Any], way: Way, device: str
) -> None:
    tensor = torch.arange(6.0, device=device)
    before = whole(tensor)
    with little_memory(device) as too_many, way.scope():
        outcome = outcome_of(lambda: call(way, tensor, too_many))
        assert isinstance(outcome.error, out_of_memory(device))
        assert differences(before, whole(tensor)) == {}
        way.resize_(tensor, 3)  # what fits, goes on working
    assert tensor.tolist() == [0, 1, 2]


@each_device
def test_an_output_that_finds_no_memory_is_as_it_was(device: str) -> None:
    out = torch.arange(6.0, device=device)
    before = whole(out)
    column = torch.ones(1, device=device)
    with little_memory(device) as too_many, guarded():
        calls: dict[str, Callable[[], Any]] = {
            "add": lambda: torch.add(column.expand(too_many), 1, out=out),
            "mul": lambda: torch.mul(column.expand(too_many), column, out=out),
            "full": lambda: torch.full((too_many,), 2.0, out=out),
            "cat": lambda: torch.cat([column.expand(too_many), column], out=out),
        }
        for name, call in calls.items():
            with pytest.raises(out_of_memory(device)):
                call()
            changed = differences(before, whole(out))
            changed.pop("version", None)  # it moves on where elements may have been written
            assert changed == {}, name
        torch.add(out, 1, out=out)
    assert out.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.cuda
def test_what_is_rolled_back_on_a_stream_is_right_on_that_stream() -> None:
    x = torch.arange(1_000_000, device="cuda", dtype=torch.float32)
    expected = x.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # the copy is taken while the stream is still busy
        with contextlib.suppress(ValueError), rollback_on_error(x, data=True):
            x.mul_(3)
            raise ValueError
    side.synchronize()
    assert torch.equal(x, expected)
