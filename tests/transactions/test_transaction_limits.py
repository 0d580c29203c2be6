"""What a transaction refuses, and what it says of what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchguard


def setup() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = setup()
    _, other = setup()
    with pytest.raises(ValueError, match="SGD has no parameter of the model"):
        torchguard.transaction(model, other)


def test_an_optimizer_of_some_of_the_parameters_is_taken() -> None:
    model, _ = setup()
    torchguard.transaction(model, torch.optim.SGD([model.bias, torch.ones(1)], lr=0.1))


def test_a_missing_optimizer_shows_the_line_to_type() -> None:
    model, _ = setup()
    with pytest.raises(TypeError, match=r"step = torchguard.transaction\(model, optimizer\)"):
        torchguard.transaction(model)


def test_a_scheduler_in_the_scalers_place_is_told_its_name() -> None:
    model, optimizer = setup()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"scaler is of type StepLR.*scheduler="):
        torchguard.transaction(model, optimizer, scheduler)


def test_a_second_step_and_a_failure_after_it_say_what_stays() -> None:
    model, optimizer = setup()
    step = torchguard.transaction(model, optimizer)
    with pytest.raises(KeyError) as caught, step:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        raise KeyError
    assert step.committed
    notes: list[str] = caught.value.__notes__  # type: ignore[attr-defined]
    assert any("SGD had stepped 2 times in this block" in note for note in notes)


@pytest.mark.parametrize("undo", ["auto", "none"])
def test_the_guarantee_names_writes_through_data(undo: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert ".data" in torchguard.transaction(model, optimizer, undo=undo).guarantee


def test_with_copies_writes_through_data_go_back() -> None:
    """As SAM does: perturb the weights, run forward again."""
    model, optimizer = setup()
    step = torchguard.transaction(model, optimizer, undo="copy")
    assert ".data" not in step.guarantee
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), step:
        model.weight.data.add_(1)
        raise KeyError
    assert torch.equal(model.weight, before)


def test_nothing_to_roll_back_is_an_error() -> None:
    with pytest.raises(TypeError, match="rollback_on_error: there is nothing to put back"):
        torchguard.rollback_on_error()


@pytest.mark.parametrize(
    ("extra", "seen"),
    [
        ((224, 224), [(224, 224)] * 2),
        ([1, 2], [[1], [2]]),
        (["a", "b"], [["a"], ["b"]]),
        (("a", "b"), [("a",), ("b",)]),
        ([1.5, "b"], [[1.5], ["b"]]),
        ((1, "b"), [(1, "b")] * 2),
    ],
)
def test_of_a_batch_only_what_has_one_entry_per_sample_is_cut(extra: Any, seen: Any) -> None:
    model, optimizer = setup()
    step = torchguard.transaction(model, optimizer)
    found = []

    def loss_of(batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 1:
            raise torch.OutOfMemoryError("out of memory")
        found.append(batch["extra"])
        loss: torch.Tensor = model(batch["x"]).mean()
        return loss

    with pytest.warns(RuntimeWarning, match="ran out of memory"):
        step.run(loss_of, {"x": torch.ones(2, 2), "extra": extra}, retry="halve")
    assert found == seen
