"""``install("verify")``: every ``torch.compile`` of the process compiles with a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchguard._torch import default_backend, inductor_backend
from torchguard.verification.backend import VerifiedBackend
from torchguard.verification.options import Options

__all__ = ["guard_compile"]

# Options that torch.compile keeps for itself.
_NOT_INDUCTORS = {"guard_filter_fn", "use_aoti"}


def guard_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``torch.compile`` that checks what inductor compiles; other backends stay as they are.

    https://github.com/pytorch/pytorch/issues/197829
    """

    def compile(model: Any = None, **settings: Any) -> Any:  # noqa: A001 - torch's name
        options = settings.get("options") or {}
        backend = settings.get("backend") or default_backend()
        if backend != "inductor" or options.get("use_aoti"):
            return original(model, **settings)
        mode, dynamic = settings.get("mode"), settings.get("dynamic")
        if mode is None or settings.get("options") is None:
            # What inductor does not know it refuses now, as torch.compile does.
            known = {name: value for name, value in options.items() if name not in _NOT_INDUCTORS}
            inductor_backend(mode, known or None, dynamic)
        checked = VerifiedBackend("inductor", Options(), dynamic=dynamic)
        return original(model, **{**settings, "backend": checked})

    return compile
