"""What belongs to the process and its threads: signals, modes, random generators, open steps.

Signals wait while something is rolled back. Python runs their handlers (Ctrl-C, an alarm) in the
main thread between two bytecodes of whatever runs there. If a signal arrives while the call that
fails is still running, its handler runs at the entry of the next function in Python: in front of
the first line of :func:`roll_back`, or of an ``__exit__``. No ``try`` in there sees what it raises,
so the caller has one, and rolls back again::

    except BaseException:
        try:
            roll_back(saved.restore)
        except BaseException:  # a signal came during the call
            roll_back(saved.restore)
            raise
        raise
"""

from __future__ import annotations

import _random
import ctypes
import functools
import inspect
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.amp.autocast_mode import is_autocast_available

from torchguard._events import warn_user
from torchguard._torch.eager import storage_key
from torchguard.errors import SaveError

# ---- signals ----

# The functions in C: those around them try to turn every handler into an enum, which takes longer
# than the rest of a step's preparation.
_in_c = sys.modules.get("_signal", signal)
_get_handler: Callable[[int], Any] = getattr(_in_c, "getsignal", signal.getsignal)
_set_handler: Callable[[int, Any], Any] = getattr(_in_c, "signal", signal.signal)
_DEFERRED = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


_Handler = Callable[[int, FrameType | None], Any]
_handlers: dict[int, _Handler] = {}
"""The program's handlers of the signals that ours was set for."""
_in_force: list[DeferredSignals] = []
"""In the order in which they began."""


class DeferredSignals:
    """Signals that Python code handles, Ctrl-C too, wait until :meth:`restore_handlers`.

    Several may be in force at once, and end in any order: the process has one handler for all of
    them. A signal waits for the one that began last, and when that ends, for those before it.
    """

    def __init__(self, numbers: Sequence[int] = _DEFERRED, *, at_most: int | None = None) -> None:
        """``at_most``: how many wait; those after them do not."""
        self._at_most = at_most
        self._arrived: list[tuple[int, _Handler]] = []
        self._numbers: Sequence[int] = ()
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run in the main thread
        self._numbers = numbers
        try:
            _in_force.append(self)
            for number in numbers:
                handler = _get_handler(number)
                if callable(handler) and handler is not _arrive:
                    _handlers[number] = handler
                    _set_handler(number, _arrive)
        except BaseException:  # one that arrived before its turn
            self.restore_handlers()
            raise

    def take(self, number: int, handler: _Handler) -> bool:
        """Let a signal wait, and return whether it does."""
        if number not in self._numbers:
            return False
        self._arrived.append((number, handler))
        if self._at_most is not None and len(self._arrived) > self._at_most:
            self.deliver()
        return True

    def deliver(self) -> None:
        """Hand on the signals that have arrived; later ones wait again."""
        if self._arrived:
            number, handler = self._arrived.pop(0)
            try:
                _hand_on(number, handler, after=self)
            finally:  # each runs, also if one before it raises
                self.deliver()

    def restore_handlers(self) -> None:
        """End it: set the program's handlers unless another needs ours; hand on what arrived."""
        try:
            if self in _in_force:
                _in_force.remove(self)
            # Elsewhere handlers can't be set. Ours stays, and calls the program's.
            if threading.current_thread() is threading.main_thread():
                for number in set(self._numbers).difference(*(x._numbers for x in _in_force)):
                    if _get_handler(number) is _arrive:  # the program may have set another one
                        _set_handler(number, _handlers[number])
        finally:
            self.deliver()


def _arrive(number: int, _: FrameType | None) -> None:
    """Handle a signal for all that are in force."""
    _hand_on(number, _handlers[number])


def _hand_on(number: int, handler: _Handler, *, after: DeferredSignals | None = None) -> None:
    """Let a signal wait for the last that began before another one, or call its handler."""
    end = _in_force.index(after) if after in _in_force else len(_in_force)
    if any(each.take(number, handler) for each in reversed(_in_force[:end])):
        return
    if threading.current_thread() is threading.main_thread():
        handler(number, None)
    else:
        signal.raise_signal(number)  # the main thread handles it


def _forget_after_fork() -> None:
    """Let a child get its signals: it leaves no block that its parent has opened."""
    for each in _in_force:
        each._arrived.clear()
    _in_force.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def roll_back(restore: Callable[..., None], *args: Any) -> None:
    """Call ``restore(*args)`` in an ``except`` clause; signals wait until it has ended."""
    try:
        signals = DeferredSignals()
    except BaseException:  # one that arrived before the first was deferred
        restore(*args)
        raise
    try:
        restore(*args)
    finally:
        signals.restore_handlers()


# ---- the accelerator ----


def accelerator() -> str | None:
    """Return the type of the accelerator that this torch is for: a build has one at most."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # up to torch 2.6, if there is none
        return None
    return None if device is None else device.type


def accelerator_in_use() -> tuple[str, Any] | None:
    """Return its type and torch's module for it, once the program has used it."""
    kind = accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    started = getattr(module, "is_initialized", torch.accelerator.is_available)
    return (kind, module) if started() else None


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until nothing runs on the devices of tensors, on the program's own streams too."""
    kind = accelerator()
    for device in {each.device for each in tensors if each.device.type == kind}:
        torch.accelerator.synchronize(device)


# ---- grad mode and autocast ----


def autocast_devices() -> list[str]:
    """Return the types of devices for which autocast can be on."""
    kind = accelerator()
    return ["cpu"] if kind is None or not is_autocast_available(kind) else ["cpu", kind]


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
            for device in autocast_devices()
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


