"""bucketed() around an ``nn.Module``: a module that is the same in everything but its call."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.auto import write_plan
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.decorator.compile import compiler_for
from torchguard.bucketing.decorator.core import Core
from torchguard.bucketing.decorator.functions import outside
from torchguard.bucketing.decorator.options import Options
from torchguard.bucketing.decorator.stats import Report, Statistics, report_of, statistics_of
from torchguard.bucketing.decorator.warming import warm_up

__all__ = ["BucketedModule", "module_around"]


class BucketedModule:
    """What a bucketed module adds to its own class.

    It shares the ``__dict__`` of the module it was made from, so parameters, buffers, hooks,
    ``training`` and every attribute are the same for both. Hooks see real inputs and outputs.
    """

    __slots__ = ()

    _bucketed: tuple[torch.nn.Module, Options, Any, Core, Caller]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run the module's own forward, cut."""
        module, _, _, _, caller = self._bucketed
        if _torch.inside_compiled():  # which must not compile what is here
            return outside(caller, (module,), args, kwargs)
        return caller((module,), args, kwargs)

    def stats(self) -> Statistics:
        """Return what has run so far: calls, buckets, waste, compile time, graphs."""
        return statistics_of(self._bucketed[4], self._bucketed[3].ladders)

    def report(self, path: str | os.PathLike[str] | None = None) -> Report:
        """Return what other buckets would change; with ``path``, draw it (extra ``plot``)."""
        return report_of(self._bucketed[4], self._bucketed[3].ladders, path)

    def warmup(self, *example: Any, progress: bool | None = None, **keywords: Any) -> None:
        """Compile every bucket, with the example cut or padded to its size."""
        module, _, _, core, caller = self._bucketed
        warm_up(caller, core.ladders, (module,), example, keywords, progress=progress)

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Check these inputs now: raise unless padding leaves answer and gradients as they are.

        Raises:
            PaddingLeakError: it does not.
        """
        module, _, _, _, caller = self._bucketed
        caller.verify((module,), inputs, keywords)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the buckets, and the sizes seen, to a file for ``plan=``."""
        _, _, _, core, caller = self._bucketed
        write_plan(path, core.ladders, caller.seen)

    def compiled(self, settings: Callable[[Any, Any], dict[str, Any]]) -> Any:
        """Return this module itself, from now on with other settings for ``torch.compile``.

        Args:
            settings: makes them from what was wrapped and from ``compile=``.
        """
        module, options, given, _, _ = self._bucketed
        options = replace(options, compile=settings(given, options.compile))
        object.__setattr__(self, "_bucketed", _parts(module, options))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, options, given, _, _ = self._bucketed
        if given is not module:
            raise TypeError(
                "bucketed: a module that was compiled before can't be pickled: wrap the module "
                "itself and pass compile={...}"
            )
        return _module_again, (module, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module, options, given, _, _ = self._bucketed
        copied = copy.deepcopy(module, memo)
        if given is module:
            return module_around(copied, options)
        settings = _torch.compiler_of(given)
        assert settings is not None
        return module_around(settings[1](copied), options)


def module_around(given: torch.nn.Module, options: Options) -> torch.nn.Module:
    """Return a bucketed module that shares everything with the one given.

    Raises:
        TypeError: a scripted module, or a bucketed one.
        ValueError: it is compiled already, and ``compile=`` is given.
    """
    parts = _parts(given, options)
    module = parts[0]
    made: torch.nn.Module = object.__new__(_class_around(type(module)))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_bucketed", parts)
    object.__setattr__(made, "_compiled_call_impl", None)
    return made


def _parts(
    given: torch.nn.Module, options: Options
) -> tuple[torch.nn.Module, Options, Any, Core, Caller]:
    in_place = getattr(given, "_compiled_call_impl", None)
    found = _torch.compiler_of(in_place)
    if found is None:
        module, static, dynamic = compiler_for(given, options.compile)
    else:
        module, (_, static, dynamic) = given, compiler_for(in_place, options.compile)
    if isinstance(module, (BucketedModule, torch.jit.ScriptModule)):
        raise TypeError(f"bucketed: function is a {type(module).__name__}: wrap the module inside")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"bucketed: {type(given).__name__} is no module inside")
    own = type(module)
    name = f"{own.__qualname__}.forward()"
    if "forward" in module.__dict__:
        raise TypeError(
            f"bucketed: this {own.__name__} has a forward of its own, set on the object: wrap that "
            "function"
        )
    core = Core(own.forward, static, dynamic, options, bound=True, name=name)
    return module, options, given, core, core.caller()


_classes: dict[type, type[Any]] = {}


def _class_around(own: type[Any]) -> type[Any]:
    found = _classes.get(own)
    if found is None:
        names = {
            # Slots win over the __dict__ that is shared: what module.compile() has put there
            # would be called instead of us.
            "__slots__": ("_bucketed", "_compiled_call_impl"),
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
            "forward": _forward_like(own.forward),
            "stats": property(lambda self: functools.partial(BucketedModule.stats, self)),
        }
        metaclass: Any = type(own)
        found = _classes[own] = metaclass(own.__name__, (BucketedModule, own), names)
    return found


def _forward_like(forward: Any) -> Any:
    """Return our forward with the signature of another: Hugging Face's Trainer reads it."""
    ours = BucketedModule.forward
    copied = FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
    functools.update_wrapper(copied, forward, assigned=("__doc__", "__annotations__"), updated=())
    _torch.mark_untraced(copied)
    return copied


def _module_again(module: torch.nn.Module, options: Options) -> torch.nn.Module:
    return module_around(module, options)
