"""Compare two runs of one function: what differs, and what may differ by rounding alone.

:func:`judge` compares by a :class:`Policy`: :data:`COMPILING` for a compiled graph beside eager,
:data:`PADDING` for a padded call beside the same call without padding, :data:`PYTHON` for what
Dynamo has traced beside Python.

Every allowance is a share of a number that the compared value itself is made of:

* of the value, and of the largest value of its tensor, since what is small there may be a
  difference of what is large. Whether it is, eager in double precision tells, if many values are
  off by a part of themselves: a row of an embedding may have its own scale. For padding, which
  leaves most values as they are, that is the largest of those that differ, in the rows and columns
  of the value;
* where a run has written a tensor, of what it has changed: the parameter of an optimizer moves by
  a millionth of itself. What is left of ``after`` is its last digit, once for each write;
* of eager's own error, where eager has been run in double precision too, among values of its size.

None is a share of another tensor, of a sentinel such as -1e9, or of the value that a small step
was added to. So whatever factor a program puts in front of a result, its allowance has it too.
Only noise is measured by something else: a gradient that is zero by algebra is as large as the
rounding of what cancels. It is :attr:`Difference.small`, and no difference if eager itself comes as
far (``perturb.py``).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from torchguard.equivalence.outcome import Outcome


class Tolerance(NamedTuple):
    """How far a value may be off: the sum of the four, and one step between subnormals."""

    relative: float = 0.0
    """The part that is a share of the value."""

    absolute: float = 0.0
    """The part for a tensor whose largest value is 1. It shrinks with a smaller one, except in
    float16; only for gradients, which have the unit of the loss, it grows with a larger one."""

    of_largest: float = 0.0
    """The part that is a share of the tensor's largest value."""

    least: float = 0.0
    """The part that is the same for every tensor."""


@dataclass(frozen=True)
class Policy:
    """What counts as a difference."""

    tolerances: Mapping[torch.dtype | None, Tolerance]
    """A tolerance for each floating-point dtype (of complex numbers, that of their parts); under
    None, that of every other dtype."""

    loose: Mapping[torch.dtype | None, Tolerance]
    """As far off a value may be if eager with perturbed inputs comes as far."""

    metadata: bool
    """Whether dtypes, devices, strides and shared memory have to be the same too."""

    nearby: bool = False
    """Whether the largest value is that of the row and column, of elements that differ."""

    autocast: frozenset[torch.dtype] = frozenset()
    """The narrower dtypes in which autocast lets a compiled graph compute."""

    def tolerance(
        self, dtype: torch.dtype, device: str = "cpu", *, loose: bool = False
    ) -> Tolerance:
        """Return the tolerance of a dtype; integers have none."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return Tolerance()
        real = dtype.to_real()
        # Under autocast float32 results and gradients come out of matmuls in the narrower dtype.
        if real is torch.float32 and not self.metadata and torch.is_autocast_enabled(device):
            real = torch.get_autocast_dtype(device)
        table = self.loose if loose else self.tolerances
        found = table[real if real in table else None]
        if real is torch.float32 and self.autocast:
            # Four units in the last place of what they were rounded to on the way.
            units = [torch.finfo(narrow) for narrow in self.autocast]
            return found._replace(
                of_largest=4 * max(unit.eps for unit in units),
                least=4 * max(unit.eps * unit.smallest_normal for unit in units),
            )
        return found


# Those of torch.testing.assert_close, and one unit in the last place of the 8-bit types; the
# absolute part follows the tensor, for the gradients of a mean loss are 1e-6 and smaller.
# https://pytorch.org/docs/stable/testing.html
_CLOSE = {
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-7),
    None: Tolerance(0.26, 1e-2),
}
# No wider run can tell what rounding explains in float64.
_LOOSE = {**_CLOSE, torch.float64: Tolerance(1e-7, 1e-7, least=1e-13)}

COMPILING = Policy(_CLOSE, _LOOSE, metadata=True)
"""The policy for a compiled graph: the same operations in another order."""

PYTHON = Policy(
    {dtype: Tolerance(relative) for dtype, (relative, *_) in _CLOSE.items()}, _LOOSE, metadata=True
)
"""The policy for what Dynamo has traced: both runs are eager, so most have the same bits. Where
torch traces an operation as several, or reads a number from a tensor, the last digits differ."""

# Sums over a padded length are taken in another order.
_PADDED = {
    torch.float16: Tolerance(of_largest=1e-2),
    torch.bfloat16: Tolerance(of_largest=4e-2),
    torch.float32: Tolerance(of_largest=5e-5),
    torch.float64: Tolerance(of_largest=1e-9),
    None: Tolerance(of_largest=0.1),
}

# Beyond that a discontinuity may explain it, if the perturbed runs show as much: a ReLU within
# rounding of zero has moved the gradients of a T5's encoder by a hundredth.
_AT_DISCONTINUITIES = {**dict.fromkeys(_PADDED, Tolerance(of_largest=5e-2)), None: _PADDED[None]}

PADDING = Policy(_PADDED, _AT_DISCONTINUITIES, metadata=False, nearby=True)
"""The policy for a padded call: the same operations on longer tensors, whose outputs were cut."""

_BLOCK = 2**18
"""So many elements of a tensor are compared at once: in double precision they are copied often."""

_NEAR = 16.0
"""Eager's error at one value says what rounding does to one that is at most so much smaller."""

