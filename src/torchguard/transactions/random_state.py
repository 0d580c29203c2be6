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

_Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads where a generator stands, and sets it back there."""


class RandomState(NamedTuple):
    """Where the default generators of torch, of each device in use, of Python and numpy stand."""

    generators: list[_Generator]
    read: list[Any]

    @classmethod
    def capture(cls) -> RandomState:
        """Read them."""
        generators = _generators()
        return cls(generators, [get_state() for get_state, _ in generators])

    def changed(self) -> int:
        """Return how many of the generators have moved on."""
        pairs = zip(self.generators, self.read, strict=True)
        return sum(_bytes_of(get_state()) != _bytes_of(before) for (get_state, _), before in pairs)

    def restore(self) -> None:
        """Set the generators back."""
        for (_, set_state), before in zip(self.generators, self.read, strict=True):
            set_state(before)


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


_known: tuple[Any, list[_Generator]] = None, []


def _generators() -> list[_Generator]:
    """Return all of them, asked for again when a device or another one of numpy came into use."""
    global _known
    numpy = sys.modules.get("numpy") if "numpy.random" in sys.modules else None
    get_bit_generator: Any = getattr(getattr(numpy, "random", None), "get_bit_generator", None)
    bit_generator = None if get_bit_generator is None else get_bit_generator()
    in_use = torch.cuda.is_initialized(), torch.xpu.is_initialized(), numpy, bit_generator
    if in_use != _known[0]:
        of_numpy = [] if numpy is None else [_of_numpy(numpy, bit_generator)]
        _known = in_use, [*rng_generators(), _of_python(), *of_numpy]
    return _known[1]


# To ask Python for its state takes 10 microseconds and numpy 45, a number object for each of 624
# words. Both are objects in C that hold the words in their own memory, whose bytes are read here in
# one; numbers are made of them when the generator is set back.
_WORDS = 624
_MT19937_BYTES = _WORDS * 4 + 4


def _memory(address: int, length: int) -> memoryview:
    """Return a view of bytes in memory; whoever uses it keeps their owner alive."""
    return memoryview((ctypes.c_char * length).from_address(address))


def _of_python() -> _Generator:
    """Return how to read Python's generator: its memory is ``int index; uint32_t state[624]``."""
    # https://github.com/python/cpython/blob/v3.13.0/Modules/_randommodule.c#L110
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    c_type: Any = random.Random.__mro__[1]
    header = object.__basicsize__
    if c_type.__basicsize__ - header < _MT19937_BYTES:
        return random.getstate, random.setstate
    memory = _memory(id(generator) + header, _MT19937_BYTES)

    def read() -> Any:
        return memory.tobytes(), generator.gauss_next

    def numbers_of(found: Any) -> Any:
        position, *words = struct.unpack(f"=i{_WORDS}I", found[0])
        return random.Random.VERSION, (*words, position), found[1]

    if numbers_of(read()) == random.getstate():
        return read, lambda found: random.setstate(numbers_of(found))
    return random.getstate, random.setstate  # an interpreter that keeps them elsewhere


def _of_numpy(numpy: Any, bit_generator: Any) -> _Generator:
    """Return how to read numpy's generator: ``uint32_t key[624]; int pos``, and a variate."""
    get_state = numpy.random.get_state
    place = _place_of_variate(numpy)

    def set_state(state: Any) -> None:
        if bit_generator is not None and numpy.random.get_bit_generator() is not bit_generator:
            numpy.random.set_bit_generator(bit_generator)
        numpy.random.set_state(state)

    if type(bit_generator).__name__ != "MT19937" or place is None:
        return lambda: get_state(legacy=False), set_state
    # The address that numpy documents for other languages.
    memory = _memory(bit_generator.ctypes.state_address, _MT19937_BYTES)
    left_over = _memory(id(get_state.__self__) + place, struct.calcsize(_VARIATE))

    def read() -> Any:
        return memory.tobytes(), left_over.tobytes()

    def set_back(found: Any) -> None:
        *words, position = struct.unpack(f"={_WORDS}Ii", found[0])
        has_variate, variate = struct.unpack(_VARIATE, found[1])
        key = numpy.array(words, dtype=numpy.uint32)
        state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
        set_state({**state, "has_gauss": has_variate, "gauss": variate})

    return read, set_back


_VARIATE = "=i4xd"  # struct { int has_gauss; double gauss; }, aligned


def _place_of_variate(numpy: Any) -> int | None:
    """Return where in a RandomState the normal variate lies that is left over; one is tried."""
    header = object.__basicsize__
    probe = numpy.random.RandomState(0)
    probe.standard_normal()
    memory = _memory(id(probe) + header, type(probe).__basicsize__ - header).tobytes()
    found = memory.find(struct.pack(_VARIATE, 1, probe.get_state(legacy=False)["gauss"]))
    return None if found < 0 else header + found
