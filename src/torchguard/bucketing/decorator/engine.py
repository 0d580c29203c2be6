"""How a bucket is run: eager, by a static graph, or by a graph with symbolic sizes in bounds.

``static`` pads to the bucket; it needs none of this. ``ranges`` compiles one graph for all sizes
of the ladder, without padding, and falls back where the function does not allow that. ``auto``
decides for each bucket while calls arrive, by :mod:`torchguard.bucketing.decorator.break_even`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchguard import _torch
from torchguard._pytree import flatten
from torchguard.bucketing.decorator.break_even import (
    AutoChoice,
    Choice,
    CompileCosts,
    How,
    SharedGraph,
)
from torchguard.bucketing.decorator.compile import (
    RECOMPILE_LIMIT,
    CompileCache,
    RangesKey,
    compiling_is_refused,
)
from torchguard.bucketing.decorator.masking import make_extras
from torchguard.bucketing.decorator.plan import Call, Mark, Plan
from torchguard.bucketing.decorator.spec import Spec
from torchguard.errors import PaddingLeakError, RecompileError

_RUNS_TO_COMPARE = 5
# Seconds that the first graph is taken to cost, until one was compiled: with inductor, and with
# others. From cold, imports and kernels included, the graph of bench_stream takes 12 (its record of
# 2026-11-22). Half of that would let a stream take three times the best choice, not twice.
_ASSUMED, _ASSUMED_CHEAP = 12.0, 0.5

Run = Callable[[Plan, Call], Any]
Timed = Callable[[Plan, Call], float]


class Engine:
    """Chooses what runs each bucket of one function."""

    def __init__(self, spec: Spec, cache: CompileCache) -> None:
        self.kind: str = spec.options["engine"]
        self._spec = spec
        self._cache = cache
        given = spec.options["compile"]
        backend = given.get("backend", "inductor") if isinstance(given, Mapping) else "inductor"
        self._costs = CompileCosts(_ASSUMED if backend == "inductor" else _ASSUMED_CHEAP)
        self._choices: dict[Any, Choice] = {}
        self._shared: dict[RangesKey, SharedGraph] = {}
        self._lock = threading.RLock()
        self._clock = Clock()

    def begin(self, plan: Plan, call: Call) -> Plan:
        """Return the plan for a call, which pads it only where a static graph runs its bucket."""
        # torch.compile makes sizes 0 and 1 constants, so they have graphs of their own.
        # https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html
        constant = tuple(size for size in plan.sizes.values() if size < 2)  # noqa: PLR2004
        key = (plan.shapes, plan.specialization.global_state, constant)
        with self._lock:
            choice = self._choices.get(key)
            if choice is None:
                choice = self._choices[key] = self._new_choice(plan, call)
            plan.choice = choice
            return self._plan_as(plan, call, choice.now())

    def run(self, plan: Plan, call: Call, run: Run, forget: Callable[[Choice], None]) -> Any:
        """Run a call as its bucket is run now, and as it was run before where that can't be.

        ``run`` runs a plan; ``forget`` drops those of a bucket that is run in another way from now
        on.
        """
        choice = plan.choice
        with self._lock:
            # What runs may be decided by this very call, or by one of another thread meanwhile.
            before = plan.how if choice.settled else None
            # In a no_recompile scope nothing is tried: what is there has to do.
            how = choice.next(may_compile=not compiling_is_refused())
        refused: dict[How, str] = {}
        while True:
            target = self._target(plan, call, how)
            try:
                output = self._timed(target, call, run)
                break
            except Exception as error:
                reason = self._reason_to_refuse(how, error)
                with self._lock:
                    instead = choice.instead_of({*refused, how})
                # Where no other way is left the call itself is wrong: its own error says more.
                if reason is None or instead is None:
                    raise
                refused[how] = reason
                how = instead
        with self._lock:
            # Not earlier: where nothing else ran either, it was the call.
            for each, reason in refused.items():
                choice.refuse(each, reason)
            # After the call: a trial that has ended takes effect with the next one.
            choice.judge()
            after = choice.now() if choice.settled else None
        if before != after:
            forget(choice)
        # A call whose bucket is not settled comes here again.
        plan.ready = target is plan and choice.settled
        return output

    def padded(self, plan: Plan, call: Call) -> Plan:
        """Return the plan that pads this call, whatever runs its bucket."""
        return plan if plan.choice is None else self._target(plan, call, "static")

    def warm(self, plan: Plan, call: Call, timed: Timed) -> None:
        """Compile all that may run a bucket; where that is not decided, time it and decide.

        ``timed`` runs a plan without side effects, and returns the seconds.
        """
        choice = plan.choice
        if not isinstance(choice, AutoChoice):
            while not self._warmed(plan, call, choice.now(), timed):
                pass
            return
        for how in choice.order:
            if how not in choice.refused and how != "eager":
                self._warmed(plan, call, how, timed)
        for _ in range(_RUNS_TO_COMPARE):
            for how in choice.order:
                if how not in choice.refused:
                    seconds = timed(self._target(plan, call, how), call)
                    choice.add(how, seconds, compiled=False, warmed=True)
        with self._lock:
            choice.settle_on_fastest()

    def describe(self) -> dict[tuple[int, ...], str]:
        """Return what runs each bucket, and why."""
        found: dict[tuple[int, ...], list[str]] = {}
        with self._lock:
            for choice in self._choices.values():
                found.setdefault(choice.buckets, []).append(choice.describe())
        return {key: "; ".join(dict.fromkeys(texts)) for key, texts in sorted(found.items())}

    # ---- what may run a bucket ----

    def _new_choice(self, plan: Plan, call: Call) -> Choice:
        buckets = tuple(plan.buckets.values())
        if self._cache.static is None:
            return Choice(buckets, ("eager",), why="nothing compiles: pass compile=True")
        reason = self._why_no_ranges(plan, call)
        if reason is not None and self.kind == "ranges":
            raise ValueError(f"bucketed: engine='ranges' is refused: {reason}; use engine='static'")
        whole = self._shared_graph(plan, whole=True)
        if self.kind == "ranges":
            # One graph for all sizes; where that can't be, the next best.
            shared = {"ranges": whole, "range": self._shared_graph(plan, whole=False)}
            return Choice(buckets, ("ranges", "range", "static", "eager"), shared)
        choice = AutoChoice(buckets, whole, self._costs)
        if reason is not None:
            choice.refuse("ranges", reason)
        return choice

    def _why_no_ranges(self, plan: Plan, call: Call) -> str | None:
        """Return why sizes may not be symbols here, None if they may."""
        if any(
            type(call.leaves[each.index]) not in {torch.Tensor, torch.nn.Parameter}
            for each in plan.inputs
        ):
            return "sizes of tensor subclasses can't be marked as symbols"
        # CUDA graphs and the kernels of max-autotune are for GPUs alone.
        if "cuda" not in _devices(plan):
            return None
        static = self._cache.variant_for(plan.shapes, plan.specialization)
        if _torch.autotunes(static.run) and _torch.bounds_of_padding_are_wrong():
            return (
                "on this torch, max-autotune on CUDA runs kernels that write behind the end of a "
                "buffer where sizes are symbols (https://github.com/pytorch/pytorch/issues/169760)"
            )
        if self.kind == "auto" and static.cuda_graphs:
            return "a CUDA graph is recorded for each size"
        return None

    def _shared_graph(self, plan: Plan, *, whole: bool) -> SharedGraph:
        """Return the symbolic graph for the sizes of the whole ladder, or of the bucket."""
        bounds = []
        for axis, size in plan.sizes.items():
            ladder = self._spec.ladders[axis]
            # Of two axes together the least size of one depends on that of the other.
            own = 2 if whole or len(ladder.axes) > 1 else ladder.least(axis, plan.sizes)
            low = max(own, 2)
            high = ladder.largest(axis) if whole else plan.buckets[axis]
            if size >= low and (high is None or high > low):
                bounds.append((axis, low, high))
        names = {axis for axis, _, _ in bounds}
        shapes = tuple((each.label, each.symbolic(names)) for each in plan.inputs)
        key = RangesKey(shapes, plan.specialization.global_state, tuple(bounds))
        return self._shared.setdefault(key, SharedGraph(key))

    # ---- plans ----

    def _target(self, plan: Plan, call: Call, how: How) -> Plan:
        """Return the plan that runs a call in this way: the given one, or one beside it."""
        if plan.how == how and plan.choice.settled:
            return plan
        found = plan.turns.get(how)
        if found is None:
            found = plan.turns[how] = self._plan_as(plan, call, how)
        return found

    def _plan_as(self, plan: Plan, call: Call, how: How) -> Plan:
        choice = plan.choice
        buckets = dict(zip(plan.sizes, choice.buckets, strict=True)) if how == "static" else {}
        extras = make_extras(self._spec, call, plan.inputs, plan.sizes, buckets or None)
        made = replace(
            plan, how=how, buckets=buckets, extras=extras, variant=self._cache.eager, marks=(),
            slices={}, turns={}, ready=False, real=1, padded=1,
        )  # fmt: skip
        if how == "static":
            made.variant = self._cache.variant_for(made.shapes, plan.specialization)
        elif how != "eager":
            key = choice.shared[how].key
            made.variant = self._cache.variant(key)
            made.marks = tuple(_marks(self._spec, plan, key, extras))
        return made

    # ---- one turn ----

    def _timed(self, target: Plan, call: Call, run: Run) -> Any:
        """Run a plan and note what it took, of forward and of the backward through it."""
        choice = target.choice
        if not isinstance(choice, AutoChoice):
            return self._counted(target, call, run)
        compiles = _will_compile(target)
        device = target.inputs[0].device

        def record(seconds: float, *, backward: bool = False) -> None:
            with self._lock:
                choice.add(target.how, seconds, compiled=compiles, backward=backward)

        # Of a call that compiles the seconds of the host count.
        stop = self._clock.start(torch.device("cpu") if compiles else device, record)
        output = self._counted(target, call, run)
        stop()
        if torch.is_grad_enabled() and not choice.settled:
            self._clock.time_backward(output, device, functools.partial(record, backward=True))
        return output

    def _counted(self, target: Plan, call: Call, run: Run) -> Any:
        """Run a plan, and give ranges up that are compiled anew for each size."""
        # One graph is to serve all sizes; one that is compiled for each is worse than a static one.
        graph = target.choice.shared.get(target.how)
        if graph is None or _will_compile(target) or target.ready:
            return run(target, call)
        graphs = _torch.graphs_compiled()
        output = run(target, call)
        with self._lock:
            graph.recompiled += _torch.graphs_compiled() > graphs
            if graph.recompiled > RECOMPILE_LIMIT:
                reason = f"compiled anew {graph.recompiled} times for other sizes"
                target.choice.refuse(target.how, reason)
        return output

    def _reason_to_refuse(self, how: str, error: Exception) -> str | None:
        """Return why a bucket can't be run in this way, None if it is the call that failed."""
        if isinstance(error, RecompileError):
            return None
        if isinstance(error, PaddingLeakError):
            return "padding changes the answer"
        if how != "eager" and isinstance(error, _torch.compile_failures()):
            if how == "static" and self.kind == "ranges":
                return None
            return _in_few_words(error)
        if how == "static" and str(error).startswith("bucketed:"):
            return str(error)
        return None

    # ---- warm-up ----

    def _warmed(self, plan: Plan, call: Call, how: How, timed: Timed) -> bool:
        """Compile what runs a bucket in this way; where that can't be, refuse it."""
        target, choice = self._target(plan, call, how), plan.choice
        compiles = _will_compile(target)
        try:
            seconds = timed(target, call)
        except Exception as error:
            reason = self._reason_to_refuse(how, error)
            if reason is None:
                raise
            choice.refuse(how, reason)
            return False
        if isinstance(choice, AutoChoice):
            choice.add(how, seconds, compiled=compiles, warmed=True)
        return True


