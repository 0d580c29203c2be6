"""One run of a graph, and all that can be seen of it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchguard._torch import (
    has_saved_tensors_hooks,
    set_version,
    version_of,
    without_autocast_cache,
)
from torchguard.equivalence.copies import Change, Copies, copy_inputs, tensors_of

__all__ = ["Outcome", "random_state_kept", "run"]


@dataclass
class Outcome:
    """What a graph has returned, written, and sent backward."""

    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    """The inputs after the run."""

    gradients: list[torch.Tensor | None] | None = None
    """For every input, or None where nothing is differentiable."""

    sharing: frozenset[tuple[str, str]] = frozenset()
    """Pairs of an output and an input or another output that overlap in memory."""

    written: bool = False
    """Whether an input was written."""

    random: bool = False
    """Whether random numbers were drawn."""

    error: Exception | None = None
    """What the run has raised."""

    backward_error: Exception | None = None


def run(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    owned: Sequence[torch.Tensor] = (),
    cast: Callable[[torch.dtype], torch.dtype] | None = None,
    change: Change | None = None,
) -> Outcome:
    """Call ``function`` on copies of the inputs, and send a gradient backward.

    Tensors that the graph owns hold copies of their data meanwhile; they are the first
    inputs of the outcome. No random state is changed, and tensor hooks, ``.grad`` and
    saved-tensor hooks of the caller see nothing of it.

    Raises:
        NotCopied: an input can't be copied.
        torch.OutOfMemoryError: the memory is too small for a second run.

    """
    copies = copy_inputs([*owned, *inputs], cast, change)
    with _holding(owned, copies.values):
        copies.sources[: len(owned)] = [
            tensor if tensor.requires_grad else None for tensor in owned
        ]
        outcome = _outcome(function, copies, len(owned))
        outcome.inputs[: len(owned)] = [tensor.detach().clone() for tensor in owned]
    return outcome


@contextlib.contextmanager
def _holding(owned: Sequence[torch.Tensor], copies: list[Any]) -> Iterator[None]:
    """Let tensors have other data for a while: neither they nor autograd will know."""
    before = [(tensor, tensor.data, version_of(tensor)) for tensor in owned]
    try:
        for tensor, copy in zip(owned, copies, strict=False):
            tensor.data = copy.detach()
        yield
    finally:
        for tensor, data, version in before:
            tensor.data = data
            if version is not None:
                set_version(tensor, version)


def _outcome(function: Callable[..., Any], copies: Copies, owned: int) -> Outcome:
    outcome = Outcome(inputs=copies.values)
    given = copies.values[owned:]
    devices = {tensor.device for tensor in tensors_of(copies.values)}
    # The cache of autocast would keep the copies alive.
    with without_autocast_cache(), _unseen_by_hooks(), random_state_kept(devices) as drawn:
        before = [_function_behind(value) for value in given]
        # Called as a module, a graph that raises prints a traceback of its own.
        called = function.forward if isinstance(function, fx.GraphModule) else function
        versions = [version_of(tensor) for tensor in tensors_of(copies.values)]
        try:
            returned = called(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a graph raises is its outcome
            outcome.error = error.with_traceback(None)
            return outcome
        outcome.outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        outcome.random = drawn()
        # None: inference tensors count no writes.
        outcome.written = None in versions or versions != [
            version_of(tensor) for tensor in tensors_of(copies.values)
        ]
        outcome.sharing = _sharing(outcome.outputs, copies.values)
        written = [
            value
            for value, function_before in zip(given, before, strict=True)
            if _function_behind(value) is not function_before
        ]
        try:
            outcome.gradients = _gradients([*outcome.outputs, *written], copies.sources)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            outcome.backward_error = error.with_traceback(None)
    return outcome


def _function_behind(value: Any) -> Any:
    return value.grad_fn if isinstance(value, torch.Tensor) else None


@contextlib.contextmanager
def _unseen_by_hooks() -> Iterator[None]:
    if not has_saved_tensors_hooks():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        yield


@contextlib.contextmanager
def random_state_kept(devices: set[torch.device]) -> Iterator[Callable[[], bool]]:
    """Draw random numbers that nobody misses afterwards; yields whether any were drawn."""
    kind = "xpu" if any(device.type == "xpu" for device in devices) else "cuda"
    module: Any = getattr(torch, kind)
    numbers = sorted({device.index or 0 for device in devices if device.type == kind})

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(module.get_rng_state(number) for number in numbers)]

    with torch.random.fork_rng(devices=numbers, device_type=kind):
        before = states()
        yield lambda: any(
            not torch.equal(old, new) for old, new in zip(before, states(), strict=True)
        )


def _gradients(results: list[Any], sources: list[Any]) -> list[torch.Tensor | None] | None:
    """Send a fixed random gradient backward through every differentiable result."""
    ends = [
        tensor
        for tensor in tensors_of(results)
        if tensor.requires_grad and tensor.grad_fn is not None
    ]
    wanted = [source for source in sources if source is not None]
    if not ends or not wanted:
        return None
    sent = [_cotangent(tensor, number) for number, tensor in enumerate(ends)]
    arrived = iter(torch.autograd.grad(ends, wanted, sent, allow_unused=True))
    return [None if source is None else next(arrived) for source in sources]


def _cotangent(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    shape = (*tensor.shape, 2) if tensor.is_complex() else tensor.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    # The same numbers in every precision: double precision judges the others.
    rounded = drawn.to(torch.bfloat16).to(torch.float64)
    if tensor.is_complex():
        rounded = torch.view_as_complex(rounded)
    return rounded.to(device=tensor.device, dtype=tensor.dtype)


def _sharing(outputs: list[Any], inputs: list[Any]) -> frozenset[tuple[str, str]]:
    spans = [(f"output {i}", _span(value)) for i, value in enumerate(outputs)]
    others = [(f"input {i}", _span(value)) for i, value in enumerate(inputs)]
    return frozenset(
        (name, other)
        for position, (name, span) in enumerate(spans)
        for other, other_span in [*spans[:position], *others]
        if span is not None and other_span is not None and _overlap(span, other_span)
    )


def _span(value: Any) -> tuple[torch.device, int, int] | None:
    """Return the device, the first address and the address behind the last element."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not value.numel() or not value.untyped_storage().nbytes():
        return None
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    first = value.data_ptr()
    return value.device, first, first + (last + 1) * value.element_size()


def _overlap(one: tuple[torch.device, int, int], other: tuple[torch.device, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
