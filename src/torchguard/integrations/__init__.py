"""What every trainer's callback does; each module here needs the library it is named after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torchguard
from torchguard._events import counts
from torchguard.patching.guards import GuardName
from torchguard.patching.install import Installation


class Session:
    """Guards that are on from ``_start`` to ``_stop``, with what they did and buckets to log."""

    def __init__(
        self,
        guards: GuardName | Iterable[GuardName] = "resize",
        *,
        buckets: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._guards = (guards,) if isinstance(guards, str) else tuple(guards)
        if not isinstance(buckets, (Mapping, type(None))):
            raise TypeError(
                f"GuardCallback: buckets is of type {type(buckets).__name__}, expected {{name: "
                "what bucketed() made}"
            )
        self._buckets = dict(buckets or {})
        for name, each in self._buckets.items():
            if not callable(getattr(each, "stats", None)):
                raise TypeError(
                    f"GuardCallback: buckets[{name!r}] is of type {type(each).__name__}, which "
                    "has no stats(): pass what bucketed() returned, not what it was given"
                )
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

    def _metrics(self) -> dict[str, float]:
        """Return the numbers to log: how often each kind of event happened, and the buckets'."""
        found: dict[str, float] = {f"torchguard/{kind}": n for kind, n in counts().items()}
        for name, bucketed in self._buckets.items():
            for key, value in bucketed.stats().as_dict().items():
                # A logger draws curves of numbers; the rest is lists and texts.
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    found[f"torchguard/{name}/{key}"] = value
        return found
