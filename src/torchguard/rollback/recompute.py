"""Activation checkpointing: the second run of a block begins from what the first one began with.

``torch.utils.checkpoint`` runs a block again in backward and restores torch's random state, and
nothing else: https://github.com/pytorch/pytorch/issues/96136. A :class:`Block` notes before the
first run what the block can see, gives it back for the time of the second run, and takes away
again what the second run has written.
"""

from __future__ import annotations

import functools
import pickle
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard._public import public
from torchguard._torch import is_recorded, is_view, base_of, patch
from torchguard._torch.checkpointing import (
    GENERATOR,
    IMPORTED_BY,
    REENTRANT,
    RefuseToUse,
    generator_of_caller,
    given_to,
    run_to_the_end,
)
from torchguard._torch.optimizers import call_unseen, members_of, versions_of
from torchguard.equivalence.isolate import all_generators

# ---- what a function reaches ----

_ATOMS = {int, float, bool, str, bytes, type(None), complex}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, functools.partial)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, tuple, set, deque)
_LONGEST = 1000
"""Of a longer container nothing is looked at: it holds data, not modules."""


class _Reached:
    """The modules, tensors and generators that a function and its arguments lead to."""

    def __init__(self, function: Any, given: Iterable[Any]) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, Tensor] = {}
        self.generators: dict[int, Any] = {}
        self.roots: list[nn.Module] = []
        self.has_rrelu = False
        self.is_module = isinstance(_called(function), nn.Module)
        """Whether the function is the call of a module, so that it uses the module's parameters."""

        self._seen: dict[int, Any] = {}
        # Positional tensors are inputs: torch saves them, and looks at their versions itself.
        waiting = [(each, True) for each in given if not isinstance(each, Tensor)]
        waiting.append((function, True))
        while waiting:
            node, open_objects = waiting.pop()
            if type(node) not in _ATOMS and id(node) not in self._seen:
                self._seen[id(node)] = node
                waiting += self._children(node, open_objects)
        self._seen.clear()

    def _children(self, node: Any, open_objects: bool) -> Iterable[tuple[Any, bool]]:  # noqa: FBT001
        found: Iterable[Any] = ()
        if isinstance(node, nn.Module):
            self.roots.append(node)
            self._take(node)
        elif isinstance(node, Tensor):
            self.tensors[id(node)] = node
        elif isinstance(node, _GENERATORS):
            self.generators[id(node)] = node
        elif isinstance(node, functools.partial):
            found = (node.func, *node.args, *node.keywords.values())
        elif isinstance(node, MethodType):
            found = (node.__self__, node.__func__)
        elif isinstance(node, FunctionType):
            found = self._of_function(node)
        elif isinstance(node, _CONTAINERS) and len(node) <= _LONGEST:
            found = node
        elif isinstance(node, dict) and len(node) <= _LONGEST:
            found = node.values()
        elif isinstance(node, BuiltinFunctionType):
            self.has_rrelu |= node.__name__.startswith("rrelu")
        elif open_objects and not isinstance(node, (type, type(random))) and hasattr(
            node, "__dict__"
        ):
            return [(value, False) for value in vars(node).values()]
        return [(value, open_objects) for value in found]

    def _of_function(self, function: FunctionType) -> Iterable[Any]:
        self.has_rrelu |= _calls_rrelu(function)
        cells: dict[str, Any] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            try:
                cells[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        if function.__qualname__ == "checkpoint_sequential.<locals>.run_function.<locals>.forward":
            return cells["functions"][cells["start"] : cells["end"] + 1]  # type: ignore[no-any-return]
        found = [*cells.values(), *(function.__defaults__ or ())]
        found += (function.__kwdefaults__ or {}).values()
        found.append(getattr(function, "__wrapped__", None))
        if not _is_torchs(function):
            names = _names_in(function.__code__)
            values = [function.__globals__.get(name) for name in names]
            # Of functions those beside it; what a library calls on the way has no state of ours.
            found += [
                value
                for value in values
                if not isinstance(value, FunctionType)
                or value.__globals__ is function.__globals__
            ]
        return found

    def _take(self, root: nn.Module) -> None:
        waiting = [root]
        while waiting:
            module = waiting.pop()
            if id(module) not in self.modules:
                self.modules[id(module)] = module
                self.has_rrelu |= _class_calls_rrelu(type(module))  # type: ignore[arg-type]
                waiting += [each for each in members_of(module)[2].values() if each is not None]

    def name_of(self, tensor: Tensor) -> str:
        """Return what a message calls a tensor that one of these functions uses."""
        for root in self.roots:
            for name, each in (*root.named_parameters(), *root.named_buffers()):
                if each is tensor:
                    return f"{name} of {type(root).__name__}"
        return "a tensor that the function captured"


def _called(function: Any) -> Any:
    """Return the module that a function is the call of, or the function."""
    while isinstance(function, functools.partial):
        function = function.func
    names = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
    if isinstance(function, MethodType) and function.__name__ in names:
        return function.__self__
    return function


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).partition(".")[0] == "torch"


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, nested))


