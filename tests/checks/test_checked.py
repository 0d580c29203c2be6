"""guarded("checks") and install("checks"): what they cover, and what they leave alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import torchguard
from support.modes import DispatchMode, FunctionMode
from torchguard.checks import calls
from torchguard.errors import IndexOutOfRangeError, TorchGuardError, ZeroDivisorError

X = torch.arange(12.0).reshape(4, 3)
BAD = torch.tensor([0, 4])
ONE, TRUE = torch.tensor([1, 0]), torch.tensor([True, True])
DEEP, DIAGONAL = torch.arange(20.0).reshape(2, 2, 5), [[True, False], [False, True]]


def raises(call: Callable[[], Any]) -> bool:
    """Whether it raises an error of ours."""
    try:
        call()
    except TorchGuardError:
        return True
    except Exception:  # noqa: BLE001 - torch's own
        return False
    return False


def test_the_error_names_what_is_out_of_range_before_anything_is_written() -> None:
    with torchguard.guarded("checks"), pytest.raises(IndexOutOfRangeError) as raised:
        functional.embedding(torch.tensor([[1, 2], [9, -3]]), X)
    assert str(raised.value) == (
        "embedding: indices: expected 0 to 3, got -3 to 9; "
        "2 of 4 out of range, the first is indices[1, 0] = 9"
    )
    assert isinstance(raised.value, (IndexError, RuntimeError))
    # Nothing is written; plain torch has stored the good rows when it comes to the bad one.
    x = X.clone()
    version = x._version
    with torchguard.guarded("checks"), pytest.raises(IndexOutOfRangeError):
        x[torch.tensor([1, 9])] = -1.0
    assert x.equal(X)
    assert x._version == version


class Subclass(torch.Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _calls(x: Tensor, index: Tensor) -> None:
    torch.gather(x, 0, index[:, None])
    x.gather(0, index[:, None])
    x[index]
    x.clone()[index] = 1.0
    index % 2
    index // 2
    torch.take_along_dim(x, index[:, None], 0)


def test_modes_and_subclasses_see_what_they_see_outside() -> None:
    """Torch's own functions, each once, and nothing of the checks; their calls are checked."""
    index = torch.tensor([0, 3])
    seen = []
    for _ in range(2):
        Subclass.seen.clear()
        with FunctionMode() as functions, DispatchMode() as operators:
            _calls(X, index)
        _calls(X.as_subclass(Subclass), index)
        seen.append((functions.seen, operators.seen, list(Subclass.seen)))
        if len(seen) == 1:
            scope = torchguard.guarded("checks")
            scope.__enter__()
    with FunctionMode(), DispatchMode():
        assert raises(lambda: X.gather(0, BAD[:, None]))
    with FakeTensorMode():
        _calls(torch.empty(4, 3), torch.empty(2, dtype=torch.int64))
    scope.__exit__(None, None, None)
    assert seen[0] == seen[1]


# Compiled too.
FINE: tuple[Callable[[], Any], ...] = (
    lambda: torch.div(ONE, 1 - ONE) + ONE.divide(1 - ONE),
    lambda: torch.ones(2).div_(ONE),
    lambda: ONE.to(torch.int8) // TRUE,
    lambda: ONE.to(torch.int32) % TRUE,
    lambda: torch.remainder(cast(float, np.float32(2.5)), ONE),
    lambda: DEEP[DIAGONAL, 4 - ONE],
    lambda: DEEP[tuple(map(tuple, DIAGONAL)), 4 - ONE],
    lambda: DEEP.clone().__setitem__((DIAGONAL, 4 - ONE), 1.0),
)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    "call",
    [
        *FINE,
        lambda: X[..., torch.tensor(2)],
        lambda: X[[0, -4]],
        lambda: X[np.array([0, -4])],
        lambda: X[torch.tensor([], dtype=torch.int64)],
        lambda: X[torch.tensor([3], dtype=torch.int32)],
        lambda: X[torch.tensor(True)],
        lambda: torch.empty(0, 3)[torch.empty(0, dtype=torch.int64)],
        lambda: functional.cross_entropy(torch.ones(1, 300), torch.tensor([255]).to(torch.uint8)),
        lambda: torch.tensor([1, 2]) / torch.tensor([0, 1]),
        lambda: torch.tensor([1.5]) // torch.tensor([0]),
        lambda: DEEP[np.array(DIAGONAL, dtype=np.uint8), 4 - ONE],  # Dynamo has never learnt it
        lambda: X.to("meta")[torch.tensor([9]).to("meta")],
        lambda: torch.vmap(lambda x, i: x[i])(X, torch.tensor([[0], [-1], [2], [1]])),
        lambda: torch.vmap(lambda i: X.index_select(0, i))(torch.tensor([[0], [3]])),
        lambda: torch.func.grad(lambda x: x[torch.tensor([-4])].sum())(X),
        lambda: torch.jit.trace(lambda x, i: x[i], (X, torch.tensor([1])))(X, torch.tensor([3])),
        lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 2, 2]), torch.tensor([2, 0]), torch.ones(2), size=(2, 3)
        ),
        lambda: torch.sparse_bsr_tensor(
            torch.tensor([0, 1]), torch.tensor([1]), torch.ones(1, 2, 2), size=(2, 4)
        ),
    ],
)
def test_no_false_alarm(call: Callable[[], Any]) -> None:
    """What the samples of OpInfo lack: lists, arrays, empty and 0-d ones, transforms, columns."""
    bare = call()
    with torchguard.guarded("checks"):
        found = [call()]
        if call in FINE:
            found.append(torch.compile(call, backend="aot_eager")())
    if bare is None or not bare.is_meta:
        torch.testing.assert_close(found, [bare] * len(found), rtol=0, atol=0, equal_nan=True)


