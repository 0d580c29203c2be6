"""Run a graph on copies of its inputs: every storage once, and the views of it built anew.

What a graph does depends on strides, on which inputs share memory, and on which is a view
of which: all of that is in the copies, and nothing done to them reaches the originals.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from torchguard._torch import (
    base_of,
    has_own_dispatch,
    set_lazy_bits,
    set_version,
    version_of,
    with_lazy_bits,
    without_torch_function,
)
from torchguard.equivalence.outcome import (
    Cotangents,
    Given,
    Gradient,
    Outcome,
    Output,
    isolated,
    outcome,
    saving_copies,
    sources_of,
)
from torchguard.equivalence.reference import reference_of
from torchguard.state.process import autocast_devices
from torchguard.state.tensors import extent

Cast: TypeAlias = Callable[[torch.dtype], torch.dtype]
"""Returns the dtype that takes the place of another."""

Change: TypeAlias = Callable[[Sequence[Any]], None]
"""Changes the values of copied inputs, and of what is sent backward, before they are used."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NUMBERS = (bool, int, float, complex, type(None))
_SMALL = 2**16  # bytes
_AT_ONCE = 2**23  # bytes


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among the values."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def why_not_copied(
    values: Sequence[Any], cast: Cast | None = None, names: Sequence[str] | None = None
) -> str | None:
    """Return which input can't be copied with all that belongs to it, and why; None if all can."""
    names = names or [f"input {position}" for position in range(len(values))]
    dtypes: dict[_Key, torch.dtype] = {}
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        kind = _unusual(value)
        if kind is not None:
            return f"{name} is {kind}"
        base = base_of(value)
        if value.requires_grad and base is not None and not _is_view_of(value, base):
            return f"{name} is a differentiable view of another dtype"
        if cast is not None:
            first = dtypes.setdefault(_key(value), value.dtype)
            if first != value.dtype and (cast(first) != first or cast(value.dtype) != value.dtype):
                return f"{name} shares a storage with one of another dtype"
    # AOTAutograd takes these to lie apart.
    if _overlap(values):
        return "inputs overlap and have no common storage"
    # After the tensors: the class of a nested tensor is a better reason than its symbolic integers.
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (torch.Tensor, *_NUMBERS)):
            return f"{name} is of type {type(value).__name__}, not a tensor or a number"
    return None


