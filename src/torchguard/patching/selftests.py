"""What each guard of ``install()`` protects, tried on the torch at hand once it is installed.

A guard replaces functions by their names and leans on names that PyTorch does not promise. If a
release renames one, or no longer calls it, the guard is on and does nothing. Each function here
uses torch as a program would, on a few numbers, and says in one sentence what is not protected.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import fx, nn

from torchguard._events import trial
from torchguard._torch import (
    DYNAMO,
    FIRST_COMPILE,
    backend_of_compiled,
    can_unwrap,
    compiles_apart,
    compiling_uncounted,
    computing_unseen,
    patch,
)
from torchguard._torch.symbolic_shapes import stance
from torchguard.errors import (
    DamagedFileError,
    IndexOutOfRangeError,
    SharedViewError,
    ValueOutOfRangeError,
    ZeroDivisorError,
)
from torchguard.rollback.recompute import runs_again_as_first
from torchguard.verification.backend import VerifiedBackend

SelfTest = Callable[[], str | None]
"""Returns None if the guard protects, else one sentence that says what is not protected."""

_CPU: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the defaults are
_FIVE = torch.ones(5, **_CPU)
_RESIZES: dict[str, Callable[[Any], object]] = {
    "torch.Tensor.resize_": lambda t: t.resize_(5),
    "torch.Tensor.resize_as_": lambda t: t.resize_as_(_FIVE),
    "torch.resize_as_": lambda t: torch.resize_as_(t, _FIVE),
    "torch.Tensor.set_": lambda t: t.set_(t.untyped_storage(), 0, (5,), (1,)),
}
_WRITES: dict[str, Callable[[Any], object]] = {
    "torch.add": lambda out: torch.add(_FIVE, 1, out=out),
    "torch.norm": lambda out: torch.norm(_FIVE, dim=0, out=out),
    "torch.linalg.vector_norm": lambda out: torch.linalg.vector_norm(_FIVE, out=out),
    "torch.special.expit": lambda out: torch.special.expit(_FIVE, out=out),
    "torch.fft.fftfreq": lambda out: torch.fft.fftfreq(5, out=out),
    "torch.nn.functional.softplus": lambda out: F.softplus(_FIVE, out=out),  # type: ignore[call-arg]
}


def _resize() -> str | None:
    for path, resize in _RESIZES.items():
        fixed = torch.from_numpy(np.ones(1))  # its memory can't grow
        loss = (torch.ones(1, **_CPU, requires_grad=True) * fixed).sum()
        if _raises(RuntimeError, functools.partial(resize, fixed), path):
            if tuple(fixed.shape) != (1,):
                return f"{path}() that raises leaves the tensor with the new shape"
            if _raises(RuntimeError, loss.backward):
                return f"autograd takes a {path}() that raises for a write to the tensor"
    return None


def _out() -> str | None:
    for path, write in _WRITES.items():
        out = torch.from_numpy(np.empty(0))
        raised = _raises(RuntimeError, functools.partial(write, out), path)
        if raised and tuple(out.shape) != (0,):
            return f"{path}(out=) that raises leaves its output with the new shape"
    return None


def _raises(expected: type[Exception], call: Callable[[], object], path: str = "") -> bool:
    """Whether a call raises this, and not PyTorch's own.

    Of a function of PyTorch by its path, which a release may lack, other errors are let through.
    """
    try:
        if not path or patch.exists(path):
            call()
    except expected:
        return True
    except Exception:  # PyTorch's own error
        if path:
            raise
    return False


def _overlap() -> str | None:
    if not can_unwrap:
        return "inside torch.func.vmap it can't tell which operands share memory"
    before = np.arange(12.0).reshape(3, 4)

    def subtract(x: Any) -> None:
        x -= x[:, :1]

    def shift(x: Any) -> None:
        x[:, 1:] = x[:, :-1]

    def write_out(x: Any) -> None:
        torch.cumsum(x[:, :-1], 1, out=x[:, 1:])

    summed = np.hstack([before[:, :1], np.cumsum(before[:, :-1], 1)])
    for name, write, expected in (
        ("x -= x[:, :1]", subtract, before - before[:, :1]),
        ("x[:, 1:] = x[:, :-1]", shift, before[:, [0, 0, 1, 2]]),
        ("torch.cumsum(x[:, :-1], 1, out=x[:, 1:])", write_out, summed),
    ):
        x = torch.tensor(before, device="cpu")
        with contextlib.suppress(RuntimeError):  # a release that refuses it has no defect
            write(x)
            if not np.array_equal(x.numpy(), expected):
                return f"{name} does not compute what it computes if the operand is copied first"
    return None


# ---- checks ----

_WEIGHT = torch.ones(2, 2, device="cpu", dtype=torch.float32)
_FAR = torch.tensor([5], device="cpu")
_FUNCTIONAL = "torch.nn.functional"
_OUTSIDE: dict[type[Exception], dict[str, Callable[[], object]]] = {
    IndexOutOfRangeError: {
        f"{_FUNCTIONAL}.embedding": lambda: F.embedding(_FAR, _WEIGHT),
        f"{_FUNCTIONAL}.embedding_bag": lambda: F.embedding_bag(_FAR[None], _WEIGHT),
        f"{_FUNCTIONAL}.one_hot": lambda: F.one_hot(_FAR, 2),
        f"{_FUNCTIONAL}.cross_entropy": lambda: F.cross_entropy(_WEIGHT[:1], _FAR),
        f"{_FUNCTIONAL}.nll_loss": lambda: F.nll_loss(_WEIGHT[:1], _FAR),
        "torch.Tensor.__getitem__": lambda: _WEIGHT[_FAR],
        "torch.Tensor.__setitem__": lambda: _WEIGHT.__setitem__(_FAR, 1.0),
        "torch.Tensor.index_select": lambda: _WEIGHT.index_select(0, _FAR),
        "torch.gather": lambda: torch.gather(_WEIGHT, 0, _FAR[None]),
        "torch.Tensor.scatter": lambda: _WEIGHT.scatter(0, _FAR[None], 1.0),
        "torch.bincount": lambda: torch.bincount(-_FAR),
    },
    ZeroDivisorError: {"torch.Tensor.__floordiv__": lambda: _FAR // 0},
    ValueOutOfRangeError: {
        "torch.multinomial": lambda: torch.multinomial(-_WEIGHT, 1),
        f"{_FUNCTIONAL}.binary_cross_entropy": lambda: F.binary_cross_entropy(_WEIGHT * 2, _WEIGHT),
    },
}
"""By error, the functions that raise it and a call with a value out of range."""


def _checks() -> str | None:
    for expected, calls in _OUTSIDE.items():
        for path, call in calls.items():
            # What this release does not have needs no check.
            if patch.exists(path) and not _raises(expected, call):
                return f"a value out of range passes {path} unchecked"
    return None


def _checks_compiled() -> str | None:
    def look_up(weight: Any, index: Any) -> Any:
        return torch.gather(weight, 0, index)

    graphs: list[Any] = []
    compiled = _compiled(look_up, graphs)
    if not _raises(IndexOutOfRangeError, lambda: compiled(_WEIGHT, _FAR[None])):
        return "an index out of range is not checked in compiled code" if graphs else None
    if compiles_apart("checks"):
        return None
    return "what was compiled without checks stays without them"


# ---- files ----


def _save() -> str | None:
    with _folder() as folder:
        if folder is None:
            return None if patch.patched("torch.save") else "there is no place to try it"
        path = folder / "probe.pt"
        path.write_bytes(b"old")
        with path.open("rb") as old:
            torch.save([1.0], path)
            same = os.path.samestat(os.fstat(old.fileno()), path.stat())
            if same or old.read() != b"old":
                return "torch.save() writes into the old file in place of replacing it"
        before = path.read_bytes()
        with contextlib.suppress(Exception):
            torch.save(lambda: None, path)  # has no name, so it can't be pickled
        if path.read_bytes() != before:
            return "a torch.save() that raises leaves half a file"
    return None


def _load() -> str | None:
    module = nn.LayerNorm(1, device="cpu")  # initializes without random numbers
    with contextlib.suppress(RuntimeError):
        module.load_state_dict(
            {"weight": torch.full((1,), 77.0, **_CPU), "bias": torch.ones(9, **_CPU)}
        )
    if module.weight.item() != 1.0:
        return "a Module.load_state_dict() that raises has loaded a part of the state"
    tied = nn.ModuleList([module, nn.LayerNorm(1, device="cpu")])
    tied[1].weight = tied[0].weight
    if patch.exists("torch.nn.Module.to_empty"):
        tied.to_empty(device="meta")
    if tied[0].weight is not tied[1].weight:
        return "Module.to_empty() makes two parameters of one that is tied"
    with _folder() as folder:
        if folder is None:
            return None
        path = folder / "empty.pt"
        path.touch()
        if _raises(DamagedFileError, lambda: torch.load(path, weights_only=True)):
            return None
    return "torch.load() of an empty file does not say what is wrong with it"


@contextlib.contextmanager
def _folder() -> Iterator[Path | None]:
    """Make a folder for a moment; None if there is no place for one, so that nothing is tried."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="torchguard-")
    except OSError:
        yield None
        return
    with folder as name:
        yield Path(name)


