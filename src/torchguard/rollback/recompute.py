"""Activation checkpointing: the second run of a block begins from what the first one began with.

``torch.utils.checkpoint`` restores torch's RNG state, and nothing else:
https://github.com/pytorch/pytorch/issues/96136. A :class:`Checkpointed` takes a snapshot of the
state that the block reaches before the first run, restores it for the second run, and rolls back
what that run has written.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from itertools import chain
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from torchguard._events import record, warn_user
from torchguard._public import public
from torchguard._pytree import with_children
from torchguard._torch import (
    TorchDispatchMode,
    base_of,
    has_own_dispatch,
    is_recorded,
    patch,
    version_of,
)
from torchguard._torch.checkpointing import (
    GENERATOR,
    IMPORTED_BY,
    REENTRANT,
    called_by,
    generator_of_caller,
    given_to,
    run_to_the_end,
)
from torchguard._torch.eager import call_unseen, call_with_grad, members_of, versions_of
from torchguard.state.containers import restore_container, same_objects
from torchguard.state.process import RNGState, named_generators
from torchguard.state.training import hooks_of
from torchguard.state.walk import (
    ATOMS,
    DATA,
    MOST,
    generators_in,
    has_attributes,
    names_in,
    reachable,
    tensors_among,
    with_submodules,
)

_Entries = dict[Any, Any]


class Checkpointed:
    """A function that is checkpointed, and what it began from."""

    def __init__(
        self, function: Any, given: Iterable[Any], *, keeps_random: bool, is_reentrant: bool = False
    ) -> None:
        self.function = function
        self._is_reentrant = is_reentrant
        self._was_called = False
        self._watched: list[Tensor] = []
        self._versions: list[int | None] = []
        # Positional tensors are inputs: torch saves them, and looks at their versions itself.
        # Those given by name are in a dict here.
        given = [each for each in given if not isinstance(each, Tensor)]
        self._reached = reachable(function, given)
        tops = [each for each in self._reached if isinstance(each, nn.Module)]
        self._modules = with_submodules(tops)
        open_modules = [each for each in self._modules if not _is_closed(each)]
        # What runs: hooks and children, also those that are there for the first run only.
        self._code = [d for each in open_modules for d in (members_of(each)[2], *hooks_of(each))]
        self._code_copies = list(map(dict.copy, self._code))
        self._owners = [(each, type(each)) for each in open_modules]
        self._holders: list[tuple[Any, Collection[str]]] = []
        if is_reentrant:
            items = [(_items_of(each), ()) for each in self._reached]
            # An attribute that is a tensor already is one that each run computes anew, as the
            # weight of the old spectral_norm.
            of_modules = [
                (d, {name for name, value in d.items() if isinstance(value, Tensor)})
                for d in map(vars, open_modules)
            ]
            self._holders = [*of_modules, *items]
        # Each dict of a module, its entries now, and those that may be or hold state.
        dicts = [d for each in open_modules for d in (*members_of(each)[:2], vars(each))]
        self._before = [(d, d.copy(), _rare_values(d)) for d in dicts]
        rare = [value for *_, values in self._before for value in values]
        copied = {
            id(tensor): tensor
            for value in rare
            for tensor in _tensors_of(value)
            if not tensor.requires_grad and _is_state(tensor)
        }
        self._are_views = any(base_of(each) is not None for each in copied.values())
        copies = _copies_of(copied.values(), are_views=self._are_views)
        self._copies = dict(zip(copied, copies, strict=True))
        self._tuples = [
            value
            for value in rare
            if isinstance(value, tuple) and any(id(t) in copied for t in _tensors_of(value))
        ]
        self._objects = [*self._reached, *(v for v in rare if not isinstance(v, Tensor))]
        generators: list[Any] = []
        if keeps_random:
            # torch sets back its generator of the CPU, and those of the devices of the inputs.
            _, *others = named_generators().values()
            members = set(map(id, chain.from_iterable(map(members_of, open_modules))))
            attributes = chain.from_iterable(vars(each).values() for each in open_modules)
            held = (value for value in attributes if id(value) not in members)
            generators = [*others, *generators_in((*self._reached, *held))]
        self._random = RNGState.capture(generators)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the function, whose first call is the first run."""
        if self._was_called:  # or is being called: a block may take gradients of its own
            return self.run_again(*args, **kwargs)
        self._was_called = True
        self.let_end(generator_of_caller(1))
        result = self.function(*args, **kwargs)
        self.end()
        return result

    def let_end(self, generator: Generator[Any, Any, Any] | None) -> None:
        """Let torch run the block to its end the second time, if it calls rrelu."""
        kinds: set[Any] = {type(module) for module in self._modules}
        calls_rrelu = any(map(_names_rrelu, self._objects)) or any(map(_calls_rrelu, kinds))
        if calls_rrelu and generator is not None and not run_to_the_end(generator):
            warn_user(
                "rrelu-in-a-checkpoint",
                "a checkpointed block calls rrelu, and this PyTorch does not say where "
                "its second run stops: its gradients may be wrong. Call the block without "
                "checkpoint",
            )

    def end(self) -> None:
        """Note what the first run has left; generators that it has not drawn from are let go."""
        self._random = self._random.drawn_from()
        watched = {id(each): each for each in self._reached if isinstance(each, Tensor)}
        for module in self._modules:
            # Embeddings with a largest norm write their weight in each run, and mean to.
            if vars(module).get("max_norm") is None:
                watched.update((id(p), p) for p in members_of(module)[0].values() if p is not None)
        self._watched = list(watched.values())
        self._versions = versions_of(self._watched)

    def run_again(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function as if nothing had happened since its first run began."""
        versions = zip(self._watched, versions_of(self._watched), self._versions, strict=True)
        written = {id(tensor): tensor for tensor, now, before in versions if now != before}
        if written and isinstance(called_by(self.function), nn.Module):
            self._refuse(next(iter(written.values())))
        with _alone_with(self._modules):
            now = _values_of(self._code)
            # Nearly always no hook or child has come or gone. A lazy module has become another one,
            # and has taken away its hooks.
            is_same = same_objects(now, _values_of(self._code_copies))
            code = self._code_copies if is_same else list(map(dict.copy, self._code))
            may_differ = not is_same and all(type(m) is kind for m, kind in self._owners)
            held = [(entries, entries.copy()) for entries, *_ in self._before]
            random = RNGState.capture(self._random.generators)
            # Copies of the copies, which a second backward begins from again.
            copies = _copies_of(self._copies.values(), are_views=self._are_views)
            again: dict[int, Any] = dict(zip(self._copies, copies, strict=True))
            again |= {id(each): _with_copies(each, again) for each in self._tuples}
            try:
                if may_differ:
                    _restore_all(self._code, self._code_copies)
                for entries, before, rare in self._before:
                    _restore_entries(entries, before, again if rare else {})
                self._random.restore()
                if self._is_reentrant:
                    return self._run_and_look(args, kwargs)
                if not written:
                    return self.function(*args, **kwargs)
                # Of all that a method or a lambda reaches it may use a part: a model may be
                # stepped layer by layer while backward goes on.
                with _RefuseToUse(written, self._refuse):
                    return self.function(*args, **kwargs)
            finally:
                if not same_objects(_values_of(self._code), now):
                    _restore_all(self._code, code)
                for entries, values in held:
                    _restore_entries(entries, values)
                random.restore()

    def _run_and_look(self, args: Any, kwargs: Any) -> Any:
        """Warn of tensors that the first run, which records no graph, has left to other code."""
        before = self._left()
        result = self.function(*args, **kwargs)
        known = {id(each) for each in (*before, *tensors_among([result], DATA))}
        for each in self._left():
            if each.grad_fn is not None and id(each) not in known:
                warn_user(
                    "tensor-left-by-a-checkpoint",
                    f"safe_checkpoint: use_reentrant=True, and {_name_of(self.function)} leaves a "
                    f"tensor of shape {tuple(each.shape)} in a dict, a list or an attribute: what "
                    "is computed from it sends no gradient back to the block. Write "
                    "use_reentrant=False, or return the tensor; leave tensor.detach() there if it "
                    "is only looked at",
                )
                break
        return result

    def _left(self) -> list[Tensor]:
        """Return the tensors that other code finds where the block can leave them."""
        holders = (
            {n: v for n, v in holder.items() if n not in names} if names else holder
            for holder, names in self._holders
        )
        return tensors_among(holders, DATA)

    def _refuse(self, tensor: Tensor) -> None:
        place = next(i for i, each in enumerate(self._watched) if each is tensor)
        block = _name_of(self.function)
        names = (
            f"{name} of {type(top).__name__}"
            for top in self._reached
            if isinstance(top, nn.Module)
            for name, each in top.named_parameters()
            if each is tensor
        )
        what = f"{block} reads a tensor written since its first run"
        record("recompute_refused", "recompute", what, is_said=True)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}], "
            f"{next(names, 'a tensor that the function captured or was given by name')}, is at "
            f"version {version_of(tensor)}; expected version {self._versions[place]} instead. The "
            f"checkpointed block {block} runs a second time in backward, and needs what its first "
            "run has read: write after backward()"
        )


class _RefuseToUse(TorchDispatchMode):
    """A scope that calls ``refuse(tensor)`` before an operator takes one of these tensors."""

    supports_higher_order_operators = True

    def __init__(self, tensors: dict[int, Any], refuse: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._refuse = tensors, refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in (*args, *kwargs.values()):
            for value in each if isinstance(each, (list, tuple)) else (each,):
                if id(value) in self._tensors:
                    self._refuse(value)
        return func(*args, **kwargs)


# ---- what a block reaches ----


# The operator saves its noise before it has drawn it, and the early stop comes in between:
# https://github.com/pytorch/pytorch/issues/193671
_RRELU = {"rrelu", "rrelu_", "RReLU", "rrelu_with_noise", "rrelu_with_noise_"}


def _names_rrelu(value: Any) -> bool:
    """Whether a value is one of the functions above, or a function that calls one."""
    if not isinstance(value, FunctionType):
        return getattr(value, "__name__", None) in _RRELU
    return not _RRELU.isdisjoint(names_in(value.__code__))


@functools.lru_cache(maxsize=4096)
def _calls_rrelu(kind: Any) -> bool:
    """Whether a method of a class calls rrelu."""
    # Or a function of the same module that a method calls does.
    functions = [v for k in kind.__mro__ for v in vars(k).values() if isinstance(v, FunctionType)]
    return any(map(_names_rrelu, reachable(None, functions)))


def _is_closed(module: nn.Module) -> bool:
    """Whether the state of a module is not to be touched."""
    # The wrappers of torch.distributed note in it how far they are in gathering parameters; that
    # of TorchScript is in C++, in no dict.
    wrappers = {"FullyShardedDataParallel", "DistributedDataParallel"}
    return type(module).__name__ in wrappers or isinstance(module, torch.jit.ScriptModule)


_KINDS = {*ATOMS, torch.Size}
_CONTAINERS = {tuple, dict, OrderedDict, set, list, deque}
_FUNCTIONS = {FunctionType, MethodType, functools.partial}
_USUAL = _KINDS | _CONTAINERS | {nn.Parameter}


def _rare_values(entries: _Entries) -> list[Any]:
    """Return the values that are no number, string, container or parameter, or hold a tensor."""
    return [
        value
        for value in entries.values()
        if type(value) not in _USUAL or (type(value) is tuple and _tensors_of(value))
    ]


def _tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an attribute that is a tensor or a tuple."""
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in _tensors_of(each)]
    return [value] if isinstance(value, Tensor) else []


