"""Run a function without side effects, and keep all that can be seen of the run afterwards.

Two functions, for two kinds of callee. :func:`run_undoing_mutations` calls a function eagerly that
has a state of its own, such as a module, and undoes what it writes.
:func:`torchguard.equivalence.copies.run_on_copies` calls a graph, compiled or not. Both return an
:class:`Outcome`, for :func:`torchguard.equivalence.compare.judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchguard._torch import (
    OPERATOR_CLASSES,
    TorchDispatchMode,
    schema_of,
    set_version,
    version_of,
)
from torchguard.equivalence.isolate import isolated

__all__ = [
    "Buffer",
    "Given",
    "Gradient",
    "Outcome",
    "Output",
    "UndoMutations",
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


class Given(NamedTuple):
    """What a function is called with."""

    leaves: list[Any]
    """Of the arguments; a write to one counts as the mutation of an input."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


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


# ---- undo what a function writes ----


class UndoMutations(TorchDispatchMode):
    """A scope whose mutations of memory from outside can be undone, and that is deterministic.

    The mode sees every operator. A storage that was there before is copied before the first
    operator that writes it, and :meth:`undo` copies it back. Dropout keeps everything: which
    elements it drops depends on the shape, so with it a padded run could never equal the real one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        """The names of the operators that ran."""
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_overload = isinstance(func, OPERATOR_CLASSES)
        if not is_overload:  # a higher-order operator, such as flex_attention
            return func(*args, **kwargs)
        schema = schema_of(func)
        self.operators.add(schema.name)
        given = _tensors((*args, *kwargs.values()))
        self._copy_what_is_written(schema, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = _deterministic(func, schema, args, kwargs)
        else:
            result = func(*args, **kwargs)
        outside = {storage_address(tensor) for tensor in given}
        self._own.update({storage_address(made) for made in _tensors((result,))} - outside)
        return result

    @property
    def mutated(self) -> set[int]:
        """The addresses of storages from outside that were written."""
        return set(self._storages)

    def undo(self) -> None:
        """Copy back what was written."""
        for storage, copied in self._storages.values():
            storage.copy_(copied)
        for tensor, version in reversed(self._versions):
            if version is not None:
                set_version(tensor, version)

    def _copy_what_is_written(self, schema: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(schema.arguments):
            info = argument.alias_info
            written = (info is not None and info.is_write) or argument.name in _WRITTEN_UNSAID
            if not written:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in _tensors((value,)):
                address = storage_address(tensor)
                if address == 0 or address in self._own:
                    continue
                self._versions.append((tensor, version_of(tensor)))
                if address not in self._storages:
                    storage = tensor.untyped_storage()
                    self._storages[address] = (storage, storage.clone())


# The schema of native_batch_norm does not say that it writes them.
_WRITTEN_UNSAID = {"running_mean", "running_var"}


def storage_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins, 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage: sparse, fake, nested
        return 0


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _deterministic(func: Any, schema: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator deterministically, so far as that has a meaning."""
    name = schema.name.removeprefix("aten::")
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name == "bernoulli_":
        return args[0].fill_(1)
    if name == "bernoulli":
        return torch.ones_like(args[0])
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" in names:
        place = names.index("dropout_p")
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
    result = func(*args, **kwargs)
    if name in {"rand", "rand_like", "uniform_"}:
        result.fill_(0.5)
    elif name in {"randn", "randn_like", "normal_"}:
        result.fill_(0.0)
    return result


# ---- run it ----


def run_undoing_mutations(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    *,
    prepare: Callable[[list[Any]], Given],
    read: Callable[[Any], tuple[Any, list[Output]]],
    names: Mapping[int, str],
    modules: Sequence[torch.nn.Module] = (),
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> Outcome:
    """Call a function that may have a state of its own, and send a gradient backward.

    The function runs deterministically (dropout keeps everything) and eagerly. Afterwards memory,
    modules and random states are as they were. What it raises comes out.

    Args:
        function: gets the arguments that ``prepare`` returns.
        leaves: of the arguments of a call. Where one requires grad, a new leaf of autograd's
            graph takes its place, so that the gradient does not run on into what made it.
        prepare: makes of the leaves what the function is called with.
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
    buffers = _buffers_of(modules)
    with isolated(modules):
        try:
            # Before operators are watched: to the function this is memory from outside, so that its
            # writes to it are seen.
            given = prepare([fresh.get(place, leaf) for place, leaf in enumerate(leaves)])
            with watch:
                returned = function(*given.args, **given.kwargs)
            structure, outputs = read(returned)
            with watch:
                gradients = send_backward(outputs, fresh, names, modules, held)
            return Outcome(
                outputs=[_kept(output) for output in outputs],
                structure=structure,
                gradients=gradients,
                buffers=_written(buffers, watch.mutated),
                mutated=frozenset(
                    place
                    for place, value in enumerate(given.leaves)
                    if isinstance(value, torch.Tensor) and storage_address(value) in watch.mutated
                ),
                operators=frozenset(watch.operators),
            )
        finally:
            watch.undo()


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
