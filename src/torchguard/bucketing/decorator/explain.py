"""Say why a call failed once it was padded, and what a user can do about it.

Padding has changed the answer, or an argument is as long as a padded axis but not in ``dims``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchguard._pytree import flatten
from torchguard._torch import OPERATOR_CLASSES, TorchDispatchMode, schema_of, uncompiled, user_line
from torchguard.bucketing.decorator.bucket import COMPILE_LOCK, Call, Plan, sizes_of
from torchguard.bucketing.decorator.output_shapes import OutputShapes
from torchguard.bucketing.decorator.slices import Narrow
from torchguard.bucketing.padding import Side, pad_to_bucket
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
    description: str = ""
    """How its data differs from the caller's."""
    changed: tuple[str, ...] = ()
    """The inputs that have other data than the caller's."""
    short: bool = False
    """Whether the caller's inputs are cut short."""


class Leak(NamedTuple):
    """What was found, until it is confirmed."""

    text: str
    advice: str = ""
    fills: Any = None
    """What the padding holds in place of what is declared, by index of the leaf."""

    def error(self, where: str = "") -> PaddingLeakError:
        """Return the error; ``where`` names the operator, or what else is known."""
        return PaddingLeakError(f"{self.text}{where}{self.advice}")


def leak_of(  # noqa: PLR0917 - as many as a difference has
    shapes: OutputShapes, case: Case, verdict: Verdict, expected: Outcome, got: Outcome, fills: Any
) -> Leak:
    """Name what differs between a run and one with more, or other, padding, and by how much.

    The structure of both outcomes is a ``FlatOutput``.
    """
    plan, function = case.plan, shapes.name
    what = sizes_of(plan)
    filled = ", ".join(each.label for each in plan.inputs if each.index in fills)
    if got.error is not None:
        return Leak(
            f"bucketed: {function} fails with another value than 0 in the padding of {filled} "
            f"({what}): {type(got.error).__name__}: {got.error}"
        )
    if fills:
        what += f"; with another value in the padding of {filled}"
    elif case.short:
        what += "; inputs cut short, to see what a small difference becomes with more padding"
    elif case.changed:
        what += f"; with other data, where {' and '.join(case.changed)} {case.description}"
    found = verdict.differences[0]
    labels = {*plan.extras, *(each.label for each in plan.inputs)}
    masks = [name for name in shapes.spec.masks if name in labels]
    if found.kind == "shape" and found.part == "structure":
        text = f"bucketed: {function} returns another structure when its input is padded ({what})"
        return Leak(text, fills=fills)
    advice = _not_neutral(case.changed) if case.changed else _advice(function, masks)
    if found.part == "outputs":
        where = f"{expected.structure.label(found.key)} of {function}"
        wanted, value = (run.outputs[found.key] for run in (expected, got))
        if found.kind == "value":
            text = f"bucketed: {where} is {value!r} with padding and {wanted!r} without ({what})"
            return Leak(text, advice, fills)
        if found.kind == "shape":
            text = (
                f"bucketed: {where} has shape {tuple(value.shape)} sliced from a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is"
            )
            return Leak(text, fills=fills)
    elif found.part == "gradients":
        gradients = {**got.gradients, **expected.gradients}
        where = f"the gradient of {gradients[found.key].name} in {function}"
    else:
        where = f"the buffer {found.key} that {function} writes"
    text = (
        f"bucketed: padding changes {where}: largest difference {found.largest:.3g}, where the "
        f"largest value is {found.scale:.3g} ({what})"
    )
    return Leak(text, advice, fills)


def _not_neutral(labels: Sequence[str]) -> str:
    fills = ", ".join(f"{label!r}: 0" for label in labels)
    return (
        ". So 0 in the padding is not neutral: pass a mask (mask=) or the true sizes (lengths=); "
        "or write in fill= a value that changes nothing, such as -inf for a maximum and inf "
        f"for a minimum; fill={{{fills}}} says that such data never comes"
    )


def _advice(function: str, masks: Sequence[str]) -> str:
    if masks:
        advice = (
            f"{' and '.join(masks)} was given: something in {function} does not use it, "
            "or a loss reads positions that it masks (labels there: fill={'labels': -100}). Pass "
            "the true sizes (lengths=)"
        )
    else:
        advice = "Pass the function a mask (mask=) or the true sizes (lengths=)"
    return f". {advice}; if what the padding holds means something to it, say so in fill="


# ---- the first operator after which the real part differs ----

_MOST_BYTES = 1 << 30
"""So much of what the operators return is kept of the first run; behind that nothing is named."""


