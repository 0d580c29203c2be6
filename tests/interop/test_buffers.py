"""Tensors over buffers: frombuffer keeps them open, and copies what is read-only."""

from __future__ import annotations

import mmap
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
import torch

import torchguard


@pytest.fixture
def installed() -> Iterator[None]:
    with torchguard.install("numpy"):
        yield


def opened(kind: str) -> tuple[Any, Callable[[], Any]]:
    """A buffer, and what closes it."""
    if kind == "bytearray":
        array = bytearray(8)
        return array, array.clear
    if kind == "mmap":
        mapped = mmap.mmap(-1, mmap.PAGESIZE)
        return mapped, mapped.close
    memory = SharedMemory(create=True, size=8)
    memory.unlink()
    return memory.buf, memory.close


@pytest.mark.parametrize("kind", ["bytearray", "mmap", "shared memory"])
def test_frombuffer_keeps_the_buffer_open(kind: str, installed: None) -> None:
    """close() raises BufferError while the tensor or a view lives, and works afterwards."""
    buffer, close = opened(kind)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=4, offset=2)
    tensor.fill_(7)
    assert bytes(buffer)[:7] == b"\0\0\7\7\7\7\0"
    view = tensor[1:]
    del tensor
    with pytest.raises(BufferError):
        close()
    del view
    close()


def test_frombuffer_of_read_only_memory(installed: None) -> None:
    immutable = bytes(bytearray(b"immutable"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.frombuffer(immutable, dtype=torch.uint8, offset=2, count=3)
    assert bytes(tensor.tolist()) == b"mut"
    tensor.fill_(0)
    assert immutable == b"immutable"
    grad = torch.frombuffer(bytes(8), dtype=torch.float32, requires_grad=True)
    assert grad.requires_grad
    assert grad.is_leaf


def test_frombuffer_copies_the_part_that_is_asked_for(installed: None) -> None:
    buffer = bytes(range(200)) * 10_000
    tracemalloc.start()
    try:
        tensors = [
            torch.frombuffer(buffer, dtype=torch.int16, count=2, offset=5),
            torch.frombuffer(buffer, dtype=torch.int16, offset=len(buffer) - 4),
        ]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert tensors[0].tolist() == [6 << 8 | 5, 8 << 8 | 7]
    assert tensors[1].tolist() == [(197 << 8 | 196) - (1 << 16), (199 << 8 | 198) - (1 << 16)]


def closed() -> Any:
    mapped, close = opened("mmap")
    close()
    return mapped


DOORS: Any = {"frombuffer": torch.frombuffer, "asarray": torch.asarray}
READ_ONLY = bytes(range(8))
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *(
        ("frombuffer", READ_ONLY, {"count": count, "offset": offset})
        for count in (-3, -1, 0, 1, 3, 9, 2**70, None)
        for offset in (-4, 0, 1, 8, 9)
    ),
    *(
        ("frombuffer", READ_ONLY, options)
        for options in ({"offset": "1"}, {"dtype": None}, {"dtype": float}, {"wrong": 1})
    ),
    *(
        (door, wrong, {})
        for door in DOORS
        for wrong in (3, "text", None, [1], closed(), np.zeros(4, "M8[s]")[::2])
    ),
]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize(("door", "buffer", "options"), CASES)
def test_what_is_wrong_with_a_buffer_torch_says(
    door: str, buffer: Any, options: dict[str, Any], installed: None
) -> None:
    def outcome(function: Callable[..., Any]) -> Any:
        try:
            tensor = function(buffer, **{"dtype": torch.int32, **options})
        except Exception as error:  # noqa: BLE001
            return type(error), str(error)
        return tensor.dtype, tensor.storage_offset(), tensor.tolist()

    assert outcome(getattr(torch, door)) == outcome(DOORS[door])


@pytest.mark.parametrize("dtype", ["M8[s]", [("when", "M8[s]")]])
def test_frombuffer_of_what_a_memoryview_can_not_name(dtype: Any, installed: None) -> None:
    array = np.arange(3).astype("M8[s]").view(dtype)
    torch.frombuffer(array, dtype=torch.int64)[1] = 7
    assert array.view("i8").tolist() == [0, 7, 2]
    array.flags.writeable = False
    torch.frombuffer(array, dtype=torch.int64).zero_()
    assert array.view("i8").tolist() == [0, 7, 2]
