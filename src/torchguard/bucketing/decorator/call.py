"""A call: pad, run, cut. What does not depend on the data is worked out once per shape."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchguard import _torch
from torchguard.bucketing.decorator import no_compiling
from torchguard.bucketing.decorator.checking import check
from torchguard.bucketing.decorator.circumstances import Circumstances, Surroundings, differing
from torchguard.bucketing.decorator.compile import Source, Variant, alone, separated
from torchguard.bucketing.decorator.cutting import Cutter
from torchguard.bucketing.decorator.forgotten import explained
from torchguard.bucketing.decorator.forms import Form
from torchguard.bucketing.decorator.output_shapes import Sizes
from torchguard.bucketing.decorator.planner import Planner
from torchguard.bucketing.decorator.plans import BucketCount, Input, Plan, told
from torchguard.bucketing.decorator.proven import Proven
from torchguard.bucketing.decorator.trees import flattened, replaced
from torchguard.bucketing.decorator.verification import Arguments, backward
from torchguard.bucketing.decorator.warning import warn_user
from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.reachable import reachable_modules
from torchguard.errors import PaddingLeakError, RecompileError, TorchGuardError

__all__ = ["Caller"]

# Each distinct shape of the inputs has a plan of some kilobytes.
_PLANS_KEPT = 8192
# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3
# As often as torch compiles a function anew before it gives up and runs it uncompiled.
_COMPILED_OFTEN = 8


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
        self.variants: dict[Any, Variant] = {}
        self._seen: dict[tuple[int, ...], list[int]] = {}
        self._forms: dict[Any, Form] = {}
        self._surroundings: Surroundings | None = None
        self.proven = Proven(shared=self.options.group is not None, masks=planner.masks.keys())
        self._warned = self._warned_of_compiling_around = False
        self._cutter = Cutter(source, planner, name)
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
        try:
            if not plan.ready or self._always:
                return self._run_carefully(plan, owner, args, kwargs)
            return self._run(plan, plan.variant.run, owner, args, kwargs)
        except RuntimeError as error:
            changed = no_compiling.reasons(error) if no_compiling.refused() else None
            if changed is None:
                raise
            because = f", because {changed}" if changed else ""
            raise RecompileError(
                f"no_recompile: {self.name} was about to compile {told(plan)} again{because}"
            ) from error

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
            output = self._cutter.cut(plan, output, owner, args, kwargs)
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
            form = self._forms[names] = Form(self.planner, len(args), tuple(kwargs))
        surroundings = self._surroundings
        if surroundings is None:
            surroundings = Surroundings(reachable_modules(self.source.function, owner))
            self._surroundings = surroundings
        key = form.key(surroundings.now(), args, kwargs)
        if self.options.group is not None:
            return self._shared_plan(form, key, len(owner), Arguments(args, kwargs))
        plan = form.plans.get(key)
        if plan is None:
            inputs, sizes = self.planner.inputs(form.entries, args, kwargs)
            plan = self._new_plan(
                inputs,
                sizes,
                together=sizes,
                circumstances=form.circumstances(key, inputs, args, kwargs),
                owned=len(owner),
                given=Arguments(args, kwargs),
            )
            self._keep(form, key, plan)
        return plan

    def _shared_plan(self, form: Form, key: Any, owned: int, given: Arguments) -> Plan:
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
        *agreed, failed = largest_of_all_ranks(self.options.group, said)
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError(
                f"bucketed: another rank could not bind the arguments of {self.name}; its own "
                "error says why"
            )
        longest = dict(zip(axes, agreed, strict=False))
        shortest = {axis: -size for axis, size in zip(axes, agreed[len(axes) :], strict=True)}
        key = (key, *agreed)
        plan = form.plans.get(key)
        if plan is None:
            plan = self._new_plan(
                inputs,
                sizes,
                together=longest,
                circumstances=form.circumstances(key[0], inputs, given.args, given.kwargs),
                owned=owned,
                given=given,
            )
            # A check may contain collectives, so all ranks make it or none does.
            plan.shortest = shortest
            self._keep(form, key, plan)
        return plan

    def _new_plan(
        self,
        inputs: tuple[Input, ...],
        sizes: Sizes,
        *,
        together: Sizes,
        circumstances: Circumstances,
        owned: int,
        given: Arguments,
    ) -> Plan:
        """Make the plan for these sizes; ``together`` decides the bucket."""
        buckets = self.planner.buckets(together, inputs)
        extras, places = self.planner.extras(inputs, sizes, buckets, given.args, given.kwargs)
        shapes = buckets and tuple((each.label, each.padded(buckets)) for each in inputs)
        with self.lock:
            return Plan(
                inputs=inputs,
                sizes=sizes,
                buckets=buckets or {},
                variant=self._variant(shapes, circumstances),
                count=self.counts.setdefault(tuple((buckets or {}).values()), BucketCount()),
                extras=extras,
                extra_places=places,
                circumstances=circumstances,
                seen=self._seen.setdefault(tuple(together.values()), [0]),
                side=self.options.side,
                owned=owned,
            )

    def _keep(self, form: Form, key: Any, plan: Plan) -> None:
        with self.lock:
            if len(form.plans) >= _PLANS_KEPT:
                form.plans.clear()
            form.plans[key] = plan

    def _variant(self, shapes: Any, circumstances: Circumstances) -> Variant:
        if circumstances.transformed:
            # torch.compile runs what is inside a transform of torch.func uncompiled.
            key: Any = "transformed"
        elif shapes is None:
            key = None
        else:
            # Dynamo compiles anew for each of these anyway. With a function of its own a call
            # finds one entry in Dynamo's cache: in a list of several, threads walk past theirs.
            key = (shapes, circumstances.around)
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = self._new_variant(key)
        return found

    def _new_variant(self, key: Any) -> Variant:
        source = self.source
        if source.static is None or key == "transformed":
            return Variant(source.function)
        if key is None:  # above the largest bucket
            return Variant(source.dynamic, compiles=self.options.overflow == "dynamic")
        # Dynamo keeps the sizes it has seen under this name, in a file too.
        sizes = "_".join("x".join(map(str, shape)) for _, shape in key[0])
        copied = separated(source.function, f"bucket_{sizes}")
        compiled = _torch.compiles_inside(source.static(copied), alone)
        return Variant(
            compiled,
            copied.__code__,
            compiles=True,
            cuda_graphs=_torch.records_cuda_graphs(compiled),
        )

    # ---- the first call of a shape ----

    def _run_carefully(
        self, plan: Plan, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            if self._to_be_checked(plan):
                check(self._cutter, plan, owner, Arguments(args, kwargs), self.proven)
            variant = plan.variant
            run = variant.run
            if variant.compiles and plan.circumstances not in variant.compiled_for:
                run = self._compiled(plan)
            output = self._run(plan, run, owner, args, kwargs)
        except PaddingLeakError as error:
            unknown = self.planner.declaration.unknown(list(self.planner.masks))
            hint = unknown or self._cutter.flattened(plan)
            error.args = (f"{error}{hint}", *error.args[1:])
            raise
        except TorchGuardError:
            raise
        except Exception as error:
            forgotten = explained(self._cutter, plan, owner, Arguments(args, kwargs), error)
            if forgotten is None:
                raise
            raise forgotten from error
        plan.ready = True
        self._warn(plan)
        return output

    def _to_be_checked(self, plan: Plan) -> bool:
        if self.options.verify == "never" or not plan.buckets or plan.circumstances.transformed:
            return False
        if self.options.group is None:
            padded = bool(plan.pads) and all(plan.sizes.values())
        else:
            padded = plan.shortest != plan.buckets
        return padded and (self._always or not self.proven.covers(plan))

    def _compiled(self, plan: Plan) -> Callable[..., Any]:
        """Return a variant's function, to be called once, that notes what compiling took."""
        variant = plan.variant
        if no_compiling.refused() and not variant.compiled_for:
            shapes = tuple((each.label, each.padded(plan.buckets)) for each in plan.inputs)
            compiled = [key for key, each in self.variants.items() if each.compiled_for and key]
            said = no_compiling.news(plan, shapes, plan.circumstances.around, compiled)
            raise RecompileError(f"no_recompile: {self.name} was about to compile {said}")

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._compiling(plan):
                return variant.run(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _compiling(self, plan: Plan) -> Iterator[None]:
        variant = plan.variant
        with alone():
            graphs, begun = _torch.graphs_compiled(), time.perf_counter()
            yield
            variant.seconds += time.perf_counter() - begun
            variant.first_graphs += max(_torch.graphs_compiled() - graphs, 0)
            if variant.code is not None:
                variant.first_entries = _torch.compiled_variants(variant.code)
            variant.compiled_for.add(plan.circumstances)

    def _warn(self, plan: Plan) -> None:
        """Say once that something else than the size differs from call to call."""
        if self._warned or len(plan.variant.compiled_for) <= _COMPILED_OFTEN:
            return
        self._warned = True
        names = differing(plan.variant.compiled_for)
        warn_user(
            f"bucketed: {self.name} was compiled {len(plan.variant.compiled_for)} times for "
            f"{told(plan)}, because {', '.join(names) or 'what is around the call'} differs from "
            "call to call: numbers, texts and sizes that dims does not name are compiled in. Pass "
            "a number as a tensor, name a size in dims"
        )

    def warn_of_compiling_around(self) -> None:
        """Say once that ``torch.compile`` around this compiles nothing of it."""
        asked = self.source.static is not None or self.options.compile is not None
        if asked or self._warned_of_compiling_around:
            return
        self._warned_of_compiling_around = True
        warn_user(
            f"bucketed: a compiled function calls {self.name}, which runs uncompiled: "
            "torch.compile stops at a bucketed function, so that what it compiles is padded. Let "
            "bucketed compile each bucket: bucketed(..., compile=True), or compile={'mode': ...} "
            "with torch.compile's arguments (in place of torch.compile around it, or of "
            "TrainingArguments(torch_compile=True)); compile=False keeps it uncompiled"
        )

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
        check(self._cutter, plan, owner, Arguments(args, kwargs), self.proven, anew=True)

    def warm(self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the variant for inputs that have the sizes of a bucket, backward included."""
        plan = self._plan(owner, args, kwargs)
        variant = plan.variant
        if not variant.compiles or plan.circumstances in variant.warmed_for:
            return
        given, named = self.planner.padded(plan, args, kwargs)
        run = self._compiled(plan)
        for turn in range(_CUDA_GRAPH_TURNS if variant.cuda_graphs else 1):
            output = (run if turn == 0 else variant.run)(*owner, *given, **named)
            begun = time.perf_counter()
            with alone():
                backward(output)
            if turn == 0:
                variant.seconds += time.perf_counter() - begun
        variant.warmed_for.add(plan.circumstances)

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


def _cloned(output: Any) -> Any:
    """Copy tensors out of the memory of a CUDA graph, which the next call overwrites."""
    new = {
        path: value.clone() for path, value in flattened(output) if isinstance(value, torch.Tensor)
    }
    return replaced(output, new)
