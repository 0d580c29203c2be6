"""Keep ``torch.Tensor`` from becoming a sequence when its ``__getitem__`` is replaced.

``torch.tensor([a, b])`` and ``x[[a, b]]`` ask ``PySequence_Check`` whether ``a`` is a sequence. A
tensor is none: its base defines ``__getitem__`` for mappings alone. When a class gets one that is
written in Python, CPython fills the slot ``sq_item`` too, in its subclasses as well, and does not
empty it when the attribute is deleted. ``torch.tensor`` of two 0-d tensors then raises
"len() of a 0-d tensor" for the rest of the process. Nothing in Python empties a slot, so it is done
in memory, after the place was compared with what the stable ABI says of it. See update_one_slot in
https://github.com/python/cpython/blob/v3.13.0/Objects/typeobject.c
"""

from __future__ import annotations

import ctypes  # torch has imported it
import functools
import sys
from typing import Any

_SQ_ITEM = 44  # Py_sq_item: https://github.com/python/cpython/blob/v3.13.0/Include/typeslots.h


def empty_sequence_slot(owner: type) -> None:
    """Empty ``sq_item`` of a class whose ``__getitem__`` was set or deleted, and of those below."""
    if sys.implementation.name != "cpython":
        return
    sq_item = _reader()
    bases = set(owner.__mro__)
    waiting, seen = [owner], set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            waiting += type.__subclasses__(cls)
            filled = sq_item(cls, _SQ_ITEM)
            if filled and all(c in bases for c in cls.__mro__ if "__getitem__" in vars(c)):
                _empty(cls, filled)


@functools.cache
def _reader() -> Any:
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_int)
    return prototype(("PyType_GetSlot", ctypes.pythonapi))


def _empty(cls: type, filled: int) -> None:
    size = ctypes.sizeof(ctypes.c_void_p)
    # tp_as_sequence is the 12th word behind the object's header; its table lies in the class.
    start = id(cls) + object.__basicsize__ + 11 * size
    table = ctypes.c_void_p.from_address(start).value or 0
    kind: Any = type
    if 0 < table - id(cls) < kind.__basicsize__:
        slot = ctypes.c_void_p.from_address(table + 3 * size)
        if slot.value == filled:
            slot.value = None
