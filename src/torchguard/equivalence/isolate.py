"""Run a function on the side: nobody else sees that it ran."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from torchguard import _torch
from torchguard.bucketing.decorator.trees import parts
from torchguard.equivalence.perturb import nudge

__all__ = [
    "Undone",
    "address",
    "buffers_kept",
    "eager",
    "forked_random_state",
    "modules_of",
    "other_last_digits",
    "python_state_kept",
    "quiet",
    "reachable",
    "tensors_around",
]


def reachable(function: Any, arguments: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the modules a function can reach, without what is inside them.

    Arguments, what it is bound to, its closure and the globals it names, and what is right
    inside these: a model in a list, or an attribute of the object a method belongs to.
    """
    found = {
        id(each): each
        for each in _candidates(function, arguments)
        if isinstance(each, torch.nn.Module)
    }
    return list(found.values())


def tensors_around(function: Any, arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors a function can reach, as :func:`reachable` the modules."""
    return [each for each in _candidates(function, arguments) if isinstance(each, torch.Tensor)]


def _candidates(function: Any, arguments: Iterable[Any]) -> list[Any]:
    candidates = [*_around(function), *arguments]
    for candidate in list(candidates):
        inside = parts(candidate)
        if inside is not None:
            candidates += [part for _, part in inside]
        elif not isinstance(candidate, (type, torch.Tensor, torch.nn.Module, ModuleType)):
            candidates += vars(candidate).values() if hasattr(candidate, "__dict__") else ()
    return candidates


def _around(function: Any) -> list[Any]:
    """Return a function and what it holds."""
    if isinstance(function, functools.partial):
        return [*_around(function.func), *function.args, *function.keywords.values()]
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    found = [function, owner]
    code = getattr(function, "__code__", None)
    if code is not None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                found.append(cell.cell_contents)
        found += [function.__globals__.get(name) for name in code.co_names]
    return found


def modules_of(function: Any, arguments: Iterable[Any]) -> list[torch.nn.Module]:
    """Return every module a function can reach, those inside others too."""
    found = {id(m): m for top in reachable(function, arguments) for m in top.modules()}
    return list(found.values())


@contextlib.contextmanager
def python_state_kept(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put back the attributes, parameters, buffers and hooks that modules hold, and gradients.

    An attribute may say that there is a hook, so they go back together: transformers registers
    those that collect ``router_logits`` at the first call, and notes in an attribute that it did.
    """
    modules = list(modules)
    kept = [
        (module, dict(module.__dict__), dict(module._parameters), dict(module._buffers))
        for module in modules
    ]
    hooks = [(module, type(module), _hooks_in(attributes)) for module, attributes, *_ in kept]
    gradients = [(p, p.grad) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in kept:
            _put_back(module.__dict__, attributes)
            _put_back(module._parameters, parameters)
            _put_back(module._buffers, buffers)
        for module, kind, registered in hooks:
            if type(module) is kind:  # a lazy module becomes another, and takes its hooks away
                for held, before in registered:
                    _put_back_in_order(held, before)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _put_back(changed: dict[Any, Any], before: dict[Any, Any]) -> None:
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


def _put_back_in_order(changed: dict[int, Any], before: dict[int, Any]) -> None:
    """Likewise, where the order counts: hooks run in that in which they were registered."""
    removed = before.keys() - changed.keys()
    _put_back(changed, before)
    if removed:
        for key, value in before.items():
            del changed[key]
            changed[key] = value


@contextlib.contextmanager
def buffers_kept(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Copy buffers and copy them back: for what :class:`Undone` does not see.

    Compiled code, and a run on tensors without data, which writes to buffers that are real.
    """
    kept = [
        (buffer, buffer.detach().clone(), _torch.version_of(buffer))
        for module in modules
        for buffer in module.buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffer, before, version in kept:
            # An inference tensor is written in inference mode only.
            with torch.inference_mode(mode=buffer.is_inference()), torch.no_grad():
                buffer.copy_(before)
                if version is not None:
                    _torch.set_version(buffer, version)


@contextlib.contextmanager
def other_last_digits(tensors: Iterable[torch.Tensor], seed: int) -> Iterator[bool]:
    """Let weights have other last digits for a while; those that are unusual keep theirs.

    In place, because nobody knows who else holds them: what another thread writes to them
    meanwhile is lost. Shared memory is left alone, lest the same happen to another process.
    Yields whether any weight has changed.
    """
    usual = {
        id(tensor): tensor
        for tensor in tensors
        if type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.is_shared())
    }
    # All of them before the first is changed: some lie in the same memory.
    kept = [(t, t.detach().clone(), _torch.version_of(t)) for t in usual.values()]
    try:
        with torch.no_grad():
            for tensor, _, _ in kept:
                with contextlib.suppress(RuntimeError):  # it overlaps itself, or is conjugate
                    nudge(tensor.detach(), seed)
        with _torch.without_autocast_cache():  # it holds the weights as they were
            yield any(not torch.equal(tensor, before) for tensor, before, _ in kept)
    finally:
        with torch.no_grad():
            for tensor, before, _ in kept:
                with contextlib.suppress(RuntimeError):  # likewise, and it is as it was
                    tensor.detach().copy_(before)
            for tensor, _, version in kept:
                if version is not None:
                    _torch.set_version(tensor, version)


@contextlib.contextmanager
def forked_random_state() -> Iterator[None]:
    """Draw random numbers that nobody misses afterwards: of torch, numpy and Python.

    So scopes that follow each other draw the same ones.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - what others use
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Let compiled functions inside run uncompiled; the setting is the whole process's."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging pages about an operation that fails without data."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


class Undone(_torch.TorchDispatchMode):
    """A scope whose writes to memory from outside are undone, and in which nothing is random.

    Every operator is seen. Memory that was there before is copied before the first write to it
    and copied back at the end. Dropout keeps everything: which elements it drops depends on
    the shape, so with it a padded run could never equal the real one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        """The names of the operators that ran."""
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schemas = _torch.schemas_of(func)
        if schemas is None:  # a higher-order operator, such as flex_attention
            return func(*args, **kwargs)
        schema = schemas[0]
        self.seen.add(schema.name)
        given = _tensors((*args, *kwargs.values()))
        self._save(schema, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = _without_chance(func, schema, args, kwargs)
        else:
            result = func(*args, **kwargs)
        outside = {address(tensor) for tensor in given}
        self._own.update({address(made) for made in _tensors((result,))} - outside)
        return result

    @property
    def written(self) -> set[int]:
        """Where memory from outside begins that was written."""
        return set(self._saved)

    def undo(self) -> None:
        """Copy back what was written."""
        for storage, copied in self._saved.values():
            storage.copy_(copied)
        for tensor, version in reversed(self._versions):
            if version is not None:
                _torch.set_version(tensor, version)

    def _save(self, schema: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(schema.arguments):
            info = argument.alias_info
            written = (info is not None and info.is_write) or argument.name in _WRITTEN_UNSAID
            if not written:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in _tensors((value,)):
                begin = address(tensor)
                if begin == 0 or begin in self._own:
                    continue
                self._versions.append((tensor, _torch.version_of(tensor)))
                if begin not in self._saved:
                    storage = tensor.untyped_storage()
                    self._saved[begin] = (storage, storage.clone())


# The schema of native_batch_norm does not say that it writes them.
_WRITTEN_UNSAID = {"running_mean", "running_var"}


def address(tensor: torch.Tensor) -> int:
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


def _without_chance(func: Any, schema: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator with its chance taken out, so far as that has a meaning."""
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
