"""Say why a call failed once it was padded, and what a user can do about it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchguard._pytree import flatten, key_paths
from torchguard._torch import OPERATOR_CLASSES, TorchDispatchMode, schema_of, uncompiled, user_line
from torchguard.bucketing.decorator.bucket import COMPILE_LOCK, Call, Plan, sizes_of
from torchguard.bucketing.decorator.options import input_of
from torchguard.bucketing.decorator.output_shapes import OutputShapes
from torchguard.bucketing.decorator.slices import Narrow
from torchguard.equivalence.compare import PADDING, Verdict, judge
from torchguard.equivalence.isolate import run_undoing_mutations
from torchguard.equivalence.outcome import Given, Outcome
from torchguard.errors import PaddingLeakError

# ---- padding has changed the answer ----


@dataclass(frozen=True)
class Case:
    """A call to compare with and without padding."""

    plan: Plan
    call: Call
    description: str = ""  # how its data differs from the caller's
    changed: tuple[str, ...] = ()  # the inputs that have other data
    short: bool = False  # whether the caller's inputs are cut short


class Leak(NamedTuple):
    """What was found, until it is confirmed."""

    text: str
    advice: str = ""
    fills: Any = None  # what the padding held in place of what is declared, by index of the leaf

    def error(self, where: str = "") -> PaddingLeakError:
        """Return the error; ``where`` names the operator, or what else is known."""
        return PaddingLeakError(f"{self.text}{where}{self.advice}")


def leak_of(  # noqa: PLR0917 - as many as a difference has
    shapes: OutputShapes, case: Case, verdict: Verdict, expected: Outcome, got: Outcome, fills: Any
) -> Leak:
    """Name what differs between a run and one with more, or other, padding, and by how much.

    The structure of both outcomes is a ``FlatOutput``.
    """
    name, what, found = shapes.name, sizes_of(case.plan), verdict.differences[0]
    filled = ", ".join(each.label for each in case.plan.inputs if each.index in fills)
    if got.error is not None:
        return Leak(
            f"bucketed: {name} fails with another value than 0 in the padding of {filled} "
            f"({what}): {type(got.error).__name__}: {got.error}"
        )
    if fills:
        what += f"; with another value in the padding of {filled}"
    elif case.short:
        what += "; inputs cut short, to see what a small difference becomes with more padding"
    elif case.changed:
        what += f"; with other data, where {' and '.join(case.changed)} {case.description}"
    if found.part == "structure":
        said = f"{name} returns another structure when its input is padded"
        return Leak(f"bucketed: {said} ({what})", fills=fills)
    if found.part == "outputs":
        where = f"{expected.structure.label(found.key)} of {name}"
        wanted, value = (run.outputs[found.key] for run in (expected, got))
        if found.kind == "shape":
            return Leak(
                f"bucketed: {where} has shape {tuple(value.shape)} sliced from a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is",
                fills=fills,
            )
    elif found.part == "gradients":
        gradients = {**got.gradients, **expected.gradients}
        where = f"the gradient of {gradients[found.key].name} in {name}"
    else:
        where = f"the buffer {found.key} that {name} writes"
    if found.part == "outputs" and found.kind == "value":
        said = f"{where} is {value!r} with padding and {wanted!r} without"
    else:
        said = (
            f"padding changes {where}: largest difference {found.largest:.3g}, where the largest "
            f"value is {found.scale:.3g}"
        )
    return Leak(f"bucketed: {said} ({what})", _advice(shapes, case), fills)


def _advice(shapes: OutputShapes, case: Case) -> str:
    if case.changed:
        fills = {each.index: 0 for each in case.plan.inputs if each.label in case.changed}
        return (
            ". So 0 in the padding is not neutral: pass a mask (mask=) or the true sizes "
            "(lengths=); or write in fill= a value that changes nothing, such as -inf for a maximum"
            " and inf for a minimum (of integers the smallest and the largest); "
            f"fill={_typed(case.call, fills)} says that such data never comes"
        )
    given = {*case.plan.extras, *(each.label for each in case.plan.inputs)}
    masks = " and ".join(name for name in shapes.spec.masks if name in given)
    advice = "Pass the function a mask (mask=) or the true sizes (lengths=)"
    if masks:
        advice = (
            f"{masks} was given: something in {shapes.name} does not use it, or a loss reads "
            "positions that it masks (labels there: fill={'labels': -100}). Pass the true sizes "
            "(lengths=)"
        )
    return f". {advice}; if what the padding holds means something to it, say so in fill="


# ---- the first operator after which the real part differs ----

_MOST_BYTES = 1 << 30
"""So much of what operators return is kept of the first run; behind that nothing is named."""


class FirstDifference(TorchDispatchMode):
    """Watches two runs, and notes the first operator whose results differ where they are real.

    Real is what both runs have; of two padded runs, what is no padding. An operator whose result
    has a size of another kind (a batch and its rows in one dim) is passed over, and where the
    runs go on with different operators nothing more is compared.
    """

    supports_higher_order_operators = True

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[bool, str] = {}
        """The operator, by whether its numbers are floating-point ones."""
        self._parted = ""
        self._sizes = {(plan.sizes[axis], bucket) for axis, bucket in plan.buckets.items()}
        self._side = plan.side
        self._first: list[tuple[str, list[torch.Tensor]]] = []
        self._expected: Iterator[tuple[str, list[torch.Tensor]]] | None = None
        """What is left to compare with; None in the first run."""
        self._bytes = 0

    @property
    def found(self) -> str:
        """Say which it is, with the user's line that called it; empty where none is known.

        Integers that differ, such as a test whether a mask is needed, are seldom the reason.
        """
        if True in self._found:
            return f". It first differs after {self._found[True]}"
        if self._parted:
            return f". Padded it goes another way: {self._parted}"
        return f". It first differs after {self._found[False]}" if self._found else ""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, watched; its second call is compared with the first."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                with self:
                    return function(*args, **kwargs)
            finally:
                self._expected = iter(self._first)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        done = True in self._found or self._bytes >= _MOST_BYTES
        if isinstance(func, OPERATOR_CLASSES) and not done:
            name = schema_of(func).name.rpartition("::")[2]
            if "empty" not in name:  # whose values are not set yet
                leaves, _ = flatten(result)
                self._note(name, [each for each in leaves if type(each) is torch.Tensor])
        return result

    def _note(self, name: str, made: list[torch.Tensor]) -> None:
        if self._expected is None:
            self._bytes += sum(each.nbytes for each in made)
            self._first.append((name, [each.detach().clone() for each in made]))
            return
        same, before = next(self._expected, ("", []))
        if same != name:
            self._parted = self._parted or _place(name)
            self._expected = iter(())
            return
        for expected, got in zip(before, made, strict=False):
            real = [Outcome(outputs=[each]) for each in self._real(expected, got)]
            if real and not judge(real[0], real[1], PADDING).equal:
                self._found.setdefault(expected.is_floating_point(), _place(name))

    def _real(self, expected: torch.Tensor, got: torch.Tensor) -> list[torch.Tensor]:
        """Cut both to what is real; return nothing where it can't be told what that is."""
        if expected.dim() != got.dim():
            return []
        for dim, (size, padded) in enumerate(zip(expected.shape, got.shape, strict=True)):
            real = size
            if size == padded:
                real = next((real for real, bucket in self._sizes if bucket == size), size)
            elif (size, padded) not in self._sizes:
                return []
            expected = expected.narrow(*Narrow.of(dim, real, size, self._side))
            got = got.narrow(*Narrow.of(dim, real, padded, self._side))
        return [expected.detach(), got.detach()]