class FirstDifference(TorchDispatchMode):
    """Runs a function twice, and notes the first operator whose results differ where they are real.

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
        self._side: Side = plan.side
        self._first: list[tuple[str, list[torch.Tensor]]] = []
        self._bytes = 0
        self._turn = 0
        self._at = 0

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
            self._turn, self._at = self._turn + 1, 0
            with self:
                return function(*args, **kwargs)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(func, OPERATOR_CLASSES)
            and self._bytes < _MOST_BYTES
            and True not in self._found
        ):
            name = schema_of(func).name.rpartition("::")[2]
            made = [each for each in flatten(result)[0] if type(each) is torch.Tensor]
            if "empty" not in name:  # whose values are not set yet
                self._note(name, made)
        return result

    def _note(self, name: str, made: list[torch.Tensor]) -> None:
        if self._turn == 1:
            self._bytes += sum(each.nbytes for each in made)
            self._first.append((name, [each.detach().clone() for each in made]))
            return
        same = self._at < len(self._first) and self._first[self._at][0] == name
        if not same:
            self._parted = self._parted or _place(name)
            self._at = len(self._first)
            return
        pairs = zip(self._first[self._at][1], made, strict=False)
        self._at += 1
        for expected, got in pairs:
            real = self._real(expected, got)
            if real is None:
                continue
            one, other = (Outcome(outputs=[each]) for each in real)
            if not judge(one, other, PADDING).equal:
                self._found.setdefault(expected.is_floating_point(), _place(name))

    def _real(
        self, expected: torch.Tensor, got: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cut both to what is real; None where it can't be told what that is."""
        if expected.dim() != got.dim():
            return None
        for dim, pair in enumerate(zip(expected.shape, got.shape, strict=True)):
            size, padded = pair
            if size == padded:
                size = next((real for real, bucket in self._sizes if bucket == size), size)
            elif pair not in self._sizes:
                return None
            start = 0 if self._side == "right" else padded - size
            got = got.narrow(dim, start, size)
            if expected.shape[dim] == padded:
                expected = expected.narrow(dim, start, size)
        return expected.detach(), got.detach()


def flattened_rows(plan: Plan) -> str:
    """Name what was sliced as one piece, but may be a batch and its rows in one dim."""
    steps = (step for each in plan.slices.values() for _, steps in each.steps for step in steps)
    for step, (axis, size) in itertools.product(steps, plan.sizes.items()):
        if isinstance(step, Narrow) and step.length > size > 0 and step.length % size == 0:
            return (
                f". The output has {step.length // size} times {axis!r} in dimension {step.dim}: "
                "if these are the rows of a batch flattened into one dim, say so in outputs=: "
                f"{{{step.dim}: (None, {axis!r})}}"
            )
    return ""


def _place(operator: str) -> str:
    """Return the name of an operator and the user's line that has called it, if there is one."""
    shown = operator.strip("_").removesuffix("_for_cpu")
    return ", ".join(filter(None, (shown, user_line())))


# ---- a dim that dims does not name ----

_MOST_TRIED = 8


class _Suspect(NamedTuple):
    """A dim of a tensor that was not padded, and is as long as an axis that was."""

    leaf: int  # its index
    dim: int
    axis: str
    label: str
    shape: tuple[int, ...]


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
    suspects = list(itertools.islice(_suspects(plan, call), _MOST_TRIED))
    works = functools.partial(_works, shapes.function, plan, call)
    with COMPILE_LOCK, uncompiled():
        # Where it runs as it was padded, the padding was not the reason.
        if not suspects or works(()):
            return None
        usual = {(axis, dim) for each in plan.inputs for dim, axis in each.axes}
        # First those in the dim in which dims names the axis: labels beside ids.
        in_place = [each for each in suspects if (each.axis, each.dim) in usual]
        groups = (*([each] for each in (*in_place, *suspects)), in_place, suspects)
        found = next((group for group in groups if group and works(group)), None)
    return ValueError(_missing(shapes.name, plan, found)) if found else None


def _suspects(plan: Plan, call: Call) -> Iterator[_Suspect]:
    padded = {(each.index, dim) for each in plan.inputs for dim, _ in each.axes}
    axes = [axis for axis, size in plan.sizes.items() if plan.buckets[axis] != size]
    for index, (label, leaf) in enumerate(zip(call.labels(), call.leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            continue
        for (dim, size), axis in itertools.product(enumerate(leaf.shape), axes):
            if size == plan.sizes[axis] and (index, dim) not in padded:
                yield _Suspect(index, dim, axis, label, tuple(leaf.shape))


def _works(
    function: Callable[..., Any], plan: Plan, call: Call, suspects: Sequence[_Suspect]
) -> bool:
    """Run the function eagerly, at the sizes of the buckets, with these padded as well."""
    leaves = plan.pad(call.leaves)
    try:
        for each in suspects:
            # A value that is there: it is a valid one, of labels too.
            leaf, size = leaves[each.leaf], plan.buckets[each.axis]
            leaves[each.leaf] = pad_to_bucket(leaf, each.dim, size, value="repeat-last").tensor
        args, kwargs = call.bind(plan.extras, leaves)
        given = Given(leaves, args, kwargs, {})
        modules = call.modules(function)
        run_undoing_mutations(function, given, read=lambda _: (None, []), names={}, modules=modules)
    except Exception:  # noqa: BLE001 - whatever it is, it did not work
        return False
    return True


def _missing(name: str, plan: Plan, found: Sequence[_Suspect]) -> str:
    axes = dict.fromkeys(each.axis for each in found)
    padded = ", ".join(f"{axis!r} from {plan.sizes[axis]} to {plan.buckets[axis]}" for axis in axes)
    shown = ", ".join(f"{each.label} of shape {each.shape}" for each in found)
    entries = ", ".join(f"{each.label!r}: {{{each.dim}: {each.axis!r}}}" for each in found)
    text = (
        f"bucketed: {name} was padded along {padded}, but not {shown}, which is as long: it runs "
        f"once that is padded too. Name it in dims: {{..., {entries}}}"
    )
    labels = [each.label for each in found if "label" in each.label or "target" in each.label]
    if labels:
        text += f", and say in fill what a loss ignores: {{{labels[0]!r}: -100}}"
    return text
