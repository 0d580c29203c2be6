"""What bucketed() returns for an ``nn.Module``: a module that shares everything with it."""

from __future__ import annotations

import copy
import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.call import NOT_TRACING, Caller, Methods, Settings
from torchguard.bucketing.decorator.compiled import compiler_for

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import Options

    class _AnyModule(torch.nn.Module):
        """To type checkers a bucketed module has every attribute: it is one of its class."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _AnyModule = object


class BucketedModule(Methods, _AnyModule):
    """What a bucketed module adds to its own class.

    It shares the ``__dict__`` of its module: parameters, buffers, hooks, ``training`` and every
    attribute are the same for both. Hooks see real inputs and outputs.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> model = bucketed(torch.nn.ReLU(), dims=({0: "t"},), buckets=Buckets([4, 8]))
        >>> model(torch.ones(3))
        tensor([1., 1., 1.])
        >>> isinstance(model, torch.nn.ReLU), model.stats().calls
        (True, 1)
    """

    __slots__ = ()

    # transformers evaluates the annotations of each class of a model, so these have to be there.
    _bucketed: tuple[torch.nn.Module, Any, Any, Caller]
    """The module, the options, what was given (compiled or not), and what calls."""

    def __init_subclass__(cls) -> None:
        """Skip the user's own __init_subclass__: this wrapper is not a class to register."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run the module's own forward, slice."""
        caller = self._bucketed[3]
        if _torch.frame_callback() not in NOT_TRACING:
            return caller.called_from_compiled_code(args, kwargs)
        return caller(args, kwargs)

    def _bucketed_caller(self) -> Caller:
        return self._bucketed[3]

    def __torchguard_compile__(self, settings: Settings) -> Any:
        """Return this module itself, from now on with other settings for ``torch.compile``."""
        module, options, given, _ = self._bucketed
        compile_ = settings(given, options["compile"])
        changed: Any = {**options, "compile": compile_}
        object.__setattr__(self, "_bucketed", _parts(module, changed))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, options, given, _ = self._bucketed
        if given is not module:
            raise TypeError(
                "bucketed: a module that was compiled before can't be pickled: wrap the module "
                "itself and pass compile={...}"
            )
        return module_around, (module, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module, options, given, _ = self._bucketed
        copied = copy.deepcopy(module, memo)
        if given is module:
            return module_around(copied, options)
        settings = _torch.compiler_of(given)
        assert settings is not None
        return module_around(settings[1](copied), options)


def module_around(given: torch.nn.Module, options: Options) -> BucketedModule:
    """Return a bucketed module that shares everything with the one given."""
    parts = _parts(given, options)
    module = parts[0]
    # Not by its constructor, which would make parameters of its own.
    own: Any = type(module)
    made: BucketedModule = object.__new__(_class_around(own))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_bucketed", parts)
    _torch.forget_compiled_in_place(made)
    return made


def _parts(
    given: torch.nn.Module, options: Options
) -> tuple[torch.nn.Module, Options, Any, Caller]:
    in_place = _torch.compiled_in_place(given)
    found = _torch.compiler_of(in_place)
    if found is None:
        module, compiler = compiler_for(given, options["compile"])
    else:
        module, (_, compiler) = given, compiler_for(in_place, options["compile"])
    if not isinstance(module, torch.nn.Module) or isinstance(module, BucketedModule):
        raise TypeError(
            f"bucketed: function is a {type(given).__name__} around an object of type "
            f"{type(module).__name__}, expected one around an nn.Module that is not bucketed yet"
        )
    own = type(module)
    if "forward" in module.__dict__:
        raise TypeError(
            f"bucketed: this {own.__name__} has a forward of its own, set on the object: wrap that "
            "function"
        )
    return module, options, given, Caller(own.forward, compiler, options, (module,))


@functools.cache
def _class_around(own: type[Any]) -> Any:
    names = {
        # Slots win over the __dict__ that is shared: what module.compile() has put there would be
        # called instead of us.
        "__slots__": ("_bucketed", _torch.COMPILED_IN_PLACE),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "forward": _forward_like(own.forward),
        # Over what verified() has put into the __dict__, too.
        "stats": property(lambda self: functools.partial(BucketedModule.stats, self)),
    }
    metaclass: Any = type(own)
    return metaclass(own.__name__, (BucketedModule, own), names)


def _forward_like(forward: Any) -> Any:
    """Return our forward with the signature of another: Hugging Face's Trainer reads it."""
    ours = BucketedModule.forward
    # A copy, so that each class has a signature of its own on it.
    copied = FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
    functools.update_wrapper(copied, forward, assigned=("__doc__", "__annotations__"), updated=())
    _torch.mark_untraced(copied)
    return copied
