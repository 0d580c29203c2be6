"""Every kind of tensor the guards promise something about, and a reader of all that a tensor is."""

from __future__ import annotations

import array
import ctypes
import tempfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import dlpack
from typing_extensions import Self

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
"""What :class:`Watching` has seen."""


class Watching(torch.Tensor):
    """A subclass that writes down every call it sees."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        CALLS.append((func, tuple(types), kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Wrapper(torch.Tensor):
    """A subclass that holds another tensor and has a dispatcher of its own."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls, wrapped.shape, strides=wrapped.stride(), dtype=wrapped.dtype, device=wrapped.device
        )
        wrapper.wrapped = wrapped
        return wrapper

    def __init__(self, wrapped: torch.Tensor) -> None: ...

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Wrapper:
        return Wrapper(parts["wrapped"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        unwrapped = tuple(arg.wrapped if isinstance(arg, Wrapper) else arg for arg in args)
        result = func(*unwrapped, **(kwargs or {}))
        if func.__name__.partition(".")[0].endswith("_"):
            return args[0]
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[], torch.Tensor]
    """A fresh tensor, each time with the same contents."""

    can_grow: bool = True
    """Whether its storage has an allocator."""

    kills: bool = False
    """Whether growing it on bare torch ends the process."""

    has_metadata: bool = True
    """Whether torch has a size, strides and a storage to restore."""

    scope: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    """Where operations on it are allowed."""


def locked(values: list[float] | torch.Tensor) -> torch.Tensor:
    """Make a tensor of these values on memory of numpy's."""
    return torch.from_numpy(np.array(values))


def empty_locked(dtype: torch.dtype, nbytes: int = 0) -> torch.Tensor:
    """An empty tensor, contiguous, of any dtype, on memory of numpy's."""
    storage = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, (0,), (1,))


COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def plain() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def _file(*, shared: bool) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "numbers")
        path.write_bytes(array.array("f", range(8)).tobytes())
        return torch.from_file(str(path), shared=shared, size=8)


def _dlpack() -> torch.Tensor:
    tensor: torch.Tensor = dlpack.from_dlpack(np.arange(6.0))
    return tensor


def _injected() -> torch.Tensor:
    return torch.empty(0, dtype=torch.float64).set_(locked([1.0, 2.0, 3.0]).untyped_storage())


def _per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0, 1])
    return torch.quantize_per_channel(plain(), scales, zeros, 0, torch.qint8)


def _non_leaf() -> torch.Tensor:
    return torch.arange(6.0, requires_grad=True) * 2


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return plain()


_fake_mode = FakeTensorMode()


def _fake() -> torch.Tensor:
    with _fake_mode:
        return torch.empty(2, 3)


LOCKED_MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "numpy": lambda: locked([1.0, 2.0, 3.0, 4.0]),
    "numpy view": lambda: torch.from_numpy(np.arange(12.0).reshape(3, 4))[1:, ::2],
    "empty numpy": lambda: empty_locked(torch.float32),
    "0-d numpy": lambda: torch.from_numpy(np.array(5.0)),
    "frombuffer": lambda: torch.frombuffer(bytearray(range(24)), dtype=torch.int16),
    "dlpack": _dlpack,
    "private file mapping": lambda: _file(shared=False),
    "shared file mapping": lambda: _file(shared=True),
    "injected storage": _injected,
    "numpy Parameter": lambda: torch.nn.Parameter(locked([1.0, 2.0])),
    "numpy subclass": lambda: locked([1.0, 2.0]).as_subclass(Watching),
    "numpy conj view": lambda: torch.from_numpy(np.array([1 + 2j, 3 - 1j])).conj(),
}
SHARED_MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "shared memory": lambda: plain().share_memory_(),
    "view in shared memory": lambda: torch.arange(12.0).share_memory_()[4:8],
}
OF_PARTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse COO": lambda: plain().to_sparse(),
    "sparse CSR": lambda: plain().to_sparse_csr(),
    "sparse CSC": lambda: plain().to_sparse_csc(),
    "sparse BSR, a batch": lambda: torch.stack([plain(), plain()]).to_sparse_bsr((1, 1)),
    "nested strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "nested jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.zeros(3)], layout=torch.jagged
    ),
}
LOCKED = tuple(
    Kind(name, make, can_grow=False, scope=torch.no_grad if "Parameter" in name else nullcontext)
    for name, make in LOCKED_MAKERS.items()
)
SHARED = tuple(Kind(name, make, can_grow=False, kills=True) for name, make in SHARED_MAKERS.items())
STRIDED = (
    Kind("plain", plain),
    Kind("0-d", lambda: torch.tensor(3.0)),
    Kind("empty", lambda: torch.empty(0)),
    Kind("empty with dimensions", lambda: torch.empty(3, 0, 2)),
    Kind("view with offset and stride", lambda: torch.arange(40.0).reshape(5, 8)[1:4, 1::2]),
    Kind("transposed", lambda: plain().t()),
    Kind(
        "channels_last",
        lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ),
    Kind("expanded", lambda: torch.arange(3.0).expand(4, 3)),
    Kind("bool", lambda: torch.tensor([True, False, True])),
    Kind("uint8", lambda: torch.arange(5, dtype=torch.uint8)),
    Kind("uint16", lambda: torch.tensor([1, 2, 3], dtype=torch.uint16)),
    Kind("bfloat16", lambda: torch.arange(5, dtype=torch.bfloat16)),
    Kind("complex", lambda: torch.tensor([1 + 2j, 3 - 1j])),
    Kind("conj view", lambda: torch.tensor([1 + 2j, 3 - 1j]).conj()),
    Kind("neg view", lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag),
    Kind("Parameter", lambda: torch.nn.Parameter(plain()), scope=torch.no_grad),
    Kind("non-leaf", _non_leaf, scope=torch.no_grad),
    Kind("inference", _inference, scope=torch.inference_mode),
    Kind("meta", lambda: torch.empty(2, 3, device="meta")),
    Kind("subclass", lambda: plain().as_subclass(Watching)),
    *LOCKED,
    *SHARED,
)
SPECIAL = (
    Kind("quantized per tensor", lambda: torch.quantize_per_tensor(plain(), 0.5, 1, torch.qint8)),
    Kind("quantized per channel", _per_channel),
    Kind("inference outside", _inference),
    Kind("non-leaf with grad", _non_leaf),
    Kind("leaf with grad", lambda: torch.nn.Parameter(plain())),
    Kind("fake", _fake, scope=lambda: _fake_mode),
    Kind("wrapper", lambda: Wrapper(plain())),
    *(Kind(name, make, has_metadata=False) for name, make in OF_PARTS.items()),
)
ALL = (*STRIDED, *SPECIAL)
COMPRESSED_KINDS = tuple(kind for kind in SPECIAL if kind.make().layout in COMPRESSED)


