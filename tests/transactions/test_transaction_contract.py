"""transaction(): its contract of four sentences, and the errors of code that is written wrong."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchguard
from support.small_training import FailAt, InjectedError, bits, everything
from support.training import KINDS, Failure, fail
from support.walk import walked


class Setup:
    """A model, its optimizer with two groups, a schedule and their transaction."""

    def __init__(self, kind: str = "foreach", name: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        groups = [{"params": list(self.model[0].parameters())}]
        groups.append({"params": [*self.model[1].parameters(), *self.model[2].parameters()]})
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            groups, lr=0.1, **KINDS[kind], **options
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = torchguard.transaction(self.model, self.optimizer, scheduler=self.scheduler)

    def backward(self, number: float = 1.0) -> Tensor:
        loss: Tensor = self.model(torch.arange(8.0).view(4, 2) * number).square().mean()
        loss.backward()
        return loss.detach()

    def state(self) -> Any:
        gradients = [each.grad for each in self.model.parameters()]
        return everything(self.model, self.optimizer), bits(gradients)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_operator_of_a_step_fails_in_turn(kind: str, later: bool, name: str) -> None:
    """A step that is copied changes nothing, and a fused one says that it was not copied."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    outcomes = set()
    for place in range(1000):
        made = Setup(kind, name, **options)
        for _ in range(later):
            with made.step:
                made.backward()
                made.optimizer.step()
                made.optimizer.zero_grad()
        before = everything(made.model, made.optimizer)
        made.step = torchguard.transaction(made.model, made.optimizer)
        with made.step:
            made.backward()
        model = bits(dict(made.model.state_dict()))
        try:
            with made.step:
                with FailAt(place):
                    made.optimizer.step()
        except torchguard.UnrecoverableStepError as error:
            outcomes.add("says so" if "use undo='copy'" in str(error) else str(error))
        except InjectedError:
            counts = made.step.committed
            same = bits(dict(made.model.state_dict())) == model
            same &= everything(made.model, made.optimizer)[1] == before[1]
            assert same != counts, f"operator {place}"
            outcomes.add("counts" if counts else "nothing")
        else:
            break  # the step has fewer operators
    assert "nothing" in outcomes
    assert ("says so" in outcomes) == (kind == "fused")


