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
from torchguard.bucketed.isolation import eager, modules_of, python_state_kept, quiet
from torchguard.bucketed.outputs import (
    Formula,
    Leaf,
    Program,
    Sizes,
    as_declared,
    as_measured,
    as_reasoned,
    leaves_of,
)
from torchguard.bucketed.plans import BucketCount, Input, Place, Plan, Planner
from torchguard.bucketed.trees import Path, flattened, parts, replaced, spelled
from torchguard.bucketed.variants import COMPILING, Source, Variant, separated
from torchguard.bucketed.verification import Arguments, Run, backward, compared, other_filler, ran
from torchguard.errors import RecompileError
from torchguard.internals import SymbolicSizes
from torchguard.padding import pad_to_bucket

__all__ = ["Caller"]

# Each distinct shape of the inputs has a plan of some kilobytes.
_PLANS_KEPT = 8192
# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3


class _Form:
    """How a call gives its arguments: how many by place, which by name."""

    def __init__(self, entries: list[tuple[Place, str]]) -> None:
        self.entries = entries
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
        self._formulas: dict[Any, Formula | None] = {}
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
            given, named = self.padded(plan, args, kwargs)
            output = run(*owner, *given, **named)
        if plan.variant.cuda_graphs:
            output = _cloned(output)
        if plan.pads:
            output = self._cut(plan, output, owner, args, kwargs)
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
            form = _Form(self.planner.entries(len(args), tuple(kwargs)))
            self._forms[names] = form
        mode = (torch.is_grad_enabled(), owner[0].training if _is_module(owner) else None)
        if self.options.group is not None:
            return self._shared_plan(form, mode, args, kwargs)
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
            buckets = self.planner.buckets(sizes, inputs)
            plan = self._new_plan(form, fixed, inputs, sizes, buckets, mode, args, kwargs)
        return plan

    def _shared_plan(
        self, form: _Form, mode: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        """Agree with the other ranks on the bucket."""
        axes = self.planner.ladders
        problem: Exception | None = None
        inputs: tuple[Input, ...] = ()
        sizes = dict.fromkeys(axes, 0)
        try:
            inputs, sizes = self.planner.inputs(form.entries, args, kwargs)
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
        buckets = self.planner.buckets(together, inputs)
        fixed = (
            mode,
            tuple((each.label, each.shape, each.fill, each.device) for each in inputs),
            tuple(largest),
        )
        plan = form.plans.get(fixed)
        if plan is None:
            plan = self._new_plan(form, fixed, inputs, sizes, buckets, mode, args, kwargs, together)
            # A check may contain collectives, so all ranks make it or none does.
            plan.checked_by_all = buckets is not None and smallest != list(buckets.values())
        return plan

    def _new_plan(
        self,
        form: _Form,
        key: Any,
        inputs: Any,
        sizes: Sizes,
        buckets: Sizes | None,
        mode: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        together: Sizes | None = None,
    ) -> Plan:
        extras = self.planner.extras(inputs, sizes, buckets, args, kwargs)
        with self.lock:
            seen = self._seen.setdefault(tuple((together or sizes).values()), [0])
            plan = self.planner.plan(
                inputs, sizes, buckets, extras, mode, self._variant, self._count_for, seen
            )
            if len(form.plans) >= _PLANS_KEPT:
                form.plans.clear()
            form.plans[key] = plan
        return plan

    def _count_for(self, combination: tuple[int, ...]) -> BucketCount:
        return self.counts.setdefault(combination, BucketCount())

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

    # ---- padding and cutting ----

    def padded(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fills: dict[tuple[Place, Path], Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments at the sizes of their buckets; ``fills`` replaces what is given."""
        side = self.options.side
        given, named = list(args), dict(kwargs)
        inside: dict[Place, dict[Path, Any]] = {}
        for place, path, pad in plan.pads:
            target: Any = given if type(place) is int else named
            tensor = target[place]
            for key in path:
                tensor = dict(parts(tensor) or ())[key]
            fill = None if fills is None else fills.get((place, path))
            if fill is None:
                tensor = pad.carefully(tensor)
            else:
                for dim, size in pad.dims:
                    tensor = pad_to_bucket(tensor, dim, size, value=fill, side=side).tensor
            if path:
                inside.setdefault(place, {})[path] = tensor
            else:
                target[place] = tensor
        for place, new in inside.items():
            target = given if type(place) is int else named
            target[place] = replaced(target[place], new)
        for argument, value in plan.extras.items():
            if internals.version_of(value) != 0:
                # Whoever wrote to it would have spoiled it for the next call.
                buckets = plan.buckets or None
                plan.extras, _ = self.planner.extras(plan.inputs, plan.sizes, buckets, args, kwargs)
                value = plan.extras[argument]  # noqa: PLW2901
            place = plan.extra_places[argument]
            target = given if type(place) is int else named
            target[place] = value
        return given, named

    def _cut(
        self,
        plan: Plan,
        output: Any,
        owner: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the real part out of an output."""
        if type(output) is torch.Tensor:
            key: Any = output.shape
        else:
            key = tuple(
                (path, value.shape if isinstance(value, torch.Tensor) else type(value))
                for path, value in flattened(output)
            )
        program = plan.programs.get(key)
        if program is None:
            leaves = leaves_of(output)
            program = self._program(plan, leaves, output, Arguments((*owner, *args), kwargs))
            plan.programs[key] = program
        if not program.cuts and not program.numbers:
            return output
        if type(output) is torch.Tensor:
            for dim, start, length in program.cuts[0][1]:
                output = output.narrow(dim, start, length)
            return output
        new: dict[Path, Any] = dict(program.numbers)
        values = dict(flattened(output))
        for path, cuts in program.cuts:
            tensor = values[path]
            for dim, start, length in cuts:
                tensor = tensor.narrow(dim, start, length)
            new[path] = tensor
        return replaced(output, new)

    def _program(self, plan: Plan, leaves: list[Leaf], whole: Any, given: Arguments) -> Program:
        """Find out how long the real part of each output is.

        Raises:
            ValueError: it can't be found out.
        """
        if all(
            (isinstance(value, torch.Tensor) and value.dim() == 0)
            or (not isinstance(value, torch.Tensor) and type(value) is not int)
            for _, value in leaves
        ):
            return Program((), ())
        side = self.options.side
        if self.options.outputs is not None:
            return as_declared(self.options.outputs, leaves, plan.sizes, plan.buckets, whole, side)
        # 0 and 1 are sizes of their own kind: torch's own code asks for them.
        usual = min(plan.sizes.values()) >= 2  # noqa: PLR2004
        if usual:
            formula = self._formula(plan, leaves, given)
            program = None
            if formula is not None:
                program = as_reasoned(formula, leaves, plan.sizes, plan.buckets, side)
            if program is not None:
                return program
        try:
            return as_measured(self._imagined(plan, given, {}), leaves, whole, side)
        except Exception as error:
            formula = None if usual else self._formula(plan, leaves, given)
            program = None
            if formula is not None:
                program = as_reasoned(formula, leaves, plan.sizes, plan.buckets, side, anyhow=True)
            if program is not None:  # an empty input, which the function itself does not take
                return program
            names = ", ".join(self.planner.ladders)
            path, value = next(
                (path, value)
                for path, value in leaves
                if not isinstance(value, torch.Tensor) or value.dim()
            )
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"bucketed: how much of {spelled('output', path, whole)} of {self.name} ({shown} "
                "after padding) is real can't be told from the sizes of the "
                f"inputs: {reason}. Say it in outputs=, in the structure of what it returns: "
                f"{{dim: axis}} with an axis of {names}, or a function of them for another length"
            ) from error

    def _formula(self, plan: Plan, leaves: list[Leaf], given: Arguments) -> Formula | None:
        """Return how the outputs of this variant depend on the sizes; None if torch can't tell."""
        key = (id(plan.variant), plan.mode, tuple(path for path, _ in leaves))
        if key not in self._formulas:
            hints = {
                axis: size if size > 1 else max(plan.buckets[axis], 2)
                for axis, size in plan.sizes.items()
            }
            try:
                self._formulas[key] = self._imagined(plan, given, hints)
            except Exception:  # noqa: BLE001 - torch can't always; a run at each size is left
                self._formulas[key] = None
        return self._formulas[key]

    def _imagined(self, plan: Plan, given: Arguments, hints: Sizes) -> Formula:
        """Run the function on tensors without data, at the real sizes or with symbols."""
        before = plan.owned

        def run(world: SymbolicSizes) -> Any:
            new: dict[Path, Any] = {}
            names = set(hints)
            values = dict(given.leaves())
            for each in plan.inputs:
                path = _path_of(each.place, each.path, before)
                new[path] = world.empty(each.symbolic(names), values[path])
            changed = given.with_parts(new)
            args, kwargs = list(changed.args), dict(changed.kwargs)
            extras = plan.extras if hints else self.planner.real_extras(plan)
            for argument, value in extras.items():
                place = plan.extra_places[argument]
                mask = self.planner.masks.get(argument)
                extra = value
                if mask is not None and hints:
                    extra = world.empty((*value.shape[:-1], mask.axis), value)
                if isinstance(place, int):
                    args[place + before] = extra
                else:
                    kwargs[place] = extra
            return self.source.function(*args, **kwargs)

        modules = modules_of(self.source.function, given.args)
        with COMPILING, eager(), quiet(), python_state_kept(modules):
            return Formula.of(run, hints)

    # ---- the first call of a shape ----

    def _run_carefully(
        self, plan: Plan, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plan.owned = len(owner)
        if self._to_be_checked(plan):
            self.check(plan, owner, args, kwargs)
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
        return self._always or (tuple(plan.buckets.values()), plan.mode) not in self.verified

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

    def check(
        self, plan: Plan, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise unless padding leaves the answer and the gradients as they are.

        Raises:
            PaddingLeakError: it does not.
        """
        plan.owned = len(owner)
        function = self.source.function
        modules = modules_of(function, (*owner, *args))
        names = {_path_of(each.place, each.path, len(owner)): each.label for each in plan.inputs}

        def once(fills: Any, parameters: Any = None) -> Run:
            def prepare(given: Arguments) -> Arguments:
                real = given.args[len(owner) :]
                if fills is None:
                    changed, named = self._unpadded(plan, real, given.kwargs)
                else:
                    changed, named = self.padded(plan, real, given.kwargs, fills)
                return Arguments((*owner, *changed), named)

            def cut(output: Any) -> Any:
                return output if fills is None else self._cut(plan, output, owner, args, kwargs)

            given = Arguments((*owner, *args), kwargs)
            return ran(function, given, prepare, cut, names, modules, parameters)

        with COMPILING, eager():
            without = once(None)
            padded = once({}, without.parameters)
            compared(without, padded, what=told(plan), function=self.name, modules=modules)
            fills = self._other_fills(plan, args, kwargs)
            if fills:
                other = once(fills, without.parameters)
                labels = ", ".join(
                    each.label for each in plan.inputs if (each.place, each.path) in fills
                )
                what = f"{told(plan)}; with another value in the padding of {labels}"
                compared(padded, other, what=what, function=self.name, modules=modules)
        self.verified.add((tuple(plan.buckets.values()), plan.mode))

    def _unpadded(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the real arguments and the lengths; masks only if the function needs one."""
        given, named = list(args), dict(kwargs)
        for argument, value in self.planner.real_extras(plan).items():
            place = plan.extra_places[argument]
            target: Any = given if type(place) is int else named
            target[place] = value
        return given, named

    def _other_fills(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[tuple[Place, Path], Any]:
        fills = {}
        for each in plan.inputs:
            value: Any = args[each.place] if isinstance(each.place, int) else kwargs[each.place]
            for key in each.path:
                value = dict(parts(value) or ())[key]
            if not each.declared and each.shape != each.padded(plan.buckets):
                fill = other_filler(value)
                if fill is not None:
                    fills[each.place, each.path] = fill
        return fills

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
        self.check(plan, owner, args, kwargs)

    def warm(self, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the variant for inputs that have the sizes of a bucket, backward included."""
        plan = self._plan(owner, args, kwargs)
        variant = plan.variant
        if variant.ready:
            return
        given, named = self.padded(plan, args, kwargs)
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
        for index, (axis, ladder) in enumerate(self.planner.ladders.items()):
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


def _path_of(place: Place, path: Path, before: int) -> Path:
    return (0, place + before, *path) if isinstance(place, int) else (1, place, *path)


def _cloned(output: Any) -> Any:
    """Copy tensors out of the memory of a CUDA graph, which the next call overwrites."""
    new = {
        path: value.clone() for path, value in flattened(output) if isinstance(value, torch.Tensor)
    }
    return replaced(output, new)


def told(plan: Plan) -> str:
    """Say which sizes a call has: ``t: 37 -> 64 (ids)``."""
    said = []
    for axis, size in plan.sizes.items():
        label = next((e.label for e in plan.inputs for _, name in e.axes if name == axis), "")
        target = f" -> {plan.buckets[axis]}" if axis in plan.buckets else ""
        said.append(f"{axis}: {size}{target} in {label}")
    return ", ".join(said)
