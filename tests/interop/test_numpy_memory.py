"""Memory shared with numpy and buffers: read-only stays read-only, nothing dangles."""

# ruff: noqa: PLW0108  the doors are looked up when they are called, after the guard stands there
from __future__ import annotations

import gc
import mmap
import os
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib.stride_tricks import sliding_window_view

import torchguard
from support.modes import FunctionMode
from torchguard._torch import storage_key
from torchguard.errors import TorchGuardWarning
from torchguard.interop import numpy_memory

DOORS: dict[str, Callable[..., Any]] = {
    "from_numpy": lambda a: torch.from_numpy(a),
    "as_tensor": lambda a: torch.as_tensor(a),
    "as_tensor, by name": lambda a: torch.as_tensor(data=a),
    "asarray": lambda a: torch.asarray(a),
    "asarray of a buffer": lambda a: torch.asarray(memoryview(a), dtype=torch.uint8),
    "from_dlpack": lambda a: torch.from_dlpack(a),  # type: ignore[attr-defined]
    "from_dlpack, by name": lambda a: torch.from_dlpack(ext_tensor=a),  # type: ignore[attr-defined]
    "utils.dlpack": lambda a: torch.utils.dlpack.from_dlpack(a),
    "tensor": lambda a: torch.tensor(a),
    "frombuffer": lambda a: torch.frombuffer(a, dtype=torch.uint8),
    "default_convert": lambda a: torch.utils.data.default_convert(a),
    "default_collate": lambda a: torch.utils.data.default_collate([a]),
    "list": lambda a: torch.as_tensor([a]),
}


@pytest.fixture
def installed() -> Iterator[None]:
    with torchguard.install("numpy"):
        yield


def arrays() -> st.SearchStrategy[np.ndarray[Any, Any]]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)
    dtypes = st.sampled_from([np.uint8, np.int64, np.float32, np.float64, np.complex64, np.bool_])
    return hnp.arrays(dtypes, shapes)


