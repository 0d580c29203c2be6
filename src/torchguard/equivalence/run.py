"""Run a function without side effects, and keep all that can be seen of the run afterwards.

Two functions, for two kinds of callee. :func:`run` calls a graph, compiled or not, on copies of
its inputs. :func:`run_undoing_mutations` calls a function eagerly that has a state of its own, such
as a module, and undoes what it writes. Both return an :class:`Outcome`, for
:func:`torchguard.equivalence.compare.judge`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from torchguard._torch import set_version, version_of
from torchguard.equivalence.copies import Cast, Change, Copies, copy_inputs
from torchguard.equivalence.isolate import UndoMutations, isolated, storage_address

__all__ = [
    "Buffer",
    "Gradient",
    "Outcome",
    "Output",
    "run",
    "run_undoing_mutations",
    "send_backward",
]


class Gradient(NamedTuple):
    """The gradient of one leaf of autograd's graph, or of one input."""

    value: torch.Tensor | None
    name: str = ""
    leaf: torch.Tensor | None = None
    """Kept, lest a leaf of another run gets its id."""
    known: bool = True
    """Whether the leaf was there before the run; some functions make leaves of their own."""


class Buffer(NamedTuple):
    """A buffer of a module that a run has written."""

    before: torch.Tensor
    after: torch.Tensor


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

    gradients: dict[Hashable, Gradient] = field(default_factory=dict)
    """By position of an input, or by ``("leaf", id)`` of another; empty if none is computed."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    """By name, those that the run has written; they are as before again."""

    sharing: frozenset[tuple[str, str]] = frozenset()
    """Pairs of an output and an input or another output that overlap in memory."""

    mutated: frozenset[int] = frozenset()
    """The positions of the inputs whose memory was written."""

    random: bool = False
    """Whether random numbers were drawn."""

    operators: frozenset[str] = frozenset()
    """The names of the operators that ran, where they were watched."""

    error: Exception | None = None
    """What the run has raised."""

    backward_error: Exception | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The leaves besides the inputs through which the outputs can be differentiated."""
        found = [each.leaf for key, each in self.gradients.items() if isinstance(key, tuple)]
        return [leaf for leaf in found if leaf is not None]


# ---- on copies of the inputs ----


def run(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    owned: Sequence[torch.Tensor] = (),
    cast: Cast | None = None,
    change: Change | None = None,
) -> Outcome:
    """Call ``function`` on copies of the inputs, and send a gradient backward.

    Tensors that the graph owns hold copies of their data meanwhile; they are the first
    inputs of the outcome. See :func:`torchguard.equivalence.isolate.isolated` for what is
    restored; hooks and ``.grad`` of the inputs see nothing, for the run has copies.

    Args:
        function: a graph, or what a compiler has made of one.
        inputs: can be copied, see :func:`torchguard.equivalence.copies.why_not_copied`.
        owned: tensors that the graph has as attributes, such as an optimizer's parameters.
        cast: runs with other dtypes.
        change: changes the values of the copies first.

    Raises:
        torch.OutOfMemoryError: a second run does not fit into memory.
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
    """Let tensors have other data for a while; neither their holders nor autograd notice it."""
    # Setting .data exchanges the memory: the object stays, and with it what autograd, an optimizer
    # and the graph's attribute refer to.
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
    # Called as a module, a graph that raises prints a traceback of its own.
    called = function.forward if isinstance(function, fx.GraphModule) else function
    with isolated() as has_drawn:
        tensors = {
            place: value
            for place, value in enumerate(copies.values)
            if isinstance(value, torch.Tensor)
        }
        versions = {place: version_of(tensor) for place, tensor in tensors.items()}
        functions = {place: tensor.grad_fn for place, tensor in tensors.items()}
        try:
            returned = called(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a graph raises is its outcome
            outcome.error = error.with_traceback(None)
            return outcome
        outcome.outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        outcome.structure = len(outcome.outputs)
        outcome.random = has_drawn()
        # None: inference tensors count no writes.
        outcome.mutated = frozenset(
            place
            for place, version in versions.items()
            if version is None or version != version_of(tensors[place])
        )
        outcome.sharing = _sharing(outcome.outputs, copies.values)
        # An input that was written to has a history now, and a gradient to send back through it.
        results = [
            tensor
            for place, tensor in tensors.items()
            if place >= owned and tensor.grad_fn is not functions[place]
        ]
        try:
            outcome.gradients = _gradients([*outcome.outputs, *results], copies.sources)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            outcome.backward_error = error.with_traceback(None)
    return outcome


def _gradients(results: list[Any], sources: list[Any]) -> dict[Hashable, Gradient]:
    """Send a fixed random gradient backward through every differentiable result."""
    ends = [
        value
        for value in results
        if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None
    ]
    wanted = {place: source for place, source in enumerate(sources) if source is not None}
    if not ends or not wanted:
        return {}
    sent = [_cotangent(tensor, number) for number, tensor in enumerate(ends)]
    arrived = torch.autograd.grad(ends, list(wanted.values()), sent, allow_unused=True)
    return {
        place: Gradient(value, f"input {place}")
        for place, value in zip(wanted, arrived, strict=True)
    }


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
    # From the first element to the last: what lies between may belong to another view, but then
    # eager and compiled code are seen to overlap alike.
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    first = value.data_ptr()
    return value.device, first, first + (last + 1) * value.element_size()


def _overlap(one: tuple[torch.device, int, int], other: tuple[torch.device, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


# ---- with a state of its own, whose mutations are undone ----


def run_undoing_mutations(
    function: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    *,
    prepare: Callable[[list[Any]], list[Any]],
    read: Callable[[Any], tuple[Any, list[Output]]],
    names: Mapping[int, str],
    modules: Sequence[torch.nn.Module] = (),
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> Outcome:
    """Call a function that may have a state of its own, and send a gradient backward.

    The function runs deterministically (dropout keeps everything) and eagerly. Afterwards memory,
    modules and random states are as they were. What it raises comes out.

    Args:
        function: gets what ``prepare`` returns.
        leaves: of the arguments of a call. Where one requires grad, a new leaf of autograd's
            graph takes its place, so that the gradient does not run on into what made it.
        prepare: makes of the leaves what the function is called with; its writes to those count
            as mutations of an input.
        read: flattens what the function returns: its structure, and its leaves. It runs outside
            of the scope in which operators are watched.
        names: what messages call the leaves, by position.
        modules: those the function may change.
        held: returns tensors besides parameters that were there before the run.
    """
    fresh = {
        place: leaf.detach().requires_grad_()
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
    }
    watch = UndoMutations()
    try:
        with isolated(modules):
            buffers = _buffers_of(modules)
            # Before operators are watched: to the function this is memory from outside, so that its
            # writes to it are seen.
            given = prepare([fresh.get(place, leaf) for place, leaf in enumerate(leaves)])
            with watch:
                returned = function(given)
            structure, outputs = read(returned)
            with watch:
                gradients = send_backward(outputs, fresh, names, modules, held)
            outcome = Outcome(
                outputs=[_kept(output) for output in outputs],
                structure=structure,
                gradients=gradients,
                buffers=_written(buffers, watch.mutated),
                mutated=frozenset(
                    place
                    for place, value in enumerate(given)
                    if isinstance(value, torch.Tensor) and storage_address(value) in watch.mutated
                ),
                operators=frozenset(watch.operators),
            )
    finally:
        watch.undo()
    return outcome


def _kept(output: Output) -> Any:
    if not isinstance(output.value, torch.Tensor):
        return output.value
    return _counted(output.value.detach(), output.counts).clone()


def _counted(value: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Put 0 where an element does not count."""
    if counts is None:
        return value
    return torch.where(counts, value, torch.zeros((), dtype=value.dtype, device=value.device))


