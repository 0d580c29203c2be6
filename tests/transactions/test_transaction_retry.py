"""step.run(): a batch that runs out of memory is run again in parts of half the size."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import torchguard
from torchguard._torch import is_out_of_memory
from torchguard.transactions.retry import _parts, _samples

# B batch, F features
B, F = 8, 4


class Setup(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any
    batch: tuple[torch.Tensor, torch.Tensor]

    def loss_of(self, part: Any) -> torch.Tensor:
        x_bf, y_b = part
        return nn.functional.mse_loss(self.model(x_bf).squeeze(1), y_b)


def setup(**options: Any) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.Linear(F, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = torchguard.transaction(model, optimizer, **options)
    return Setup(model, optimizer, step, (torch.randn(B, F).double(), torch.randn(B).double()))


def out_of_memory() -> torch.Tensor:
    return torch.empty(2**58, dtype=torch.uint8)


def too_large_for(
    loss_of: Callable[[Any], torch.Tensor], limit: int, sizes: list[int]
) -> Callable[[Any], torch.Tensor]:
    """Run out of memory in each part of more than ``limit`` samples, after forward."""

    def limited(part: Any) -> torch.Tensor:
        sizes.append(len(part[0]))
        loss = loss_of(part)
        if len(part[0]) > limit:
            out_of_memory()
        return loss

    return limited


def plain_step(made: Setup, before_step: Callable[[], Any] | None = None) -> torch.Tensor:
    loss = made.loss_of(made.batch)
    loss.backward()
    if before_step is not None:
        before_step()
    made.optimizer.step()
    made.optimizer.zero_grad()
    return loss.detach()


class TestAStepInOnePart:
    def test_equals_the_plain_loop_bit_for_bit(self) -> None:
        plain, guarded = setup(), setup()
        for _ in range(3):
            expected = plain_step(plain)
            loss = guarded.step.run(guarded.loss_of, guarded.batch)
            assert torch.equal(loss, expected)
            assert not loss.requires_grad
        for a, b in zip(plain.model.parameters(), guarded.model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert b.grad is None

    def test_calls_before_step_with_unscaled_gradients(self) -> None:
        made = setup(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        plain = setup()
        norms = []

        def note(each: Setup) -> Callable[[], None]:
            return lambda: norms.append(nn.utils.clip_grad_norm_(each.model.parameters(), 0.1))

        plain_step(plain, note(plain))
        made.step.run(made.loss_of, made.batch, before_step=note(made))
        torch.testing.assert_close(norms[1], norms[0])

    def test_steps_scaler_and_schedulers_as_well(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(F, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        step = torchguard.transaction(model, optimizer, scaler=scaler, scheduler=scheduler)
        step.run(lambda x: model(x).mean(), torch.ones(2, F))
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert scaler.get_scale() == 8.0

    def test_a_scheduler_that_wants_a_metric_is_refused(self) -> None:
        made = setup()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer)
        step = torchguard.transaction(made.model, made.optimizer, scheduler=plateau)
        with pytest.raises(TypeError, match=r"also=\(scheduler,\)"):
            step.run(made.loss_of, made.batch)

    def test_a_loss_of_several_numbers_is_refused(self) -> None:
        made = setup()
        with pytest.raises(TypeError, match=r"returned shape \(8, 1\), expected a tensor of one"):
            made.step.run(lambda part: made.model(part[0]), made.batch)


class TestOutOfMemory:
    def test_runs_the_batch_in_parts_whose_gradient_is_that_of_the_whole(self) -> None:
        plain, made = setup(), setup()
        sizes: list[int] = []
        gradients: list[list[torch.Tensor]] = [[], []]

        def note(each: Setup, to: list[torch.Tensor]) -> Callable[[], None]:
            return lambda: to.extend(p.grad.clone() for p in each.model.parameters())  # type: ignore[union-attr]

        expected = plain_step(plain, note(plain, gradients[0]))
        with pytest.warns(RuntimeWarning, match="batch of 8 samples ran out of memory.*parts of 2"):
            loss = made.step.run(
                too_large_for(made.loss_of, 3, sizes),
                made.batch,
                retry="halve",
                before_step=note(made, gradients[1]),
            )
        assert sizes == [8, 4, 2, 2, 2, 2]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients[1], gradients[0])
        assert made.step.stats().commits == 1

    def test_parts_of_unequal_size_have_their_share(self) -> None:
        plain, made = setup(), setup()
        for each in (plain, made):
            part = each.batch[0][:7], each.batch[1][:7]
            whole = each._replace(batch=part)
            if each is plain:
                expected = plain_step(whole)
                continue
            with pytest.warns(RuntimeWarning, match="parts of 4"):
                loss = each.step.run(too_large_for(each.loss_of, 4, []), part, retry="halve")
        torch.testing.assert_close(loss, expected)
        for a, b in zip(plain.model.parameters(), made.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    def test_the_size_is_remembered_and_said_once(self, recwarn: pytest.WarningsRecorder) -> None:
        made = setup()
        sizes: list[int] = []
        for _ in range(3):
            made.step.run(too_large_for(made.loss_of, 4, sizes), made.batch, retry="halve")
        assert sizes == [8, 4, 4, 4, 4, 4, 4]
        assert len([w for w in recwarn if "ran out of memory" in str(w.message)]) == 1

    def test_that_does_not_end_at_the_smallest_part_is_raised_and_nothing_has_changed(self) -> None:
        made = setup()
        before = copy.deepcopy(made.model.state_dict())
        sizes: list[int] = []
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            made.step.run(too_large_for(made.loss_of, 0, sizes), made.batch, retry="halve")
        assert sizes == [8, 4, 2, 1]
        for name, value in made.model.state_dict().items():
            assert torch.equal(value, before[name])
        assert not made.optimizer.state

    def test_without_retry_is_raised_at_once(self) -> None:
        made = setup()
        sizes: list[int] = []
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            made.step.run(too_large_for(made.loss_of, 4, sizes), made.batch)
        assert sizes == [8]

    def test_another_error_is_not_retried(self) -> None:
        made = setup()

        def wrong(_: Any) -> torch.Tensor:
            raise RuntimeError("shape mismatch")

        with pytest.raises(RuntimeError, match="shape mismatch"):
            made.step.run(wrong, made.batch, retry="halve")

    def test_in_before_step_takes_the_whole_step_back(self) -> None:
        plain, made = setup(), setup()
        calls = []

        def once() -> None:
            calls.append(1)
            if len(calls) == 1:
                out_of_memory()

        plain_step(plain)
        with pytest.warns(RuntimeWarning, match="parts of 4"):
            made.step.run(made.loss_of, made.batch, retry="halve", before_step=once)
        assert len(calls) == 2
        for a, b in zip(plain.model.parameters(), made.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    def test_the_failed_attempt_is_freed_before_the_next_one(self) -> None:
        made = setup()
        activations: list[weakref.ref[torch.Tensor]] = []
        alive: list[int] = []

        def loss_of(part: Any) -> torch.Tensor:
            alive.append(sum(each() is not None for each in activations))
            activation = made.model[0](part[0])  # type: ignore[index]
            activations.append(weakref.ref(activation))
            if len(part[0]) > 2:
                try:
                    out_of_memory()
                except RuntimeError as error:
                    raise torch.OutOfMemoryError("out of memory") from error
            return activation.mean()  # type: ignore[no-any-return]

        gc.disable()
        try:
            with pytest.warns(RuntimeWarning, match="parts of 2"):
                made.step.run(loss_of, made.batch, retry="halve")
        finally:
            gc.enable()
        assert alive[:3] == [0, 0, 0]

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
            (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
            (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
            (MemoryError("Unable to allocate 8.00 EiB for an array"), True),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
            (ValueError("out of memory"), False),
        ],
    )
    def test_is_known_by_class_or_by_message(self, error: Exception, expected: bool) -> None:
        assert is_out_of_memory(error) is expected

    def test_what_is_no_retry_is_refused(self) -> None:
        made = setup()
        with pytest.raises(ValueError, match="retry is 'half', expected 'halve' or None"):
            made.step.run(made.loss_of, made.batch, retry="half")


@dataclass
class Sample:
    ids: torch.Tensor
    texts: list[str]


class Pair(NamedTuple):
    ids: torch.Tensor
    scale: float


class TestSplitting:
    @staticmethod
    def parts(batch: Any, size: int) -> list[tuple[Any, float]]:
        return list(_parts(batch, _samples(batch), size))

    def test_a_tensor_is_split_into_views(self) -> None:
        x = torch.arange(10).reshape(5, 2)
        (a, share), (b, _), (c, last) = self.parts(x, 2)
        assert torch.equal(torch.cat([a, b, c]), x)
        assert a.data_ptr() == x.data_ptr()
        assert (share, last) == (0.4, 0.2)

    def test_a_batch_that_is_not_split_is_the_very_object(self) -> None:
        batch = {"x": torch.ones(3)}
        [(part, share)] = self.parts(batch, 3)
        assert part is batch
        assert share == 1.0

    def test_containers_stay_what_they_are(self) -> None:
        batch = {
            "sample": Sample(torch.arange(4), ["a", "b", "c", "d"]),
            "pair": Pair(torch.arange(4), 0.5),
            "more": [torch.arange(4), (np.arange(4), None, "every part")],
            "temperature": torch.tensor(2.0),
        }
        (first, _), (second, _) = self.parts(batch, 3)
        assert type(first["sample"]) is Sample
        assert first["sample"].ids.tolist() == [0, 1, 2]
        assert first["sample"].texts == ["a", "b", "c"]
        assert first["pair"].ids.tolist() == [0, 1, 2]
        assert type(first["pair"]) is Pair
        assert second["sample"].texts == ["d"]
        assert second["more"][1][0].tolist() == [3]
        assert second["more"][1][1:] == (None, "every part")
        assert second["temperature"] is batch["temperature"]
        assert len(batch["sample"].ids) == 4  # type: ignore[attr-defined]

    def test_what_a_tokenizer_returns_stays_a_batch_encoding(self) -> None:
        batch = BatchEncoding({"input_ids": torch.arange(8).reshape(4, 2), "n": torch.arange(4)})
        (first, _), (second, _) = self.parts(batch, 2)
        assert isinstance(second, BatchEncoding)
        assert second["input_ids"].tolist() == [[4, 5], [6, 7]]
        assert second.input_ids is second["input_ids"]
        assert first["n"].tolist() == [0, 1]

    @pytest.mark.parametrize(
        ("batch", "name"),
        [
            (
                {"x": torch.ones(4, 2), "w": torch.ones(3)},
                r"batch\['w'\] of shape \(3,\): expected 4",
            ),
            ((torch.ones(4), [torch.ones(4), torch.ones(5)]), r"batch\[1\]\[1\] of shape \(5,\)"),
            ({"x": torch.ones(4), "graph": torch.eye(4).to_sparse()}, "batch.'graph'.*sparse_coo"),
            ({"x": torch.ones(4), "path": object()}, r"batch\['path'\], of type object"),
            (
                (torch.ones(4), nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])),
                r"batch\[1\], of type PackedSequence",
            ),
            ({"n": 3}, "found no tensor to split"),
        ],
    )
    def test_what_can_not_be_split_is_named(self, batch: Any, name: str) -> None:
        with pytest.raises(TypeError, match=name):
            _samples(batch)
