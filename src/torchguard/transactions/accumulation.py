"""Accelerate's ``accumulate``, whose counter of micro-batches a rollback has to put back."""

from __future__ import annotations

import sys
from typing import Any


def is_accelerator(each: Any) -> bool:
    """Whether this is an ``accelerate.Accelerator``."""
    accelerate = sys.modules.get("accelerate")
    return isinstance(each, getattr(accelerate, "Accelerator", ()))


class Accumulation:
    """What a micro-batch changes of an ``Accelerator``: where ``accumulate`` stands.

    https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the micro-batch, and whether it is the last of a step."""
        each = self._accelerator
        return {"step": each.step, "sync_gradients": each.sync_gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them."""
        self._accelerator.step = state["step"]
        self._accelerator.sync_gradients = state["sync_gradients"]


def is_accumulating() -> bool:
    """Whether ``accumulate`` is between the micro-batches of a step."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    # To make one would set the state of the process.
    return not getattr(state, "_shared_state", {}).get("sync_gradients", True)
