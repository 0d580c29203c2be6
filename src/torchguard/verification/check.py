"""The check of one compiled graph, and which of its calls are checked."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import fx

from torchguard._events import record
from torchguard._torch import has_hooks, warn_at_compiled_call
from torchguard.equivalence.compare import COMPILING, Difference, judge
from torchguard.equivalence.copies import (
    bytes_of,
    overlapping,
    run_on_copies,
    tensors_of,
    why_not_copied,
)
from torchguard.equivalence.outcome import Outcome
from torchguard.equivalence.perturb import not_by_rounding
from torchguard.equivalence.reference import reference_of
from torchguard.errors import MiscompilationError, MiscompilationWarning
from torchguard.verification.backend import Inner, OnMismatch, Options
from torchguard.verification.graph import SizesOf, names_of
from torchguard.verification.random import (
    EQUAL,
    FORWARD_AND_BACKWARD,
    ORDERED,
    CompiledDraws,
    Draw,
    EagerDraws,
    Seeds,
)
from torchguard.verification.report import (
    GraphRecord,
    first_of,
    message_of,
    note_mismatch,
    say_unverified,
)
from torchguard.verification.reproduce import reproducer_of
from torchguard.verification.rounding import exact, perturbed_runs, policy_of, right_in_double


class UnverifiedError(Exception):
    """It can't be compared; the text is the reason."""


@contextlib.contextmanager
def checking(record: GraphRecord) -> Iterator[None]:
    """Note in the record that a call was checked, or why it could not be."""
    start, reason = time.perf_counter(), ""
    try:
        yield
    except UnverifiedError as error:
        reason = str(error)
    except torch.OutOfMemoryError:
        reason = "out of memory while running it again for verification"
    except Exception as error:  # noqa: BLE001 - a check must never break the call it checks
        reason = f"the check raised {type(error).__name__}: {error}"
    finally:
        record.checks += 1
        record.seconds += time.perf_counter() - start
    if reason and record.status in {"compiled", "verified"}:
        record.status, record.reason = "unverified", reason


def require_comparable(
    tensors: Sequence[Any], max_bytes: int | None, names: Sequence[str] | None = None
) -> None:
    """Raise an :class:`UnverifiedError` if these can't be copied, or have too many bytes."""
    reason = why_not_copied(tensors, names=names)
    if reason is None and max_bytes is not None and (size := bytes_of(tensors)) > max_bytes:
        reason = f"it has {size:,} bytes of tensors, max_bytes is {max_bytes:,}"
    if reason is not None:
        raise UnverifiedError(reason)


