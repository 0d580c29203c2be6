"""The table of guards: what each replaces, and when it is needed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType
from typing import Any, Literal

from torchguard._torch import (
    DYNAMO,
    has_python_out,
    original_of,
    patch,
    paths_behind_python,
)
from torchguard.assignment.traced import (
    SETITEM_SWITCH,
    setitem_replacements,
)
from torchguard.checkpoint.loading import guard_load, guard_module_load, guard_optimizer_load
from torchguard.checkpoint.saving import guard_commit, guard_save, guard_serialize_file
from torchguard.checkpoint.ties import guard_to_empty
from torchguard.checks import api as checks
from torchguard.checks.calls import SWITCH as CHECKS_SWITCH
from torchguard.interop import numpy_memory
from torchguard.rollback import out, overlap, recompute, resize
from torchguard.rollback.out import guard_out
from torchguard.rollback.resize import (
    guard_metadata,
    guard_resize_,
    guard_resize_as_,
    guard_set_,
)
from torchguard.verification.decorator import guard_compile

GuardName = Literal[
    "all", "checks", "load", "numpy", "out", "overlap",
    "recompute", "resize", "save", "setitem", "verified",
]  # fmt: skip
"""The names that ``install()`` takes: the keys of :data:`GUARDS` and ``"all"``."""


@dataclass(frozen=True)
class Guard:
    """What ``install(name)`` and ``guarded(name)`` do."""

    name: str
    replacements: Callable[[], patch.Replacements]
    """Paths to replace, each with what makes the replacement from the original."""

    tried_by_self_test: bool = False
    """Whether the guard is not needed if its self-tests pass without it; else it always is."""

    in_modules: Mapping[str, patch.Replacements] = field(default_factory=dict)
    """Paths to replace as soon as a module is imported, by that module's name."""

    changed: Callable[[], None] = lambda: None
    """Called after the guard's paths were replaced or put back."""

    ended: Callable[..., None] | None = None
    """Called with ``failed=`` at the end of a scope and of the installation; may raise."""

    switch: patch.Switch | None = None
    """What the guard's replacements read; without one they are wrapped in what reads it."""

    @functools.cached_property
    def on(self) -> patch.Switch:
        """Count the installations and the open scopes."""
        return patch.Switch() if self.switch is None else self.switch

    def paths(self) -> patch.Replacements:
        """Return what to replace now: in torch, and in the modules that are imported."""
        found = dict(self.replacements())
        for name in self.in_modules:
            if name in sys.modules:
                found.update(self.in_modules[name])
        if self.switch is not None:
            return found
        return {path: _if_on(make, self.on) for path, make in found.items()}

    def waits(self) -> bool:
        """Whether a module is not imported yet in which it replaces something."""
        return any(name not in sys.modules for name in self.in_modules)


@functools.cache  # what patch has made of one is used again
def _if_on(make: Any, switch: patch.Switch) -> patch.Make:
    """Return what makes a replacement that does nothing while its guard is off."""

    def make_if_on(original: Callable[..., Any]) -> Callable[..., Any]:
        guarded = make(original)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (guarded if switch.on else original)(*args, **kwargs)

        return replacement

    return make_if_on


_RESIZE: patch.Replacements = {
    "torch.Tensor.resize_": guard_resize_,
    "torch.Tensor.resize_as_": guard_resize_as_,
    "torch.Tensor.set_": guard_set_,
    "torch.resize_as_": guard_resize_as_,
    # The other ways to change a shape that leave a corrupt tensor behind when they fail.
    **dict.fromkeys(
        ("torch.Tensor.as_strided_", "torch.as_strided_", "torch.Tensor.addbmm_"), guard_metadata
    ),
}


_OUT_NAMESPACES = overlap.NAMESPACES

# What torch.norm, torch.tensordot and torch.chain_matmul, written in Python, hand
# their out to. (torch.nn.functional.normalize hands it to torch.div.)
_OUT_BEHIND_PYTHON = ("norm", "frobenius_norm", "nuclear_norm", "tensordot", "chain_matmul")


def _out_replacements() -> patch.Replacements:
    paths = [
        f"{namespace.__name__}.{name}"
        for namespace in _OUT_NAMESPACES
        for name, value in sorted(vars(namespace).items())
        if not name.startswith("__")
        and isinstance(function := original_of(value), BuiltinFunctionType)
        and has_python_out(function)
    ]
    paths += paths_behind_python(*_OUT_BEHIND_PYTHON)
    return dict.fromkeys(paths, guard_out)


_DCP = "torch.distributed.checkpoint"


def _dcp_paths(module: str, *names: str) -> Mapping[str, patch.Make]:
    """Return two paths per function: in its module, and in the package that imports it."""

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        from torchguard.checkpoint import sharded  # noqa: PLC0415 - imports _DCP

        made: Callable[..., Any] = getattr(sharded, f"guard_dcp_{name}")(original)
        return made

    return {
        f"{package}.{name}": partial(guarded, name)
        for name in names
        for package in (_DCP, f"{_DCP}.{module}")
    }


_SAVE = {"torch.save": guard_save}
_SAVE_IN_PACKAGES: Mapping[str, Mapping[str, patch.Make]] = {
    "safetensors.torch": {
        # save_file and save_model call it.
        "safetensors.torch.serialize_file": guard_serialize_file,
    },
    # Lightning writes its checkpoints through fsspec.
    "fsspec.implementations.local": {
        "fsspec.implementations.local.LocalFileOpener.commit": guard_commit,
    },
    _DCP: _dcp_paths("state_dict_saver", "save", "async_save"),
}
_LOAD_IN_PACKAGES = {_DCP: _dcp_paths("state_dict_loader", "load")}


_LOAD = {
    "torch.load": guard_load,
    "torch.nn.Module.load_state_dict": guard_module_load,
    "torch.nn.Module.to_empty": guard_to_empty,
    "torch.optim.Optimizer.load_state_dict": guard_optimizer_load,
}


# In the order in which they lie on a path that several replace: the last is called first.
GUARDS: dict[str, Guard] = {
    guard.name: guard
    for guard in (
        Guard("resize", lambda: _RESIZE, switch=resize.SWITCH),
        Guard("out", _out_replacements, tried_by_self_test=True, switch=out.SWITCH),
        Guard("overlap", overlap.replacements, tried_by_self_test=True, switch=overlap.SWITCH),
        Guard(
            "checks",
            checks.replacements,
            in_modules=checks.IN_MODULES,
            changed=checks.changed,
            ended=checks.ended,
            switch=CHECKS_SWITCH,
        ),
        Guard("setitem", dict, in_modules={DYNAMO: setitem_replacements()}, switch=SETITEM_SWITCH),
        Guard("verified", lambda: {"torch.compile": guard_compile}),
        Guard("save", lambda: _SAVE, tried_by_self_test=True, in_modules=_SAVE_IN_PACKAGES),
        Guard("load", lambda: _LOAD, tried_by_self_test=True, in_modules=_LOAD_IN_PACKAGES),
        Guard("numpy", numpy_memory.replacements, changed=numpy_memory.changed),
        Guard(
            "recompute",
            recompute.replacements,
            tried_by_self_test=True,
            in_modules=recompute.IN_MODULES,
        ),
    )
}
"""Every guard that ``install()`` knows, by name."""

NEWEST_TESTED_TORCH = (2, 15)
"""The newest of ``TORCH_VERSIONS`` in noxfile.py; of a later one ``install()`` warns."""