_MULTIPLE = 4.0
"""How many times eager's own rounding error a compiled result may be off."""

_OF_ITSELF = 1 / 64
"""A value further off than this share of itself may be noise of a larger one, or wrong."""

_FEW = 1 / 1024
"""So many of a tensor's values cancel that far in any sum. If more do, eager's error decides."""

_CANCELLING = 8.0
"""And eager's error counts so many times, since few values may have cancelled that far."""

_CANCELLED = 2**-40
"""A value that is this share of the largest one, in double precision, is zero by algebra."""

_TRUSTED = 0.05
"""A reference further away from eager than this, relative to its size, computed something else."""

_NOISE = 0.125
"""A gradient that should be zero may be as much of the largest one, in eager."""

_NOISE_EPSILONS = 64
"""And as much in units of the dtype's ``eps``."""

Part = Literal[
    "run", "backward", "structure", "outputs", "inputs", "sharing", "gradients", "buffers"
]  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One thing that a run does otherwise than the reference."""

    part: Part
    key: Any
    """Which output, input, gradient or buffer."""

    what: str
    kind: Literal["error", "value", "shape", "metadata", "strides", "memory", "numbers"]
    largest: float = 0.0
    """The largest absolute difference of numbers; it may be infinite or NaN."""

    scale: float = 0.0
    """The largest finite number of the reference."""

    finite: bool = False
    """Whether it is one of numbers, and each of them is finite, or not, in both."""

    small: bool = False
    """Whether it is one of numbers so small that it is noise if eager comes as far."""

    apart: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """At which elements finite numbers differ."""

    strides: tuple[int, ...] | None = None
    """The reference's strides, where those of an output are all that has been compared so far."""

    def __str__(self) -> str:
        numbered = isinstance(self.key, int) and self.part in {"inputs", "gradients"}
        key = f"input {self.key}" if numbered else self.key
        return f"{_NAMES[self.part].format(key)}: {self.what}"

    def named(self, names: Sequence[str]) -> Difference:
        """Return it with these names for the inputs, in place of their numbers."""

        def name_of(match: re.Match[str]) -> str:
            return names[int(match[1])]

        if self.part in {"inputs", "gradients"} and isinstance(self.key, int):
            return replace(self, key=names[self.key])
        if self.part != "sharing":
            return self
        key, what = (re.sub(r"\binput (\d+)", name_of, text) for text in (self.key, self.what))
        return replace(self, key=key, what=what)


_NAMES = {
    "run": "the run",
    "backward": "the backward pass",
    "structure": "the run",
    "outputs": "output {}",
    "inputs": "{} after the call",
    "sharing": "{}",
    "gradients": "gradient of {}",
    "buffers": "buffer {}",
}


