"""Build the fake device, load it, and let ``torch.cuda`` lead to it, or a device of another name.

The environment says which: ``FAKE_DEVICE=cuda`` or ``FAKE_DEVICE=private``. ``load()`` is called
once, before torch is imported: ``startup/sitecustomize.py`` does that in every process. What the
device models, and what it does not, is in ``fake_device.cpp`` and in docs/project/contributing.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "fake_device.cpp"
BUILT = HERE.parents[1] / "build" / "fake_device"
IS_CUDA = os.environ.get("FAKE_DEVICE", "cuda") == "cuda"
NAME = "cuda" if IS_CUDA else "fake"
DEVICES = 4
"""How many devices there can be; two are visible, unless ``set_visible`` says otherwise."""

_library: Any = None
_casts: Any = None


class Counts(NamedTuple):
    """What has happened on the device so far, or between two times."""

    launches: int
    waits: int
    allocations: int
    bytes_allocated: int
    caches_emptied: int
    replays: int

    def since(self, before: Counts) -> Counts:
        """Return what has happened since."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


# ---- build and load ----


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def why_not() -> str | None:
    """Return why the device can't be here, or None."""
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this build of torch has CUDA, whose place the fake device would take"
    if not sys.platform.startswith("linux"):
        return "the fake device needs Linux"
    if shutil.which("g++") is None and not _path().exists():
        return "the fake device needs g++"
    return None