# ---- numpy ----


def _numpy() -> str | None:
    for name, convert in (
        ("from_numpy", torch.from_numpy),
        ("as_tensor", functools.partial(torch.as_tensor, device="cpu")),
        ("asarray", functools.partial(torch.asarray, device="cpu")),
    ):
        array = np.zeros(1)
        array.flags.writeable = False
        convert(array).fill_(1.0)
        if array[0]:
            return f"a tensor that torch.{name}() has made writes to a read-only array"
    buffer = bytearray(8)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if not _raises(BufferError, buffer.clear):
        return "torch.frombuffer() does not keep its buffer open"
    tensor = torch.zeros(1, **_CPU)
    array = tensor.numpy()
    if not _raises(SharedViewError, tensor.share_memory_):
        return "Tensor.share_memory_() frees memory that a numpy array is a view of"
    del array  # it has been held until here
    return None


# ---- recompute ----


def _recompute(*, reentrant: bool) -> str | None:
    if runs_again_as_first(reentrant=reentrant):
        return None
    return (
        f"torch.utils.checkpoint.checkpoint(use_reentrant={reentrant}) runs a block again from "
        "what its first run has left"
    )


# ---- compiled code ----


def _compiled(function: Any, graphs: list[Any]) -> Callable[..., Any]:
    """Compile a function of this module with a backend that keeps each graph, and runs it."""

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return fx.Interpreter(graph).run  # calls PyTorch's functions, not what has replaced them

    # With a code object of its own: Dynamo leaves this module's alone, and keeps what it compiles.
    code = function.__code__.replace(co_name="probe")
    return torch.compile(FunctionType(code, function.__globals__), backend=keep)


