"""Say why a call failed once it was padded, and what a user can do about it.

Padding has changed the answer, or an argument is as long as a padded axis but not in ``dims``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchguard._pytree import all_reachable_modules
from torchguard._torch import SymbolicSizes
from torchguard.bucketing.decorator.bucket import Call, Plan, alone_and_eager
from torchguard.bucketing.decorator.output_shapes import OutputShapes, running_without_data
from torchguard.bucketing.decorator.slices import Narrow
from torchguard.equivalence.compare import Difference
from torchguard.equivalence.outcome import Outcome

# ---- padding has changed the answer ----


class Context(NamedTuple):
    """What an error says besides what differs."""

    what: str
    """The sizes, and what is in the padding."""
    function: str
    """Its name."""
    modules: Sequence[torch.nn.Module]
    """Those it can reach."""
    masks: Sequence[str]
    """The ones that the call has."""
    others: Sequence[str]
    """The inputs that have other data than the caller's."""


def leak_message(found: Difference, expected: Outcome, got: Outcome, context: Context) -> str:
    """Name what differs between a run and one with more, or other, padding, and by how much.

    The structure of both outcomes is a ``FlatOutput`` of
    :mod:`torchguard.bucketing.decorator.output_shapes`.
    """
    what, function = context.what, context.function
    if found.kind == "shape" and found.part == "structure":
        return f"bucketed: {function} returns another structure when its input is padded ({what})"
    operators = expected.operators | got.operators
    advice = _not_neutral(context.others) if context.others else _causes(operators, context)
    ending = f"({what}). {advice}"
    if found.part == "outputs":
        where = f"{expected.structure.label(found.key)} of {function}"
        wanted, value = (run.outputs[found.key] for run in (expected, got))
        if found.kind == "value":
            return f"bucketed: {where} is {value!r} with padding and {wanted!r} without {ending}"
        if found.kind == "shape":
            return (
                f"bucketed: {where} has shape {tuple(value.shape)} sliced from a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is"
            )
    elif found.part == "gradients":
        gradients = {**got.gradients, **expected.gradients}
        where = f"the gradient of {gradients[found.key].name} in {function}"
    else:
        where = f"the buffer {found.key} that {function} writes"
    return (
        f"bucketed: padding changes {where}: largest difference {found.largest:.3g}, where the "
        f"largest value is {found.scale:.3g} {ending}"
    )


_BATCH_NORM = "BatchNorm in training mode, whose statistics include the padding"
_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)
# By the beginnings of operators' names.
_CULPRITS = (
    (("native_batch_norm", "_native_batch_norm", "_batch_norm", "cudnn_batch_norm"), _BATCH_NORM),
    (("mean", "var", "std"), "a mean or variance over the padded dim"),
    (
        ("_softmax", "_log_softmax", "_scaled_dot_product"),
        "softmax or attention without a mask",
    ),
    (
        ("sum", "norm", "linalg_vector_norm", "amax", "amin", "max", "mse_loss"),
        "a sum, maximum or loss over the padded dim without weights",
    ),
)


def _not_neutral(others: Sequence[str]) -> str:
    fills = ", ".join(f"{label!r}: 0" for label in others)
    return (
        "So 0 in the padding is not neutral: pass a mask (mask=) or the true sizes (lengths=); "
        "or write in fill= a value that changes nothing, such as -inf for a maximum and inf "
        f"for a minimum; fill={{{fills}}} says that such data never comes"
    )


def _causes(operators: frozenset[str], context: Context) -> str:
    """Name the usual culprits, those that have run, and what to write."""
    _, function, modules, masks, _ = context
    names = [name.removeprefix("aten::") for name in operators]
    trains = not modules or any(isinstance(m, _BATCH_NORMS) and m.training for m in modules)
    found = [
        culprit
        for beginnings, culprit in _CULPRITS
        if any(name.startswith(beginnings) for name in names) and (culprit != _BATCH_NORM or trains)
    ]
    if not found:
        found = ["a mean, a softmax without a mask, BatchNorm in training mode"]
    if masks:
        advice = (
            f"{' and '.join(masks)} was given: something in {function} does not use it, "
            "or a loss reads positions that it masks (labels there: fill={'labels': -100}). Pass "
            "the true sizes (lengths=)"
        )
    else:
        advice = "Pass the function a mask (mask=) or the true sizes (lengths=)"
    return (
        f"Usual causes, seen here: {'; '.join(found)}. {advice}; if what the padding holds means "
        "something to it, say so in fill="
    )


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


# ---- a dim that dims does not name ----

_MOST_TRIED = 16


class _Suspect(NamedTuple):
    """A dim of a tensor that was not padded, and is as long as an axis that was."""

    leaf: int
    """Its index."""
    dim: int
    axis: str
    label: str
    shape: tuple[int, ...]


def explain_failure(
    shapes: OutputShapes, plan: Plan, call: Call, error: Exception
) -> ValueError | None:
    """Return an error that names the arguments that ``dims`` lacks, None if it lacks none.

    The function runs on tensors without data: if it fails with the padded arguments, and does
    not once some others are padded too, those are the ones.
    """
    # Memory is no matter of dims; and of a group all ranks would have to run, not only this one.
    memory = isinstance(error, torch.OutOfMemoryError)
    if memory or not plan.pads or shapes.spec.options["group"] is not None:
        return None
    suspects = list(itertools.islice(_suspects(plan, call), _MOST_TRIED))
    modules = all_reachable_modules(shapes.function, (*call.owner, *call.arguments))
    works = functools.partial(_works, shapes.function, plan, call)
    with alone_and_eager(), running_without_data(modules):
        # Where it runs without data as it was padded, the values were the reason.
        if not suspects or works(()):
            return None
        usual = {(axis, dim) for each in plan.inputs for dim, axis in each.axes}
        # First those in the dim in which dims names the axis: labels beside ids.
        in_place = [each for each in suspects if (each.axis, each.dim) in usual]
        for group in (in_place, *([each] for each in suspects), suspects):
            if group and works(group):
                found = list(group)
                break
        else:
            return None
        # What it runs without is not named.
        for each in list(found):
            fewer = [other for other in found if other is not each]
            if fewer and works(fewer):
                found = fewer
    return ValueError(_missing(shapes.name, plan, found))


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
    """Run the function without data, at the sizes of the buckets, with these padded as well."""
    shapes = {each.index: list(each.padded(plan.buckets)) for each in plan.inputs}
    for each in suspects:
        shapes.setdefault(each.leaf, list(each.shape))[each.dim] = plan.buckets[each.axis]
    try:
        with SymbolicSizes({}) as world:
            padded = {
                index: world.empty(tuple(shape), call.leaves[index])
                for index, shape in shapes.items()
            }
            args, kwargs = call.with_leaves(padded).bind(plan.extras)
            function(*args, **kwargs)
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