def sparse(pointers: list[int], columns: list[int]) -> Tensor:
    numbers = torch.tensor(pointers), torch.tensor(columns)
    return torch.sparse_csr_tensor(*numbers, torch.ones(2), size=(2, 3))


def test_indices_of_sparse_tensors_and_offsets() -> None:
    numbers = (([0, 1, 2], [0, 3]), ([0, 1, 2], [0, -1]), ([0, 5, 2], [0, 1]), ([0, 9, 9], [0, 1]))
    with torchguard.guarded("checks"):
        for pointers, columns in numbers:
            assert raises(lambda: sparse(pointers, columns)), (pointers, columns)  # noqa: B023
        assert raises(lambda: functional.embedding_bag(BAD % 4, X, torch.tensor([0, 9])))


@pytest.mark.parametrize("as_list", [True, False])
def test_lengths_of_ctc_loss(as_list: bool) -> None:
    """As tensors and as lists; of padded targets what lies beyond their length is not read."""
    log_probs = torch.zeros(4, 1, 3).log_softmax(-1)

    def call(input_length: int, target_length: int, target: int) -> Tensor:
        both: Any = [[input_length], [target_length]]
        both = both if as_list else map(torch.tensor, both)
        return functional.ctc_loss(log_probs, torch.tensor([[target, -100]]), *both)

    with torchguard.guarded("checks"):
        call(4, 1, 1)
        for bad in ((9, 1, 1), (-1, 1, 1), (4, -1, 1), (4, 1, 3)):
            assert raises(lambda bad=bad: call(*bad)), bad  # type: ignore[misc]


def test_the_number_zero_as_divisor_of_integers() -> None:
    """Torch raises a bare RuntimeError on a CPU, and nothing on CUDA."""
    x = torch.ones(2, dtype=torch.long)
    divisions: list[Callable[[], Any]] = [
        lambda: x // 0,
        lambda: x % False,
        lambda: torch.fmod(x, 0),
        lambda: torch.remainder(x, np.int64(0)),  # type: ignore[call-overload]
        lambda: x.clone().floor_divide_(0),
        lambda: torch.div(x, 0, rounding_mode="floor"),
    ]
    with torchguard.guarded("checks"):
        for divide in divisions:
            with pytest.raises(ZeroDivisorError, match="other"):
                divide()
        assert torch.div(x, 0).isinf().all()
        assert (x // 0.0).isinf().all()
        assert (torch.empty(0, dtype=torch.long) // 0).shape == (0,)
        assert (x.to("meta") // 0).shape == (2,)
        with pytest.raises(RuntimeError, match="rounding_mode to be one of"):
            torch.div(x, 2, rounding_mode="")


def test_uninstall_reports_what_it_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for everything in (True, False):
        installation = torchguard.install("checks", "resize")
        with monkeypatch.context() as as_on_a_gpu:
            as_on_a_gpu.setattr(calls, "is_on_cpu", lambda _: False)
            X.index_select(0, BAD)
        with pytest.raises(IndexOutOfRangeError, match="index_select"):
            (torchguard.uninstall if everything else installation.uninstall)()
        assert torchguard.installed() == ()
        assert not raises(lambda: X[BAD])


class Own(torch.Tensor):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


def test_a_tensor_is_no_sequence_in_a_scope_and_after_it() -> None:
    """As in plain torch: setting ``__getitem__`` fills another slot of the class too."""
    one, two, x = torch.tensor(1), torch.tensor(2), torch.arange(12).reshape(3, 4)

    def use() -> Any:
        kinds = one, torch.nn.Parameter(torch.ones(())), torch.ones(()).as_subclass(Own)
        are = [ctypes.pythonapi.PySequence_Check(ctypes.py_object(each)) for each in kinds]
        return are, torch.tensor([one, two]).tolist(), x[[one, two], 1].tolist(), len([*x])

    plain = [0, 0, 1], [1, 2], [5, 9], 3
    with torchguard.guarded("checks"):
        assert use() == plain
    assert use() == plain
    with torchguard.install("checks"):
        assert use() == plain
    assert use() == plain


def test_what_is_no_index_is_torchs_error() -> None:
    with torchguard.guarded("checks"), pytest.raises(Exception) as raised:  # noqa: PT011  torch's, or ours
        torch.zeros(3, 3)[[[1, 2], [0]], BAD]
    assert "inhomogeneous" not in str(raised.value)
    with torchguard.guarded("checks"), pytest.raises(TypeError, match="tuple of Tensors, not None"):
        X.index_put(cast(Any, None), torch.ones(()))