@pytest.mark.parametrize(("name", "calls"), [("AdamW", 5), ("SGD", 3)])
def test_memory_that_runs_out_while_a_fused_step_makes_its_state_changes_nothing(
    name: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the second group is made before the kernel of the first one runs."""
    made = Setup("fused", name, **({"momentum": 0.9} if name == "SGD" else {}))
    before = made.state()
    left = [calls]

    def limited(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **options: Any) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("out of memory")
            return original(*args, **options)

        return allocate

    with pytest.raises(torch.OutOfMemoryError), made.step:
        made.backward()
        for function in ("zeros_like", "full_like", "empty_like"):
            monkeypatch.setattr(torch, function, limited(getattr(torch, function)))
        made.optimizer.step()
    monkeypatch.undo()
    assert left == [0]
    assert made.state() == before
    with made.step:
        made.backward()
        made.optimizer.step()
    assert made.step.committed


def test_the_copies_of_a_step_on_a_cpu_lie_in_the_memory_of_the_last_one() -> None:
    """A second step of one block gets its own, for the first one may still be rolled back."""
    made = Setup("foreach")
    addresses = []
    for steps in (1, 1, 2, 1):
        with made.step:
            made.backward()
            for _ in range(steps):
                made.optimizer.step()
        (kept,) = made.step._guarded.kept.values()
        addresses.append(sorted(each.data_ptr() for each in kept._copies or []))
    assert addresses[1] != addresses[0]  # the first step has made the state
    assert addresses[1] != addresses[2]
    assert addresses[3] == addresses[2]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "shorter": lambda weight: weight[:1],
    "wider": lambda weight: weight.double(),
    "elsewhere": lambda weight: weight.clone(),
}


@pytest.mark.parametrize("compared_by", ["Dynamo", "a loop"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_changed_between_blocks_is_seen(
    change: str, compared_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layout and memory at the beginning of the block are restored, and its copies fit."""
    if compared_by == "a loop":
        monkeypatch.setattr("torchguard._torch.eager._sees_layouts", lambda: False)
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    model = nn.Module()
    model.weight = weight
    model.register_buffer("table", torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=True)
    step = torchguard.transaction(model, optimizer)

    def seen() -> Any:
        tensors = weight, model.get_buffer("table")
        return [(t.shape, t.stride(), t.dtype, t.data_ptr(), t.tolist()) for t in tensors]

    for _ in range(2):
        with step:
            (weight * weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for tensor in (weight, model.get_buffer("table")):
        tensor.data = CHANGES[change](tensor.data)
    optimizer.state.clear()
    before = seen()
    with pytest.raises(Failure), step:
        (weight * weight).sum().backward()
        weight.data = torch.zeros(5)
        raise Failure
    assert seen() == before
    optimizer.register_step_post_hook(fail)
    with pytest.raises(Failure), step:
        (weight * weight).sum().backward()
        optimizer.step()
    assert seen() == before


def after_the_commit(made: Setup) -> None:
    with made.step:
        made.backward()
        made.optimizer.step()
        raise Failure


def in_run(made: Setup) -> None:
    made.scheduler.step = fail  # type: ignore[assignment, method-assign]
    try:
        made.step.run(lambda x: made.model(x).square().mean(), torch.arange(8.0).view(4, 2))
    finally:
        del made.scheduler.step


@pytest.mark.parametrize("way", [after_the_commit, in_run])
def test_gradients_that_were_used_are_dropped_and_the_note_says_what_is_missing(
    way: Callable[[Setup], None],
) -> None:
    plain, made = Setup(), Setup()
    with pytest.raises(Failure) as raised:
        way(made)
    plain.backward()
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    assert made.state() == plain.state()
    assert made.step.committed
    note = "".join(raised.value.__notes__)  # type: ignore[attr-defined]
    assert "this training step counts" in note
    assert "its gradients are dropped" in note
    assert "ExponentialLR has not stepped" in note
    made.scheduler.step()
    plain.scheduler.step()
    for each in (plain, made):
        with each.step:
            each.backward()
            each.optimizer.step()
    assert made.state() == plain.state()


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_waits_from_the_first_step_to_the_end_of_the_block(kind: str) -> None:
    made, seen = Setup(kind), []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), made.step:
            made.backward()
            made.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
            made.optimizer.step()
            made.scheduler.step()
            seen.append("the end of the block")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert seen
    assert made.step.committed


def test_a_step_that_a_scaler_has_skipped_counts_once_it_is_updated() -> None:
    made = Setup("foreach")
    scaler = torch.amp.GradScaler("cpu")
    step = torchguard.transaction(made.model, made.optimizer, scaler)
    for number in (float("inf"), 1.0):
        with step:
            scaler.scale(made.model(torch.ones(4, 2) * number).sum()).backward()
        assert not step.committed
        with step:
            scaler.step(made.optimizer)
            scaler.update()
        assert step.committed
        made.optimizer.zero_grad()


def test_one_autocast_scope_around_several_steps_does_not_use_casts_of_old_weights() -> None:
    """PyTorch alone trains on the first cast of each weight: the loss stays as it was."""
    losses: list[list[float]] = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step: Any = torchguard.transaction(model, optimizer) if guarded else None
        x, found = torch.ones(2, 4), []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                with step or contextlib.nullcontext():
                    loss = model(x).float().square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
        losses.append(found)
    assert len(set(losses[0])) == 1
    assert len(set(losses[1])) == 3


@pytest.mark.parametrize(("fails", "files", "changes"), [(False, 7, 28), (True, 8, 53)])
def test_the_walk_of_a_fused_step_does_not_grow(
    fails: bool, files: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchguard.uninstall()  # replacements of a scope that has ended, which other tests have left
    # In a program that has it, a block asks once more whether gradients accumulate.
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = torchguard.transaction(model, optimizer)

    def call() -> None:
        with contextlib.suppress(Failure), step:
            model(torch.ones(1, 2)).sum().backward()
            if fails:
                raise Failure
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        call()
    gc.collect()  # transactions of other tests, which forget their hooks as they go
    walk = walked(call)
    assert len(walk.files) <= files, walk.files
    assert walk.changes <= changes, walk.entered


def in_a_thread(call: Callable[[], object]) -> list[Exception]:
    """Call it in another thread; return the SaveError that it raises there."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except torchguard.errors.SaveError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_checkpoint_inside_of_a_block_is_refused(tmp_path: Path) -> None:
    """It would hold half a step. Another thread, and this one after the block, may save."""
    made = Setup()
    state = made.step.state_dict()

    def save() -> None:
        torchguard.save(made.model.state_dict(), tmp_path / "model.pt")

    def save_a_folder() -> None:
        with torchguard.checkpoint_folder(tmp_path / "checkpoint"):
            pass

    with made.step:
        made.backward()
        load = functools.partial(made.step.load_state_dict, state)
        for call in (save, save_a_folder, made.step.state_dict, load):
            with pytest.raises(torchguard.errors.SaveError, match="save after the block"):
                call()
        assert not in_a_thread(lambda: torchguard.save({}, tmp_path / "other.pt"))
        assert in_a_thread(made.step.state_dict)
        made.optimizer.step()
    assert [each.name for each in tmp_path.iterdir()] == ["other.pt"]
    save()


Saved = Callable[[Any], Any]
LIVE: dict[str, Saved] = {
    "state of the model": lambda made: made.model.state_dict(),
    "one parameter": lambda made: made.model[0].weight.data,
    "a view of it": lambda made: [made.model[0].weight.detach()[:1]],
    "a buffer": lambda made: {"mean": made.model[1].running_mean},
    "the model": lambda made: made.model,
    "the optimizer's state": lambda made: {"epoch": 1, "optimizer": made.optimizer.state_dict()},
    "a state that was taken before the block": lambda made: made.taken,
}
APART: dict[str, Saved] = {
    "copies": lambda made: copy.deepcopy(made.model.state_dict()),
    "another model": lambda _: nn.Linear(2, 2).state_dict(),
    "numbers": lambda _: {"epoch": 3},
    "a frozen model in the same process": lambda made: made.frozen,
}


@pytest.mark.parametrize("what", [*LIVE, *APART])
def test_another_thread_saves_copies_of_what_a_block_trains(what: str, tmp_path: Path) -> None:
    made: Any = Setup()
    made.frozen = nn.Linear(2, 2).requires_grad_(False)
    with made.step:
        made.backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    made.taken = made.step.state_dict()

    def save() -> None:
        torchguard.save({**LIVE, **APART}[what](made), tmp_path / "saved.pt")

    with made.step:
        made.backward()
        raised = in_a_thread(save)
        made.optimizer.step()
    assert [*tmp_path.iterdir()] == ([] if what in LIVE else [tmp_path / "saved.pt"])
    assert all("another thread is inside a block" in str(each) for each in raised)
    assert bool(raised) == (what in LIVE)
    assert not in_a_thread(save)


def test_what_is_written_wrong_is_named() -> None:
    made = Setup()
    with pytest.raises(TypeError, match=r"not a decorator.*with step:"):

        @made.step
        def train() -> None: ...

    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy([made.model, made.optimizer, made.step])

    def loss_of(x: Tensor) -> Tensor:
        return made.model(x).mean()  # type: ignore[no-any-return]

    def backward(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward(retain_graph=True)
        return loss

    before = made.state()
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "loss_of has called backward": (backward, {}),
        r"returned shape \(2, 1\), expected a tensor of one": (made.model, {}),
        "before_step=clip, without parentheses": (loss_of, {"before_step": torch.ones(())}),
        "retry is 'half', expected 'halve' or None": (loss_of, {"retry": "half"}),
        "parts is 0, expected a number of 1 or more": (loss_of, {"parts": 0}),
        "metric is of type float, expected a function": (loss_of, {"metric": 1.0}),
    }
    for message, (function, options) in calls.items():
        with pytest.raises((TypeError, ValueError), match=message):
            made.step.run(function, torch.ones(2, 2), **options)
    assert made.state() == before


@pytest.mark.parametrize("stepped", [True, False])
def test_a_loop_that_steps_the_scheduler_beside_run_is_warned_once(stepped: bool) -> None:
    """And one that loads the scheduler's state is not."""
    made = Setup()
    saved = made.scheduler.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            made.step.run(lambda x: made.model(x).mean(), torch.ones(2, 2))
            if stepped:
                made.scheduler.step()
            elif number == 2:
                made.scheduler.load_state_dict(saved)
            assert len(caught) == (stepped and number > 0)
    assert all("your loop has stepped it too" in str(each.message) for each in caught)
