"""Run a function without side effects, and keep what the run leaves.

:func:`outcome` calls a function, collects what it has returned and written, and sends a gradient
backward. :func:`isolated` restores what that does besides, but for the memory of tensors: a
compiled function is called with copies (:mod:`torchguard.equivalence.copies`), and
:class:`UndoMutations` sees the operators of an eager one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torchguard._torch import (
    OPERATOR_CLASSES,
    TorchDispatchMode,
    has_saved_tensors_hooks,
    members_of,
    schema_of,
    set_version,
    version_of,
    without_torch_function,
)
from torchguard.equivalence.operands import separated
from torchguard.equivalence.reference import may_write
from torchguard.state.process import RNGState, ThreadModes
from torchguard.state.tensors import Elements, Gradients
from torchguard.state.training import Modules

# ---- what it leaves ----


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
    sources: Mapping[int, Any]
    """The tensors, or edges of these, at which gradients arrive, by position: leaves of autograd's
    graph in place of the caller's tensors, lest a gradient runs on into what made these."""


def sources_of(values: Iterable[Any]) -> dict[int, Any]:
    """Return by position where gradients of tensors arrive, whatever is written to them later."""
    edge = torch.autograd.graph.get_gradient_edge
    return {
        place: value if value.is_leaf else edge(value)
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }


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


# ---- one run ----


class Cotangents(NamedTuple):
    """What is sent backward, and who is asked for its gradient.

    It is positive, 0.5 to 1.5, so that sums over a padded dim do not cancel, and rises, or is
    ``mixed``.
    """

    names: Mapping[int, str] = {}
    """What the inputs are called, by position."""

    modules: Sequence[torch.nn.Module] = ()
    """Those whose names parameters have."""

    held: Callable[[], Iterable[torch.Tensor]] = tuple
    """Returns tensors besides parameters that were there before the run."""

    retain_graph: bool = False
    """Whether the graph of what was made before is left to the caller."""

    mixed: bool = False

    change: Callable[[Sequence[Any]], None] | None = None
    """Changes it before: the gradient of a linear function depends on nothing else."""

    within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    """A scope for the backward."""


def outcome(
    function: Callable[..., Any],
    given: Given,
    cotangents: Cotangents,
    read: Callable[[Any], tuple[Any, list[Output]]],
    *,
    raises: bool = False,
) -> Outcome:
    """Call a function, collect what it has returned and written, and send a gradient backward.

    ``read`` returns the structure and the leaves of what it returns, which are the outcome's
    outputs. What is raised is kept in the outcome too, unless it ``raises``.
    """
    found = Outcome()
    with without_torch_function():
        before = [
            (place, leaf, version_of(leaf), leaf.grad_fn)
            for place, leaf in enumerate(given.leaves)
            if isinstance(leaf, torch.Tensor)
        ]
    with contextlib.nullcontext() if raises else _noting(found, "error"):
        returned = function(*given.args, **given.kwargs)
    if found.error is not None:
        return found
    found.structure, found.outputs = read(returned)
    with without_torch_function():
        # None: inference tensors count no writes.
        found.writes = {
            place: 1 if version is None else now - version
            for place, leaf, version, _ in before
            if version is None or (now := version_of(leaf) or version) != version
        }
        # An input that was written to has a history now, and a gradient to send back through.
        written = [Output(leaf) for _, leaf, _, grad_fn in before if leaf.grad_fn is not grad_fn]
    with contextlib.nullcontext() if raises else _noting(found, "backward_error"):
        ends = [*found.outputs, *written]
        found.gradients = send_backward(ends, given.sources, cotangents)
    return found