def _is_view_of(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the tensor can be built anew as a view of a copy of its base."""
    return base.dtype == tensor.dtype and _unusual(base) is None


def _unusual(tensor: torch.Tensor) -> str | None:
    if type(tensor) not in _PLAIN or has_own_dispatch(tensor):
        return f"of class {type(tensor).__name__}, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.device.type == "meta":
        return "on the meta device"
    return None


def bytes_of(values: Sequence[Any]) -> int:
    """Count the bytes of the storages behind the tensors, each storage once."""
    storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors_of(values)}
    return sum(storage.nbytes() for storage in storages.values())


def copy_inputs(
    values: Sequence[Any],
    cast: Cast | None = None,
    storages: dict[_Key, torch.UntypedStorage] | None = None,
) -> list[Any]:
    """Copy the inputs of a call, for which :func:`why_not_copied` returns None.

    Storages that are given are copies already, and those that are made are put there.
    """
    copier = _Copier(cast, {} if storages is None else storages)
    return [copier.copy(value) if isinstance(value, torch.Tensor) else value for value in values]


_Key: TypeAlias = tuple[str, int, int]
"""Where a storage lies: its device, its address and its bytes."""


def _key(tensor: torch.Tensor) -> _Key:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # Empty storages have no address that tells them apart.
    return (str(tensor.device), storage.data_ptr(), size) if size else ("", id(tensor), 0)


def _overlap(values: Sequence[Any]) -> bool:
    """Whether storages share memory with each other, as two slices of a numpy array do."""
    end = "", 0
    for device, start, size in sorted(set(map(_key, tensors_of(values)))):
        if (device, start) < end and device[:3] != "mps":  # there it is no address
            return True
        end = max(end, (device, start + size))
    return False


@dataclass
class _Copier:
    cast: Cast | None
    storages: dict[_Key, torch.UntypedStorage] = field(default_factory=dict)
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.copies:
            # The original stays referenced, so its id stays its own.
            self.copies[id(tensor)] = (tensor, self._build(tensor))
        return self.copies[id(tensor)][1]

    def _build(self, tensor: torch.Tensor) -> torch.Tensor:
        base = base_of(tensor)
        if base is not None and _is_view_of(tensor, base):
            # AOTAutograd asks which inputs are views of one base. A view that requires a gradient
            # and is a leaf got it by requires_grad_(), not from its base: x[1:].requires_grad_().
            is_leaf = tensor.requires_grad and tensor.is_leaf
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            with torch.set_grad_enabled(tensor.requires_grad and not is_leaf):
                view = with_lazy_bits(self.copy(base).as_strided(*place), tensor)
            return view.requires_grad_() if is_leaf else view
        storage, dtype = self._storage(tensor)
        with torch.inference_mode(tensor.is_inference()):
            # set_() and not as_strided(): the copy of a tensor that is no view must not be one.
            copy = torch.empty(0, dtype=dtype, device=tensor.device)
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            # Inductor reads a negative view without its sign, so the copy has to be one too.
            if tensor.is_neg() or tensor.is_conj():
                set_lazy_bits(copy, tensor)
        if not tensor.requires_grad:
            return copy
        if tensor.is_leaf:
            return copy.requires_grad_()
        with torch.enable_grad():
            origin = torch.zeros((), dtype=dtype, device=tensor.device).expand_as(copy)
            made: torch.Tensor = _NotALeaf.apply(  # type: ignore[no-untyped-call]
                origin.detach().requires_grad_(), copy
            )
        return made

    def _storage(self, tensor: torch.Tensor) -> tuple[torch.UntypedStorage, torch.dtype]:
        key, dtype = _key(tensor), tensor.dtype if self.cast is None else self.cast(tensor.dtype)
        if key not in self.storages:
            storage = tensor.untyped_storage()
            if dtype == tensor.dtype:
                storage = storage.clone()
            else:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                whole.set_(storage)
                storage = whole.to(dtype).untyped_storage()
            self.storages[key] = storage
        return self.storages[key], dtype


class _NotALeaf(torch.autograd.Function):
    """Give a tensor a history, so that a graph may write into it as into any result."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(copy)
        return copy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004 - torch's signature
        return gradient, None


# ---- a graph on copies ----


def run_on_copies(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    owned: Sequence[torch.Tensor] = (),
    cast: Cast | None = None,
    change: Change | None = None,
    *,
    reference: Outcome | None = None,
    within: contextlib.AbstractContextManager[Any] | None = None,
    keeps: bool = False,
) -> Outcome:
    """Call a graph, or what is made of it, on copies of the inputs, and send a gradient backward.

    Tensors that the graph owns hold copies of their data meanwhile; they are the first inputs of
    the outcome. Copies that the ``reference`` has left as they were are used again: whatever this
    run writes to them is seen, because the originals are what it is compared with. Memory that a
    graph leaves unwritten could hold the values of the reference by chance, so free memory of these
    sizes is overwritten before. ``within`` is a scope for the run and its backward. With ``keeps``,
    autograd saves copies.
    """
    given = [*owned, *inputs]
    storages: dict[_Key, torch.UntypedStorage] = {}
    if reference is not None:
        storages, reference.spare = reference.spare, {}
    copies = copy_inputs(given, cast, storages)
    if change is not None:
        change(copies)
    with _holding(owned, copies):
        if reference is not None:
            overwrite_free_memory([*reference.outputs, *reference.gradients.values()])
        scope = within or contextlib.nullcontext()
        found = _outcome(function, copies, owned, change, scope, keeps=keeps)
        found.inputs[: len(owned)] = [tensor.detach() for tensor in owned]
    found.before = given
    if cast is None and change is None and reference is None:
        _share(found, storages)
    if found.backward_error is not None and isinstance(function, fx.GraphModule) and not keeps:
        # A program may overwrite what autograd has saved, and never go backward.
        again = run_on_copies(function, inputs, owned, cast, change, within=within, keeps=True)
        found.gradients = again.gradients if again.backward_error is None else {}
    return found


def _share(outcome: Outcome, storages: dict[_Key, torch.UntypedStorage]) -> None:
    """Keep the originals in place of copies that a run has left as they were."""
    places: dict[_Key, list[int]] = {}
    for place, value in enumerate(outcome.before):
        if isinstance(value, torch.Tensor):
            places.setdefault(_key(value), []).append(place)
    results = [*outcome.outputs, *(each.value for each in outcome.gradients.values())]
    kept = {_key(tensor) for tensor in tensors_of(results)}
    for key, copied in storages.items():
        pairs = [(outcome.before[p].detach(), outcome.inputs[p], p) for p in places.get(key, ())]
        is_as_before = all(
            (one.shape, one.stride(), one.storage_offset(), copied.data_ptr())
            == (two.shape, two.stride(), two.storage_offset(), two.untyped_storage().data_ptr())
            for one, two, _ in pairs
        )
        if is_as_before and pairs and _same_bytes(pairs[0][0].untyped_storage(), copied):
            if (key[0], copied.data_ptr(), copied.nbytes()) not in kept:
                outcome.spare[key] = copied
            for original, copy, place in pairs:
                outcome.inputs[place] = original.requires_grad_(copy.requires_grad)
                outcome.writes.pop(place, None)


def written_places(outcome: Outcome) -> list[int]:
    """Return the positions of the inputs that a run of eager has not left as they were."""
    # Version counters miss what operators on lists write; what is as before is the original.
    return [
        place
        for place, (before, after) in enumerate(zip(outcome.before, outcome.inputs, strict=True))
        if isinstance(before, torch.Tensor) and _key(before) != _key(after)
    ]


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    # Not by version counters: a write through .data counts none.
    parts = (
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each).split(_AT_ONCE)
        for each in (one, other)
    )
    return all(map(torch.equal, *parts))


