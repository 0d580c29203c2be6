"""Run code without side effects: what it does to random states, modules and memory is undone.

:func:`isolated` restores everything but the memory of tensors. For that there are two ways:
copies of the inputs (:mod:`torchguard.equivalence.copies`), which a compiled function can be
called with, and :class:`torchguard.equivalence.run.UndoMutations`, which sees the operators of a
function that runs eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torchguard._torch import (
    has_saved_tensors_hooks,
    set_version,
    version_of,
)

__all__ = [
    "ThreadModes",
    "buffers_restored",
    "isolated",
    "module_state_restored",
    "rng_generators",
    "rng_state_restored",
    "without_autocast_cache",
]


@contextlib.contextmanager
def isolated(modules: Iterable[torch.nn.Module] = ()) -> Iterator[Callable[[], bool]]:
    """Restore what the code in the scope changes, besides the memory of tensors.

    These are the RNG states of torch on every device, of Python and of numpy; the attributes,
    parameters, buffers, hooks and gradients of ``modules``; grad mode, autocast and its cache of
    weights. The caller's saved-tensors hooks are not called. Yields a function that says whether
    the code drew random numbers of torch.
    """
    with _modes_restored(), module_state_restored(modules), rng_state_restored() as has_drawn:
        # Else a cast that was kept before is taken for a weight that is perturbed here, and one
        # that is kept here for the weight of the caller.
        torch.set_autocast_cache_enabled(False)
        unseen: Any = contextlib.nullcontext()
        if has_saved_tensors_hooks():
            # torch has no switch for the caller's hooks; the innermost pair is the one it calls.
            # https://pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
            unseen = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with unseen:
            yield has_drawn


class ThreadModes(NamedTuple):
    """Grad mode and autocast, as this thread has them."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """Of each device, whether it is on and to which dtype it casts."""

    caches: bool
    nesting: int
    """How many autocast scopes are open; the outermost clears the cache of casts when it ends."""

    @classmethod
    def capture(cls) -> ThreadModes:
        """Read them."""
        autocast = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda", "xpu")
        )
        # Nothing reads the counter but what changes it.
        try:
            nesting = torch.autocast_increment_nesting() - 1
        finally:  # also if an interrupt comes as the call returns
            torch.autocast_decrement_nesting()
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), nesting)

    def restore(self) -> None:
        """Set them back, where a scope was left without its ``__exit__``, or in the middle of it.

        ``torch.autocast`` and ``torch.no_grad`` are written in Python: an interrupt in their
        ``__exit__`` leaves them on. The nodes of a graph that set them have no ``finally``.
        """
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.caches)
        while torch.autocast_increment_nesting() <= self.nesting:
            pass
        while torch.autocast_decrement_nesting() > self.nesting:
            pass


@contextlib.contextmanager
def _modes_restored() -> Iterator[None]:
    before = ThreadModes.capture()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def rng_state_restored() -> Iterator[Callable[[], bool]]:
    """Restore the RNG states of torch on every device, of Python and of numpy.

    Scopes that follow each other draw the same numbers. Yields a function that says whether
    torch has drawn any.
    """
    generators = rng_generators()
    states = [get_state() for get_state, _ in generators]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one

    def has_drawn() -> bool:
        pairs = zip(states, generators, strict=True)
        return any(not torch.equal(state, get_state()) for state, (get_state, _) in pairs)

    try:
        yield has_drawn
    finally:
        for state, (_, set_state) in zip(states, generators, strict=True):
            set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


_Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]


def rng_generators() -> list[_Generator]:
    """Return how to get and set the state of each default generator of torch.

    A device that was not used yet is left alone: to ask for its state would start it.
    """
    found: list[_Generator] = [(torch.get_rng_state, torch.set_rng_state)]
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu)
    for device in devices:
        for index in range(device.device_count()) if device.is_initialized() else ():
            get_state = functools.partial(device.get_rng_state, index)
            found.append((get_state, functools.partial(device.set_rng_state, device=index)))
    if torch.backends.mps.is_available():
        found.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    return found


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast cast every time: it neither keeps casts nor takes those it has kept."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# ---- modules ----


@contextlib.contextmanager
def module_state_restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the attributes, parameters, buffers and hooks that modules hold, and gradients.

    An attribute may say that there is a hook, so they go back together: transformers registers
    those that collect ``router_logits`` at the first call, and notes in an attribute that it did.
    """
    modules = list(modules)
    before = [
        (module, dict(module.__dict__), dict(module._parameters), dict(module._buffers))
        for module in modules
    ]
    hooks = [(module, type(module), _hooks_in(attributes)) for module, attributes, *_ in before]
    gradients = [(p, p.grad) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            _restore(module.__dict__, attributes)
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)
        for module, kind, registered in hooks:
            if type(module) is kind:  # a lazy module becomes another, and takes its hooks away
                for held, entries in registered:
                    _restore_in_order(held, entries)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _restore(changed: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Touch only what is different: another thread may be reading the rest."""
    for name in changed.keys() - before.keys():
        del changed[name]
    for name, value in before.items():
        if name not in changed or changed[name] is not value:
            changed[name] = value


def _hooks_in(attributes: dict[str, Any]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return each of the dicts in which a module holds hooks, and a copy of it."""
    return [
        (held, dict(held))
        for name, held in attributes.items()
        if name.endswith(_HOOKS) and isinstance(held, dict)
    ]


# Of torch.nn.Module: _forward_pre_hooks, _forward_hooks_with_kwargs, _state_dict_hooks, ...
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def _restore_in_order(changed: dict[int, Any], before: dict[int, Any]) -> None:
    """Likewise, where the order counts: hooks run in that in which they were registered."""
    removed = before.keys() - changed.keys()
    _restore(changed, before)
    if removed:
        for key, value in before.items():
            del changed[key]
            changed[key] = value


@contextlib.contextmanager
def buffers_restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Copy the values of buffers and copy them back.

    For what :class:`torchguard.equivalence.run.UndoMutations` can't see: compiled code, and a run
    on tensors without data, which writes to buffers that are real.
    """
    before = [
        (buffer, buffer.detach().clone(), version_of(buffer))
        for module in modules
        for buffer in module.buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffer, values, version in before:
            # An inference tensor is written in inference mode only.
            with torch.inference_mode(mode=buffer.is_inference()), torch.no_grad():
                buffer.copy_(values)
                if version is not None:
                    set_version(buffer, version)
