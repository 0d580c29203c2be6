"""What every trainer's callback does; each module here needs the library it is named after."""

from __future__ import annotations

from collections.abc import Iterable

import torchguard
from torchguard.patching.guards import GuardName
from torchguard.patching.install import Installation


class Session:
    """Guards that are on from ``_start`` to ``_stop``."""

    def __init__(self, guards: GuardName | Iterable[GuardName] = "resize") -> None:
        super().__init__()
        self._guards = (guards,) if isinstance(guards, str) else tuple(guards)
        self._installation: Installation | None = None

    def _start(self) -> None:
        """Install the guards; starting twice is starting once."""
        if self._installation is None:
            self._installation = torchguard.install(*self._guards)

    def _stop(self) -> None:
        """Let go of the guards."""
        if self._installation is not None:
            self._installation.uninstall()
            self._installation = None

    def _check(self, *objects: object) -> None:
        """Raise if a checkpoint of these would be garbage: a shape is not backed by memory."""
        torchguard.check_consistent([each for each in objects if each is not None])
