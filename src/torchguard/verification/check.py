"""The check of one compiled graph: down the fallbacks to the first that does what eager does."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchguard._events import record
from torchguard._torch import has_hooks, warn_at_compiled_call
from torchguard.equivalence.compare import COMPILING, Difference, judge
from torchguard.equivalence.copies import (
    bytes_of,
    draws_random_numbers,
    run_on_copies,
    why_not_copied,
    with_a_repeated_id,
)
from torchguard.equivalence.outcome import Outcome
from torchguard.equivalence.reference import warn_of
from torchguard.errors import MiscompilationError, MiscompilationWarning
from torchguard.verification.backend import Options
from torchguard.verification.fallback import EAGER, Fallback, TracedGraph, with_strides
from torchguard.verification.graph import names_of, unlogged
from torchguard.verification.report import GraphRecord, first_of, message_of
from torchguard.verification.reproduce import reproducer_of
from torchguard.verification.rounding import exact, not_by_rounding, policy_of, right_in_double


class _UnverifiedError(Exception):
    """The graph can't be compared with eager; the text is the reason."""


class _Judged(NamedTuple):
    """What was found about one way to compile the graph."""

    differences: tuple[Difference, ...]
    function: Callable[..., Any]
    """The compiled graph; where nothing but strides of outputs was wrong, it gives them eager's."""

    note: str = ""
    """What differs and is allowed, as text."""