def _items_of(value: Any) -> Any:
    """Return what other code finds tensors in that a block leaves: a dict, a list, an object's."""
    if isinstance(value, (dict, list, set, deque)):
        return value if len(value) <= MOST else None
    if isinstance(value, (Tensor, functools.partial)) or not has_attributes(value):
        return None
    return vars(value)


def _name_of(function: Any) -> str:
    block = called_by(function)
    return getattr(block, "__qualname__", type(block).__name__)


def _with_copies(value: Any, copies: dict[int, Any]) -> Any:
    """Return a tuple whose tensors are replaced by their copies."""
    if isinstance(value, tuple):
        return with_children(value, {i: _with_copies(v, copies) for i, v in enumerate(value)})
    return copies.get(id(value), value)


def _is_state(value: Any) -> bool:
    """Whether a block that writes an attribute like this is run again with the value before."""
    # torch.func.functional_call puts tensors in the place of parameters.
    return (
        type(value) in _KINDS
        or type(value) in _FUNCTIONS  # a forward that is replaced for a call
        or isinstance(value, tuple)
        or (
            isinstance(value, Tensor)
            and not nn.parameter.is_lazy(value)
            and not _is_of_parameter(value)
        )
    )


def _is_of_parameter(value: Any) -> bool:
    # FSDP puts such views into modules while it has gathered their parameters.
    return isinstance(value, nn.Parameter) or (
        isinstance(value, Tensor) and isinstance(base_of(value), nn.Parameter)
    )


