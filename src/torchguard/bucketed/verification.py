"""Does the padding change the answer? Three eager runs, compared.

The function on the real inputs, on the padded ones, and on inputs padded with something else:
what is cut out of each has to be the same, and so have the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchguard.bucketed.isolation import (
    Undone,
    address,
    forked_random_state,
    python_state_kept,
)
from torchguard.bucketed.outputs import leaves_of
from torchguard.bucketed.trees import Path, flattened, is_leaf, replaced, spelled
from torchguard.errors import PaddingLeakError
from torchguard.last_digits import nudge

__all__ = [
    "Arguments",
    "Run",
    "backward",
    "compared",
    "other_filler",
    "ran",
    "with_other_last_digits",
]

# Differences that rounding alone makes, as a share of the largest value. Sums over a padded
# length are taken in another order, so they are not exact.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
_COARSEST = 0.1  # of dtypes with fewer bits
# A gradient that is zero but for rounding is measured by the largest of all.
_OF_LARGEST = 1e-2


class Arguments(NamedTuple):
    """How to call a function: what comes first (``self``), by place and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[tuple[Path, Any]]:
        """Everything in it, with paths."""
        return [
            *(((0, *path), value) for path, value in flattened(self.args)),
            *(((1, *path), value) for path, value in flattened(self.kwargs)),
        ]

    def with_parts(self, new: dict[Path, Any]) -> Arguments:
        """Return the same with some parts replaced."""
        return Arguments(*replaced((self.args, self.kwargs), new))


class Run(NamedTuple):
    """What one run gave."""

    output: Any
    leaves: list[tuple[Path, Any]]
    gradients: list[tuple[str, torch.Tensor | None]]
    parameters: list[torch.Tensor]
    operators: set[str]


def ran(
    function: Callable[..., Any],
    given: Arguments,
    *,
    prepare: Callable[[Arguments], Arguments],
    cut: Callable[[Any], Any],
    names: dict[Path, str],
    modules: Sequence[torch.nn.Module],
    parameters: Sequence[torch.Tensor] | None = None,
) -> Run:
    """Run a function on the side; return the real part of its output and the gradients.

    Args:
        function: runs eagerly.
        given: its arguments, not padded.
        prepare: pads them.
        cut: takes the real part of the output.
        names: what to call the inputs by path.
        modules: those the function may change.
        parameters: the leaves to take gradients for; None to find them in the graph.
    """
    leaves: dict[Path, torch.Tensor] = {}
    for path, value in given.leaves():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            # A new leaf: the gradient must not run on into what made the input.
            leaves[path] = value.detach().requires_grad_()
    aside = Undone()
    try:
        with forked_random_state(), python_state_kept(modules):
            fresh = prepare(given.with_parts(dict(leaves)))
            inputs = {
                address(value): names[path]
                for path, value in fresh.leaves()
                if path in names and isinstance(value, torch.Tensor)
            }
            with aside:
                output = function(*fresh.args, **fresh.kwargs)
            output = cut(output)  # which may run the function on tensors without data
            parts = [(leaf.path, leaf.value) for leaf in leaves_of(output)]
            if parameters is None:
                parameters = _parameters([value for _, value in parts], leaves.values())
            with aside:
                gradients = _gradients(parts, leaves, parameters, names, modules)
            kept = [
                (path, value.detach().clone() if isinstance(value, torch.Tensor) else value)
                for path, value in parts
            ]
    finally:
        aside.undo()
    lost = [name for place, name in inputs.items() if place and place in aside.written]
    if lost:
        raise ValueError(
            f"bucketed: the function writes to its input {lost[0]}; what it gets is a padded copy, "
            "so the write would be lost: return the new value instead"
        )
    return Run(output, kept, gradients, list(parameters), aside.seen)


def _parameters(outputs: list[Any], inputs: Any) -> list[torch.Tensor]:
    """Find the leaves that outputs depend on by way of the graph, inputs left out."""
    known = {id(tensor) for tensor in inputs}
    found: dict[int, torch.Tensor] = {}
    waiting = [
        value.grad_fn
        for value in outputs
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def _gradients(
    parts: list[tuple[Path, Any]],
    inputs: dict[Path, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    names: dict[Path, str],
    modules: Sequence[torch.nn.Module],
) -> list[tuple[str, torch.Tensor | None]]:
    wanted = [*inputs.values(), *parameters]
    differentiable = [
        value
        for _, value in parts
        if isinstance(value, torch.Tensor) and value.requires_grad and value.numel()
    ]
    if not wanted or not differentiable:
        return []
    weights = [
        torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=torch.float64)
        .to(value.dtype)
        .view(value.shape)
        for value in differentiable
    ]
    found = torch.autograd.grad(differentiable, wanted, weights, allow_unused=True)
    said = {id(p): name for m in modules for name, p in m.named_parameters()}
    labels = [
        *(names.get(path, spelled("input", path[1:])) for path in inputs),
        *(said.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)),
    ]
    return list(zip(labels, found, strict=True))


