"""One call as plain Python and compiled, each undone; and what is compared of the two runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchguard._torch import CALLBACK_OF_CALL, patch
from torchguard.equivalence.compare import PADDING, Difference, judge
from torchguard.equivalence.copies import sharing_of
from torchguard.equivalence.isolate import (
    OperandsFirst,
    UndoMutations,
    isolated,
    module_state_restored,
    rng_state_restored,
)
from torchguard.equivalence.outcome import Outcome, Output, send_backward
from torchguard.state.process import RNGState, ThreadModes
from torchguard.verification.reached import MISSING, Reached, leaves_of

_POLICY = replace(PADDING, metadata=True)
"""Wide: what compilers round is the business of the check of each graph."""


class UnverifiedError(Exception):
    """The call can't be compared; the text is the reason."""


class _Thread(threading.local):
    watched: Any = None
    """Whose call this thread is in, if it ends when it compiles."""

    runs: str = ""
    """``python`` or ``compiled`` during the runs of a comparison."""


thread = _Thread()


class Run(NamedTuple):
    """One run of a call, undone afterwards."""

    outcome: Outcome
    outputs: dict[str, Any]
    state: dict[str, Any]


# ---- runs ----


def run_undone(
    reached: Reached,
    watch: UndoMutations,
    function: Callable[..., Any],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    runs: str,
) -> Run:
    """Run a call as ``python`` or as ``compiled``, and restore all that it has changed.

    ``watch`` copies the memory that Python writes; what is compiled is expected to write that too.
    """
    is_python = runs == "python"
    thread.watched, thread.runs = None, runs
    reached.snapshot()
    with contextlib.ExitStack() as scope:
        for restore in (watch.undo, reached.restore, ThreadModes.capture().restore):
            scope.callback(restore)
        if is_python:
            scope.enter_context(_nothing_compiles())
            scope.enter_context(isolated(reached.modules))
        else:
            # isolated() changes the cache of autocast, which Dynamo guards on.
            scope.enter_context(module_state_restored(reached.modules))
            scope.enter_context(rng_state_restored())
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                scope.callback(torch.clear_autocast_cache)
        outcome, states, returned = Outcome(), RNGState.capture(), None
        with watch if is_python else contextlib.nullcontext():
            try:
                with OperandsFirst() if is_python else contextlib.nullcontext():
                    returned = function(*given[0], **given[1])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it raises is its outcome
                outcome.error = error.with_traceback(None)
            *drawn, _, of_numpy = states.changed()  # Python's numbers are the same in both
            outcome.random = any(drawn) or of_numpy
            outputs = leaves_of(returned)
            _send_backward(reached, outcome, outputs, retain_graph=is_python)
        results = [(f"output {path}", each) for path, each in outputs.items()]
        outcome.sharing = sharing_of([*reached.given(), *results])
        return Run(outcome, _copied(outputs), _copied(reached.changes(watch.mutated)))


def _send_backward(
    reached: Reached, outcome: Outcome, outputs: Mapping[str, Any], *, retain_graph: bool
) -> None:
    if (view := reached.rebased_view()) is not None:
        raise UnverifiedError(f"it writes {view}, a view that has a history")
    ends = list(map(Output, (*outputs.values(), *reached.rebased())))
    names = dict(enumerate(reached.names))
    try:
        outcome.gradients = send_backward(
            ends, reached.sources, names, retain_graph=retain_graph, without=reached.behind
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - likewise
        outcome.backward_error = error.with_traceback(None)


def _copied(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors among leaves: the next run may write them."""
    return {
        path: each.detach().clone().requires_grad_(each.requires_grad)
        if isinstance(each, torch.Tensor)
        else each
        for path, each in leaves.items()
    }


def judged(
    reached: Reached, reference: Run, candidate: Run, *, values: bool = True
) -> tuple[Difference, ...]:
    """Compare two runs; without ``values`` what depends on random numbers is left out."""
    errors = [type(run.outcome.error) for run in (reference, candidate)]
    if len(set(errors)) > 1 and type(None) not in errors:
        what = f"raises {errors[1].__name__}, Python raises {errors[0].__name__}"
        return (Difference("run", None, what, "error"),)
    outputs = {**reference.outputs, **candidate.outputs}
    state = {**reference.state, **candidate.state}

    def aligned(run: Run) -> Outcome:
        before = reached.before
        return replace(
            run.outcome,
            outputs=[_comparable(run.outputs.get(p, MISSING), values=values) for p in outputs],
            inputs=[
                _comparable(run.state.get(p, before.get(p, MISSING)), values=values) for p in state
            ],
            gradients=run.outcome.gradients if values else {},
        )

    names = {"outputs": list(outputs), "inputs": list(state), "gradients": reached.names}
    return tuple(
        replace(each, key=names[each.part][each.key].removeprefix("self."))
        if each.part in names and isinstance(each.key, int)
        else each
        for each in judge(aligned(reference), aligned(candidate), _POLICY).differences
    )


def _comparable(leaf: Any, *, values: bool) -> Any:
    if isinstance(leaf, float):  # rounded as a tensor was
        leaf = torch.tensor(leaf, dtype=torch.float32)
    if values or not isinstance(leaf, (torch.Tensor, int, complex)):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    shape = (0,) * leaf.dim()
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(
        leaf.requires_grad
    )


# ---- runs as Python compile nothing ----

_python_runs = 0


@contextlib.contextmanager
def _nothing_compiles() -> Iterator[None]:
    """Let this thread run what others have compiled, such as ``flex_attention``, as Python."""
    # Under a dispatch mode Dynamo would leave such a function uncompiled for good.
    global _python_runs
    with patch.lock:
        _python_runs += 1
        patch.apply("against python", {CALLBACK_OF_CALL: _none_in_python})
    try:
        yield
    finally:
        with patch.lock:
            _python_runs -= 1
            if not _python_runs:
                patch.undo("against python", leave_conflicts=True)


def _none_in_python(original: Callable[..., Any]) -> Callable[..., Any]:
    def _callback_from_stance(callback: Any) -> Any:
        return None if thread.runs == "python" else original(callback)

    return _callback_from_stance