def _copies_of(tensors: Collection[Tensor], *, are_views: bool) -> list[Tensor]:
    # Selective checkpointing has a mode that knows no operators but the block's. What runs
    # operators of its own (a fake tensor, a DTensor) can't do without.
    if any(map(has_own_dispatch, tensors)):
        return call_with_grad(False, _clones, tensors, are_views)  # type: ignore[no-any-return]
    return call_unseen(_clones, tensors, are_views)  # type: ignore[no-any-return]


def _clones(tensors: Collection[Tensor], are_views: bool) -> list[Tensor]:
    """Copy tensors; views of one tensor share their memory afterwards too."""
    if not are_views:
        return [tensor.clone() for tensor in tensors]
    memo: dict[int, Any] = {}
    return [copy.deepcopy(tensor.detach(), memo) for tensor in tensors]


def _restore_all(dicts: list[_Entries], before: list[_Entries]) -> None:
    for entries, held in zip(dicts, before, strict=True):
        restore_container(entries, held)


def _values_of(dicts: list[_Entries]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _restore_entries(entries: _Entries, held: _Entries, copies: _Entries | None = None) -> None:
    """Restore the values in a module's dict; new names that hold state are deleted.

    With ``copies`` (by id of the original) only state is restored, copies in place of originals.
    """
    is_same = [*entries] == [*held] and all(map(is_, entries.values(), held.values()))
    if is_same and not copies:
        return
    for name in entries.keys() - held.keys():
        if _is_state(entries[name]):
            del entries[name]
    for name, value in held.items():
        if copies is not None and not _is_state(value):
            continue
        then = (copies or {}).get(id(value), value)
        now = entries.get(name, entries)
        if now is not then and not (_is_of_parameter(now) and _is_of_parameter(then)):
            entries[name] = then


_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_lock, _without_modules = threading.Lock(), threading.RLock()


@contextlib.contextmanager
def _alone_with(modules: list[nn.Module]) -> Iterator[None]:
    """Keep two threads from running a module again at the same time, whatever else they run."""
    with _lock:
        locks = [_locks.setdefault(each, threading.RLock()) for each in modules]
    with contextlib.ExitStack() as stack:
        # In one order, so that no thread waits for ever.
        for lock in sorted(locks, key=id) or [_without_modules]:
            stack.enter_context(lock)
        yield


# ---- guards ----


def guard_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the generator that ``checkpoint(use_reentrant=False)`` runs around a first run."""

    def checkpoint_generator(fn: Any, *given: Any, **options: Any) -> Generator[None, None, None]:
        if _is_inert() or not torch.is_grad_enabled():
            yield from original(fn, *given, **options)
            return
        values, keeps_random = given_to(given, options)
        block = Checkpointed(fn, values, keeps_random=keeps_random)
        generator = original(block.run_again, *given, **options)
        next(generator)
        block.let_end(generator)
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
            run_function = Checkpointed(
                run_function, args, keeps_random=preserve_rng_state, is_reentrant=True
            )
        return original(ctx, run_function, preserve_rng_state, *args)

    return forward


def _is_inert() -> bool:
    # What compiles a checkpointed block decides itself what is computed twice.
    return torch.compiler.is_compiling() or is_recorded()


def replacements() -> dict[str, patch.Make]:
    """Return what ``install("recompute")`` patches."""
    return {GENERATOR: guard_generator, REENTRANT: guard_reentrant}


IN_MODULES = {module: {path: guard_generator} for module, path in IMPORTED_BY.items()}


class _Enough(Exception):  # noqa: N818  ends a backward early
    """A block has begun its second run."""


class _Counting(nn.Module):
    """A block that notes what each run begins from, and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[int] = []
        self.runs = 0
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        self.began.append(self.runs)
        self.runs += 1
        if len(self.began) > 1:
            raise _Enough  # what comes next in torch's backward imports a compiler
        return x * self.factor


def runs_again_as_first(*, reentrant: bool) -> bool:
    """Whether a block under ``checkpoint`` begins in backward from what it has begun from before.

    Without reentrant autograd this imports Dynamo on most releases, which takes seconds.
    """
    # What is around the function imports Dynamo in either mode.
    checkpoint: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    block = _Counting()
    # In anomaly mode torch warns of the exception.
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = torch.ones((), dtype=torch.float64, device="cpu", requires_grad=True)
        with contextlib.suppress(_Enough):
            checkpoint(block, x, use_reentrant=reentrant).backward()
    return block.began == [0, 0] and block.runs == 1


@public
def safe_checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """Activation checkpointing whose recomputation reproduces the original forward.

    Equals ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)``:
    the same outputs, and gradients, buffers and random numbers are those of ``function(*args)``
    without checkpointing. ``checkpoint`` alone runs the block on what the first run has left: a
    batch counts twice in BatchNorm, and a block that reads what it writes, or that draws from
    Python, numpy or a generator of its own, has wrong gradients.

    The second run begins with the hooks and children of the first, with copies of the buffers, with
    the attributes that are numbers, strings, functions, tensors, tuples of these or None, and with
    the states of the generators (also those in lists, dicts and tuples); afterwards all of it is
    restored. A list, a file or a tensor in a closure that a block writes is written twice.

    Args:
        function: the block: a module, a method, a function.
        *args: what to call it with.
        use_reentrant: which of torch's two implementations runs it.
        **options: of ``checkpoint``, such as ``context_fn``, ``determinism_check``, ``debug``,
            ``preserve_rng_state`` and ``early_stop``; the rest are arguments of ``function``.
            With ``preserve_rng_state=False`` no RNG state is restored.

    Returns:
        What ``function`` returns.

    Raises:
        RuntimeError: in backward: a parameter, or a tensor that the function captured or was given
            by name, was written in place since the first run. The message names it.

    Upstream: https://github.com/pytorch/pytorch/issues/96136,
    https://github.com/pytorch/pytorch/issues/193671

    Cost:
        Copies of the buffers. Parameters and inputs are not copied.

    Example:
        >>> import torch, torchguard
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> x = torch.randn(4, 2, requires_grad=True)
        >>> torchguard.safe_checkpoint(norm, x).sum().backward()
        >>> norm.num_batches_tracked  # the batch counts once
        tensor(1)
    """
    if not callable(function):
        raise TypeError(
            f"safe_checkpoint: function is of type {type(function).__name__}, expected what to "
            "call: safe_checkpoint(layer, x), not safe_checkpoint(layer(x))"
        )
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    if not (_is_inert() or patch.patched(GENERATOR)) and torch.is_grad_enabled():
        keeps_random = options.get("preserve_rng_state", True)
        function = Checkpointed(
            function, [*args, options], keeps_random=keeps_random, is_reentrant=use_reentrant
        )
    return checkpoint(function, *args, use_reentrant=use_reentrant, **options)
