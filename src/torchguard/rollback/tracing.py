"""What guarded() repairs of Dynamo's tracing, while at least one scope is open.

The guards "setitem" and "slice_scatter" in the form that install() gives them too. They
are for code that is compiled inside the scope; what was compiled before stays as it is.
"""

from __future__ import annotations

import contextlib
import sys

import wrapt

from torchguard._torch import patch
from torchguard.assignment import dynamo_scatter, dynamo_setitem

__all__ = ["begin", "end"]

_LAST = "torch._dynamo.output_graph"  # of what is patched, the module that is imported last
_users = 0
_applied: list[str] = []
_waiting_for_dynamo = False


def begin() -> None:
    """Count one more scope."""
    global _users, _waiting_for_dynamo
    with patch.lock:
        _users += 1
        if hasattr(sys.modules.get(_LAST), "OutputGraph"):
            _apply()
        elif not _waiting_for_dynamo:
            _waiting_for_dynamo = True
            wrapt.register_post_import_hook(_dynamo_was_imported, _LAST)


def end() -> None:
    """Count one scope less; the last one undoes everything."""
    global _users
    with patch.lock:
        _users -= 1
        if _users == 0 and _applied:
            # Where somebody has patched on top it stays; it changes nothing where torch is right.
            patch.undo(_applied, leave_conflicts=True)
            _applied.clear()


def _dynamo_was_imported(_: object) -> None:
    with patch.lock:
        if _users:
            _apply()


def _apply() -> None:
    if _applied:
        return
    # "setitem" finds out in every single case whether it is needed, so nothing is tried first.
    replacements = dict(dynamo_setitem.replacements())
    if dynamo_scatter.not_needed() is None:
        replacements.update(dynamo_scatter.replacements())
    with contextlib.suppress(AttributeError):  # a Dynamo that is built differently
        patch.apply(replacements.items())
        _applied.extend(replacements)