# The operator saves its noise before it has drawn it, and the early stop comes in between:
# https://github.com/pytorch/pytorch/issues/193671
@functools.lru_cache(maxsize=4096)
def _class_calls_rrelu(kind: type) -> bool:
    functions = (value for each in kind.__mro__ for value in vars(each).values())
    return any(_calls_rrelu(each) for each in functions if isinstance(each, FunctionType))


def _calls_rrelu(function: FunctionType, seen: frozenset[CodeType] = frozenset()) -> bool:
    names = _names_in(function.__code__)
    if not names.isdisjoint(_RRELU):
        return True
    if _is_torchs(function):
        return False
    seen |= {function.__code__}
    others = (function.__globals__.get(name) for name in names)
    return any(
        _calls_rrelu(each, seen)
        for each in others
        if isinstance(each, FunctionType) and each.__code__ not in seen
    )


_RRELU = {"rrelu", "rrelu_", "RReLU", "rrelu_with_noise", "rrelu_with_noise_"}


# ---- a block ----


class Block:
    """A function that is checkpointed, with what it began from."""

    def __init__(self, function: Any, given: Iterable[Any], *, keeps_random: bool) -> None:
        self.function = function
        self.reached = _Reached(function, given)
        self._keeps_random = keeps_random
        self._has_begun = False
        self._watched: list[Tensor] = []
        self._versions: list[int | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the function, whose first call is the first run."""
        if self._has_begun:
            return self.run_again(*args, **kwargs)
        self.begin()
        if self.reached.has_rrelu:
            run_to_the_end(generator_of_caller(1))
        result = self.function(*args, **kwargs)
        self.end()
        return result

    def begin(self) -> None:
        """Note what the first run begins from."""
        self._has_begun = True
        self._entries = [
            (entries, dict.fromkeys(entries), _restorable(entries))
            for module in self.reached.modules.values()
            for entries in _state_of(module)
        ]
        values = (value for *_, state in self._entries for value in state.values())
        tensors = {id(value): value for value in values if _is_copied(value)}
        self._copies = dict(zip(tensors, call_unseen(_copies_of, tensors.values()), strict=True))
        for _, _, state in self._entries:
            for name, value in state.items():
                state[name] = self._copies.get(id(value), value)
        generators: list[Any] = []
        if self._keeps_random:
            # torch sets back its generator of the CPU, and those of the devices of the inputs.
            generators += all_generators()[1:]
            generators += map(_of_generator, self.reached.generators.values())
            for module in self.reached.modules.values():
                held = (value for value in vars(module).values() if isinstance(value, _GENERATORS))
                generators += map(_of_generator, held)
        self._random = [(get, set_, get()) for get, set_ in generators]

    def end(self) -> None:
        """Note after the first run what it has left; what it has not drawn from is let go."""
        self._random = [each for each in self._random if not _same(each[0](), each[2])]
        watched = dict(self.reached.tensors)
        for module in self.reached.modules.values():
            # Embeddings with a largest norm write their weight in each run, and mean to.
            if getattr(module, "max_norm", None) is None:
                watched.update((id(p), p) for p in members_of(module)[0].values() if p is not None)
        self._watched = list(watched.values())
        self._versions = versions_of(self._watched)

    def run_again(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function as if nothing had happened since its first run began."""
        moved = self._written_since()
        if moved and self.reached.is_module:
            self._refuse(next(iter(moved.values())))
        with _lock_of(self.reached.modules):
            before = [(entries, dict(entries)) for entries, *_ in self._entries]
            drawn = [(set_, get()) for get, set_, _ in self._random]
            try:
                self._go_back()
                if not moved:
                    return self.function(*args, **kwargs)
                # Of all that a method or a lambda reaches it may use a part: a model may be
                # stepped layer by layer while backward goes on.
                with RefuseToUse(moved, self._refuse):
                    return self.function(*args, **kwargs)
            finally:
                for entries, held in before:
                    _put_back(entries, held, held)
                for set_, state in drawn:
                    set_(state)

    def _go_back(self) -> None:
        copies = self._copies.values()
        fresh = {
            id(copy): again
            for copy, again in zip(copies, call_unseen(_copies_of, copies), strict=True)
        }
        for entries, names, state in self._entries:
            again = {name: fresh.get(id(value), value) for name, value in state.items()}
            _put_back(entries, names, again)
        for _, set_, state in self._random:
            set_(state)

    def _written_since(self) -> dict[int, Tensor]:
        now = versions_of(self._watched)
        if now == self._versions:
            return {}
        pairs = zip(self._watched, now, self._versions, strict=True)
        return {id(tensor): tensor for tensor, new, old in pairs if new != old}

    def _refuse(self, tensor: Tensor) -> None:
        position = next(i for i, each in enumerate(self._watched) if each is tensor)
        function = _called(self.function)
        name = getattr(function, "__qualname__", type(function).__name__)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}], {self.reached.name_of(tensor)}, "
            f"is at version {tensor._version}; expected version {self._versions[position]} "
            f"instead. The checkpointed block {name} runs a second time in backward and needs the "
            "value of its first run: write to it after backward()."
        )


