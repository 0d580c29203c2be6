"""save(): a tensor that changes while it is written is named, and nothing is written."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.child_process import output_of
from support.writers import OLD, left, same
from torchguard._torch import tensors
from torchguard.checkpoint import saving


class Steps:
    """Pickled after the tensors before it; writes to one of them, as another thread would."""

    def __init__(self, tensor: torch.Tensor, times: int = 1) -> None:
        self.tensor, self.times = tensor, times

    def __reduce__(self) -> Any:
        if self.times:
            self.times -= 1
            self.tensor.add_(1)
        return dict, ()


class Holds:
    """An object of the user's."""


class TestTorn:
    def test_a_tensor_that_changes_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        weight = torch.zeros(3)
        obj = {"model": [{"weight": weight}], "then": Steps(weight)}
        with pytest.raises(
            torchguard.errors.TornSaveError, match=r"obj\['model'\]\[0\]\['weight'\]"
        ):
            torchguard.save(obj, path)
        assert same(torch.load(path), OLD)
        assert not left(tmp_path)

    @pytest.mark.parametrize("make", [lambda: torch.nn.Linear(1, 1), Holds])
    def test_a_tensor_inside_any_object_is_seen(
        self, tmp_path: Path, make: Callable[[], object]
    ) -> None:
        """In a module, which is looked into before, and in an object that pickle meets."""
        weight, held = torch.zeros(3), make()
        vars(held)["extra"] = [weight]
        with pytest.raises(torchguard.errors.TornSaveError, match=r"a tensor of shape \(3,\)"):
            torchguard.save([held, Steps(weight)], tmp_path / "model.pt")
        assert not list(tmp_path.iterdir())

    def test_retry_saves_a_state_that_was_one_and_ignore_any(self, tmp_path: Path) -> None:
        path, weight = tmp_path / "model.pt", torch.zeros(3)
        torchguard.save([weight, Steps(weight, times=2)], path, on_torn="retry")
        loaded = torch.load(path, weights_only=False)
        assert torch.equal(loaded[0], torch.full((3,), 2.0))
        with pytest.raises(torchguard.errors.TornSaveError):
            torchguard.save([weight, Steps(weight, times=100)], path, on_torn="retry")
        torchguard.save([weight, Steps(weight)], path, on_torn="ignore")
        with pytest.raises(ValueError, match="on_torn is 'never'"):
            torchguard.save(OLD, path, on_torn="never")  # type: ignore[arg-type]

    def test_a_tensor_that_is_not_saved_may_change(self, tmp_path: Path) -> None:
        """Also a gradient, which torch does not pickle."""
        other, parameter = torch.zeros(3), torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.zeros(3)
        torchguard.save([parameter, Steps(other), Steps(parameter.grad)], tmp_path / "model.pt")

    def test_a_thread_that_trains(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every file that is written holds one state; some saves are refused."""
        # On a loaded machine the other thread may stand still for longer than a save waits.
        wait = tensors.versions_after
        monkeypatch.setattr(saving, "versions_after", lambda s, given: wait(5 * s, given))
        model = torch.nn.ParameterList(torch.zeros(20_000) for _ in range(20))
        ends = threading.Event()

        def train() -> None:
            with torch.no_grad():
                while not ends.is_set():
                    for parameter in model:
                        parameter.add_(1)

        trainer = threading.Thread(target=train)
        trainer.start()
        torn = written = 0
        try:
            # On a loaded machine one of the two may not come up for a while.
            while (torn == 0 or written < 5) and torn + written < 2000:
                try:
                    torchguard.save(model.state_dict(), tmp_path / "model.pt", fsync=False)
                except torchguard.errors.TornSaveError:
                    torn += 1
                    continue
                written += 1
                saved = torch.load(tmp_path / "model.pt").values()
                values = [each.unique().tolist() for each in saved]
                assert all(len(each) == 1 for each in values), "an operation was in its middle"
                steps = [step for (step,) in values]
                assert steps == sorted(steps, reverse=True)
                assert steps[0] - steps[-1] <= 1
        finally:
            ends.set()
            trainer.join()
        assert torn
        assert written

    def test_threads_that_wait_in_the_standard_library_are_idle(self) -> None:
        """A save sleeps only where another thread may be in the middle of an operation."""
        printed = output_of("""
            import queue, threading, time
            from torchguard.checkpoint import saving

            event, items = threading.Event(), queue.Queue()
            for wait in (event.wait, items.get):
                threading.Thread(target=wait, daemon=True).start()
            print(saving._another_thread_runs())

            def count():
                while not event.is_set():
                    pass

            threading.Thread(target=count).start()
            end = time.monotonic() + 60
            while not saving._another_thread_runs() and time.monotonic() < end:
                pass
            print(saving._another_thread_runs())
            event.set()
            """)
        assert printed.split() == ["False", "True"]

    def test_another_pickle_module(self, tmp_path: Path) -> None:
        """The pickler of the module that was given is the one that is used."""
        seen = []

        class Module:
            __name__ = "mine"
            dump, dumps, loads = pickle.dump, pickle.dumps, pickle.loads

            class Pickler(pickle.Pickler):
                def reducer_override(self, obj: Any) -> Any:
                    seen.append(type(obj))
                    return NotImplemented

        torchguard.save([torch.ones(3)], tmp_path / "model.pt", Module)
        assert torch.Tensor in seen
