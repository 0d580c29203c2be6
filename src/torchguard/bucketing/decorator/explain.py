"""Say what padding has changed: the output, the size, the first operator that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchguard._events import user_line
from torchguard._pytree import flatten
from torchguard._torch import OPERATOR_CLASSES, TorchDispatchMode, schema_of
from torchguard.bucketing.decorator.real import Narrow, Real
from torchguard.bucketing.decorator.shape import Shape
from torchguard.equivalence.compare import PADDING, Difference, judge
from torchguard.equivalence.outcome import Outcome

# ---- padding has changed the answer ----


def leak_of(
    real: Real, found: Difference, expected: Outcome, got: Outcome, fills: Mapping[int, Any]
) -> str:
    """Name what differs between a run and one with more, or other, padding, and by how much.

    The structure of both outcomes is a ``FlatOutput``.
    """
    name, what = real.spec.name, str(real.shape)
    filled = " and ".join(each.label for each in real.shape.inputs if each.index in fills)
    if got.error is not None:
        return (
            f"{name} fails with another value than 0 in the padding of {filled} ({what}): "
            f"{type(got.error).__name__}: {got.error}"
        )
    if fills:
        what += f"; with another value in the padding of {filled}"
    elif real.content:
        what += "; the padding is that with which the call has arrived"
    if found.part == "structure":
        return f"{name} returns another structure when its input is padded ({what})"
    if found.part == "outputs":
        where = f"{expected.structure.label(found.key)} of {name}"
        wanted, value = (run.outputs[found.key] for run in (expected, got))
        if found.kind == "shape":
            return (
                f"{where} has shape {tuple(value.shape)} sliced from a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is"
            )
        if found.kind == "value":
            return f"{where} is {value!r} with padding and {wanted!r} without ({what})"
    elif found.part == "gradients":
        gradients = {**got.gradients, **expected.gradients}
        where = f"the gradient of {gradients[found.key].name} in {name}"
    else:
        where = f"the buffer {found.key} that {name} writes"
    return (
        f"padding changes {where}: largest difference {found.largest:.3g}, where the largest "
        f"value is {found.scale:.3g} ({what})"
    )


def advice(real: Real, fills: Mapping[int, Any]) -> str:
    """Return what to type: a mask, the true sizes, or what the padding has to hold."""
    given = {*real.own, *(each.label for each in real.shape.inputs)}
    masks = " and ".join(name for name in real.spec.masks if name in given)
    if masks:
        text = (
            f". {masks} was given: something in {real.spec.name} does not use it, or takes it the "
            "other way round, or a loss reads positions that it masks (labels there: "
            "fill={'labels': -100})"
        )
    else:
        text = ". Pass the function a mask (mask=) or the true sizes (lengths=)"
    if fills:
        zeros = dict.fromkeys(map(real.call.argument_of, fills), 0)
        return (
            f"{text}. With 0 there nothing differs for this call; fill={zeros} says that 0 is "
            "right for every call (as for a sum, but not for a maximum)"
        )
    return f"{text}; if what the padding holds means something to it, say so in fill="


# ---- the first operator after which the real part differs ----

_MOST_BYTES = 1 << 30
"""So much of what operators return is kept of the first run; behind that nothing is named."""


class FirstDifference(TorchDispatchMode):
    """Watches two runs, and notes the first operator whose numbers differ where they are real.

    Real is what both runs have; of two padded runs, what is not padding. An operator whose result
    has a size of another kind (a batch and its rows in one dim) is passed over, and where the
    runs continue with different operators nothing more is compared.
    """

    supports_higher_order_operators = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        """Says which it is, with the user's line that called it."""
        self._sizes = set(zip(shape.real, shape.bucket, strict=True))
        self._side = shape.side
        self._first: list[tuple[str, list[torch.Tensor]]] = []
        self._expected: Iterator[tuple[str, list[torch.Tensor]]] | None = None
        """What is left to compare with; None in the first run."""
        self._bytes = 0

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
        done = self.found or self._bytes >= _MOST_BYTES
        if isinstance(func, OPERATOR_CLASSES) and not done:
            name = schema_of(func).name.rpartition("::")[2]
            if "empty" not in name:  # whose values are not set yet
                leaves, _ = flatten(result)
                made = [each for each in leaves if isinstance(each, torch.Tensor)]
                # Integers, such as a test whether a mask is needed, are seldom the reason.
                self._note(name, [e for e in made if e.is_floating_point() or e.is_complex()])
        return result

    def _note(self, name: str, made: list[torch.Tensor]) -> None:
        if self._expected is None:
            self._bytes += sum(each.nbytes for each in made)
            self._first.append((name, [each.detach().clone() for each in made]))
            return
        same, before = next(self._expected, ("", []))
        if same != name:
            self._expected = iter(())
            return
        for expected, got in zip(before, made, strict=False):
            real = [Outcome(outputs=[each]) for each in self._real(expected, got)]
            if real and judge(real[0], real[1], PADDING):
                shown = name.strip("_").removesuffix("_for_cpu")
                place = ", ".join(filter(None, (shown, user_line())))
                self.found = f". It first differs after {place}"
                return

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