def overwrite_free_memory(results: Sequence[Any]) -> None:
    """Write NaN into free memory of the sizes of the results: allocators hand it out next.

    A kernel that leaves memory unwritten: https://github.com/pytorch/pytorch/issues/195582
    """
    tensors = [each.value if isinstance(each, Gradient) else each for each in results]
    sizes = Counter(
        (tensor.device, tensor.untyped_storage().nbytes())
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    )
    for (device, size), count in sizes.items():
        # Of small blocks malloc keeps many free ones, and any of them may be next.
        wanted = count if size >= _SMALL else count + 64
        free = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(wanted)]
        for memory in free:
            memory.fill_(0xFF)  # NaN in every floating-point dtype
        del free


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


def _outcome(
    function: Callable[..., Any],
    copies: list[Any],
    owned: Sequence[torch.Tensor],
    change: Change | None,
    within: contextlib.AbstractContextManager[Any],
    *,
    keeps: bool,
) -> Outcome:
    # Nobody is warned here: a warning may be an error, and that is none of the graph's.
    called = function
    if isinstance(function, fx.GraphModule):
        called = reference_of(function, warns=False)
    values, count = copies[len(owned) :], len(owned)
    held = {place: each for place, each in enumerate(owned) if each.requires_grad}
    given = Given([*owned, *values], values, {}, {**sources_of(copies), **held})
    cotangents = Cotangents(mixed=True, change=change)
    with isolated(), within, saving_copies() if keeps else contextlib.nullcontext():
        found = outcome(called, given, cotangents, _read)
        found.inputs, found.outputs = copies, [each.value for each in found.outputs]
        found.mutated = frozenset(place for place in found.writes if place >= count)
        if found.error is None:
            with without_torch_function():
                found.sharing = sharing_of(copies, found.outputs)
    return found


def _read(returned: Any) -> tuple[int, list[Output]]:
    with without_torch_function():
        outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    # As programs do, which leave autocast before backward().
    for device in autocast_devices():
        torch.set_autocast_enabled(device, False)
    return len(outputs), list(map(Output, outputs))


def sharing_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> frozenset[tuple[str, str]]:
    """Return by name the pairs of an output and an input, or an earlier output, that overlap."""
    names = [f"input {place}" for place in range(len(inputs))]
    names += [f"output {place}" for place in range(len(outputs))]
    pairs = map(sorted, overlapping([*inputs, *outputs]))
    return frozenset((names[two], names[one]) for one, two in pairs if two >= len(inputs))


def overlapping(values: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the places of the tensors that overlap in memory, in pairs.

    The one that begins first is in front. What lies between two elements may belong to another
    view, but then in eager and compiled code alike.
    """
    spans = sorted(
        (str(value.device), begin, begin + size * value.element_size(), place)
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
        if (size := extent(value.shape, value.stride())) and (begin := value.data_ptr())
    )
    found = []
    for place, (device, _, end, number) in enumerate(spans):
        for its_device, its_begin, _, its_number in spans[place + 1 :]:
            if its_device != device or its_begin >= end:
                break
            found.append((number, its_number))
    return tuple(found)