_Held = tuple[str, torch.nn.Module, str, torch.Tensor]
"""A buffer: its full name, the module that has it, its name there."""


def _buffers_of(modules: Sequence[torch.nn.Module]) -> list[_Held]:
    names: dict[int, str] = {}
    for module in modules:  # the outer ones first
        for name, buffer in module.named_buffers():
            names.setdefault(id(buffer), name)
    return [
        (names.get(id(buffer), key), module, key, buffer)
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _written(held: Iterable[_Held], mutated: set[int]) -> dict[str, Buffer]:
    """Copy the buffers whose memory was written, or that are another tensor now."""
    found = {}
    for name, module, key, buffer in held:
        now = module._buffers.get(key)
        if now is not None and (now is not buffer or storage_address(buffer) in mutated):
            found[name] = Buffer(buffer, now.detach().clone())
    return found


def send_backward(
    outputs: Sequence[Output],
    sources: Mapping[int, torch.Tensor],
    names: Mapping[int, str],
    modules: Sequence[torch.nn.Module] = (),
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> dict[Hashable, Gradient]:
    """Send a fixed gradient backward to inputs and to every other leaf; none is accumulated.

    It is positive, 0.5 to 1.5, so that sums over a padded dim do not cancel.
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
    sent = [
        _counted(
            torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=torch.float64)
            .to(value.dtype)
            .view(value.shape),
            counts,
        )
        for value, counts in ends
    ]
    # Not backward(): that would add to .grad, and call the hooks for it.
    arrived = torch.autograd.grad([each.value for each in ends], wanted, sent, allow_unused=True)
    said: dict[int, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            said.setdefault(id(parameter), name)
    there = {*said, *(id(tensor) for tensor in held())}
    labels: list[tuple[Hashable, str, bool]] = [
        *((place, names[place], True) for place in sources),
        *(
            (("leaf", id(p)), said.get(id(p), f"parameter {i}"), id(p) in there)
            for i, p in enumerate(parameters)
        ),
    ]
    return {
        key: Gradient(value, name, leaf, is_known)
        for (key, name, is_known), leaf, value in zip(labels, wanted, arrived, strict=True)
    }


def _leaves_behind(outputs: Sequence[Any], inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Find the leaves that outputs depend on by way of autograd's graph, inputs left out."""
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
