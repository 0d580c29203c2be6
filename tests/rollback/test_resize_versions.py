"""The version counter of a tensor whose resize fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.kinds import locked
from support.ways import (
    Way,
    each_way,
    outcome_of,
)

if TYPE_CHECKING:
    pass


class TestTheVersionCounter:
    def saved_for_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
        saved = locked([5.0, 7.0])
        return weight, saved, (weight * saved).sum()

    @each_way
    @pytest.mark.parametrize("operation", ["resize_", "resize_as_", "set_"])
    def test_lets_backward_go_on_after_a_failure(self, way: Way, operation: str) -> None:
        weight, saved, loss = self.saved_for_backward()
        arguments: dict[str, tuple[Any, ...]] = {
            "resize_": (1000,),
            "resize_as_": (torch.empty(1000),),
            "set_": (saved.untyped_storage(), 0, (1000,), (1,)),
        }
        with way.scope(), pytest.raises(RuntimeError):
            getattr(way, operation)(saved, *arguments[operation])
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [5, 7]

    def test_is_not_what_saves_plain_torch(self) -> None:
        weight, saved, loss = self.saved_for_backward()
        with pytest.raises(RuntimeError):
            saved.resize_(1000)
        spoiled = outcome_of(loss.backward).error is not None
        wrong = weight.grad is None or weight.grad.tolist() != [5, 7]
        assert spoiled or wrong or saved.shape == (1000,)

    @each_way
    def test_moves_on_when_it_succeeds(self, way: Way) -> None:
        weight = torch.tensor([2.0, 3.0], requires_grad=True)
        saved = torch.tensor([5.0, 7.0])
        loss = (weight * saved).sum()
        twin = torch.tensor([5.0, 7.0])
        twin.resize_(1)
        with way.scope():
            way.resize_(saved, 1)
        assert saved._version == twin._version
        if twin._version:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    @each_way
    def test_is_shared_with_views_and_comes_back_for_them_too(self, way: Way) -> None:
        base = locked([1.0, 2.0, 3.0, 4.0])
        view = base[1:3]
        base.add_(1)
        versions = base._version, view._version
        with way.scope(), pytest.raises(RuntimeError):
            way.resize_(view, 1000)
        assert (base._version, view._version) == versions
        assert view.tolist() == [3, 4]
