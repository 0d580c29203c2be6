"""install("overlap") on lists of tensors: long ones are compared by where they lie."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import torchguard
from torchguard import OverlapWarning


@pytest.mark.parametrize(("place", "of"), [(0, 49), (7, 23), (49, 0)])
def test_one_overlap_among_fifty_tensors(place: int, of: int) -> None:
    """It is found wherever it stands; the tensors lie in memory in another order."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    memory = torch.arange(50.0 * 8).view(50, 8)
    written = [memory[each, :6] for each in order]
    operands: list[torch.Tensor] = [torch.full((6,), float(each)) for each in range(50)]
    operands[place] = memory[order[of], 1:7]
    expected = [one - other for one, other in zip(written, operands, strict=True)]
    with torchguard.install("overlap"), pytest.warns(OverlapWarning):
        torch._foreach_sub_(written, operands)
    assert all(map(torch.equal, written, expected))


def test_views_of_one_tensor_that_lie_between_each_other_are_not_copied() -> None:
    memory = torch.arange(60.0)
    written = [memory[each::10] for each in range(5)]
    operands = [memory[5 + each :: 10] for each in range(5)]
    expected = [one - other for one, other in zip(written, operands, strict=True)]
    with torchguard.install("overlap"), warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        torch._foreach_sub_(written, operands)
    assert all(map(torch.equal, written, expected))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_computes_what_it_computed(options: dict[str, Any]) -> None:
    """Ten steps with the guard are ten steps without, to the bit, and nothing is said."""

    def trained(model: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    plain = trained(copy.deepcopy(model))
    with torchguard.install("overlap"), warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        guarded = trained(model)
    assert all(map(torch.equal, plain, guarded))
