"""A call: pad, run, cut. What does not depend on the data is worked out once per shape."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchguard import internals
from torchguard.bucketed import no_compiling, ranks
from torchguard.bucketed.checking import check
from torchguard.bucketed.cutting import Cutter
from torchguard.bucketed.outputs import Sizes
from torchguard.bucketed.plans import BucketCount, Input, Place, Plan, Planner, told
from torchguard.bucketed.trees import flattened, replaced
from torchguard.bucketed.variants import COMPILING, Source, Variant, separated
from torchguard.bucketed.verification import Arguments, backward
from torchguard.errors import RecompileError

__all__ = ["Caller"]

# Each distinct shape of the inputs has a plan of some kilobytes.
_PLANS_KEPT = 8192
# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3
# Arguments that are more likely to switch something than to count something.
_SWITCHES = frozenset({bool, int, str})


class _Form:
    """How a call gives its arguments: how many by place, which by name."""

    def __init__(
        self, entries: list[tuple[Place, str]], count: int, keywords: tuple[str, ...]
    ) -> None:
        self.entries = entries
        declared = {place for place, _ in entries}
        self.others: list[Place] = [p for p in (*range(count), *keywords) if p not in declared]
        self.plans: dict[Any, Plan] = {}


class Caller:
    """Runs one function through its buckets.

    Args:
        source: what to run.
        planner: pads its inputs.
        name: of the function, for messages.
    """

    def __init__(self, source: Source, planner: Planner, name: str) -> None:
        self.source = source
        self.planner = planner
        self.options = planner.options
        self.name = name
        self.lock = threading.Lock()
        self.counts: dict[tuple[int, ...], BucketCount] = {}
        self._seen: dict[tuple[int, ...], list[int]] = {}
        self.variants: dict[Any, Variant] = {}
        self.verified: set[Any] = set()
        self._forms: dict[Any, _Form] = {}
        self._cutter = Cutter(source, planner, name)
        self._extra = bool(planner.masks or planner.lengths)
        self._always = self.options.verify == "always"
        self._fitting = any(ladder.automatic for ladder in planner.ladders.values())

    @property
    def seen(self) -> dict[tuple[int, ...], int]:
        """How often each combination of sizes was called."""
        return {sizes: cell[0] for sizes, cell in list(self._seen.items()) if cell[0]}

    # ---- the way of every call ----

    def __call__(
        self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function; ``owner`` comes first in what it is given."""
        plan = self._plan(owner, args, kwargs)
        if not plan.ready or self._always:
            return self._run_carefully(plan, owner, args, kwargs)
        return self._run(plan, plan.variant.run, owner, args, kwargs)

    def _run(
        self,
        plan: Plan,
        run: Callable[..., Any],
        owner: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if plan.flat and plan.ready and not plan.extras:  # nearly always
            given = [*owner, *args]
            before = len(owner)
            named = kwargs.copy()
            for place, _, pad in plan.pads:
                if type(place) is int:
                    given[place + before] = pad.quickly(given[place + before])
                else:
                    named[place] = pad.quickly(named[place])  # type: ignore[index]
            output = run(*given, **named)
        else:
            given, named = self.planner.padded(plan, args, kwargs)
            output = run(*owner, *given, **named)
        if plan.variant.cuda_graphs:
            output = _cloned(output)
        if plan.pads:
            output = self._cutter.cut(plan, output, Arguments((*owner, *args), kwargs))
        with self.lock:
            count = plan.count
            count.calls += 1
            count.real += plan.real
            count.padded += plan.padded
            plan.seen[0] += 1
            if self._fitting:
                self._refit()
        return output

    def _plan(self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        names = (len(args), *kwargs)
        form = self._forms.get(names)
        if form is None:
            keywords = tuple(kwargs)
            form = _Form(self.planner.entries(len(args), keywords), len(args), keywords)
            self._forms[names] = form
        mode: tuple[Any, ...] = (
            torch.is_grad_enabled(),
            owner[0].training if _is_module(owner) else None,
        )
        for place in form.others:  # what a function returns, and whether it leaks, may hang on it
            value = args[place] if type(place) is int else kwargs[place]  # type: ignore[index]
            if type(value) in _SWITCHES:
                mode += (value,)
        if self.options.group is not None:
            return self._shared_plan(form, mode, len(owner), Arguments(args, kwargs))
        key: list[Any] = [mode]
        for place, name in form.entries:
            value = args[place] if type(place) is int else kwargs[place]  # type: ignore[index]
            if isinstance(value, torch.Tensor):
                key.append(value.shape)
                key.append(value.dtype)
                if self._extra:
                    key.append(value.device)
            elif value is None:
                key.append(None)
            else:
                key += [
                    (each.path, each.tensor.shape, each.tensor.dtype)
                    for each in self.planner.found(name, value)
                ]
        fixed = tuple(key)
        plan = form.plans.get(fixed)
        if plan is None:
            inputs, sizes = self.planner.inputs(form.entries, args, kwargs)
            plan = self._new_plan(
                form,
                fixed,
                inputs=inputs,
                sizes=sizes,
                together=sizes,
                mode=mode,
                owned=len(owner),
                given=Arguments(args, kwargs),
            )
        return plan

    def _shared_plan(
        self, form: _Form, mode: tuple[Any, ...], owned: int, given: Arguments
    ) -> Plan:
        """Agree with the other ranks on the bucket."""
        axes = self.planner.ladders
        problem: Exception | None = None
        inputs: tuple[Input, ...] = ()
        sizes = dict.fromkeys(axes, 0)
        try:
            inputs, sizes = self.planner.inputs(form.entries, given.args, given.kwargs)
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting
            problem = error
        own = list(sizes.values())
        said = [*own, *(-size for size in own), int(problem is not None)]
        *largest, failed = ranks.agree(self.options.group, said)
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError(
                f"bucketed: another rank could not bind the arguments of {self.name}; its own "
                "error says why"
            )
        together = dict(zip(axes, largest, strict=False))
        smallest = [-size for size in largest[len(axes) :]]
        fixed = (
            mode,
            tuple((each.label, each.shape, each.fill, each.device) for each in inputs),
            tuple(largest),
        )
        plan = form.plans.get(fixed)
        if plan is None:
            plan = self._new_plan(
                form,
                fixed,
                inputs=inputs,
                sizes=sizes,
                together=together,
                mode=mode,
                owned=owned,
                given=given,
            )
            # A check may contain collectives, so all ranks make it or none does.
            plan.checked_by_all = smallest != list(plan.buckets.values())
        return plan

    def _new_plan(
        self,
        form: _Form,
        key: Any,
        *,
        inputs: tuple[Input, ...],
        sizes: Sizes,
        together: Sizes,
        mode: tuple[Any, ...],
        owned: int,
        given: Arguments,
    ) -> Plan:
        """Make the plan for these sizes; ``together`` decides the bucket."""
        buckets = self.planner.buckets(together, inputs)
        extras, places = self.planner.extras(inputs, sizes, buckets, given.args, given.kwargs)
        shapes = buckets and tuple((each.label, each.padded(buckets)) for each in inputs)
        with self.lock:
            plan = Plan(
                inputs=inputs,
                sizes=sizes,
                buckets=buckets or {},
                variant=self._variant(shapes),
                count=self.counts.setdefault(tuple((buckets or {}).values()), BucketCount()),
                extras=extras,
                extra_places=places,
                mode=mode,
                seen=self._seen.setdefault(tuple(together.values()), [0]),
                side=self.options.side,
                owned=owned,
            )
            if len(form.plans) >= _PLANS_KEPT:
                form.plans.clear()
            form.plans[key] = plan
        return plan

    def _variant(self, key: Any) -> Variant:
        found = self.variants.get(key)
        if found is not None:
            return found
        source = self.source
        if key is None:  # above the largest bucket
            run = source.dynamic if self.options.overflow == "dynamic" else source.function
            variant = Variant(run, None, ready=self.options.overflow != "dynamic")
        elif source.static is None:
            variant = Variant(source.function, None, ready=True)
        else:
            # Dynamo keeps the sizes it has seen under this name, in a file too.
            sizes = "_".join("x".join(map(str, shape)) for _, shape in key)
            copied = separated(source.function, f"bucket_{sizes}")
            compiled = source.static(copied)
            variant = Variant(compiled, copied.__code__)
            variant.cuda_graphs = internals.records_cuda_graphs(compiled)
        self.variants[key] = variant
        return variant

    # ---- the first call of a shape ----

    def _run_carefully(
        self, plan: Plan, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._to_be_checked(plan):
            self._check(plan, owner, args, kwargs)
        run = plan.variant.run if plan.variant.ready else self._first_run(plan)
        output = self._run(plan, run, owner, args, kwargs)
        plan.ready = True
        return output

    def _to_be_checked(self, plan: Plan) -> bool:
        if self.options.verify == "never" or not plan.buckets or internals.inside_transform():
            return False
        if self.options.group is None:
            padded = bool(plan.pads) and all(plan.sizes.values())
        else:
            padded = plan.checked_by_all
        if not padded:
            return False
        return self._always or self._checked_as(plan) not in self.verified

    def _checked_as(self, plan: Plan) -> tuple[Any, ...]:
        # Switches may differ between ranks, and all of them have to check at the same time.
        mode = plan.mode if self.options.group is None else plan.mode[:2]
        return (*plan.buckets.values(), mode)

    def _first_run(self, plan: Plan) -> Callable[..., Any]:
        """Return a variant's function, to be called once, that notes what compiling took."""
        if no_compiling.refused():
            raise RecompileError(f"no_recompile: {self.name} was about to compile {told(plan)}")
        variant = plan.variant

        def run(*args: Any, **kwargs: Any) -> Any:
            with COMPILING, internals.without_recompile_limit():
                graphs, begun = internals.graphs_compiled(), time.perf_counter()
                output = variant.run(*args, **kwargs)
                variant.seconds += time.perf_counter() - begun
                variant.first_graphs += max(internals.graphs_compiled() - graphs, 0)
                if variant.code is not None:
                    variant.first_entries = internals.compiled_variants(variant.code)
                variant.ready = True
            return output

        return run

    def _check(
        self, plan: Plan, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = Arguments(args, kwargs)
        check(self._cutter, plan, owner, given)
        self.verified.add(self._checked_as(plan))

    def verify(self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check these inputs, whatever was checked before.

        Raises:
            PaddingLeakError: padding changes the answer or a gradient.
            ValueError: they are above the largest bucket.
        """
        plan = self._plan(owner, args, kwargs)
        if not plan.buckets:
            raise ValueError(
                f"bucketed: nothing to check: {told(plan)} is above the largest bucket"
            )
        self._check(plan, owner, args, kwargs)

    def warm(self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the variant for inputs that have the sizes of a bucket, backward included."""
        plan = self._plan(owner, args, kwargs)
        variant = plan.variant
        if variant.ready:
            return
        given, named = self.planner.padded(plan, args, kwargs)
        run = self._first_run(plan)
        for turn in range(_CUDA_GRAPH_TURNS if variant.cuda_graphs else 1):
            output = (run if turn == 0 else variant.run)(*owner, *given, **named)
            begun = time.perf_counter()
            with COMPILING, internals.without_recompile_limit():
                backward(output)
            if turn == 0:
                variant.seconds += time.perf_counter() - begun

    # ---- buckets that fit themselves ----

    def _refit(self) -> None:
        """Fit automatic ladders once enough calls were seen."""
        changed = False
        seen = self.seen
        for index, ladder in enumerate(self.planner.ladders.values()):
            if not ladder.fitting:
                continue
            sizes: Counter[int] = Counter()
            for combination, count in seen.items():
                sizes[combination[index]] += count
            ran_with = {buckets[index] for buckets in self.counts if buckets}
            changed |= ladder.observe(sizes, ran_with)
        self._fitting = any(ladder.fitting for ladder in self.planner.ladders.values())
        if changed:
            for form in self._forms.values():
                form.plans.clear()


def _is_module(owner: tuple[Any, ...]) -> bool:
    return bool(owner) and isinstance(owner[0], torch.nn.Module)


def _cloned(output: Any) -> Any:
    """Copy tensors out of the memory of a CUDA graph, which the next call overwrites."""
    new = {
        path: value.clone() for path, value in flattened(output) if isinstance(value, torch.Tensor)
    }
    return replaced(output, new)
