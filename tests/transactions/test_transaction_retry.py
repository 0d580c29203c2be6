"""step.run(): a batch that runs out of memory is run again in parts of half the size."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from torchguard.errors import TorchGuardWarning

# B batch, F features
B, F = 8, 4


class Setup:
    """A model, its transaction and a batch."""

    def __init__(self, samples: int = 8, scale: float | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.Linear(F, 1)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler: Any = scale and torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=1
        )
        self.step = torchguard.transaction(self.model, self.optimizer, self.scaler, self.scheduler)
        self.batch = (torch.randn(samples, F).double(), torch.randn(samples).double())
        self.sizes: list[int] = []
        self.gradients: list[torch.Tensor] = []

    def loss_of(self, part: Any) -> torch.Tensor:
        x_bf, y_b = part
        self.sizes.append(len(x_bf))
        return nn.functional.mse_loss(self.model(x_bf).squeeze(1), y_b)

    def too_large_for(self, limit: int) -> Callable[[Any], torch.Tensor]:
        """A loss that runs out of memory in parts of more than ``limit`` samples, after forward."""

        def limited(part: Any) -> torch.Tensor:
            loss = self.loss_of(part)
            if len(part[0]) > limit:
                out_of_memory()
            return loss

        return limited

    def note(self) -> None:
        """Keep the gradients that ``before_step`` finds."""
        self.gradients += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def plain_step(self) -> torch.Tensor:
        loss = self.loss_of(self.batch)
        loss.backward()
        self.note()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()


def out_of_memory() -> torch.Tensor:
    return torch.empty(2**58, dtype=torch.uint8)


def assert_close(one: Setup, other: Setup) -> None:
    torch.testing.assert_close(list(one.model.parameters()), list(other.model.parameters()))
    torch.testing.assert_close(one.gradients, other.gradients)


class TestAStepInOnePart:
    def test_equals_the_plain_loop_bit_for_bit(self) -> None:
        plain, guarded = Setup(), Setup()
        for _ in range(3):
            loss = guarded.step.run(guarded.loss_of, guarded.batch)
            assert torch.equal(loss, plain.plain_step())
            assert not loss.requires_grad
        for a, b in zip(plain.model.parameters(), guarded.model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert b.grad is None
        assert guarded.scheduler.get_last_lr() == plain.scheduler.get_last_lr() == [0.1 * 0.5**3]

    def test_a_plateau_without_a_metric_is_refused(self) -> None:
        made = Setup()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer)
        step = torchguard.transaction(made.model, made.optimizer, scheduler=plateau)
        with pytest.raises(TypeError, match=r"also=\(scheduler,\)"):
            step.run(made.loss_of, made.batch)


class TestOutOfMemory:
    @pytest.mark.parametrize("scale", [None, 1024.0])
    @pytest.mark.parametrize(
        ("samples", "limit", "parts", "sizes"),
        [
            *((8, 3, 1, [8, 4, 2, 2, 2, 2]), (7, 4, 1, [7, 4, 3]), (8, 2, 2, [4, 2, 2, 2, 2])),
            *((7, 9, 2, [4, 3]), (7, 9, 3, [3, 3, 1]), (7, 9, 99, [1] * 7)),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*a batch of . samples")
    def test_runs_the_batch_in_parts_whose_gradient_is_that_of_the_whole(
        self, samples: int, limit: int, parts: int, sizes: list[int], scale: float | None
    ) -> None:
        """Parts of unequal size have their share; before_step sees gradients without the scale."""
        plain, made = Setup(samples), Setup(samples, scale)
        loss = made.step.run(
            made.too_large_for(limit),
            made.batch,
            parts=parts,
            retry="halve" if limit < samples else None,
            before_step=made.note,
        )
        assert made.sizes == sizes
        torch.testing.assert_close(loss, plain.plain_step())
        assert_close(made, plain)
        assert made.step.stats().commits == 1
        assert scale is None or made.scaler.get_scale() == 2 * scale

    def test_the_size_is_remembered_and_said_once(self, recwarn: pytest.WarningsRecorder) -> None:
        made = Setup()
        for _ in range(3):
            made.step.run(made.too_large_for(4), made.batch, retry="halve")
        assert made.sizes == [8, 4, 4, 4, 4, 4, 4]
        (said,) = [str(warning.message) for warning in recwarn]
        assert said.startswith(
            "torchguard: a batch of 8 samples ran out of memory; it was run in parts of 4"
        )
        assert "parts of 4 samples" in made.step.guarantee

    @pytest.mark.parametrize(("retry", "expected"), [("halve", [8, 4, 2, 1]), (None, [8])])
    def test_what_does_not_end_is_raised_and_nothing_has_changed(
        self, retry: Any, expected: list[int]
    ) -> None:
        """At the smallest part; without retry at once."""
        made = Setup()
        before = copy.deepcopy(list(made.model.parameters()))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            made.step.run(made.too_large_for(0), made.batch, retry=retry)
        assert made.sizes == expected
        assert all(map(torch.equal, made.model.parameters(), before))
        assert not made.optimizer.state

    def test_the_failed_attempt_is_freed_before_the_next_one(self) -> None:
        made = Setup()
        activations: list[weakref.ref[torch.Tensor]] = []
        alive: list[int] = []

        def loss_of(part: Any) -> torch.Tensor:
            alive.append(sum(each() is not None for each in activations))
            activation = made.model[0](part[0])
            activations.append(weakref.ref(activation))
            if len(part[0]) > 2:
                try:
                    out_of_memory()
                except RuntimeError as error:
                    raise torch.OutOfMemoryError("out of memory") from error
            return activation.mean()  # type: ignore[no-any-return]

        gc.disable()
        try:
            with pytest.warns(TorchGuardWarning, match="parts of 2"):
                made.step.run(loss_of, made.batch, retry="halve")
        finally:
            gc.enable()
        assert alive[:3] == [0, 0, 0]

    @pytest.mark.parametrize(
        ("error", "message", "is_retried"),
        [
            (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB", True),
            (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory", True),
            (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", True),
            (MemoryError, "Unable to allocate 8.00 EiB for an array", True),
            (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
            (ValueError, "out of memory", False),
        ],
    )
    def test_is_known_by_class_or_by_message(
        self, error: type[Exception], message: str, is_retried: bool
    ) -> None:
        with (
            contextlib.nullcontext()
            if is_retried
            else pytest.raises(error, match=re.escape(message))
        ):
            assert len(parts_of(torch.ones(2, 2), error, message)) == 2


class Unwilling:
    """What ``also=`` names, and cannot be put back: the text is one of memory."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": object()}  # never the same

    def load_state_dict(self, _: Any) -> None:
        raise RuntimeError("CUDA out of memory")


def test_a_step_that_could_not_be_undone_is_not_run_again() -> None:
    made = Setup()
    step = torchguard.transaction(made.model, made.optimizer, also=Unwilling())
    with pytest.raises(torchguard.UnrecoverableStepError, match="CUDA out of memory"):
        step.run(made.too_large_for(2), made.batch, retry="halve")
    assert made.sizes == [8]


def parts_of(
    batch: Any, error: type[Exception] = torch.OutOfMemoryError, message: str = "out of memory"
) -> list[Any]:
    """The two halves of a batch that has run out of memory as a whole."""
    model = nn.Linear(2, 1)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    seen: list[Any] = []

    def loss_of(part: Any) -> torch.Tensor:
        seen.append(part)
        if len(seen) == 1:
            assert part is batch  # not split, it is the very object
            raise error(message)
        return model(torch.ones(1, 2)).sum()  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TorchGuardWarning)
        step.run(loss_of, batch, retry="halve")
    return seen[1:]
