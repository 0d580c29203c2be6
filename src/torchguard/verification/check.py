"""The check of one graph: down the ladder to the first step that does what eager does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchguard._torch import has_hooks, shape_guards, tracing_again
from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.compare import COMPILING, Difference, judge, same_outcome
from torchguard.equivalence.copies import bytes_of, why_not_copied
from torchguard.equivalence.run import Outcome, run
from torchguard.errors import MiscompilationError
from torchguard.verification.case import Case, exact
from torchguard.verification.fallback import EAGER, OUTSIDE, Step
from torchguard.verification.graph import copy_graph, is_symbolic, owned_tensors
from torchguard.verification.options import Options
from torchguard.verification.quiet import quiet
from torchguard.verification.reducing import Reduced, reduced
from torchguard.verification.report import GraphRecord
from torchguard.verification.reproducer import NotWritten, write_reproducer
from torchguard.verification.rounding import not_by_rounding, right_in_double
from torchguard.verification.strides import with_strides

__all__ = ["Check"]


_SECONDS_TO_REDUCE, _MOST_SECONDS_TO_REDUCE = 10.0, 60.0
"""How long the reproducer of a wrong graph may be made smaller: the caller is waiting.

Where compiling took long, twice as long as that, so that there is time for some tries.
"""


class _Unverified(Exception):  # noqa: N818 - it is an answer, not an error
    """The graph can't be checked; the text says why."""


class _NeverVerified(_Unverified):
    """No inputs will change that."""