# ---- random generators ----

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
        """Read their states."""
        generators = [*named_generators().values()] if generators is None else generators
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
    if type(now) is not type(before) or (now is before and isinstance(now, (dict, tuple))):
        return now is before
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


_known: tuple[Any, dict[str, Access]] = "not asked yet", {}


def named_generators() -> dict[str, Access]:
    """Return the process's generators: PyTorch's, the CPU's first, then Python's and numpy's."""
    global _known  # anew if a device came into use
    in_use = accelerator_in_use()
    if in_use != _known[0]:
        found: dict[str, Access] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
        # To ask for the state of a device that was not used yet would start it.
        found |= {} if in_use is None else _generators_on(*in_use)
        found["python"] = _read_if_changed(random.getstate, _fields_of_python), random.setstate
        of_numpy: Any = np.random  # the types leave out what legacy= returns
        read = functools.partial(of_numpy.get_state, legacy=False)
        found["numpy"] = _read_if_changed(read, _fields_of_numpy), of_numpy.set_state
        _known = in_use, found
    return _known[1]


def _read_if_changed(read: Callable[[], Any], fields: Callable[[], Any]) -> Callable[[], Any]:
    """Return what reads the state of a generator, and reads it again only if its fields changed.

    Python and numpy make an object of each of 624 numbers, which takes a fifth of the time that a
    block adds to a step.
    """
    # Compared byte by byte, never interpreted, and only if a trial shows that draws change them.
    # https://github.com/python/cpython/blob/v3.13.0/Modules/_randommodule.c
    # https://github.com/numpy/numpy/blob/v2.2.0/numpy/random/mtrand.pyx
    last: tuple[Any, Any] = None, None

    def get_state() -> Any:
        nonlocal last
        now = fields()
        if now is None or now != last[0]:
            last = now, read()  # a draw of another thread in between is seen the next time
        return last[1]

    return get_state


def _fields_of_python() -> Any:
    """Return what Python's generator holds, or None if it is another one."""
    own: Any = getattr(random.getstate, "__self__", None)
    if type(own) is not random.Random or not _fields_show_draws():
        return None
    return fields_of(own, _random.Random), vars(own)["gauss_next"]


def _fields_of_numpy() -> Any:
    """Return what numpy's generator holds, or None if it is another one."""
    of_numpy: Any = np.random  # the types leave this out
    own: Any = getattr(of_numpy.get_state, "__self__", None)
    bits = of_numpy.get_bit_generator()
    if not (type(own) is np.random.RandomState and type(bits) is np.random.MT19937):
        return None
    if not _fields_show_draws():
        return None
    # Half of a pair of normal numbers waits in the one, 624 numbers and a position in the other.
    return fields_of(own, np.random.RandomState), ctypes.string_at(bits.ctypes.state_address, 2500)


def fields_of(instance: object, kind: type) -> bytes:
    """Return the fields in C of an object, without its count of references and its class."""
    head = object.__basicsize__
    return ctypes.string_at(id(instance) + head, kind.__basicsize__ - head)


@functools.cache
def _fields_show_draws() -> bool:
    """Whether the fields in C of generators change with each draw: so on CPython."""
    python, numpy = random.Random(0), np.random.RandomState(0)  # noqa: S311  no secret
    before = fields_of(python, _random.Random)
    python.random()
    changed = [fields_of(python, _random.Random) != before]
    for _ in range(2):
        before = fields_of(numpy, np.random.RandomState)
        numpy.standard_normal()
        changed.append(fields_of(numpy, np.random.RandomState) != before)
    return all(changed)


def _generators_on(kind: str, module: Any) -> dict[str, Access]:
    """Return the generators of the devices of an accelerator, by torch's module for it."""
    get_state, set_state = (getattr(module, f"{do}_rng_state", None) for do in ("get", "set"))
    if get_state is None or set_state is None:
        warn_user(
            "device-without-random-state",
            f"torch.{kind} has no get_rng_state and set_rng_state, so random numbers "
            f"on {kind} are neither saved, nor drawn again after a step is rolled back",
        )
        return {}
    if not inspect.signature(get_state).parameters:  # one device: MPS
        return {kind: (get_state, set_state)}
    return {
        f"{kind}:{index}": (
            functools.partial(get_state, index),
            functools.partial(set_state, device=index),
        )
        for index in range(module.device_count())
    }


# ---- training steps ----

_Tensors = Callable[[], Iterable[torch.Tensor]]
open_steps: dict[int, tuple[int, _Tensors]] = {}
"""Of the open blocks of ``transaction()``, by id: the thread, and what returns the tensors that the
step writes."""


def refuse_inside_step(function: str, saved: _Tensors = tuple) -> None:
    """Raise if this thread is inside of a block of ``transaction()``.

    Or if another thread is, whose step writes the memory of tensors that are saved here.
    """
    others: list[torch.Tensor] = []
    for thread, tensors in tuple(open_steps.values()):
        if thread == threading.get_ident():
            raise SaveError(
                f"{function}: called inside a block of transaction(), which is half a step "
                "(BatchNorm has counted the batch, the model may not have stepped): save after the "
                "block"
            )
        others += tensors()
    if others and not _memory_of(saved()).isdisjoint(_memory_of(others)):
        raise SaveError(
            f"{function}: another thread is inside a block of transaction() that writes these "
            "tensors, so the file would hold half a step: copy them between two steps, and save "
            "the copies"
        )


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return a number for each memory that tensors lie in, or for a tensor that says of none."""
    found = set()
    for tensor in tensors:
        try:
            found.add(storage_key(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # sparse, or of a class of its own
            found.add(id(tensor))
    return found