def _state_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts in which a module holds what a run may write: buffers and attributes."""
    # The wrappers of torch.distributed note there how far they are in gathering parameters.
    if type(module).__name__ in {"FullyShardedDataParallel", "DistributedDataParallel"}:
        return []
    return [members_of(module)[1], vars(module)]


_KINDS = {*_ATOMS, tuple, torch.Size}


def _restorable(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if _is_state(value)}


def _is_state(value: Any) -> bool:
    return type(value) in _KINDS or (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and not nn.parameter.is_lazy(value)
        and not _is_part_of_parameter(value)
    )


def _is_part_of_parameter(value: Any) -> bool:
    # FSDP puts such views into modules while it has gathered their parameters.
    return isinstance(value, Tensor) and is_view(value) and isinstance(base_of(value), nn.Parameter)


def _is_copied(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def _copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _put_back(entries: dict[str, Any], names: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Let a module hold these values again, and none of the others of their kind."""
    for name in [name for name in entries if name not in names and _is_state(entries[name])]:
        del entries[name]
    for name, value in held.items():
        now = entries.get(name, entries)
        if now is not value and not _is_part_of_parameter(now) and not _is_part_of_parameter(value):
            entries[name] = value


_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_no_modules = threading.RLock()
_making = threading.Lock()


def _lock_of(modules: dict[int, nn.Module]) -> Any:
    """Return what keeps two threads from running the same modules again at the same time."""
    module = next(iter(modules.values()), None)
    if module is None:
        return _no_modules
    with _making:
        return _locks.setdefault(module, threading.RLock())


def _of_generator(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return how to read where a generator stands, and how to set it back."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    return pickle.dumps(now) == pickle.dumps(before)


# ---- guards ----


def guard_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the generator that ``checkpoint(use_reentrant=False)`` runs around a first run."""

    def checkpoint_generator(fn: Any, *given: Any, **options: Any) -> Generator[None, None, None]:
        if _is_inert() or not torch.is_grad_enabled():
            yield from original(fn, *given, **options)
            return
        values, keeps_random = given_to(given, options)
        block = Block(fn, values, keeps_random=keeps_random)
        block.begin()
        generator = original(block.run_again, *given, **options)
        next(generator)
        if block.reached.has_rrelu:
            run_to_the_end(generator)
        try:
            yield
        except BaseException as error:
            try:
                generator.throw(error)
            except StopIteration:  # a context of the user's has taken the exception
                return
            raise
        next(generator, None)
        block.end()

    return checkpoint_generator


def guard_reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard ``CheckpointFunction.forward``, which ``checkpoint(use_reentrant=True)`` applies."""

    def forward(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        if not _is_inert() and any(ctx.needs_input_grad):
            run_function = Block(run_function, args, keeps_random=preserve_rng_state)
        return original(ctx, run_function, preserve_rng_state, *args)

    return forward


def _is_inert() -> bool:
    # What compiles a checkpointed block decides itself what is computed twice.
    return torch.compiler.is_compiling() or is_recorded()


def replacements() -> dict[str, patch.Make]:
    """Return what ``install("recompute")`` patches."""
    return {GENERATOR: guard_generator, REENTRANT: guard_reentrant}


IN_MODULES = {module: {path: guard_generator} for module, path in IMPORTED_BY.items()}


def not_needed() -> str | None:
    """Count in a checkpointed block."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, device="cpu"))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.sin()

    block = Count()
    with torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    if block.calls.item() == 1:
        return "the second run of a checkpointed block counts no batch twice on this torch"
    return None


@public
def safe_checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """Checkpoint a block whose second run, in backward, is the first one again.

    Equals ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)``:
    the same outputs, and gradients, buffers and random numbers are those of ``function(*args)``
    without checkpointing. ``checkpoint`` alone runs the block on what the first run has left: a
    batch counts twice in BatchNorm, and a block that reads what it writes, or that draws from
    Python, numpy or a generator of its own, has wrong gradients.

    The second run begins with copies of the buffers, with the attributes of the modules that are
    numbers, strings, tensors, tuples or None, and with the states of the generators; afterwards
    all are as they were before it. Parameters and inputs are not copied. What a block writes
    elsewhere (a list, a file, a tensor in a closure) it writes twice.

    Args:
        function: the block: a module, a method, a function.
        *args: what to call it with.
        use_reentrant: which of torch's two implementations runs it.
        **options: of ``checkpoint``, such as ``context_fn``, ``determinism_check``, ``debug``,
            ``preserve_rng_state`` and ``early_stop``; the rest are arguments of ``function``.
            With ``preserve_rng_state=False`` no random state is restored.

    Returns:
        What ``function`` returns.

    Raises:
        RuntimeError: in backward: a parameter, or a tensor that the function captured, was
            written in place since the first run. The message names it.

    Upstream: https://github.com/pytorch/pytorch/issues/96136,
    https://github.com/pytorch/pytorch/issues/193671
    """
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    if not (_is_inert() or patch.patched(GENERATOR)) and torch.is_grad_enabled():
        keeps_random = options.get("preserve_rng_state", True)
        function = Block(function, [*args, *options.values()], keeps_random=keeps_random)
    return checkpoint(function, *args, use_reentrant=use_reentrant, **options)