def judge(
    reference: Outcome,
    candidate: Outcome,
    policy: Policy,
    exact: Callable[[], Outcome | None] | None = None,
) -> tuple[Difference, ...]:
    """Compare a run with one that is right by definition: eager, or without padding.

    ``exact`` makes the outcome in double precision, where values differ by more than the tolerance.
    """
    if reference.error is not None or candidate.error is not None:
        return _errors("run", reference.error, candidate.error)
    if reference.structure != candidate.structure:
        counts = f"{len(candidate.outputs)} outputs where eager has {len(reference.outputs)}"
        return (Difference("structure", None, counts, "shape"),)
    comparison = _Comparison(policy, None if exact is None else functools.cache(exact))
    comparison.values("outputs", enumerate(zip(reference.outputs, candidate.outputs, strict=True)))
    comparison.inputs(reference, candidate)
    if policy.metadata:
        comparison.sharing(reference, candidate)
    # What a discontinuity may explain in an output says nothing about gradients; for padding, and
    # for whatever else differs, the outputs are wrong already.
    explicable = policy.metadata and all(each.finite for each in comparison.found)
    if explicable or not comparison.found:
        refused = reference.backward_error is not None and not reference.gradients
        if candidate.backward_error is not None or refused:
            errors = reference.backward_error, candidate.backward_error
            comparison.found += _errors("backward", *errors)
        else:
            comparison.gradients(reference, candidate)
            comparison.buffers(reference, candidate)
    return tuple(comparison.found)


def _errors(
    part: Part, reference: Exception | None, candidate: Exception | None
) -> tuple[Difference, ...]:
    if (reference is None) == (candidate is None):
        return ()
    what = f"does not raise, eager raises {_shown(reference)}"
    if reference is None:
        what = f"raises {_shown(candidate)}, eager does not"
    return (Difference(part, None, what, "error"),)


def _shown(error: Exception | None) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def value_of(outcome: Outcome, part: Part, key: Any) -> Any:
    """Return what a difference is about in one of the outcomes; None if it has no such value."""
    if part == "gradients":
        gradient = outcome.gradients.get(key)
        return None if gradient is None else gradient.value
    if part == "buffers":
        buffer = outcome.buffers.get(key)
        return None if buffer is None else buffer.after
    values: list[Any] = getattr(outcome, part)
    return values[key] if key < len(values) else None


class _Pair(NamedTuple):
    """One tensor of both runs, and what it was if the reference has written it."""

    expected: torch.Tensor
    actual: torch.Tensor
    before: torch.Tensor | None = None
    writes: int = 0