def read_only(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    if how == "transposed":
        array = array.T
    elif how == "subclass":
        array = array.view(np.ma.MaskedArray)
    elif how == "broadcast":
        return np.broadcast_to(array, (2, *array.shape))
    array.flags.writeable = False
    return array


@settings(max_examples=150)
@given(
    array=arrays(),
    door=st.sampled_from(sorted(DOORS)),
    how=st.sampled_from(["plain", "transposed", "subclass", "broadcast"]),
)
@example(array=np.array([False]), door="list", how="plain")
def test_no_write_reaches_a_read_only_array(array: Any, door: str, how: str) -> None:
    """Whatever the door, shape and dtype: the same values as torch's, and memory of its own."""
    assume(not (how == "subclass" and door == "default_convert"))  # which leaves it as it is
    array = read_only(array, how)
    before = array.tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = DOORS[door](array).clone()
        except BufferError:  # this torch takes no read-only array through DLPack: a copy will do
            expected = torch.from_numpy(array.copy())
        except (TypeError, ValueError, RuntimeError) as error:
            with torchguard.install("numpy"), pytest.raises(type(error)):
                DOORS[door](array)
            return
    with torchguard.install("numpy"), warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch 2.6 reads booleans of numpy as indices, and numpy warns of that.
        warnings.filterwarnings("ignore", "In future, it will be an error for 'np.bool")
        tensor = DOORS[door](array)
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert tensor.numpy().tobytes() == expected.numpy().tobytes()
    for value in (0, 1):
        tensor.fill_(value)
        assert array.tobytes() == before


@pytest.mark.parametrize("door", ["from_numpy", "as_tensor", "asarray", "from_dlpack"])
def test_a_view_with_more_elements_than_memory_stays_one(door: str, installed: None) -> None:
    """numpy marks what broadcast_to() and sliding_window_view() return as read-only."""
    scalar = DOORS[door](np.broadcast_to(np.float32(3), (10**6, 10**6)))
    assert (scalar.shape, scalar.stride()) == ((10**6, 10**6), (0, 0))
    assert scalar[7, 7] == 3
    array = np.arange(24.0).reshape(4, 6)
    for source in (array, array[::2], array.T, array[::-1]):
        windows = sliding_window_view(source, 2, axis=1)
        tensor = DOORS[door](windows)
        assert tensor.numpy().tolist() == windows.tolist()
        if windows.strides[0] > 0:  # torch has no negative strides: that one is copied
            assert tensor.stride() == tuple(stride // 8 for stride in windows.strides)
        tensor[0, 0, 0] = -1
        assert array.min() == 0


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_writable_array_is_shared_as_before(door: str, installed: None) -> None:
    array = np.arange(6, dtype=np.uint8)
    tensor = DOORS[door](array)
    shares = tensor.data_ptr() == array.ctypes.data
    with_torch = ("tensor", "default_collate", "list")
    assert shares == (door not in with_torch)


def test_asarray_copies_read_only_memory_or_raises(
    installed: None, recwarn: pytest.WarningsRecorder
) -> None:
    array = np.zeros(3)
    assert torch.asarray(array, copy=False).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    for obj in (array, memoryview(bytes(array))):
        torch.asarray(obj, copy=True, dtype=torch.float64).fill_(7)
        with pytest.raises(torchguard.errors.ReadOnlyMemoryError, match="asarray"):
            torch.asarray(obj, copy=False, dtype=torch.float64)
    assert array.tolist() == [0, 0, 0]
    assert not recwarn.list


def test_share_memory_under_an_array_raises(installed: None) -> None:
    """For the tensor, its views and a module's parameters; afterwards everything works."""
    layer = torch.nn.Linear(2, 2)
    tensor = layer.weight.detach()
    array = layer.weight.numpy(force=True)
    view = array[1:]
    for share in (tensor.share_memory_, tensor[1:].share_memory_, layer.share_memory):
        with pytest.raises(torchguard.errors.SharedViewError, match="numpy"):
            share()
    del array
    with pytest.raises(torchguard.errors.SharedViewError):
        tensor.share_memory_()
    del view
    layer.share_memory()
    shared = tensor.numpy()
    assert tensor.share_memory_() is tensor
    shared[0] = 9
    assert tensor[0, 0] == 9


def test_an_array_that_is_a_copy_holds_nothing(installed: None) -> None:
    tensor = torch.ones(3, requires_grad=True)
    copied = tensor.detach().clone().numpy()
    tensor.detach().share_memory_()
    assert copied.tolist() == [1, 1, 1]
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    copied = conjugated.numpy(force=True)
    conjugated.conj().share_memory_()
    assert copied.tolist() == [1, 1, 1]
    plain = torch.ones(3)
    empty = plain[:0].numpy()
    plain.share_memory_()
    assert empty.tolist() == []


class Rest(torch.Tensor):
    """A subclass whose numpy() returns a view of the array, and which notes what it sees."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return result[1:] if func.__name__ == "numpy" else result


def test_modes_and_subclasses_see_the_call_of_numpy_alone(installed: None) -> None:
    tensor = torch.ones(3)
    with FunctionMode() as mode:
        array = tensor.numpy()
    assert [function.__name__ for function, *_ in mode.seen] == ["numpy"]
    rest = tensor.clone().as_subclass(Rest)
    Rest.seen.clear()
    array = rest.numpy()
    assert Rest.seen == ["numpy"]
    assert array.tolist() == [1, 1]
    with pytest.raises(torchguard.errors.SharedViewError):
        rest.share_memory_()  # type: ignore[no-untyped-call]


def test_what_is_sent_is_a_copy(installed: None) -> None:
    """A queue and a spawned process get the values, and the array keeps its memory."""
    tensor = torch.nn.Parameter(torch.arange(4.0))
    array = tensor.detach().numpy()
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with pytest.warns(TorchGuardWarning, match="sent to another process as a copy"):
        queue.put(tensor)
    got = queue.get()
    assert isinstance(got, torch.nn.Parameter)
    assert got.tolist() == [0, 1, 2, 3]
    array[0] = 5
    assert tensor[0] == 5
    assert not tensor.is_shared()
    del array
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        queue.put(tensor)
    assert tensor.is_shared()
    queue.get()


def test_what_can_not_be_sent_or_is_shared_already_is_left_to_torch(installed: None) -> None:
    product = torch.ones(3, requires_grad=True) * 2
    array = product.detach().numpy()
    with pytest.raises(RuntimeError, match="non-leaf"):
        ForkingPickler.dumps(product)
    assert array.tolist() == [2, 2, 2]
    tensor = torch.ones(3).share_memory_()
    array = tensor.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ForkingPickler.loads(bytes(ForkingPickler.dumps(tensor))).zero_()
    assert array.tolist() == [0, 0, 0]


def test_uninstall_leaves_the_picklers_table() -> None:
    def reducers() -> dict[type, int]:  # a replacement is equal to its original
        table = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        return {kind: id(function) for kind, function in table.items()}

    before = reducers()
    with torchguard.install("numpy"):
        assert reducers() != before
    assert reducers() == before


@pytest.mark.parametrize("function", [torch.from_numpy, torch.as_tensor, torch.asarray])
def test_compiled_code_keeps_its_graph(function: Any, installed: None) -> None:
    """fullgraph=True goes on working, with the name looked up inside."""
    name = function.__name__

    def double(array: Any) -> Any:
        return getattr(torch, name)(array) * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(np.arange(3.0)).tolist() == [0, 2, 4]


def test_a_copy_that_is_sent_lives_until_a_spawned_process_takes_it(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process(args=(tensor,)) keeps the number of an open file until the process is started."""
    files: list[int] = []

    def keep_number(file: int) -> int:
        files.append(file)
        return file

    reduction: Any = torch.multiprocessing.reductions.multiprocessing.reduction  # type: ignore[attr-defined]
    monkeypatch.setattr(reduction, "DupFd", keep_number)
    tensor = torch.ones(3)
    array = tensor.numpy()
    with pytest.warns(TorchGuardWarning, match="sent to another process as a copy"):
        ForkingPickler.dumps(tensor)
    gc.collect()
    assert os.fstat(files[0]).st_size >= array.nbytes


def test_the_note_of_a_storage_goes_with_its_last_array(installed: None) -> None:
    tensor = torch.zeros(3, 1)
    arrays = [row.numpy() for row in tensor]
    assert storage_key(tensor.untyped_storage()) in numpy_memory._viewed
    del arrays
    assert storage_key(tensor.untyped_storage()) not in numpy_memory._viewed


def test_an_array_that_goes_leaves_the_note_of_another(installed: None) -> None:
    """Two threads may drop their last arrays while a third one makes a new one."""
    tensor = torch.ones(3)
    array = tensor.numpy()
    another: Any = ({}, [])
    key = storage_key(tensor.untyped_storage())
    numpy_memory._viewed[key] = another
    del array
    assert numpy_memory._viewed.pop(key) is another


@pytest.mark.parametrize("scalar", [np.float64(3.5), np.int32(4), np.bool_(1), np.complex64(1j)])
def test_asarray_of_a_numpy_scalar_is_its_value(scalar: Any, installed: None) -> None:
    """Though it offers its bytes as a read-only buffer."""
    tensor = torch.asarray(scalar)
    assert tensor.dtype == torch.from_numpy(np.array(scalar)).dtype
    assert tensor.item() == scalar.item()


def test_asarray_of_a_read_only_buffer_that_offers_dlpack(installed: None) -> None:
    """torch asks for the buffer first, and writes to it."""

    class Both(bytes):
        def __dlpack__(self, **options: Any) -> Any:
            return torch.zeros(3).__dlpack__(**options)

    both = Both(b"read-only")
    tensor = torch.asarray(both, dtype=torch.uint8)
    tensor.zero_()
    assert both == b"read-only"


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


OF_BUFFERS: Any = {"frombuffer": torch.frombuffer, "asarray": torch.asarray}
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
        for door in OF_BUFFERS
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

    assert outcome(getattr(torch, door)) == outcome(OF_BUFFERS[door])


@pytest.mark.parametrize("dtype", ["M8[s]", [("when", "M8[s]")]])
def test_frombuffer_of_what_a_memoryview_can_not_name(dtype: Any, installed: None) -> None:
    array = np.arange(3).astype("M8[s]").view(dtype)
    torch.frombuffer(array, dtype=torch.int64)[1] = 7
    assert array.view("i8").tolist() == [0, 7, 2]
    array.flags.writeable = False
    torch.frombuffer(array, dtype=torch.int64).zero_()
    assert array.view("i8").tolist() == [0, 7, 2]
