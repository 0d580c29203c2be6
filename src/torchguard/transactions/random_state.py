"""Where the random number generators stand: read before a step, set back if it fails."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard.equivalence.isolate import rng_generators

__all__ = ["RandomState"]


class RandomState(NamedTuple):
    """Where the random number generators of torch, Python and numpy stand."""

    torch: list[tuple[Callable[[Tensor], None], Tensor]]
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Read the default generators: torch's of each device in use, Python's and numpy's."""
        states = [(set_state, get_state()) for get_state, set_state in _generators_of_torch()]
        return cls(states, _python.state(), _numpy_state())

    def changed(self) -> int:
        """Return how many of the generators have moved on."""
        now = RandomState.capture()
        pairs = zip(now.torch, self.torch, strict=True)
        moved = [not torch.equal(one, other) for (_, one), (_, other) in pairs]
        moved += [now.python != self.python, pickle.dumps(now.numpy) != pickle.dumps(self.numpy)]
        return sum(moved)

    def restore(self) -> None:
        """Set the generators back."""
        for set_state, state in self.torch:
            set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


_in_use: tuple[bool, bool] | None = None
_generators: list[Any] = []


def _generators_of_torch() -> list[Any]:
    """Return ``rng_generators()``, asked for again when a device has come into use."""
    global _generators, _in_use
    # Devices don't come and go otherwise, and to ask for all of them takes microseconds.
    in_use = torch.cuda.is_initialized(), torch.xpu.is_initialized()
    if in_use != _in_use:
        _generators, _in_use = rng_generators(), in_use
    return _generators


class _Reader:
    """Reads a generator's state anew only where a byte of its memory has changed.

    To make a state takes 10 microseconds in Python and 45 in numpy, which is a number object for
    each of 624 words, and most steps draw nothing. Generators are objects in C that hold their
    words, and a normal variate that is left over, in their own memory: the same bytes are the same
    state, wherever in them what lies.
    """

    def __init__(self, get_state: Callable[[], Any], *memory: tuple[int, int]) -> None:
        """``memory``: addresses and lengths; the caller keeps their owners alive."""
        self._get_state = get_state
        self._views = [
            memoryview((ctypes.c_char * length).from_address(address)) for address, length in memory
        ]
        self._last: tuple[list[bytes], Any] | None = None

    def bytes_now(self) -> list[bytes]:
        return [view.tobytes() for view in self._views]

    def state(self) -> Any:
        now = self.bytes_now()
        if self._last is not None and self._last[0] == now:
            return self._last[1]
        state = self._get_state()
        # Another thread may have drawn between the two readings.
        self._last = (now, state) if self._views and self.bytes_now() == now else None
        return state


def _own_memory(owner: Any, kind: type) -> tuple[int, int]:
    """Return where the fields of an object lie that ``kind``, written in C, has declared."""
    header = object.__basicsize__
    return id(owner) + header, kind.__basicsize__ - header


class _PythonReader(_Reader):
    """Python's default generator, whose left over variate is an attribute."""

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._variate: Any = None
        c_type: Any = random.Random.__mro__[1]
        super().__init__(random.getstate, _own_memory(self._generator, c_type))
        words = struct.pack("=624I", *random.getstate()[1][:624])
        if words not in self.bytes_now()[0]:
            self._views = []  # an interpreter that keeps them elsewhere

    def state(self) -> Any:
        if self._generator.gauss_next is not self._variate:
            self._variate, self._last = self._generator.gauss_next, None
        return super().state()


_MT19937_BYTES = 624 * 4 + 4  # struct mt19937_state: uint32_t key[624]; int pos


class _NumpyReader(_Reader):
    """numpy's default generator, as long as it has this bit generator."""

    def __init__(self, numpy: Any, bit_generator: Any) -> None:
        self.bit_generator = bit_generator
        get_state = numpy.random.get_state
        memory = []
        if type(bit_generator).__name__ == "MT19937" and _holds_its_variate(numpy):
            # The address that numpy documents for other languages, and the RandomState itself.
            memory.append((bit_generator.ctypes.state_address, _MT19937_BYTES))
            memory.append(_own_memory(get_state.__self__, numpy.random.RandomState))
        super().__init__(lambda: get_state(legacy=False), *memory)


def _holds_its_variate(numpy: Any) -> bool:
    """Whether a RandomState has the variate left over in its own memory; one of ours is tried."""
    probe = numpy.random.RandomState(0)
    probe.standard_normal()
    reader = _Reader(lambda: None, _own_memory(probe, numpy.random.RandomState))
    return struct.pack("=d", probe.get_state(legacy=False)["gauss"]) in reader.bytes_now()[0]


_python = _PythonReader()
_numpy: _NumpyReader | None = None


def _numpy_state() -> Any:
    """Return ``numpy.random.get_state()``; None as long as nobody has imported it."""
    global _numpy
    numpy = sys.modules.get("numpy")
    if numpy is None or "numpy.random" not in sys.modules:
        return None
    get_bit_generator: Any = getattr(numpy.random, "get_bit_generator", None)
    if get_bit_generator is None:  # numpy < 1.24
        return numpy.random.get_state(legacy=False)
    bit_generator = get_bit_generator()
    if _numpy is None or _numpy.bit_generator is not bit_generator:
        _numpy = _NumpyReader(numpy, bit_generator)
    return _numpy.state()