class _Comparison:
    """What was found so far."""

    def __init__(self, policy: Policy, exact: Callable[[], Outcome | None] | None) -> None:
        self.policy = policy
        self.exact = exact
        self.found: list[Difference] = []
        self.largest_gradient = 0.0

    def values(self, part: Part, pairs: Any, before: Any = None, writes: int = 1) -> None:
        """Compare pairs of values: tensors, and what else a function may return."""
        for key, (expected, actual) in pairs:
            if not self.policy.metadata and type(expected) is type(actual) is float:
                # loss.item(): rounded as the tensor was.
                expected, actual = torch.tensor([expected, actual], dtype=torch.float32)  # noqa: PLW2901
            difference = self._kinds(part, key, expected, actual)
            if difference is None and isinstance(expected, torch.Tensor):
                pair = _Pair(expected.detach(), actual.detach())
                if _is_like(before, expected):
                    pair = pair._replace(before=before.detach(), writes=writes)
                difference = self._numbers(part, key, pair)
            if difference is not None:
                self.found.append(difference)

    def inputs(self, reference: Outcome, candidate: Outcome) -> None:
        """Compare what the runs have made of the inputs with what these were before."""
        pairs = zip(reference.inputs, candidate.inputs, strict=True)
        for place, pair in enumerate(pairs):
            before = reference.before[place] if reference.before else None
            self.values("inputs", [(place, pair)], before, reference.writes.get(place, 1))

    def sharing(self, reference: Outcome, candidate: Outcome) -> None:
        """Compare which tensors overlap in memory."""
        for name, other in sorted(candidate.sharing ^ reference.sharing):
            what = f"shares memory with {other}, in eager it does not"
            if (name, other) in reference.sharing:
                what = f"does not share memory with {other}, in eager it does"
            self.found.append(Difference("sharing", name, what, "memory"))

    def gradients(self, reference: Outcome, candidate: Outcome) -> None:
        """Compare gradients; none, and one of zeros, are the same number."""
        self.largest_gradient = _largest_gradient(reference)
        for key in {**reference.gradients, **candidate.gradients}:
            one, other = reference.gradients.get(key), candidate.gradients.get(key)
            there = [each for each in (one, other) if each is not None]
            if len(there) == 1 and not there[0].known:
                continue  # a leaf that this run has made: no caller can read its gradient
            like = next((each.value for each in there if each.value is not None), None)
            if like is None:
                continue
            expected, actual = (
                torch.zeros_like(like) if each is None or each.value is None else each.value
                for each in (one, other)
            )
            self.values("gradients", [(key, (expected, actual))])

    def buffers(self, reference: Outcome, candidate: Outcome) -> None:
        """Compare what the runs have written to buffers; what one has not is as it was before."""
        for name in reference.buffers.keys() | candidate.buffers.keys():
            one, other = reference.buffers.get(name), candidate.buffers.get(name)
            written = other or one
            assert written is not None
            expected = written.before if one is None else one.after
            actual = written.before if other is None else other.after
            # A buffer as long as the input, such as a table of positions, is no statistic.
            if expected.shape == actual.shape:
                self.values("buffers", [(name, (expected, actual))], written.before)

    def _kinds(self, part: Part, key: Any, expected: Any, actual: Any) -> Difference | None:
        """Compare all but the values of tensors."""
        if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
            if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
                what = f"of type {type(actual).__name__}, eager has type {type(expected).__name__}"
                return Difference(part, key, what, "value")
            if not self.policy.metadata and not isinstance(expected, _PLAIN):
                return None  # an object that may compare by identity
            right = expected == actual or (expected != expected and actual != actual)  # noqa: PLR0124 - NaN
            what = f"{actual!r}, eager has {expected!r}"
            return None if right else Difference(part, key, what, "value")
        names = ("shape", "dtype", "device", "layout", "requires_grad")
        for name in names if self.policy.metadata else names[:1]:
            want, got = getattr(expected, name), getattr(actual, name)
            if want != got:
                if name == "shape":
                    want, got = tuple(want), tuple(got)
                what = f"{name} {got}, eager has {want}"
                return Difference(part, key, what, "shape" if name == "shape" else "metadata")
        # Autograd gives a leaf's gradient the leaf's own strides.
        compared = self.policy.metadata and part != "gradients"
        if compared and not same_strides(expected, actual):
            what = f"strides {actual.stride()}, eager has {expected.stride()}"
            strides = expected.stride() if part == "outputs" else None
            return Difference(part, key, what, "strides", strides=strides)
        return None

    def _numbers(self, part: Part, key: Any, pair: _Pair) -> Difference | None:
        """Compare the values of two tensors of one shape."""
        expected, actual = pair.expected, pair.actual
        if self.policy.metadata and expected.layout is not torch.strided:
            return None
        if _same(expected, actual):
            return None
        if pair.before is not None and _same(expected, pair.before):
            pair = pair._replace(writes=0)
        tolerance = self.policy.tolerance(expected.dtype, expected.device.type)
        # A sentinel, which is the same in both, is not rounded to a narrower dtype.
        other = actual if tolerance.of_largest else None
        largest, own = _largest(expected, pair.before, other), None
        if not self.policy.nearby and _within(part, pair, tolerance, largest):
            if self.exact is None or not _many_off(part, pair, tolerance):
                return None
            own = _of_itself(tolerance)
        nearby = _nearby(expected, actual) if self.policy.nearby and pair.writes == 0 else largest
        off, allowed = _distance(part, pair, own or tolerance, nearby)
        if bool((off <= allowed).all()):  # NaN is not
            return None
        near = self._as_near_as_eager(part, key, pair, tolerance, own)
        if near or (near is None and own is not None):
            return None
        what, finite = _described(expected, actual, off, allowed)
        loose = self.policy.tolerance(expected.dtype, expected.device.type, loose=True)
        value = pair._replace(before=None)
        _, at_most = _distance(part, value, loose, _largest(expected))
        if part == "gradients" and (expected.is_floating_point() or expected.is_complex()):
            noise = min(_NOISE_EPSILONS * torch.finfo(expected.dtype).eps, _NOISE)
            at_most = at_most.clamp(min=noise * self.largest_gradient)
        return Difference(
            part, key, what, "numbers",
            largest=float(off.max()) if not finite else float(off.nan_to_num(0, 0, 0).max()),
            scale=_largest(expected),
            finite=finite,
            small=bool((off <= at_most).all()),
            apart=~(off <= allowed) if finite else None,
        )  # fmt: skip

    def _as_near_as_eager(
        self, part: Part, key: Any, pair: _Pair, tolerance: Tolerance, own: Tolerance | None
    ) -> bool | None:
        """Whether a value is as near to the exact one as eager's; None where nothing is exact."""
        outcome = None if self.exact is None else self.exact()
        if outcome is None or outcome.error is not None:
            return None
        if outcome.backward_error is not None and not outcome.gradients:
            return None
        exact = value_of(outcome, part, key)
        if part == "gradients" and exact is None and outcome.gradients:
            exact = torch.zeros_like(pair.expected)
        if not isinstance(exact, torch.Tensor) or exact.shape != pair.expected.shape:
            return None
        exact = exact.detach()
        if not (pair.expected.is_floating_point() or pair.expected.is_complex()):
            return exact.dtype == pair.actual.dtype and torch.equal(exact, pair.actual)
        largest = _largest_gradient(outcome) if part == "gradients" else 0.0
        return _as_near(part, pair, exact, tolerance, own, largest, self.policy)