def backward(output: Any) -> None:
    """Run the backward of an output; no gradient is accumulated anywhere."""
    parts = [(leaf.path, leaf.value) for leaf in leaves_of(output)]
    parameters = _parameters([value for _, value in parts], ())
    _gradients(parts, {}, parameters, {}, ())


def compared(
    expected: Run, got: Run, *, what: str, function: str, modules: Sequence[torch.nn.Module]
) -> None:
    """Raise unless two runs agree.

    Raises:
        PaddingLeakError: naming what differs, and by how much.
    """
    if [path for path, _ in expected.leaves] != [path for path, _ in got.leaves]:
        raise PaddingLeakError(
            f"bucketed: {function} returns another structure when its input is padded ({what})"
        )
    causes = _causes(expected.operators | got.operators, modules)
    for (path, wanted), (_, value) in zip(expected.leaves, got.leaves, strict=True):
        where = spelled("output", path, expected.output)
        if not isinstance(wanted, torch.Tensor):
            if is_leaf(wanted) and wanted != value and not (wanted != wanted and value != value):  # noqa: PLR0124
                raise PaddingLeakError(
                    f"bucketed: {where} of {function} is {value!r} with padding and {wanted!r} "
                    f"without ({what}). {causes}"
                )
            continue
        if wanted.shape != value.shape:
            raise PaddingLeakError(
                f"bucketed: {where} of {function} has shape {tuple(value.shape)} cut out of a "
                f"padded run, and {tuple(wanted.shape)} without padding ({what}): say in outputs= "
                "how long it is"
            )
        _compare(wanted, value, where=f"{where} of {function}", what=what, causes=causes)
    largest = max((_largest(g) for _, g in expected.gradients if g is not None), default=0.0)
    for (name, wanted), (_, value) in zip(expected.gradients, got.gradients, strict=True):
        if wanted is None and value is None:
            continue
        zero = value if wanted is None else wanted
        assert zero is not None
        _compare(
            torch.zeros_like(zero) if wanted is None else wanted,
            torch.zeros_like(zero) if value is None else value,
            scale=_OF_LARGEST * largest,
            where=f"the gradient of {name} in {function}",
            what=what,
            causes=causes,
        )


def _compare(
    wanted: torch.Tensor,
    value: torch.Tensor,
    *,
    where: str,
    what: str,
    causes: str,
    scale: float = 0.0,
) -> None:
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        tolerance = _TOLERANCES.get(wanted.dtype, _COARSEST)
        allowed = tolerance * max(_largest(wanted), scale)
        wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
        a, b = wanted.to(wide), value.to(wide)
        # Infinities and NaN have to be in the same places.
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(a), a - b).abs()
    else:
        allowed = 0
        difference = (wanted != value).to(torch.float64)
    largest = float(difference.max()) if difference.numel() else 0.0
    if largest <= allowed:  # NaN is not
        return
    raise PaddingLeakError(
        f"bucketed: padding changes {where}: largest difference {largest:.3g}, where the largest "
        f"value is {_largest(wanted):.3g} ({what}). {causes}"
    )


def _largest(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    size = tensor.abs() if tensor.dtype != torch.bool else tensor.to(torch.int8)
    size = size.to(torch.float64)
    return float(size[size.isfinite()].max()) if bool(size.isfinite().any()) else 0.0


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
        ("sum", "norm", "linalg_vector_norm", "amax", "max", "mse_loss"),
        "a sum, maximum or loss over the padded dim without weights",
    ),
)


def _causes(operators: set[str], modules: Sequence[torch.nn.Module]) -> str:
    """Name the usual culprits, those that ran first."""
    names = [name.removeprefix("aten::") for name in operators]
    trains = not modules or any(isinstance(m, _BATCH_NORMS) and m.training for m in modules)
    found = [
        culprit
        for beginnings, culprit in _CULPRITS
        if any(name.startswith(beginnings) for name in names) and (culprit != _BATCH_NORM or trains)
    ]
    if not found:
        found = ["a mean, a softmax without a mask, BatchNorm in training mode"]
    return (
        f"Usual causes, seen here: {'; '.join(found)}. Pass the function a mask (mask=) or the "
        "true sizes (lengths=); if what the padding holds means something to it, say so in fill="
    )


def with_other_last_digits(given: Arguments, seed: int) -> tuple[Arguments, bool]:
    """Return the call with other last digits in what requires a gradient, and if any changed."""
    new: dict[Path, Any] = {}
    changed = False
    for path, value in given.leaves():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            copy = value.detach().clone()
            nudge(copy, seed)
            changed |= not torch.equal(copy, value)
            new[path] = copy.requires_grad_()
    return given.with_parts(new), changed


def other_filler(tensor: torch.Tensor) -> Any:
    """Return another value than 0 for the padding of an input; None if there is none to try."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return None
    if tensor.dtype.is_floating_point:
        finite = tensor.detach()[tensor.detach().isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        value = 1.0 + 2.0 * scale
        return value if value < torch.finfo(tensor.dtype).max else None
    # Numbers of tokens: only those that are there are known to be valid.
    other = tensor[tensor != 0]
    return int(other.flatten()[0]) if other.numel() else None
