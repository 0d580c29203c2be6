"""The modes of a thread: grad mode, autocast."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ThreadModes(NamedTuple):
    """A snapshot of this thread's grad mode and autocast."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """For each device, whether autocast is on and to which dtype it casts."""

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
        # The counter can be read only by changing it.
        try:
            nesting = torch.autocast_increment_nesting() - 1
        finally:  # also if an interrupt comes as the call returns
            torch.autocast_decrement_nesting()
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), nesting)

    def restore(self) -> None:
        """Set them again, if an interrupt or a graph has left a scope without its end."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.caches)
        while torch.autocast_increment_nesting() <= self.nesting:
            pass
        while torch.autocast_decrement_nesting() > self.nesting:
            pass
