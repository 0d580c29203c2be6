"""What a run leaves: outputs, gradients, buffers, and which memory was written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Gradient(NamedTuple):
    """The gradient of one leaf of autograd's graph, or of one input."""

    value: torch.Tensor | None
    name: str = ""
    leaf: torch.Tensor | None = None
    """Kept alive, lest a leaf of another run gets its id."""
    known: bool = True
    """Whether the leaf was there before the run; some functions make leaves of their own."""


class Buffer(NamedTuple):
    """A buffer of a module that a run has written."""

    before: torch.Tensor
    after: torch.Tensor


class Given(NamedTuple):
    """What a function is called with."""

    leaves: list[Any]
    """The leaves of the arguments; a write to one counts as the mutation of an input."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    sources: Mapping[int, torch.Tensor]
    """The tensors at which gradients arrive, by position: leaves of autograd's graph in place of
    the caller's tensors, so that a gradient does not run on into what made these."""


class Output(NamedTuple):
    """A leaf of what a function returns."""

    value: Any
    counts: torch.Tensor | None = None
    """Which elements count, as a mask that broadcasts; the others are compared as 0."""


@dataclass
class Outcome:
    """What a run has returned, written, and sent backward."""

    outputs: list[Any] = field(default_factory=list)
    structure: Any = None
    """What the outputs are leaves of; it is compared as a whole."""

    inputs: list[Any] = field(default_factory=list)
    """The inputs after the run; empty if its mutations were undone."""

    before: Sequence[Any] = ()
    """What they were before it; the caller's own, of which the run has written copies."""

    writes: dict[int, int] = field(default_factory=dict)
    """How often the run has written an input, by its position."""

    spare: dict[Any, torch.UntypedStorage] = field(default_factory=dict)
    """Copies of storages that the run has left as they were: another run may use them."""

    gradients: dict[Hashable, Gradient] = field(default_factory=dict)
    """Gradients by the position of an input, or by ``("leaf", id)`` of another leaf; empty if none
    is computed."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    """The buffers that the run has written, by name; in the module they are as before again."""

    sharing: frozenset[tuple[str, str]] = frozenset()
    """Pairs of an output and an input or another output that overlap in memory."""

    mutated: frozenset[int] = frozenset()
    """The positions of the inputs whose memory was written."""

    error: Exception | None = None
    """What the run has raised."""

    backward_error: Exception | None = None
    """What its backward has raised. If torch only refuses, because what it had saved was written
    afterwards, gradients are there: those of a run that saves copies."""


# ---- gradients ----


def send_backward(
    outputs: Sequence[Output],
    sources: Mapping[int, Any],
    names: Mapping[int, str],
    modules: Sequence[torch.nn.Module] = (),
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
    *,
    retain_graph: bool = False,
    mixed: bool = False,
    change: Callable[[Sequence[Any]], None] | None = None,
) -> dict[Hashable, Gradient]:
    """Send a fixed gradient backward to inputs and to every other leaf; none is accumulated.

    It is positive, 0.5 to 1.5, so that sums over a padded dim do not cancel, and rises, or is
    ``mixed``. With ``retain_graph`` the graph of what was made before is left to the caller. What
    is sent can be changed before: the gradient of a linear function depends on nothing else.
    ``sources`` may have the edge of a tensor in its place.
    """
    parameters = _leaves_behind([output.value for output in outputs], sources.values())
    wanted = [*sources.values(), *parameters]
    ends = [
        output
        for output in outputs
        if isinstance(output.value, torch.Tensor)
        and output.value.requires_grad
        and output.value.numel()
    ]
    if not wanted or not ends:
        return {}
    cotangent = _mixed if mixed else _rising
    sent = [counted(cotangent(value, i), counts) for i, (value, counts) in enumerate(ends)]
    if change is not None:
        change(sent)
    # Not backward(): that would add to .grad, and call the hooks for it.
    arrived = torch.autograd.grad(
        [each.value for each in ends], wanted, sent, retain_graph=retain_graph, allow_unused=True
    )
    # The outer modules are the first: their names for a parameter are the longer ones.
    outer_last = reversed(modules)
    known = {id(p): name for module in outer_last for name, p in module.named_parameters()}
    there = {*known, *(id(tensor) for tensor in held())}
    gradients: dict[Hashable, Gradient] = {
        place: Gradient(value, names[place], source)
        for (place, source), value in zip(sources.items(), arrived, strict=False)
    }
    for i, (p, value) in enumerate(zip(parameters, arrived[len(sources) :], strict=True)):
        name = known.get(id(p), f"parameter {i}")
        gradients["leaf", id(p)] = Gradient(value, name, p, known=id(p) in there)
    return gradients


def _rising(value: torch.Tensor, _: int) -> torch.Tensor:
    """Return numbers whose sums narrow dtypes round alike, however long a padded dim is."""
    numbers = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=torch.float64)
    return numbers.to(value.dtype).view(value.shape)


def _mixed(value: torch.Tensor, place: int) -> torch.Tensor:
    """Return the same numbers in every precision, which a shift by a power of two changes."""
    numbers = torch.arange(place, place + value.numel(), device=value.device, dtype=torch.float64)
    numbers = (numbers * _GOLDEN % 1 + 0.5).to(torch.bfloat16).to(torch.float64)
    if value.is_complex():
        numbers = torch.complex(numbers, numbers.flip(0))
    return numbers.to(value.dtype).view(value.shape)


_GOLDEN = 0.6180339887498949


def _leaves_behind(outputs: Sequence[Any], inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Find the leaves that outputs depend on by way of autograd's graph, inputs left out.

    An input may be an edge of the graph; what is behind it is left out too.
    """
    inputs = list(inputs)
    known = {id(tensor) for tensor in inputs}
    ends = {each.node for each in inputs if not isinstance(each, torch.Tensor)}
    found: dict[int, torch.Tensor] = {}
    waiting: list[Any] = [
        value.grad_fn
        for value in outputs
        if isinstance(value, torch.Tensor) and value.grad_fn not in {None, *ends}
    ]
    seen: set[Any] = {*waiting, *ends}
    while waiting:
        node = waiting.pop()
        # Only AccumulateGrad has it: the node of a leaf.
        # https://pytorch.org/docs/stable/notes/autograd.html#how-autograd-encodes-the-history
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def counted(value: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Put 0 where an element does not count."""
    if counts is None:
        return value
    return torch.where(counts, value, torch.zeros((), dtype=value.dtype, device=value.device))
