"""Which threads are inside of a training step that may still be rolled back."""

from __future__ import annotations

import threading

from torchguard.errors import SaveError

threads: dict[int, int] = {}
"""The threads of the open blocks of ``transaction()``, by the id of the block."""


def refuse_inside_step(function: str) -> None:
    """Raise if this thread is inside of a block of ``transaction()``."""
    if threading.get_ident() in threads.values():
        raise SaveError(
            f"{function}: called inside a block of transaction(), which is half a step (BatchNorm "
            "has counted the batch, the model may not have stepped): save after the block"
        )