@dataclass(eq=False)
class GraphCheck:
    """Checks calls of one graph, and knows what is trusted to run."""

    traced: TracedGraph
    fallbacks: tuple[Fallback, ...]
    """The backend that has compiled it, and what to compile it with if that is wrong."""

    options: Options
    record: GraphRecord
    """Is kept up to date."""

    runs: Callable[..., Any]
    """What is trusted so far, at first what the backend made of the graph; each call gets its
    result from it."""

    draws_like_eager: bool
    """Whether what the backend made draws the random numbers that eager draws."""

    conclusive: bool = True
    """Whether the last check could tell: eager did not raise."""

    mutates: bool = False
    """Whether a check has seen the graph write its inputs."""

    _position: int = 0  # of what runs, among the fallbacks
    _settled: bool = False  # there is nothing left to check
    _overlaps: list[Any] = field(default_factory=list)  # to be warned of
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int | None = None  # the one that holds the lock

    @property
    def settled(self) -> bool:
        """Whether nothing is left to check: eager runs, or what has been decided on."""
        return self._settled or self.fallbacks[self._position] is EAGER

    @functools.cached_property
    def names(self) -> list[str]:
        """What messages call the inputs, those that the graph owns first."""
        owned = [f"tensor {number} of the graph" for number in range(len(self.traced.owned))]
        return [*owned, *names_of(self.traced.graph)]

    def trust_what_is_new(self) -> None:
        """Note that from now on sizes are trusted that were not checked."""
        if self.record.status == "verified":
            self.record.reason = f"trusted with sizes after the first {self.record.checks} checks"

    def call(self, inputs: tuple[Any, ...], look: Callable[[tuple[Any, ...]], str | None]) -> Any:
        """Run a call for which ``look`` says whether it is checked; no other thread does meanwhile.

        A check may take as long as compiling, so another thread runs the graph eagerly. Only where
        the graph owns tensors it waits, for a check swaps their data.
        """
        wait = bool(self.traced.owned) and self._thread != threading.get_ident()
        if not self._lock.acquire(blocking=wait):
            return self.traced.eager(*inputs)
        self._thread = threading.get_ident()
        try:
            warning = look(inputs)
            function = self.runs
            overlaps, self._overlaps = self._overlaps, []
        finally:
            self._thread = None
            self._lock.release()
        for found in overlaps:
            warn_of(*found)
        if warning is not None:
            record("miscompiled", "verified", warning.partition("\n")[0].rstrip(":"))
            # Not under the lock: who shows warnings may call anything. As an error it comes out.
            warn_at_compiled_call(warning, MiscompilationWarning)
        return function(*inputs)

    def check(self, inputs: Sequence[Any]) -> str | None:
        """Check what runs with the inputs of one call; afterwards the right one runs.

        Returns the text of a warning, if there is one.
        """
        if self.settled:
            return None
        with self._counted():
            warning = None
            try:
                warning = self._check(inputs)
            except _UnverifiedError as reason:
                self._leave(str(reason))
            except torch.OutOfMemoryError:
                self._leave("out of memory while re-running the graph for verification")
            except Exception as error:  # noqa: BLE001 - a check must never break the call it checks
                self._leave(f"the check raised {type(error).__name__}: {error}")
            return warning

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a check, and the time it takes."""
        start = time.perf_counter()
        self.conclusive = True
        try:
            yield
        finally:
            self.record.checks += 1
            self.record.seconds += time.perf_counter() - start

    def _check(self, inputs: Sequence[Any]) -> str | None:
        eager = self._run_eagerly(inputs)
        self.mutates |= bool(eager.mutated)
        judged = self._judge(self.fallbacks[self._position], self.runs, eager, inputs)
        self.runs = judged.function
        adds = bool(eager.gradients) or _accumulates(self.traced.graph)
        if not judged.differences and adds and self.record.status == "compiled":
            wrong = self._with_a_repeated_id(eager, inputs)
            if wrong is not None:
                judged, eager, inputs = wrong
        if judged.differences:
            if not judge(eager, self._run_eagerly(inputs), COMPILING).equal:
                raise _UnverifiedError("eager itself does not give the same result twice")
            return self._replace(judged.differences, eager, inputs)
        if eager.error is not None:
            reason = f"eager raises {type(eager.error).__name__}"
            self.conclusive = False  # this call proves nothing
            if self.record.status == "compiled":
                self.record.reason = f"{reason}; the next call is checked"
        elif self.record.status in {"compiled", "verified"}:
            earlier_note = self.record.reason if self.record.status == "verified" else ""
            self.record.status = "verified"
            self.record.reason = judged.note or earlier_note
        return None

    def _with_a_repeated_id(
        self, eager: Outcome, inputs: Sequence[Any]
    ) -> tuple[_Judged, Outcome, Sequence[Any]] | None:
        """Check what is added up where an id occurs twice, if no id of this call does.

        Compiled code may overwrite instead (https://github.com/pytorch/pytorch/issues/147848).
        Outputs count too where the graph adds at indices and writes at none: what is written at one
        index twice is undefined. None if all of it is right.
        """
        repeated = with_a_repeated_id(inputs)
        if repeated is None:
            return None
        try:
            again = self._run_eagerly(repeated)
        except _UnverifiedError:
            return None  # the call itself could be compared, and was right
        if again.gradients.keys() != eager.gradients.keys():
            return None
        judged = self._judge(self.fallbacks[self._position], self.runs, again, repeated)
        others = any(each.part != "gradients" for each in judged.differences)
        if others and not _accumulates(self.traced.graph):
            return None
        return (judged, again, repeated) if judged.differences else None

    def _leave(self, reason: str) -> None:
        """Leave the graph unverified."""
        if self.record.status in {"compiled", "verified"}:
            self.record.status = "unverified"
            self.record.reason = reason

    def _run_eagerly(self, inputs: Sequence[Any]) -> Outcome:
        """Return what eager does; raises where that can't be compared with what runs."""
        reason = self._why_not_run(inputs)
        if reason is not None:
            raise _UnverifiedError(reason)
        eager = run_on_copies(self.traced.graph, inputs, self.traced.owned)
        self._overlaps = eager.overlaps or self._overlaps
        eager.random = eager.random and draws_random_numbers(
            self.traced.graph, inputs, self.traced.owned
        )
        if eager.random and not self.draws_like_eager:
            self._settled = True  # no inputs will change that
            name = self.fallbacks[0].name
            if name != "inductor":
                raise _UnverifiedError(
                    f"it draws random numbers, which {name} may draw in its own way"
                )
            raise _UnverifiedError(
                "it draws random numbers, which inductor draws in its own way; with the option "
                "fallback_random=True it can be checked"
            )
        return eager

    def _why_not_run(self, inputs: Sequence[Any]) -> str | None:
        tensors = [*self.traced.owned, *inputs]
        reason = why_not_copied(tensors)
        if reason is not None:
            return reason
        limit = self.options.max_bytes
        if limit is not None and (size := bytes_of(tensors)) > limit:
            return f"its inputs have {size:,} bytes, max_bytes is {limit:,}"
        if any(has_hooks(tensor) for tensor in self.traced.owned):
            return "a tensor that the graph owns has hooks"
        return None

    # ---- judging ----

    def _judge(
        self,
        fallback: Fallback,
        function: Callable[..., Any],
        eager: Outcome,
        inputs: Sequence[Any],
    ) -> _Judged:
        """Compare what a fallback has compiled with eager."""
        found, note = self._differences(fallback, function, eager, inputs)
        strides = {each.key: each.strides for each in found if each.strides is not None}
        if found and len(strides) == len(found):
            relaid = with_strides(function, strides)
            if not self._differences(fallback, relaid, eager, inputs)[0]:
                outputs = ", ".join(map(str, sorted(strides)))
                note = f"{fallback.name} gives outputs other strides, they get eager's: {outputs}"
                return _Judged((), relaid, note)
        return _Judged(found, function, note)

    def _differences(
        self,
        fallback: Fallback,
        function: Callable[..., Any],
        eager: Outcome,
        inputs: Sequence[Any],
    ) -> tuple[tuple[Difference, ...], str]:
        """Return what differs, and as text what rounding alone makes differ."""
        graph = self.traced.graph
        compiled = run_on_copies(function, inputs, self.traced.owned, reference=eager)
        unknown = eager.random or self.traced.owned
        in_double = None if unknown else functools.cache(functools.partial(exact, graph, inputs))
        found = judge(eager, compiled, COMPILING, in_double).differences
        if found and (policy := policy_of(graph, inputs)) is not COMPILING:  # under autocast
            found = judge(eager, compiled, policy, in_double).differences
        # Without Dynamo's symbols, what is compiled in double would be another graph.
        if not found or self.traced.owned or self.traced.is_dynamic:
            return found, ""
        left = not_by_rounding(graph, inputs, eager, compiled, found)
        if left or not right_in_double(graph, inputs, fallback.compile):
            return tuple(left) or found, ""
        named = [each.named(self.names) for each in found]
        return (), f"rounding decides at a discontinuity: {'; '.join(first_of(named))}"

    # ---- replacing ----

    def _replace(
        self, found: tuple[Difference, ...], eager: Outcome, inputs: Sequence[Any]
    ) -> str | None:
        """Replace what is wrong as the user has chosen; return the text of the warning."""
        first, record, wrong = self.fallbacks[0], self.record, self.runs
        action = self.options.on_mismatch
        if action == "fallback":
            with unlogged():
                self._fall_back(eager, inputs, self._position + 1)
        record.status = "mismatched"
        record.runs = self.fallbacks[self._position].name
        found = tuple(each.named(self.names) for each in found)
        record.differences = tuple(map(str, found))
        reproducer = record.reproducer
        if reproducer is None:
            reproducer = reproducer_of(self.traced, wrong, inputs, first, record)
        text = message_of(record, first, found, action, reproducer)
        self._settled |= action != "fallback"
        if action != "raise":
            return text
        record.runs = "nothing"

        def refuse(*_: Any) -> Any:
            raise MiscompilationError(text)

        self.runs = refuse
        return None

    def _fall_back(self, eager: Outcome, inputs: Sequence[Any], start: int) -> None:
        """Take the first fallback, from ``start`` on, that can be compiled and is right.

        The last is eager itself.
        """
        last = len(self.fallbacks) - 1
        position, function = last, EAGER.compile(self.traced.graph, [])
        with contextlib.suppress(Exception):  # out of memory, perhaps: what is wrong can't stay
            for place in range(start, last):
                compiled = self._compiled_right(place, eager, inputs)
                if compiled is not None:
                    position, function = place, compiled
                    break
        # Not after a KeyboardInterrupt: the next call has to check again.
        self._position, self.runs = position, function

    def _compiled_right(
        self, place: int, eager: Outcome, inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Compile with a fallback; None if it can't, or if that does not do what eager does."""
        compiled = self.traced.compile(self.fallbacks[place], inputs)
        if compiled is None:
            return None
        judged = self._judge(self.fallbacks[place], compiled, eager, inputs)
        return None if judged.differences else judged.function


def checked_calls(check: GraphCheck) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, the first calls of which are checked."""
    remaining = check.options.calls
    target: Callable[..., Any]

    def look(inputs: tuple[Any, ...]) -> str | None:
        nonlocal target, remaining
        warning = None
        if remaining > 0:
            warning = check.check(inputs)
            remaining -= check.conclusive
        if remaining <= 0 or check.settled:
            target = check.runs  # nothing of the check stays alive
        return warning

    def first(*inputs: Any) -> Any:
        return check.call(inputs, look)

    # Dynamo keeps what it was given, so that the way to the compiled graph is one call of Python.
    target = first

    def run_target(*inputs: Any) -> Any:
        return target(*inputs)

    return run_target


def _accumulates(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph adds at indices that it is given, and overwrites at none."""
    calls = [node.target for node in graph.graph.nodes if node.op.startswith("call_")]
    names = {str(getattr(each, "__name__", each)).rstrip("_") for each in calls}
    adds = {"index_add", "scatter_add"}
    writes = {"index_put", "index_copy", "index_fill", "scatter", "put", "setitem"}
    writes |= {"sliced_assign", "combined"}  # torchguard's own, as whole nodes
    return bool(names & adds) and not names & writes