@contextlib.contextmanager
def _noting(found: Outcome, name: str) -> Iterator[None]:
    """Keep what the scope raises: whatever it raises is its outcome."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as it says
        vars(found)[name] = error.with_traceback(None)


def send_backward(
    outputs: Sequence[Output], sources: Mapping[int, Any], cotangents: Cotangents
) -> dict[Hashable, Gradient]:
    """Send a fixed gradient backward to sources and to every other leaf; none is accumulated."""
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
    make = _mixed if cotangents.mixed else _rising
    sent = [counted(make(value, i), counts) for i, (value, counts) in enumerate(ends)]
    if cotangents.change is not None:
        cotangents.change(sent)
    values, keep = [each.value for each in ends], cotangents.retain_graph
    # Not backward(): that would add to .grad, and call the hooks for it.
    with cotangents.within:
        arrived = torch.autograd.grad(values, wanted, sent, retain_graph=keep, allow_unused=True)
    # The outer modules are the first: their names for a parameter are the longer ones.
    outer_last = reversed(cotangents.modules)
    known = {id(p): name for module in outer_last for name, p in module.named_parameters()}
    there = {*known, *(id(tensor) for tensor in cotangents.held())}
    gradients: dict[Hashable, Gradient] = {
        place: Gradient(value, cotangents.names.get(place, ""), source)
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


# ---- without side effects ----


@contextlib.contextmanager
def isolated(modules: Iterable[torch.nn.Module] = ()) -> Iterator[None]:
    """Restore what the code in the scope changes, besides the memory of tensors.

    These are the RNG states, the ``modules``, grad mode, autocast and its cache of weights. The
    caller's saved-tensors hooks are not called.
    """
    with module_state_restored(modules), rng_state_restored():
        modes = ThreadModes.capture()
        try:
            # Else a cast that was kept before is taken for a weight that is perturbed here, and one
            # that is kept here for the weight of the caller.
            torch.set_autocast_cache_enabled(False)
            hooks: Any = contextlib.nullcontext()
            if has_saved_tensors_hooks():
                # torch has no switch for the caller's hooks; the innermost pair is the one it
                # calls: https://pytorch.org/docs/stable/autograd.html
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with hooks:
                yield
        finally:
            modes.restore()


def saving_copies() -> contextlib.AbstractContextManager[None]:
    """Let autograd save copies: a backward is right then though what it needs is overwritten."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


@contextlib.contextmanager
def rng_state_restored() -> Iterator[None]:
    """Restore the RNG states."""
    states = RNGState.capture()
    try:
        yield
    finally:
        states.restore()


# ---- modules ----


@contextlib.contextmanager
def module_state_restored(
    modules: Iterable[torch.nn.Module], *, values: bool = False
) -> Iterator[None]:
    """Restore the attributes, members and hooks that modules hold, and which gradients.

    With ``values``, also the values of buffers, for what :class:`UndoMutations` can't see.
    """
    # An attribute may say that there is a hook: transformers notes those for ``router_logits``.
    modules = list(modules)
    if not modules:
        yield
        return
    snapshot = Modules(modules).snapshot()
    gradients = Gradients(p for module in modules for p in module.parameters(recurse=False))
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    elements = Elements(buffers) if values and buffers else None
    try:
        yield
    finally:
        if elements is not None:
            elements.restore()
        snapshot.restore(lazy=False)
        gradients.restore()


# ---- undo what a function writes ----