def _setitem_compiled() -> str | None:
    def assign(value: Any) -> Any:
        target = torch.zeros(2, 2, device="cpu")
        target[0][0] = value
        return target.requires_grad, target

    tracked, _ = _compiled(assign, [])(torch.ones((), device="cpu", requires_grad=True))
    if tracked:
        return None
    return "requires_grad is False in compiled code after x[0][0] = v"


def _verified_compiled() -> str | None:
    made: Any = torch.compile(_verified_compiled)  # and is not called
    if made is _verified_compiled:  # TORCHDYNAMO_DISABLE=1
        return None
    if isinstance(backend_of_compiled(made), VerifiedBackend):
        return None
    return "torch.compile() no longer hands its graphs to the backend that checks them"


# ---- the table ----


def _tried(test: SelfTest) -> str | None:
    """Run a test whatever the thread's modes are, and unseen by them; what raises fails."""
    try:
        with (
            computing_unseen(),
            trial(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            return test()
    except Exception as error:  # noqa: BLE001  a name that is gone may raise anything
        return f"the guard raises {type(error).__name__}: {error}"


def _tried_compiled(test: SelfTest) -> str | None:
    def compiled() -> str | None:
        with compiling_uncounted(), stance("default"):
            return test()

    return _tried(compiled)


def _table(run: Callable[[SelfTest], str | None], **tests: SelfTest) -> dict[str, SelfTest]:
    return {name: functools.partial(run, test) for name, test in tests.items()}


SELF_TESTS: Mapping[str, Mapping[str, SelfTest]] = {
    "torch": _table(
        _tried,
        resize=_resize,
        out=_out,
        overlap=_overlap,
        checks=_checks,
        save=_save,
        load=_load,
        numpy=_numpy,
        recompute=functools.partial(_recompute, reentrant=True),
    ),
    # This mode of checkpoint imports Dynamo, which takes seconds.
    DYNAMO: _table(_tried, recompute=functools.partial(_recompute, reentrant=False)),
    FIRST_COMPILE: _table(
        _tried_compiled,
        checks=_checks_compiled,
        setitem=_setitem_compiled,
        verified=_verified_compiled,
    ),
}
"""By module and guard: run once the guard is in place and something has imported the module."""