def flattened_rows(plan: Plan) -> str:
    """Name what was sliced as one piece, but may be a batch and its rows in one dim."""
    steps = (step for each in plan.slices.values() for _, steps in each.steps for step in steps)
    for step, (axis, size) in itertools.product(steps, plan.sizes.items()):
        if isinstance(step, Narrow) and step.length > size > 0 and step.length % size == 0:
            return (
                f". The output has {step.length // size} times {axis!r} in dimension {step.dim}: "
                "if these are the rows of a batch flattened into one dim, say so in outputs=, in "
                f"the structure of what it returns: {{{step.dim}: (None, {axis!r})}}"
            )
    return ""


def _place(operator: str) -> str:
    """Return the name of an operator and the user's line that has called it, if there is one."""
    shown = operator.strip("_").removesuffix("_for_cpu")
    return ", ".join(filter(None, (shown, user_line())))


# ---- a dim that dims does not name ----

_MOST_TRIED = 8


def explain_failure(
    shapes: OutputShapes, plan: Plan, call: Call, error: Exception
) -> ValueError | None:
    """Return an error that names the arguments that ``dims`` lacks, None if it lacks none.

    If the function fails with the padded arguments, and does not once some others are padded too,
    those are the ones.
    """
    # Memory is no matter of dims; and of a group all ranks would have to run, not only this one.
    memory = isinstance(error, torch.OutOfMemoryError)
    if memory or not plan.pads or shapes.spec.options["group"] is not None:
        return None
    named = {(each.index, dim) for each in plan.inputs for dim, _ in each.axes}
    padded = [axis for axis, size in plan.sizes.items() if plan.buckets[axis] != size]
    suspects = [
        # Padded with a value that is there: it is a valid one, of labels too.
        input_of(index, label, leaf, ((dim, axis),), "repeat-last")
        for index, (label, leaf) in enumerate(zip(call.labels(), call.leaves, strict=True))
        if isinstance(leaf, torch.Tensor)
        for (dim, size), axis in itertools.product(enumerate(leaf.shape), padded)
        if size == plan.sizes[axis] and (index, dim) not in named
    ][:_MOST_TRIED]
    # First those in the dim in which dims names the axis: labels beside ids.
    usual = {place for each in plan.inputs for place in each.axes}
    in_place = [each for each in suspects if each.axes[0] in usual]
    with COMPILE_LOCK, uncompiled():
        # Where it runs as it was padded, the padding was not the reason.
        if not suspects or _works(shapes.function, plan, call):
            return None
        for found in (*([each] for each in (*in_place, *suspects)), in_place, suspects):
            longer = replace(plan, inputs=(*plan.inputs, *found))
            if found and _works(shapes.function, longer, call):
                break
        else:
            return None
    grown = ", ".join(
        f"{axis!r} from {plan.sizes[axis]} to {plan.buckets[axis]}"
        for axis in dict.fromkeys(each.axes[0][1] for each in found)
    )
    shown = ", ".join(f"{each.label} of shape {each.shape}" for each in found)
    entries: dict[int, dict[int, str]] = {}
    for each in found:
        entries.setdefault(each.index, {}).update(each.axes)
    text = (
        f"bucketed: {shapes.name} was padded along {grown}, but not {shown}, which is as long: it "
        f"runs once that is padded too. Name it in dims: {{..., {_typed(call, entries)[1:]}"
    )
    labels = {e.index: -100 for e in found if "label" in e.label or "target" in e.label}
    if labels:
        text += f", and say in fill what a loss ignores: {_typed(call, labels)}"
    return ValueError(text)


def _works(function: Callable[..., Any], plan: Plan, call: Call) -> bool:
    """Run the function eagerly, at the sizes of the buckets; return whether it raises nothing."""
    try:
        leaves = plan.pad(call.leaves)
        given = Given(leaves, *call.bind(plan.extras, leaves), {})
        modules = call.modules(function)
        run_undoing_mutations(function, given, read=lambda _: (None, []), names={}, modules=modules)
    except Exception:  # noqa: BLE001 - whatever it is, it did not work
        return False
    return True


def _typed(call: Call, values: Mapping[int, Any]) -> str:
    """Return values of leaves, by index, as dims= and fill= take them: nested, by argument."""
    names, _, treedefs, _ = call.signature
    arguments = zip(names, treedefs, strict=True)
    paths = [(name, *path) for name, treedef in arguments for path in key_paths(treedef)]
    tree: dict[Any, Any] = {}
    for index, value in values.items():
        node = tree
        *outer, last = paths[index]
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = value
    return repr(tree)
