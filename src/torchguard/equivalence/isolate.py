"""Run a function without side effects: what it does to RNG states, modules and memory is undone.

:func:`isolated` restores everything but the memory of tensors. For that a compiled function is
called with copies (:mod:`torchguard.equivalence.copies`), and :class:`UndoMutations` sees the
operators of an eager one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
)
from torchguard.equivalence.operands import may_write, separated
from torchguard.equivalence.outcome import (
    Buffer,
    Given,
    Gradient,
    Outcome,
    Output,
    counted,
    send_backward,
)
from torchguard.state.process import RNGState, ThreadModes
from torchguard.state.tensors import Elements, Gradients
from torchguard.state.training import Modules


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


@contextlib.contextmanager
def noting(run: Any, name: str) -> Iterator[None]:
    """Keep what the scope raises in the attribute of a run: whatever it raises is its outcome."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as it says
        vars(run)[name] = error.with_traceback(None)


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


def _deterministic(func: Any, schema: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator deterministically, so far as that has a meaning."""
    name = schema.name.removeprefix("aten::")
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name in {"bernoulli", "bernoulli_"}:
        return args[0].fill_(1) if name.endswith("_") else torch.ones_like(args[0])
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" in names[: len(args)]:
        place = names.index("dropout_p")
        args = (*args[:place], 0.0, *args[place + 1 :])
    elif "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    result = func(*args, **kwargs)
    if name in {"rand", "rand_like", "uniform_", "exponential_"}:
        result.fill_(0.5)
    elif name in {"randn", "randn_like", "normal_", "normal"}:
        result.fill_(0.0)
    elif name in {"randint", "randint_like", "random_"}:
        bounds = {**dict(zip(names, args, strict=False)), **kwargs}
        result.fill_(bounds.get("low", bounds.get("from", 0)))
    return result


# ---- run it ----


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
    *,
    read: Callable[[Any], tuple[Any, list[Output]]],
    names: Mapping[int, str],
    modules: Sequence[torch.nn.Module] = (),
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
    change: Callable[[Sequence[Any]], None] | None = None,
) -> Outcome:
    """Call a function that may have a state of its own, and send a gradient backward.

    It runs deterministically and eagerly; memory, modules and RNG states are restored. ``read``
    returns the structure and the leaves of what it returns, ``names`` are those of the leaves of
    its arguments, and ``held`` returns tensors besides parameters that were there before the run.
    """
    watch = UndoMutations()
    buffers = _buffers_of(modules)
    with isolated(modules):
        try:
            with watch, OperandsFirst():
                returned = function(*given.args, **given.kwargs)
            structure, outputs = read(returned)
            tensors = [each.value for each in outputs if isinstance(each.value, torch.Tensor)]
            gradients: dict[Hashable, Gradient] = {}
            if any(tensor.requires_grad for tensor in tensors):
                with watch:
                    gradients = send_backward(
                        outputs,
                        given.sources,
                        names,
                        modules,
                        held,
                        retain_graph=True,
                        change=change,
                    )
            return Outcome(
                outputs=[_detached(each) for each in outputs],
                structure=structure,
                gradients=gradients,
                buffers=_written(buffers, watch.mutated),
                mutated=frozenset(
                    place
                    for place, value in enumerate(given.leaves)
                    if isinstance(value, torch.Tensor) and storage_address(value) in watch.mutated
                ),
            )
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
