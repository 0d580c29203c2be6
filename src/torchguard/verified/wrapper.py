"""``@verified()``: around a function, a module, or what ``torch.compile`` has made of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchguard.internals import compile_in_place, settings_of_compiled
from torchguard.verified.backend import VerifiedBackend
from torchguard.verified.decorated import Decorator
from torchguard.verified.options import Every, OnMismatch, Options

__all__ = ["verified"]


def verified(
    *,
    calls: int = 1,
    on_mismatch: OnMismatch = "fallback",
    max_bytes: int | None = None,
    every: Every = "graph",
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    group: Any = None,
    **compile_options: Any,
) -> Decorator:
    """Compile a function or a module, and keep of each graph only what does what eager does.

    ``verified()(f)`` equals ``torch.compile(f)`` where inductor is right. A module is
    compiled in place, as ``module.compile()`` does, and returned: class, parameters and
    state dict stay what they were. Of something that ``torch.compile`` has made already,
    the mode, the options, ``dynamic`` and ``fullgraph`` are kept. The result has a method
    ``stats()``, unless a module has a ``stats`` of its own.

    Args:
        calls: see :func:`verified_backend`, like the next three.
        on_mismatch: what happens to a wrong graph.
        max_bytes: the largest inputs that are copied.
        every: ``"graph"`` or ``"shape"``.
        backend: what compiles, by name or itself.
        mode: as for ``torch.compile``.
        options: as for ``torch.compile``.
        group: a process group whose ranks take the same step, see :func:`verified_backend`.
        **compile_options: further arguments of ``torch.compile``: ``fullgraph``, ``dynamic``.

    Raises:
        TypeError: something that was compiled already by another backend than inductor.
        ValueError: an argument is none of those it can be.

    Upstream: https://github.com/pytorch/pytorch/issues/197829
    """
    checks = Options(calls, on_mismatch, max_bytes, every, group)

    def wrap(function: Any, /) -> Any:
        checked = VerifiedBackend(
            backend,
            checks,
            mode=mode,
            inner_options=options,
            dynamic=compile_options.get("dynamic"),
        )
        if _is_compiled(function):
            if (backend, mode, options, compile_options) != ("inductor", None, None, {}):
                raise TypeError(
                    "verified: this was compiled already and keeps its own backend, mode and "
                    "options; give them to torch.compile, or pass what was compiled"
                )
            return _compiled_again(function, checks)
        if isinstance(function, torch.nn.Module):
            compile_in_place(function, backend=checked, **compile_options)
            made: Any = function
        else:
            made = torch.compile(function, backend=checked, **compile_options)
        _give_stats(made, checked)
        return made

    return wrap


def _is_compiled(function: Any) -> bool:
    # torch.compile leaves a module's own class, and puts what it compiled behind it.
    return hasattr(function, "get_compiler_config")


def _compiled_again(compiled: Any, checks: Options) -> Any:
    settings = settings_of_compiled(compiled)
    if settings is None:
        raise TypeError(
            f"verified: {compiled!r} was compiled already, by a backend that can't be read from "
            "it; pass what was compiled: verified(backend=...)(function)"
        )
    checked = VerifiedBackend(settings["compiler"], checks)
    again = torch.compile(
        settings["function"],
        backend=checked,
        fullgraph=settings["fullgraph"],
        dynamic=settings["dynamic"],
    )
    _give_stats(again, checked)
    return again


def _give_stats(function: Any, checked: VerifiedBackend) -> None:
    if not hasattr(function, "stats"):
        function.stats = checked.stats