def _path() -> Path:
    """Return where the library for this torch and this source is, or will be."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return BUILT / f"{version}-{digest}" / "fake_device.so"


def _build(to: Path) -> None:
    torch = _torch()
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        new = Path(temporary) / to.name
        line = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
        line += [
            f"-isystem{torch / each}" for each in ("include", "include/torch/csrc/api/include")
        ]
        line += [str(SOURCE), "-o", str(new)]
        line += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        print("building the fake device, a minute or two", file=sys.stderr)  # noqa: T201
        subprocess.run(line, check=True)
        new.replace(to)  # complete, if two processes build it at once


def load() -> None:
    """Load the device; build it the first time."""
    global _library
    path = _path()
    if not path.exists():
        _build(path)
    os.environ["FAKE_DEVICE"] = "cuda" if IS_CUDA else "private"
    if IS_CUDA:  # torch asks for CUDA's hooks while it is imported, and keeps the answer
        assert "torch" not in sys.modules, "the fake device has to be loaded before torch"
        for name in ("c10", "torch_cpu", "torch"):
            ctypes.CDLL(str(_torch() / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
        _library = ctypes.CDLL(str(path))
        _fill_cuda()
    else:
        import torch  # noqa: PLC0415

        utils: Any = torch.utils
        utils.rename_privateuse1_backend(NAME)
        _library = ctypes.CDLL(str(path))
        _make_module()


def is_loaded() -> bool:
    """Whether this process has the device."""
    return _library is not None


# ---- what tests say and ask ----


def _number(name: str) -> Any:
    kind = ctypes.c_int64 if name.startswith("fake_fail") else ctypes.c_int
    return kind.in_dll(_library, name)


def _of_each_device(name: str) -> Any:
    return (ctypes.c_int64 * DEVICES).in_dll(_library, name)


def counts() -> Counts:
    """Return what has happened since the process began."""
    return Counts(*(ctypes.c_int64 * len(Counts._fields)).in_dll(_library, "fake_counters"))


def races() -> list[str]:
    """Return the accesses that did not wait for another stream, and forget them."""
    return _lines("fake_races")


@contextlib.contextmanager
def noting(launches: list[str]) -> Iterator[None]:
    """Append the names of the operators that are launched."""
    _lines("fake_noted")
    _number("fake_noting").value = 1
    try:
        yield
    finally:
        _number("fake_noting").value = 0
        launches += _lines("fake_noted")


def _lines(function: str) -> list[str]:
    said = getattr(_library, function)
    said.restype = ctypes.c_char_p
    return str(said().decode()).splitlines()


@contextlib.contextmanager
def failing(first: int, count: int = 2**60) -> Iterator[None]:
    """Let allocations run out of memory: the next is number 0, and ``count`` of them fail."""
    start, end = _number("fake_fail_from"), _number("fake_fail_until")
    before = start.value, end.value
    start.value = counts().allocations + first
    end.value = start.value + count
    try:
        yield
    finally:
        start.value, end.value = before


@contextlib.contextmanager
def asserting() -> Iterator[None]:
    """Let a bad index end the context, as on a GPU; afterwards there is a new one."""
    _number("fake_asserts").value = 1
    try:
        yield
    finally:
        _number("fake_asserts").value = _number("fake_dead").value = 0


def set_visible(devices: int) -> None:
    """Set how many devices there are, before the first is used."""
    _number("fake_visible").value = devices


def memory(device: int = 0) -> tuple[int, int]:
    """Return the bytes in use, and the most that were since ``reset_peak``."""
    return _of_each_device("fake_used")[device], _of_each_device("fake_peak")[device]


def reset_peak(device: int = 0) -> None:
    """Let the peak be what is in use now."""
    _of_each_device("fake_peak")[device] = _of_each_device("fake_used")[device]


@contextlib.contextmanager
def capacity(size: int, device: int = 0) -> Iterator[None]:
    """Let a device have so many bytes."""
    capacities = _of_each_device("fake_capacity")
    before = capacities[device]
    capacities[device] = size
    try:
        yield
    finally:
        capacities[device] = before


# ---- torch.cuda ----


class _Properties:
    name, major, minor, multi_processor_count = "fake device", 9, 0, 132
    total_memory = 2**34
    gcnArchName, uuid = "", "0"  # noqa: N815
    warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536
    shared_memory_per_block, shared_memory_per_multiprocessor = 49152, 233472
    L2_cache_size, is_integrated, is_multi_gpu_board = 2**25, 0, 0


def _fill_cuda() -> None:  # noqa: C901  many small functions
    import torch  # noqa: PLC0415

    C: Any = torch._C  # noqa: N806
    cuda: Any = torch.cuda
    own: Any = torch.ops.fake_device

    def exchange_device(index: int) -> int:
        before = int(C._accelerator_getDeviceIndex())
        if index >= 0:
            C._accelerator_setDeviceIndex(index)
        return before

    def stream_data(index: int) -> tuple[int, int, int]:
        stream = C._accelerator_getStream(index)
        return stream.stream_id, stream.device_index, stream.device_type

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        C._accelerator_setDeviceIndex(device_index)
        C._accelerator_setStream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    def memory_stats(device: int) -> dict[str, Any]:
        current, peak = memory(device)
        both = {"all": {"current": current, "peak": peak}}
        return {"allocated_bytes": both, "reserved_bytes": both}

    def set_fraction(fraction: float, device: int) -> None:
        _of_each_device("fake_capacity")[device] = int(fraction * _Properties.total_memory)

    def empty_cache() -> None:
        (ctypes.c_int64 * 5).in_dll(_library, "fake_counters")[4] += 1

    def init() -> None:
        devices = range(_number("fake_visible").value)
        cuda.default_generators = tuple(map(own.default_generator, devices))

    is_capturing = lambda: bool(_number("fake_capturing").value)  # noqa: E731
    functions = {
        "getDeviceCount": lambda: _number("fake_visible").value,
        "getDevice": C._accelerator_getDeviceIndex,
        "setDevice": C._accelerator_setDeviceIndex,
        "exchangeDevice": exchange_device,
        "maybeExchangeDevice": exchange_device,
        "synchronize": lambda: C._accelerator_synchronizeDevice(C._accelerator_getDeviceIndex()),
        "emptyCache": empty_cache,
        "isInBadFork": lambda: False,
        "getCurrentStream": stream_data,
        "getDefaultStream": lambda index: (0, index, 1),
        "getCurrentRawStream": lambda index: stream_data(index)[0],
        "setStream": set_stream,
        "getArchFlags": lambda: "sm_90",
        "get_sync_debug_mode": lambda: 0,
        "canDeviceAccessPeer": lambda *_: False,
        "memoryStats": memory_stats,
        "resetPeakMemoryStats": reset_peak,
        "resetAccumulatedMemoryStats": lambda _: None,
        "setMemoryFraction": set_fraction,
        "init": init,
        "isCurrentStreamCapturing": is_capturing,
    }
    for name, function in functions.items():
        setattr(C, f"_cuda_{name}", function)
    C._host_emptyCache = lambda: None
    C._graph_pool_handle = cuda.graphs._graph_pool_handle = lambda: (0, 1)
    C._CudaDeviceProperties = _Properties
    cuda._cudart = object()
    # Dynamo has a handler for each of the two.
    cuda._exchange_device = exchange_device
    cuda._maybe_exchange_device = lambda i: exchange_device(i)  # noqa: PLW0108  not the same
    cuda.get_device_properties = cuda._get_device_properties = lambda _=None: _Properties()
    cuda.graphs._cuda_isCurrentStreamCapturing = is_capturing
    cuda._sleep = lambda _: torch.zeros(1, device="cuda")

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            index = cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, device=f"cuda:{index}")

        cuda_stream = property(lambda self: self.stream_id)

    class Event:  # torch.Event asks the other one for its very class
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return torch.Event("cuda", enable_timing=enable_timing)

    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    _fill_graphs(C._CUDAGraph, own)
    _fill_storages(torch, own)


def _fill_graphs(base: Any, own: Any) -> None:
    """Let ``torch.cuda.CUDAGraph`` record and replay."""

    def new(cls: Any, *_: Any) -> Any:
        made = object.__new__(cls)
        made._number = None
        return made

    def capture_end(self: Any) -> None:
        end = _library.fake_end_capture
        end.restype = ctypes.c_int64
        self._number = end()

    def reset(self: Any) -> None:
        if self._number is not None:
            _library.fake_drop_graph(ctypes.c_int64(self._number))
            self._number = None

    base.__new__, base.__init__ = new, lambda self, *_, **__: None
    base.capture_begin = lambda self, *_, **__: _library.fake_begin_capture()
    base.capture_end, base.reset = capture_end, reset
    base.replay = lambda self: own.replay(self._number)
    base.instantiate, base.pool = lambda self: None, lambda self: (0, 1)


def _fill_storages(torch: Any, own: Any) -> None:
    """Add what the storages of a build without CUDA lack."""
    kind = torch.UntypedStorage
    new, resize_ = kind.__new__, kind.resize_

    def make(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        data = args[0] if args and not isinstance(args[0], int) else None
        if data is not None:
            return torch.tensor(list(data), dtype=torch.uint8).to(device).untyped_storage()
        return torch.empty(*args or (0,), dtype=torch.uint8, device=device).untyped_storage()

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_(self, size)
        with torch._C.DisableTorchFunction():
            own.resize_storage(
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size
            )
        return self

    kind.__new__, kind.resize_ = make, resize


# ---- a device that torch does not know by name ----


def _make_module() -> None:
    import torch  # noqa: PLC0415

    C: Any = torch._C  # noqa: N806
    module: Any = types.ModuleType(f"torch.{NAME}")

    def generator(device: Any = NAME) -> Any:
        index = device if isinstance(device, int) else torch.device(device).index
        return module.default_generators[module.current_device() if index is None else index]

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before = module.current_device()
        module.set_device(torch.device(NAME, index) if isinstance(index, int) else index)
        try:
            yield
        finally:
            module.set_device(before)

    global _casts  # goes with the library, else
    _casts = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _casts.fallback(torch.library.fallthrough_kernel)
    devices = range(_number("fake_visible").value)
    module.default_generators = tuple(map(torch.ops.fake_device.default_generator, devices))
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(devices)
    module.current_device = C._accelerator_getDeviceIndex
    module.set_device = lambda device: C._accelerator_setDeviceIndex(
        torch.device(NAME, device).index
    )
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.empty_cache = lambda: None
    module.get_rng_state = lambda device=NAME: generator(device).get_state()
    module.set_rng_state = lambda state, device=NAME: generator(device).set_state(state)
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [
        each.manual_seed(seed) for each in module.default_generators
    ]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.device = device
    torch._register_device_module(NAME, module)
    utils: Any = torch.utils
    utils.generate_methods_for_privateuse1_backend()