class UndoMutations(TorchDispatchMode):
    """A scope whose mutations of memory from outside can be undone, and that is deterministic.

    A storage that was there before is copied before the first operator that writes it. Dropout
    keeps everything: which elements it drops depends on the shape.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_overload = isinstance(func, OPERATOR_CLASSES)
        if not is_overload:  # a higher-order operator, such as flex_attention
            return func(*args, **kwargs)
        schema = schema_of(func)
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
            # native_batch_norm writes these two, and its schema does not mark them.
            if (info is None or not info.is_write) and argument.name not in _RUNNING:
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


_RUNNING = {"running_mean", "running_var"}


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


# What takes the place of random numbers, by operator, in place or not.
_CONSTANTS = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "exponential", "log_normal", "cauchy"), 0.5),
    **dict.fromkeys(("standard_gamma", "sample_dirichlet"), 0.5),
    **dict.fromkeys(("randn", "randn_like", "normal", "multinomial"), 0),
    **dict.fromkeys(("bernoulli", "poisson", "binomial", "geometric"), 1),
}


def _deterministic(func: Any, schema: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator deterministically, so far as that has a meaning."""
    name = schema.name.removeprefix("aten::").strip("_")
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" in names[: len(args)]:
        place = names.index("dropout_p")
        args = (*args[:place], 0.0, *args[place + 1 :])
    elif "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    before = args[0].clone() if name == "rrelu_with_noise" else None
    result = func(*args, **kwargs)
    if name in _CONSTANTS:
        result.fill_(_CONSTANTS[name])
    elif name in {"randint", "randint_like", "random"}:
        bounds = {**dict(zip(names, args, strict=False)), **kwargs}
        result.fill_(bounds.get("low", bounds.get("from", 0)))
    elif before is not None:  # the second argument keeps the slopes, for the backward
        args[1].copy_(torch.where(before > 0, 1.0, 0.25))
        result.copy_(before * args[1])
    return result


# ---- eagerly ----


class OperandsFirst(TorchFunctionMode):
    """Calls in this scope compute as if operands that overlap what is written were copied first.

    For runs in which no compiled function runs: Dynamo guards on modes. See ``reference.py``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out") is not None or _may_write(func):
            args, kwargs, _ = separated(func, args, kwargs)
        return func(*args, **kwargs)


# Most functions only read: each is asked about once.
_may_write = functools.lru_cache(maxsize=4096)(functools.partial(may_write, kwargs={}))


def run_undoing_mutations(
    function: Callable[..., Any],
    given: Given,
    cotangents: Cotangents,
    read: Callable[[Any], tuple[Any, list[Output]]],
) -> Outcome:
    """Call a function that may have a state of its own, and send a gradient backward.

    It runs deterministically and eagerly; memory, modules and RNG states are restored. A write to
    a leaf that is ``given`` counts as the mutation of an input.
    """
    watch, modules = UndoMutations(), cotangents.modules
    buffers = _buffers_of(modules)
    sent = cotangents._replace(retain_graph=True, within=watch)

    def run(*args: Any, **kwargs: Any) -> Any:
        with watch, OperandsFirst():
            return function(*args, **kwargs)

    with isolated(modules):
        try:
            # Without the leaves: the watch sees what is written.
            found = outcome(run, given._replace(leaves=[]), sent, read, raises=True)
            found.outputs = list(map(_detached, found.outputs))
            found.buffers = _written(buffers, watch.mutated)
            found.mutated = frozenset(
                place
                for place, value in enumerate(given.leaves)
                if isinstance(value, torch.Tensor) and storage_address(value) in watch.mutated
            )
            return found
        finally:
            watch.undo()


def _detached(output: Output) -> Any:
    if not isinstance(output.value, torch.Tensor):
        return output.value
    value = output.value.detach()
    return (value if output.counts is None else counted(value, output.counts)).clone()


_Held = tuple[str, torch.nn.Module, str, torch.Tensor]
"""A buffer: its full name, the module that has it, its name there."""


def _buffers_of(modules: Sequence[torch.nn.Module]) -> list[_Held]:
    # The outer modules are the first: their names for a buffer are the longer ones.
    outer_last = reversed(modules)
    names = {id(b): name for module in outer_last for name, b in module.named_buffers()}
    return [
        (names.get(id(buffer), key), module, key, buffer)
        for module in modules
        for key, buffer in members_of(module)[1].items()
        if buffer is not None
    ]


def _written(held: Iterable[_Held], mutated: set[int]) -> dict[str, Buffer]:
    """Copy the buffers whose memory was written, or that are another tensor now."""
    found = {}
    for name, module, key, buffer in held:
        now = members_of(module)[1].get(key)
        if now is not None and (now is not buffer or storage_address(buffer) in mutated):
            found[name] = Buffer(buffer, now.detach().clone())
    return found