_PLAIN = (
    type(None), int, float, complex, str, bytes, bool, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


# ---- numbers ----


def as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in double precision, of a complex tensor both parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    return tensor.to(torch.float64)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal, and none is NaN."""
    plain = one.layout is torch.strided and one.dtype == other.dtype and one.itemsize > 1
    return plain and one.device == other.device and torch.equal(one, other)


def _is_like(before: Any, after: torch.Tensor) -> bool:
    """Whether the difference of two tensors is what was written."""
    return (
        isinstance(before, torch.Tensor)
        and (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)
        and before.layout is after.layout is torch.strided
    )


def _blocks(*tensors: torch.Tensor | None) -> Iterator[list[torch.Tensor | None]]:
    """Cut tensors of one shape into blocks, for what is made of them in double precision."""
    first = tensors[0]
    assert first is not None
    if first.numel() <= _BLOCK or first.layout is not torch.strided:
        yield list(tensors)
        return
    flat = [None if each is None else each.reshape(-1) for each in tensors]
    for start in range(0, first.numel(), _BLOCK):
        yield [None if each is None else each[start : start + _BLOCK] for each in flat]


def _within(part: Part, pair: _Pair, tolerance: Tolerance, largest: float) -> bool:
    """Whether no value is further off than the tolerance, one block after the other."""
    for expected, actual, before in _blocks(*pair[:3]):
        assert expected is not None
        assert actual is not None
        block = _Pair(expected, actual, before, pair.writes)
        off, allowed = _distance(part, block, tolerance, largest)
        if not bool((off <= allowed).all()):  # NaN is not
            return False
    return True


def _of_itself(tolerance: Tolerance) -> Tolerance:
    """Return the tolerance without a share of the tensor's largest value."""
    share = 2 * max(tolerance.relative, tolerance.of_largest)
    return Tolerance(max(_OF_ITSELF, share), least=tolerance.least)


def _many_off(part: Part, pair: _Pair, tolerance: Tolerance) -> bool:
    """Whether more values are off by a part of themselves than those that happen to cancel."""
    if not (pair.expected.is_floating_point() or pair.expected.is_complex()):
        return False
    count = values = 0
    for expected, actual, before in _blocks(*pair[:3]):
        assert expected is not None
        assert actual is not None
        block = _Pair(expected, actual, before, pair.writes)
        off, allowed = _distance(part, block, _of_itself(tolerance), 0.0)
        count += int((off > allowed).count_nonzero())
        values += int(as_double(expected).count_nonzero())
    return count > _FEW * values


def _distance(
    part: Part, pair: _Pair, tolerance: Tolerance, largest: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each value is off, and how far it may be in a tensor with this largest one.

    Equal values are 0 apart, infinities and NaN too; one that only one of the tensors has is
    infinitely far from the other.
    """
    expected, actual, before, writes = pair
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = expected != actual
        if torch.bool in {expected.dtype, actual.dtype}:
            return wrong.to(torch.float64), torch.zeros((), device=wrong.device)
        off = (expected.to(torch.float64) - actual.to(torch.float64)).abs()
        # Two integers beyond 2 ** 53 may be one number in double precision.
        return off.clamp_(min=wrong.to(torch.float64)), torch.zeros((), device=wrong.device)
    if tolerance.of_largest and expected.is_complex():
        one, other = expected.to(torch.complex128), actual.to(torch.complex128)
    else:
        one, other = as_double(expected), as_double(actual)
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, torch.zeros_like(one), one - other).abs()
    allowed = _allowed(part, expected.dtype, one, before, writes, tolerance, largest)
    # An infinite one allows nothing: its neighbours are infinitely far off.
    return off, torch.where(allowed.isfinite(), allowed, 0.0)


def _allowed(  # noqa: PLR0917 - one private rule
    part: Part,
    dtype: torch.dtype,
    values: torch.Tensor,
    before: torch.Tensor | None,
    writes: int,
    tolerance: Tolerance,
    largest: float | torch.Tensor,
) -> torch.Tensor:
    """Return how far each of the values may be off; the largest is that of what was changed."""
    relative, absolute, of_largest, least = tolerance
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    scale = largest if part == "gradients" or absolute == 0 else min(float(largest), 1.0)
    if before is not None:
        old = before.to(values.dtype) if values.is_complex() else as_double(before)
        share = relative * (values - old).abs() + absolute * scale + of_largest * largest
        # Each write rounds to the last digit; a compiler may write once for several.
        digits = (writes + 1) / 2 if writes else 0.0
        return share + least + digits * (info.eps * values.abs() + step)
    if info.dtype == "float16":
        # Below 6e-5 it loses digits, which a compiler that keeps float32 in its kernels has.
        scale = max(scale, 1.0) if isinstance(scale, float) else scale
    return relative * values.abs() + (absolute * scale + of_largest * largest + least + step)


def _largest_gradient(outcome: Outcome) -> float:
    """Return the largest finite absolute value in a whole backward."""
    values = [gradient.value for gradient in outcome.gradients.values()]
    return max((_largest(value) for value in values if value is not None), default=0.0)


def _largest(
    tensor: torch.Tensor, before: torch.Tensor | None = None, other: torch.Tensor | None = None
) -> float:
    """Return the largest finite absolute value, or the largest change; of those that differ."""
    largest = 0.0
    for after, old, apart in _blocks(tensor.detach(), before, other):
        assert after is not None
        kind = torch.complex128 if after.is_complex() else torch.float64
        wide = (after.to(kind) if old is None else after.to(kind) - old.to(kind)).abs()
        counts = wide.isfinite() if apart is None else wide.isfinite() & (after != apart)
        finite = wide[counts]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return largest


def _nearby(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return, for each element, the largest one that differs in its row and in its column.

    Of all dims it is the least. A sentinel is the same in both, and is left out.
    """
    kind = torch.complex128 if expected.is_complex() else torch.float64
    wide = expected.to(kind).abs()
    counts = (expected != actual) & wide.isfinite()
    values = torch.where(counts, wide, torch.zeros_like(wide))
    if not values.numel():
        return values
    dims = [dim for dim, size in enumerate(values.shape) if size > 1]
    rows = [
        values.amax([other for other in range(values.dim()) if other != dim], keepdim=True)
        if values.dim() > 1
        else values
        for dim in dims
    ]
    return functools.reduce(torch.minimum, rows, values.max())


def _as_near(  # noqa: PLR0917 - one private rule
    part: Part,
    pair: _Pair,
    exact: torch.Tensor,
    tolerance: Tolerance,
    own: Tolerance | None,
    largest_gradient: float,
    policy: Policy,
) -> bool | None:
    """Whether of eager's, the compiled and the exact result the second is as near as the first.

    ``own`` is the tolerance for values that are no difference of larger ones. Returns None if
    eager is no reference.
    """
    wide, narrow, true = as_double(pair.expected), as_double(pair.actual), as_double(exact)
    places = torch.isfinite(true)
    for result in (wide, narrow):
        if not torch.equal(torch.isfinite(result), places):
            return False
        if not torch.equal(result[~places].nan_to_num(), true[~places].nan_to_num()):
            return False
    before = None if pair.before is None else as_double(pair.before)[places]
    wide, narrow, true = wide[places], narrow[places], true[places]
    if not true.numel():
        return True
    eager_error, error = (wide - true).abs(), (narrow - true).abs()
    most, largest = float(eager_error.max()), float(true.abs().max())
    limit = _allowed(
        part, pair.expected.dtype, true, before, pair.writes, tolerance, _largest(true, before)
    )
    if eager_error.square().mean() > (_TRUSTED**2) * true.square().mean():
        # A gradient that is zero by algebra, of a bias in front of a BatchNorm, is all noise.
        eps = torch.finfo(pair.expected.dtype).eps
        is_noise = largest <= eps * largest_gradient and most <= _NOISE * largest_gradient
        if not is_noise:
            # It is no reference for this graph. Gradients that underflow under autocast are as far
            # off: a compiler that keeps float32 in its kernels is nearer.
            nearer = error.square().mean() <= eager_error.square().mean()
            return (bool(policy.autocast) and bool(nearer) and float(error.max()) <= most) or None
        if largest <= _NOISE_EPSILONS * torch.finfo(torch.float64).eps * largest_gradient:
            # In double precision too: another order of the same sums may leave more.
            limit = limit.clamp(min=min(_NOISE_EPSILONS * eps, _NOISE) * largest_gradient)
    if own is None:
        return _no_further(error, eager_error, limit, true.abs())
    of_itself = _allowed(part, pair.expected.dtype, true, before, pair.writes, own, 0.0)
    limit = torch.where(true.abs() <= _CANCELLED * largest, limit, of_itself)
    return _no_further(error, _CANCELLING * eager_error, limit, true.abs())


def _no_further(
    error: torch.Tensor, eager: torch.Tensor, limit: torch.Tensor, size: torch.Tensor
) -> bool:
    """Whether errors are as small as eager's at values of the same size, or as the limit."""
    order = size.argsort()
    size, error, eager, limit = (each[order] for each in (size, error, eager, limit))
    # The last one that eager's error counts of. A mask's -1e9 rounds by 32, and excuses no score.
    last = torch.searchsorted(size, _NEAR * size, right=True) - 1
    # No compiler has to be better than eager, such as in a sum of many terms in half precision.
    if not bool((error <= torch.maximum(limit, _MULTIPLE * eager.cummax(0).values[last])).all()):
        return False
    # Nor worse on the whole: one number that eager rounds to the other side excuses no other.
    its, allowed, eagers = (each.square().cumsum(0)[last] for each in (error, limit, eager))
    return bool((its <= torch.maximum(allowed, _MULTIPLE**2 * eagers) * (1 + 1e-9)).all())


def _described(
    expected: torch.Tensor, actual: torch.Tensor, off: torch.Tensor, allowed: torch.Tensor
) -> tuple[str, bool]:
    """Return what differs, as text, and whether all of it is finite numbers."""
    if expected.is_floating_point() or expected.is_complex():
        wide, narrow = as_double(expected), as_double(actual)
        for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
            wrong = test(wide) != test(narrow)
            if wrong.any():
                text = f"{int(wrong.sum())} of {wrong.numel()} elements are {name} in one only"
                return text, False
    wrong = ~(off <= allowed)
    text = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    if expected.dtype != torch.bool:
        text += f", the largest by {float(off.nan_to_num(0, 0, 0).max()):.3g}"
    return text, True


# ---- strides ----


def same_strides(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether no program can tell the strides of ``actual`` from those of ``expected``.

    Dims, except those of size 1, come in the same order, and two that ``view()`` can merge stay so.
    A compiler may write out what eager expands, but an expanded tensor can't be written in place.
    """
    order = _order(expected)
    return order is None or (order == _order(actual) and _merged(expected) <= _merged(actual))


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the largest stride to the smallest; None where one is expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [(stride, dim) for dim, (size, stride) in enumerate(sizes) if size > 1]
    if not tensor.numel() or any(stride == 0 for stride, _ in strides):
        return None
    return tuple(dim for _, dim in sorted(strides, key=lambda pair: (-pair[0], pair[1])))


def _merged(tensor: torch.Tensor) -> set[int]:
    """Return the dims that ``view()`` can merge with the next one."""
    sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
    dims = [dim for dim, (size, _) in enumerate(sizes) if size > 1]
    return {
        dim
        for dim, after in itertools.pairwise(dims)
        if sizes[dim][1] == sizes[after][0] * sizes[after][1]
    }
