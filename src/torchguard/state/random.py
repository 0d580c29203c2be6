"""Every generator of random numbers: where it stands, and how to set it there again."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads the state of a generator, and sets it."""

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The classes of generators that a program makes itself."""


class RNGState(NamedTuple):
    """A snapshot of generators, by default of those that belong to the process."""

    generators: list[Access]
    read: list[Any]

    @classmethod
    def capture(cls, generators: list[Access] | None = None) -> RNGState:
        """Read where they stand."""
        generators = all_generators() if generators is None else generators
        return cls(generators, [get_state() for get_state, _ in generators])

    def changed(self) -> list[bool]:
        """Return of each generator whether numbers were drawn from it."""
        pairs = zip(self.generators, self.read, strict=True)
        return [not same_state(get_state(), before) for (get_state, _), before in pairs]

    def drawn_from(self) -> RNGState:
        """Return the part of the snapshot whose generators have been drawn from since."""
        pairs = zip(self.generators, self.read, self.changed(), strict=True)
        changed = [(generator, before) for generator, before, has_changed in pairs if has_changed]
        return RNGState([each for each, _ in changed], [before for _, before in changed])

    def restore(self) -> None:
        """Set the generators to where they stood."""
        for (_, set_state), before in zip(self.generators, self.read, strict=True):
            set_state(before)


def same_state(now: Any, before: Any) -> bool:
    """Whether two states are the same: of a generator, or what a ``state_dict()`` returned."""
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):  # numpy's
        same_keys = now.keys() == before.keys()
        return same_keys and all(same_state(value, before[key]) for key, value in now.items())
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(same_state, now, before))
    if isinstance(now, np.ndarray):
        return bool(now.tobytes() == before.tobytes())
    if isinstance(now, torch.Tensor):  # comparing a DTensor communicates, one on a GPU waits
        return type(now) is torch.Tensor and now.is_cpu and torch.equal(now, before)
    return bool(now == before)


def access_of(generator: Any) -> Access:
    """Return how to read and set the state of a generator of one of the ``GENERATORS``."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.get_state, legacy=False), generator.set_state
    return generator.get_state, generator.set_state


def generators_among(values: Iterable[Any]) -> list[Access]:
    """Return how to read and set those of the values that are generators, each once."""
    return [
        access_of(each) for each in {id(v): v for v in values if isinstance(v, GENERATORS)}.values()
    ]


_numpy: Any = np.random  # whose global generator may be exchanged, since numpy 1.24
_known: tuple[Any, list[Access]] = None, []


def all_generators() -> list[Access]:
    """Return the process's generators: PyTorch's, the CPU's first, then Python's and numpy's."""
    global _known  # anew if a device or another generator of numpy came into use
    bit_generator = _numpy.get_bit_generator() if hasattr(_numpy, "get_bit_generator") else None
    in_use = torch.cuda.is_initialized(), torch.xpu.is_initialized(), bit_generator
    if in_use != _known[0]:
        found: list[Access] = [(torch.get_rng_state, torch.set_rng_state)]
        devices: tuple[Any, ...] = (torch.cuda, torch.xpu)
        for device in devices:
            # To ask for the state of a device that was not used yet would start it.
            for index in range(device.device_count()) if device.is_initialized() else ():
                get_state = functools.partial(device.get_rng_state, index)
                found.append((get_state, functools.partial(device.set_rng_state, device=index)))
        if torch.backends.mps.is_available():
            found.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
        found.append((random.getstate, random.setstate))
        _known = in_use, [*found, _of_numpy(bit_generator)]
    return _known[1]


def _of_numpy(bit_generator: Any) -> Access:
    """Return the access to numpy's global generator, which may have been exchanged meanwhile."""

    def set_state(state: Any) -> None:
        if bit_generator is not None and _numpy.get_bit_generator() is not bit_generator:
            _numpy.set_bit_generator(bit_generator)
        _numpy.set_state(state)

    return functools.partial(_numpy.get_state, legacy=False), set_state