def _devices(plan: Plan) -> set[str]:
    return {each.device.type for each in plan.inputs}


def _in_few_words(error: Exception) -> str:
    """Return why something can't be compiled in a few words."""
    text = " ".join(str(error).split())
    # The texts of torch.fx.experimental.symbolic_shapes for a mark that does not hold.
    # https://github.com/pytorch/pytorch/blob/main/torch/fx/experimental/symbolic_shapes.py
    _, found, guard = text.partition("satisfy the generated guard ")
    if found:
        return f"a graph would hold only where {guard[:100]}"
    _, found, rest = text.partition("as dynamic but your code specialized")
    if found:
        return f"the function specialized{rest[:100]}"
    return f"{type(error).__name__}: {text[:100]}"


def _will_compile(plan: Plan) -> bool:
    return plan.variant.compiles and plan.specialization not in plan.variant.compiled_for


def _marks(
    spec: Spec, plan: Plan, key: RangesKey, extras: dict[str, torch.Tensor]
) -> Iterator[Mark]:
    """Yield which sizes of which tensors are symbols."""
    bounds = {axis: (low, high) for axis, low, high in key.bounds}
    for each in plan.inputs:
        for dim, axis in each.axes:
            if axis in bounds:
                yield Mark(each.index, dim, *bounds[axis])
    for argument, value in extras.items():
        mask = spec.masks.get(argument)
        if mask is not None and mask.axis in bounds:
            yield Mark(argument, value.dim() - 1, *bounds[mask.axis])


class Clock:
    """Times calls. On a GPU by events in its stream, which are read once they are over.

    So no call waits for the device. The seconds of a call come after some later ones.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def start(self, device: torch.device, record: Callable[[float], None]) -> Callable[[], None]:
        """Begin to time; what is returned ends it, and ``record`` gets the seconds."""
        while self._events and self._events[0][1].query():
            begun, ended, waiting = self._events.popleft()
            waiting(begun.elapsed_time(ended) / 1e3)
        if device.type != "cuda":
            at = time.perf_counter()
            return lambda: record(time.perf_counter() - at)
        # By events: the host's clock would say how fast kernels are launched.
        # https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()

        def stop() -> None:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self._events.append((begun, ended, record))

        return stop

    def time_backward(
        self, output: Any, device: torch.device, record: Callable[[float], None]
    ) -> None:
        """Time the backward through an output, if there is one later."""
        started: list[Callable[[], None]] = []

        def stop() -> None:
            started.pop()()

        leaves = [each for each in flatten(output)[0] if isinstance(each, torch.Tensor)]
        _torch.call_around_backward(
            leaves, lambda: started.append(self.start(device, record)), stop
        )