@dataclass
class Check:
    """Knows a graph, the ladder, and what runs at the moment."""

    graph: fx.GraphModule
    """As Dynamo traced it: what eager is."""

    steps: tuple[Step, ...]
    options: Options
    record: GraphRecord
    random_like_eager: bool
    """Whether the first step draws the random numbers that eager draws."""

    trusted: Callable[..., Any]
    """What runs: first what the first step made of the graph."""

    examples: list[Any]
    """What Dynamo gave to compile with, None in place of tensors that hold values."""

    fakes: list[Any] | None
    """The inputs of a graph with dynamic shapes without their values, to compile it again."""

    context: Any
    """What Dynamo knew when it traced the graph, to compile it again."""

    symbols: list[Any]
    """What it had decided about the sizes of each input."""

    compile_seconds: float
    """How long the first step took."""

    position: int = 0
    """The step of the ladder that runs."""

    decided: bool = False
    """Whether a difference has been found and the user wants no other step."""

    forgiven: str = ""
    """What differs by rounding alone, though far, in words."""

    writes: bool = False
    """Whether the graph writes its inputs, as far as checks have seen."""

    never_outside: bool = False
    """Whether the step that keeps writes out of the graph was tried, and can't be taken."""

    warning: str | None = None
    """What to warn of once the check is over."""

    hopeless: bool = False
    """Whether the graph can't be checked, whatever its inputs are."""

    guards: int | None = None
    """How many guards on sizes there were when Dynamo wrote its own; later ones nobody watches."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int | None = None
    """The thread that holds the lock."""

    def __post_init__(self) -> None:
        self.record.runs = self.steps[0].name
        self.owned = owned_tensors(self.graph)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to check: eager runs, or what has been decided on."""
        return self.decided or self.hopeless or self.steps[self.position] is EAGER

    def begin(self) -> bool:
        """Take the check for this thread, up to :meth:`end`; False if another thread has it.

        That one may hold it for as long as it compiles, and waits for Dynamo's lock to do so.
        Who is told False runs the graph eagerly: it is right, and waits for nothing.
        Only where the graph owns tensors everybody waits, for a check swaps their data.
        """
        wait = bool(self.owned) and self._thread != threading.get_ident()
        if not self._lock.acquire(blocking=wait):
            return False
        self._thread = threading.get_ident()
        return True

    def end(self) -> None:
        """Let other threads check."""
        self._thread = None
        self._lock.release()

    def eager(self, *inputs: Any) -> Any:
        """Run the graph as Dynamo traced it."""
        return self.graph.forward(*inputs)

    def __call__(self, inputs: Sequence[Any]) -> str | None:
        """Check what runs with the inputs of one call; afterwards the right one runs.

        Returns what to warn of; not under the lock, for who shows warnings may call anything.
        """
        if self.finished:
            return None
        start = time.perf_counter()
        self.warning = None
        try:
            self._check_here(inputs)
            if self._all_ranks_check():
                self._agree(inputs)
        finally:
            self.record.checks += 1
            self.record.seconds += time.perf_counter() - start
        return self.warning

    def _all_ranks_check(self) -> bool:
        """Whether the other ranks are here too: new sizes come to each of them at other calls."""
        together = self.options.group is not None and self.options.on_mismatch == "fallback"
        return together and self.record.checks < self.options.calls

    @property
    def writes_inside(self) -> bool:
        """Whether the graph writes its inputs itself, and a step is left that keeps that out."""
        following = self.steps[self.position + 1 : self.position + 2]
        outside = any(step.name == OUTSIDE for step in following)
        fallback = self.options.on_mismatch == "fallback" and not self.never_outside
        return self.writes and outside and fallback

    def write_outside(self, inputs: Sequence[Any]) -> bool:
        """Take the step that writes inputs outside of the graph; whether it is right here.

        Otherwise the graph counts as one that leaves its inputs alone.
        """
        start = time.perf_counter()
        step = self.steps[self.position + 1]
        try:
            eager = self._eager(inputs)
            compiled = self._compiled(step, inputs)
            right = False
            if compiled is not None:
                found, compiled = self._judged(step, compiled, eager, inputs)
                right = not found
        except (_Unverified, torch.OutOfMemoryError):
            right = False
        if right:
            assert compiled is not None
            self.position, self.trusted = self.position + 1, compiled
            self.record.runs = OUTSIDE
            self.record.reason = "it writes its inputs, of more sizes than are checked one by one"
        self.never_outside = not right
        self.record.checks += 1
        self.record.seconds += time.perf_counter() - start
        return right

    def _check_here(self, inputs: Sequence[Any]) -> None:
        try:
            self._check(inputs)
        except _Unverified as reason:
            # Ranks that check together do so until all of them have done.
            self.hopeless = isinstance(reason, _NeverVerified) and self.options.group is None
            self._leave(str(reason))
        except torch.OutOfMemoryError:
            self._leave("the memory is too small for a second run")
        except Exception as error:  # noqa: BLE001 - a check must never break the call it checks
            self._leave(f"the check raised {type(error).__name__}: {error}")

    def _agree(self, inputs: Sequence[Any]) -> None:
        """Go down to where the rank is that is furthest down; that step has to be right here."""
        while True:
            negative, highest = largest_of_all_ranks(
                self.options.group, [-self.position, self.position]
            )
            lowest = -negative
            if lowest == highest:
                return
            if self.position == highest:
                continue  # the others come down, and may have to go further
            self.position = highest - 1
            try:
                self._descend(
                    None if self.record.status == "unverified" else self._eager(inputs), inputs
                )
            except (_Unverified, torch.OutOfMemoryError):
                self._descend(None, inputs)
            self.record.runs = self.steps[self.position].name

    def _leave(self, reason: str) -> None:
        if self.record.status in {"compiled", "verified"}:
            self.record.status = "unverified"
            self.record.reason = reason

    def _check(self, inputs: Sequence[Any]) -> None:
        reason = why_not_copied([*self.owned, *inputs]) or self._too_large(inputs)
        if reason is None and any(has_hooks(tensor) for tensor in self.owned):
            reason = "a tensor that the graph owns has hooks"
        if reason is not None:
            raise _Unverified(reason)
        eager = self._eager(inputs)
        self.writes |= bool(eager.mutated)
        found, self.trusted = self._judged(self.steps[self.position], self.trusted, eager, inputs)
        if not found:
            if eager.error is not None:
                raise _Unverified(f"eager raises {type(eager.error).__name__}")
            if self.record.status in {"compiled", "verified"}:
                self.record.status = "verified"
                self.record.reason = self.forgiven or self.record.reason
            return
        self._distrust(found, eager, inputs)

    def _too_large(self, inputs: Sequence[Any]) -> str | None:
        limit = self.options.max_bytes
        size = 0 if limit is None else bytes_of([*self.owned, *inputs])
        if limit is None or size <= limit:
            return None
        return f"its inputs have {size:,} bytes, max_bytes is {limit:,}"

    def _eager(self, inputs: Sequence[Any]) -> Outcome:
        eager = run(self.graph, inputs, self.owned)
        if eager.random and not self.random_like_eager:
            raise _NeverVerified(
                "it draws random numbers, which inductor draws in its own way; with the option "
                "fallback_random=True it can be checked"
            )
        return eager

    def _judged(
        self, step: Step, function: Callable[..., Any], eager: Outcome, inputs: Sequence[Any]
    ) -> tuple[list[Difference], Callable[..., Any]]:
        """Return what ``function`` does otherwise than eager, and the function.

        Where nothing but the strides of outputs is wrong, it is one that gives them eager's.
        """
        found = self._differences(step, function, eager, inputs)
        strides = {each.key: each.strides for each in found if each.strides is not None}
        if not found or len(strides) < len(found):
            return found, function
        relaid = with_strides(function, strides)
        if self._differences(step, relaid, eager, inputs):
            return found, function
        outputs = ", ".join(map(str, sorted(strides)))
        self.forgiven = f"{step.name} gives outputs other strides, they get eager's: {outputs}"
        return [], relaid

    def _differences(
        self, step: Step, function: Callable[..., Any], eager: Outcome, inputs: Sequence[Any]
    ) -> list[Difference]:
        """Return what ``function``, which the step has compiled, does otherwise than eager."""
        compiled = run(function, inputs, self.owned)
        unknown = eager.random or self.owned
        verdict = judge(
            eager, compiled, COMPILING, lambda: None if unknown else exact(self.graph, inputs)
        )
        found = list(verdict.differences)
        # Without Dynamo's symbols, what is compiled in double would be another graph.
        if not found or self.owned or any(map(is_symbolic, self.examples)):
            return found
        left = not_by_rounding(self.graph, inputs, eager, compiled, found)
        if left or not right_in_double(self.graph, inputs, step.compile):
            return left or found
        self.forgiven = f"rounding decides where it jumps: {'; '.join(_first(found))}"
        return []

    def _distrust(self, found: list[Difference], eager: Outcome, inputs: Sequence[Any]) -> None:
        again = self._eager(inputs)
        if not same_outcome(eager, again):
            raise _Unverified("eager itself does not give the same result twice")
        wrong, runs = self.trusted, self.steps[self.position].name
        if self.options.on_mismatch == "fallback":
            with quiet():
                self._descend(eager, inputs)
            runs = self.steps[self.position].name
        self.record.status = "mismatched"
        self.record.runs = runs
        self.record.differences = tuple(map(str, found))
        if self.record.reproducer is None:
            reproducer = self._reproducer(Case(self.graph, wrong, list(inputs)))
        else:
            reproducer = self.record.reproducer
        text = _message(self.record, self.steps[0], found, self.options.on_mismatch, reproducer)
        self.decided = self.options.on_mismatch != "fallback"
        if self.options.on_mismatch == "raise":
            self.record.runs = "nothing"
            self.trusted = _refusal(text)
        else:
            self.warning = text

    def _reproducer(self, case: Case) -> str:
        """Write the script; return where it is, or why there is none."""
        source = self.steps[0].source
        if source is None:
            return f"none: {self.steps[0].name} is a callable, which a script can't name"
        if self.owned:
            return "none: the graph holds tensors of its own, such as an optimizer's parameters"
        with quiet():
            small = self._reduced(case)
            try:
                path = write_reproducer(small.case, source, self.record)
            except NotWritten as reason:
                return f"none: {reason}"
        self.record.reproducer = path
        if not small.ended_early:
            return path
        return f"{path} (reducing it ended early: its time was up)"

    def _reduced(self, case: Case) -> Reduced:
        if any(map(is_symbolic, self.examples)):
            # Without Dynamo's symbols it would be another graph.
            return Reduced(case, ended_early=False)
        seconds = min(max(_SECONDS_TO_REDUCE, 2 * self.compile_seconds), _MOST_SECONDS_TO_REDUCE)
        try:
            with tracing_again(None):
                return reduced(case, self.steps[0].compile, seconds, self.compile_seconds)
        except Exception:  # noqa: BLE001 - the large one is there
            return Reduced(case, ended_early=False)

    def _descend(self, eager: Outcome | None, inputs: Sequence[Any]) -> None:
        """Take the next step that is right, or can be compiled; the last one is eager itself."""
        before = self.position
        try:
            self._next_step(eager, inputs)
        except Exception:  # noqa: BLE001 - memory, say: what runs is wrong, so it can't stay
            self.position = len(self.steps) - 1
            self.trusted = self.eager
        except BaseException:
            self.position = before  # Ctrl-C: the next call has to check again
            raise

    def _next_step(self, eager: Outcome | None, inputs: Sequence[Any]) -> None:
        while self.position < len(self.steps) - 1:
            self.position += 1
            step = self.steps[self.position]
            if step is EAGER:
                self.trusted = step.compile(self.graph, [])
                return
            compiled = self._compiled(step, inputs)
            if compiled is None:
                continue
            found: list[Difference] = []
            if eager is not None:
                found, compiled = self._judged(step, compiled, eager, inputs)
            if not found:
                self.trusted = compiled
                return

    def _compiled(self, step: Step, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compile with another step; None if it can't, or only under conditions nobody watches."""
        if self.guards is None:
            self.guards = shape_guards(self.context)
        examples = self.fakes
        if examples is None:
            if any(map(is_symbolic, self.examples)):
                return None  # the sizes of this call are not those of every call
            pairs = zip(self.examples, inputs, strict=True)
            examples = [given if example is None else example for example, given in pairs]
        try:
            with tracing_again(self.context, zip(inputs, self.symbols, strict=True)):
                compiled = step.compile(copy_graph(self.graph), examples)
        except Exception:  # noqa: BLE001 - then the next step has to do
            return None
        return compiled if shape_guards(self.context) == self.guards else None


def _refusal(text: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise MiscompilationError(text)

    return refuse


def _first(found: list[Difference]) -> list[str]:
    shown = [str(difference) for difference in found[:3]]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more differences")
    return shown


def _blamed(step: Step) -> str:
    """Name what has compiled the graph: a backend that somebody has written is not torch's."""
    if step.source is None:
        return f"the backend {step.name} (torch {torch.__version__})"
    with_backend = f" with {step.source}" if step.source.startswith("backend=") else ""
    return f"torch.compile{with_backend} (torch {torch.__version__})"


def _message(
    record: GraphRecord,
    step: Step,
    found: list[Difference],
    on_mismatch: str,
    reproducer: str,
) -> str:
    largest = max((d.largest for d in found if d.finite), default=None)
    now = {
        "fallback": f"{record.runs} runs instead",
        "warn": 'the wrong graph runs all the same, because of on_mismatch="warn"',
        "raise": "it is not run",
    }[on_mismatch]
    lines = [
        f"{_blamed(step)} compiled {record.function} wrong:",
        *(f"  {line}" for line in _first(found)),
        f"  last statement: {record.place}",
        *([] if largest is None else [f"  largest difference: {largest:.3g}"]),
        f"  now: {now}",
        f"  reproducer: {reproducer}",
    ]
    return "\n".join(lines)