def named(kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Arguments of ``pytest.mark.parametrize`` for these kinds."""
    return {"argvalues": kinds, "ids": [kind.name for kind in kinds]}


State = dict[str, Any]


class Same:
    """Equal to another of the very same object; shows nothing of its contents."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"<{type(self.held).__name__} at {id(self.held):#x}>"


def state(tensor: torch.Tensor) -> State:
    """Everything a tensor is; two of these are equal if nothing about it has changed."""
    with torch._C.DisableTorchFunction():
        return _state(tensor)


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor, or one that was made to view one
        return None


def compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _state(tensor: torch.Tensor) -> State:
    found: State = {
        "type": type(tensor),
        "layout": tensor.layout,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "grad_fn": Same(tensor.grad_fn),
        "version": _version(tensor),
    }
    if isinstance(tensor, Wrapper):
        found["wrapped"] = _state(tensor.wrapped)
    elif tensor.layout is torch.sparse_coo:
        found["shape"] = tensor.shape
        found["parts"] = [_state(tensor._indices()), _state(tensor._values())]
    elif tensor.layout in COMPRESSED:
        found["shape"] = tensor.shape
        found["parts"] = [
            (part.shape, part.stride(), part.storage_offset(), _bytes(part))
            for part in compressed_parts(tensor)
        ]
    elif tensor.is_nested:
        found["parts"] = [_bytes(part) for part in tensor.unbind()]
    if tensor.layout is torch.strided and not tensor.is_nested:
        found["shape"], found["stride"] = tensor.shape, tensor.stride()
        found["offset"] = tensor.storage_offset()
        found["conj"], found["neg"] = tensor.is_conj(), tensor.is_neg()
        # A storage is one Python object for as long as it is referenced, as here.
        storage = tensor.untyped_storage()
        found["storage"], found["nbytes"] = Same(storage), storage.nbytes()
        fake = isinstance(tensor, (Wrapper, FakeTensor))
        found["bytes"] = None if fake else _bytes(tensor)
    return found


def _bytes(tensor: torch.Tensor) -> tuple[int, int, bytes] | None:
    """The whole storage, whatever the tensor shows of it: length, checksum, beginning."""
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu" or not 0 < storage.nbytes() < 2**20:
        return None
    try:
        address = storage.data_ptr()
    except RuntimeError:  # the storage of a wrapper subclass, given to another tensor
        return None
    held = ctypes.string_at(address, storage.nbytes())
    return len(held), zlib.crc32(held), held[:16]


def values(tensor: torch.Tensor) -> State:
    """The state without what differs between two tensors made alike."""
    found = state(tensor)
    for name in ("storage", "grad_fn"):
        found.pop(name, None)
    if isinstance(found.get("wrapped"), dict):
        found["wrapped"] = values(tensor.wrapped)  # type: ignore[attr-defined]
    if tensor.layout is torch.sparse_coo:
        with torch._C.DisableTorchFunction():
            found["parts"] = [values(tensor._indices()), values(tensor._values())]
    return found