def replacement(
    action: OnMismatch, text: str, right: Callable[..., Any], wrong: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what runs in place of what is wrong, as ``on_mismatch`` says."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise MiscompilationError(text)

    return {"fallback": right, "warn": wrong, "raise": refuse}[action]


@dataclass(eq=False)
class GraphCheck:
    """Checks calls of one graph, those with a new key, and knows what is trusted to run.

    A key is a combination of sizes. If the graph writes its inputs, it has which of them share
    memory too. Of the floats it has whether they are those of the first call: inductor of
    torch 2.13 returns ``n + 1`` as the constant that it was then, and two values tell. Each key
    that is new is checked, up to :attr:`MOST`; later ones are trusted.
    """

    MOST: ClassVar[int] = 256

    graph: fx.GraphModule
    """As Dynamo traced it: this is eager."""

    inner: Inner
    """The backend that has compiled it."""

    options: Options
    record: GraphRecord
    """Is kept up to date."""

    runs: Callable[..., Any]
    """What is trusted so far, at first what the backend made of the graph."""

    draws_like_eager: bool
    """Whether what the backend made draws the random numbers that eager draws."""

    sizes: SizesOf | None
    """Reads the sizes of a call; None if the shapes are static."""

    numbers: Sequence[int]
    """The positions of the floats."""

    owned: Sequence[torch.Tensor]
    """The tensors that the graph has as attributes, such as an optimizer's parameters."""

    _conclusive: bool = True  # the last check could tell: eager did not raise
    _mutates: bool = False  # a check has seen the graph write its inputs
    _settled: bool = False  # nothing is left to check
    _first: list[Any] | None = None  # the floats of the first call
    _checks: Counter[Hashable] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int | None = None  # the one that holds the lock

    def __post_init__(self) -> None:
        self.cell: list[_State] = [(self, set(), self.runs)]
        self._seeds = ORDERED
        self._doubt_drops = False
        self._draws: EagerDraws  # of the last run of eager
        self._drawn: CompiledDraws  # of the last run of what is compiled

    @functools.cached_property
    def eager(self) -> Callable[..., Any]:
        """Runs the graph as Dynamo traced it; operands that it overwrites are copied first."""
        return reference_of(self.graph)

    # ---- which calls are checked ----

    def key(self, inputs: Sequence[Any]) -> Hashable:
        """Return the key of a call."""
        values = [inputs[place].item() for place in self.numbers]
        if self._first is None:
            self._first = values
        return (
            values == self._first,
            None if self.sizes is None else self.sizes(inputs),
            overlapping(inputs) if self._mutates else None,
        )

    def call(self, inputs: tuple[Any, ...]) -> Any:
        """Run a call, and check it if its key is new; another thread runs the graph eagerly then.

        Only where the graph owns tensors it waits, for a check swaps their data.
        """
        wait = bool(self.owned) and self._thread != threading.get_ident()
        if not self._lock.acquire(blocking=wait):
            return self.eager(*inputs)
        self._thread = threading.get_ident()
        try:
            warning = self._look(inputs)
            function = self.runs
        finally:
            self._thread = None
            self._lock.release()
        if self.record.status == "unverified":
            say_unverified(self.record)
        if warning is not None:
            what = warning.partition("\n")[0].rstrip(":")
            record("miscompiled", "verified", what, is_said=True)
            # Not under the lock: who shows warnings may call anything. As an error it comes out.
            warn_at_compiled_call("miscompiled", warning, MiscompilationWarning)
        return function(*inputs)

    def _look(self, inputs: tuple[Any, ...]) -> str | None:
        """Check the call if its key is new; return the text of a warning."""
        checks, most = self._checks, self.options.calls
        check, known, runs = self.cell[0]
        if check is None:
            return None  # another thread has checked the last one
        key, warning = self.key(inputs), None
        if checks[key] < most and (key in checks or len(checks) < self.MOST):
            self._conclusive = True
            with checking(self.record):
                warning = self._check(inputs)
            if self.runs is not runs:  # with no other key that was checked
                checks.clear()
                known = set()
            if self._conclusive:
                key = self.key(inputs)  # it has come out whether the graph writes its inputs
                checks[key] += 1
        if checks[key] >= most:
            known.add(key)
        varies = self.sizes is not None or bool(self.numbers) or self._mutates
        is_full = len(checks) >= self.MOST
        if self._settled or (len(known) == len(checks) > 0 and (is_full or not varies)):
            if is_full and self.record.status == "verified":
                count = self.record.checks
                self.record.reason = f"trusted with sizes after the first {count} checks"
            check = None  # nothing of the check stays alive
        self.cell[0] = check, known, self.runs
        return warning

    # ---- a check ----

    def _check(self, inputs: Sequence[Any]) -> str | None:
        eager = self._run_eagerly(inputs)
        self._mutates |= bool(eager.mutated)
        found, note = self._judge(eager, inputs)
        if found:
            return self._replace(found, inputs)
        if eager.error is not None:
            reason = f"eager raises {type(eager.error).__name__}"
            self._conclusive = False  # this call proves nothing
            if self.record.status == "compiled":
                self.record.reason = f"{reason}; the next call is checked"
        elif self.record.status in {"compiled", "verified"}:
            earlier_note = self.record.reason if self.record.status == "verified" else ""
            self.record.status = "verified"
            self.record.reason = note or earlier_note
        return None

    def _run_eagerly(self, inputs: Sequence[Any]) -> Outcome:
        """Return what eager does; raises where that can't be compared with what runs."""
        require_comparable([*self.owned, *inputs], self.options.max_bytes)
        if any(map(has_hooks, self.owned)):
            raise UnverifiedError("a tensor that the graph owns has hooks")
        self._draws = self._eager_draws()
        eager = run_on_copies(self.graph, inputs, self.owned, within=self._draws)
        if (self._draws.counts or self._draws.problem) and not self.draws_like_eager:
            on_gpu = any(tensor.is_cuda for tensor in tensors_of(inputs))
            reason = self.inner.why_draws_differ(on_gpu=on_gpu)
            if not reason and self._draws.problem:
                reason = f"which can't be chosen: {self._draws.problem}"
            if reason:
                self._settled = True  # no inputs will change that
                raise UnverifiedError(f"it draws random numbers, {reason}")
        return eager

    def _eager_draws(self, like: EagerDraws | None = None) -> EagerDraws:
        """Return a scope in which eager draws the numbers of this check."""
        if self.draws_like_eager:
            return EagerDraws()
        dynamic = self.sizes is not None
        drops = self._doubt_drops
        return EagerDraws(self._seeds, self.inner, like, dynamic=dynamic, doubt_drops=drops)

    def _judge(self, eager: Outcome, inputs: Sequence[Any]) -> tuple[tuple[Difference, ...], str]:
        """Compare what runs with eager, with random numbers in any order."""
        found, note = self._compare(eager, inputs)
        if not found or not self._draws.counts or self.draws_like_eager:
            return found, note
        try:
            if self._draws.doubt:
                return self._either_way(inputs)
            return self._in_any_order(found, inputs)
        finally:
            self._seeds, self._doubt_drops = ORDERED, False

    def _either_way(self, inputs: Sequence[Any]) -> tuple[tuple[Difference, ...], str]:
        """Compare once more, with what was taken for no dropout taken for one."""
        self._doubt_drops = True
        found, note = self._compare(self._run_eagerly(inputs), inputs)
        if found:
            doubt = f"whether {self._draws.doubt} drops out"
            raise UnverifiedError(f"it draws random numbers, and it is not known {doubt}")
        return (), note

    def _in_any_order(
        self, found: tuple[Difference, ...], inputs: Sequence[Any]
    ) -> tuple[tuple[Difference, ...], str]:
        """Compare with one seed for all draws, if two runs differ whose draws have an order."""

        def again(seeds: Seeds) -> tuple[tuple[Difference, ...], str]:
            self._seeds = seeds
            return self._compare(self._run_eagerly(inputs), inputs)

        differs = [bool(again(seeds)[0]) for seeds in EQUAL]
        expected, drawn = self._draws.counts, self._drawn.counts
        if all(differs):
            # What draws in another way may compute something else from the same seeds. When it does
            # is no matter: inductor draws in the forward what a backward of the program needs.
            if _by_kind(expected) != _by_kind(drawn):
                raise UnverifiedError(f"it draws {_text(drawn)}, eager {_text(expected)}")
            if any(draw.is_seed and draw.device.type != "cpu" for draw in drawn):
                raise UnverifiedError("the same seed may give other numbers on this device")
            return found, ""
        if any(differs):
            raise UnverifiedError("its random numbers decide whether it does what eager does")
        late, late_in_eager = (
            sum(count for draw, count in each.items() if draw.late) for each in (drawn, expected)
        )
        if late > late_in_eager:  # does a backward draw again what the forward has drawn?
            found, _ = again(FORWARD_AND_BACKWARD)
            if found and drawn.total() > expected.total():
                return found, ""
            raise UnverifiedError(f"it draws {_text(drawn)}, eager {_text(expected)}")
        return (), "its random numbers come in another order than eager's"

    def _compare(self, eager: Outcome, inputs: Sequence[Any]) -> tuple[tuple[Difference, ...], str]:
        """Compare what runs with eager; return what differs, and what differs and is allowed.

        If only strides of outputs are wrong, from now on the outputs get those of eager.
        """
        found, note = self._differences(self.runs, eager, inputs)
        strides = {each.key: each.strides for each in found if each.strides is not None}
        if found and len(strides) == len(found):
            relaid = with_strides(self.runs, strides)
            if not self._differences(relaid, eager, inputs)[0]:
                self.runs = relaid
                outputs = ", ".join(map(str, sorted(strides)))
                note = f"{self.inner.name} gives outputs other strides, they get eager's: {outputs}"
                return (), note
        return found, note

    def _differences(
        self, function: Callable[..., Any], eager: Outcome, inputs: Sequence[Any]
    ) -> tuple[tuple[Difference, ...], str]:
        """Return what differs, and as text what rounding alone makes differ."""
        graph, draws = self.graph, self._draws
        is_random = bool(draws.counts)
        chosen = is_random and not self.draws_like_eager
        drawn = None
        if chosen:
            drawn = self._drawn = CompiledDraws(self._seeds)
        compiled = run_on_copies(function, inputs, self.owned, reference=eager, within=drawn)
        in_double = None
        if chosen or not is_random:
            in_double = functools.cache(
                lambda: exact(graph, inputs, self.owned, within=self._eager_draws(like=draws))
            )
        found = judge(eager, compiled, COMPILING, in_double)
        if found and (policy := policy_of(graph, inputs)) is not COMPILING:  # under autocast
            found = judge(eager, compiled, policy, in_double)
        twice = judge(eager, self._run_eagerly(inputs), COMPILING) if found else ()
        if not all(each.small for each in twice):
            raise UnverifiedError("eager itself does not give the same result twice")
        is_noise = all(each.small for each in found)
        # Without Dynamo's symbols, what is compiled in double would be another graph.
        if not found or (not is_noise and (self.owned or self.sizes is not None)):
            return found, ""
        again = perturbed_runs(graph, inputs, self.owned, eager, within=draws)
        left = not_by_rounding(found, eager, compiled, again)
        wide, wide_compiled = self._eager_draws(), CompiledDraws(self._seeds) if chosen else None
        if left or (
            not is_noise
            and not right_in_double(graph, inputs, self.inner.compile, wide, wide_compiled)
        ):
            return tuple(left) or found, ""
        if is_noise:
            return (), ""
        shown = "; ".join(first_of(self._named(found)))
        return (), f"rounding decides at a discontinuity: {shown}"

    def _named(self, found: Sequence[Difference]) -> tuple[Difference, ...]:
        """Return differences with what the program calls the inputs; those of the graph first."""
        owned = [f"tensor {number} of the graph" for number in range(len(self.owned))]
        names = [*owned, *names_of(self.graph)]
        return tuple(each.named(names) for each in found)

    def _replace(self, found: tuple[Difference, ...], inputs: Sequence[Any]) -> str | None:
        """Replace what is wrong as the user has chosen; return the text of the warning."""
        record, action = self.record, self.options.on_mismatch
        self._settled = True
        named = self._named(found)
        note_mismatch(record, named, action, "eager")
        draws = bool(self._draws.counts) and not self.draws_like_eager
        reproducer = reproducer_of(self.graph, inputs, self.inner, record, draws=draws)
        # A callable of the user's is named itself: its fault is none to report to PyTorch.
        source = self.inner.source
        with_source = f" with {source}" if source and source.startswith("backend=") else ""
        by = f"the backend {self.inner.name}" if source is None else f"torch.compile{with_source}"
        head = f"{by} (torch {torch.__version__}) compiled {record.function}"
        text = message_of(record, head, named, action, f"reproducer: {reproducer}")
        self.runs = replacement(action, text, self.eager, self.runs)
        return None if action == "raise" else text


def _by_kind(drawn: Counter[Draw]) -> Counter[tuple[torch.device, str]]:
    counts = Counter[tuple[torch.device, str]]()
    for draw, count in drawn.items():
        counts[draw.device, draw.name] += count
    return counts


def _text(drawn: Counter[Draw]) -> str:
    counts = Counter[str]()
    for draw, count in drawn.items():
        counts[f"{draw.name}{' in backward' if draw.late else ''}"] += count
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"


def with_strides(
    function: Callable[..., Any], outputs: Mapping[int, tuple[int, ...]]
) -> Callable[..., Any]:
    """Return ``function`` with outputs copied into memory with the order of these strides.

    Inductor keeps the strides that AOTAutograd hands over
    (https://github.com/pytorch/pytorch/blob/main/torch/_inductor/graph.py). By then
    ``cat([empty, x])``, the first key-value cache of a decoder, has become ``x.clone()``, which has
    the strides of ``x``, where eager's result is contiguous.
    """
    orders = {
        position: sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
        for position, strides in outputs.items()
    }

    def run(*inputs: Any) -> Any:
        returned = list(function(*inputs))
        for position, order in orders.items():
            value = returned[position]
            # Not permute().contiguous(): the result would be a view, and eager's is not.
            made = torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device)
            returned[position] = made.copy_(value)
        return returned

    return run


_State: TypeAlias = "tuple[GraphCheck | None, set[Hashable], Callable[..., Any]]"
"""What checks calls, if any are checked; the keys of which none is; and what runs."""


def checked_calls(check: GraphCheck) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, whose calls with new keys are checked."""
    cell = check.cell  # nothing of the check is kept once this has let go of it

    def run(*inputs: Any) -> Any:
        check, known, trusted = cell[0]
        if check is None or check.key(inputs) in known:
            return trusted(*inputs)
        return check.call(inputs)

    return run
