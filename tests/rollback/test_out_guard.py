"""The guard ``out``: an operation that fails, one that succeeds, and outputs in shared memory."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchguard
from support.child_process import output_of, run_python
from support.install import locked
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- the guard `out`: failures


class Case:
    """One call that fails, with what it is to fail on."""

    def __init__(self, call: Callable[..., Any], *outs: Callable[[], torch.Tensor]) -> None:
        self.call = call
        self.outs = outs

    def __call__(self) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
        """Make the call, and yield each output with what it was before."""
        outs = [out() for out in self.outs]
        before = [_state(out) for out in outs]
        with pytest.raises((RuntimeError, IndexError)) as failure:
            self.call(*outs)
        assert not isinstance(failure.value, torchguard.TorchGuardError)
        yield from zip(outs, before, strict=True)


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        storage._cdata,  # which storage it is: growing may move its bytes
        storage.nbytes(),
        tensor.requires_grad,
    )


def locked_empty() -> torch.Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.float32))


def locked_long() -> torch.Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.int64))


def growable() -> torch.Tensor:
    return torch.arange(12.0)[3:9].view(2, 3).t()


MATRIX = torch.arange(1.0, 10).view(3, 3) + torch.eye(3)


FAR = torch.tensor([0, 99])


FAILING = {
    "add into numpy": Case(lambda out: torch.add(MATRIX, 1, out=out), locked_empty),
    "cat into numpy": Case(lambda out: torch.cat([MATRIX, MATRIX], out=out), locked_empty),
    "arange into numpy": Case(lambda out: torch.arange(9.0, out=out), locked_empty),
    "gelu into numpy": Case(
        lambda out: torch.nn.functional.gelu(MATRIX, out=out),  # type: ignore[call-arg]
        locked_empty,
    ),
    "normalize into numpy": Case(
        lambda out: torch.nn.functional.normalize(MATRIX, out=out), locked_empty
    ),
    "fft into numpy": Case(
        lambda out: torch.fft.rfft(MATRIX, out=out),
        lambda: torch.from_numpy(np.empty(0, dtype=np.complex64)),
    ),
    "special into numpy": Case(lambda out: torch.special.erf(MATRIX, out=out), locked_empty),
    "inv into numpy": Case(lambda out: torch.linalg.inv(MATRIX, out=out), locked_empty),
    "max, two outputs": Case(
        lambda values, indices: torch.max(MATRIX, 1, out=(values, indices)),
        locked_empty,
        locked_long,
    ),
    "sort, the second fails": Case(
        lambda values, indices: torch.sort(MATRIX, out=(values, indices)), growable, locked_long
    ),
    "sort, a list of outputs": Case(
        lambda values, indices: torch.sort(MATRIX, out=[values, indices]),
        locked_empty,
        locked_long,
    ),
    "qr, the second fails": Case(
        lambda q, r: torch.linalg.qr(MATRIX, out=(q, r)), growable, locked_empty
    ),
    "tensordot by place": Case(lambda out: torch.tensordot(MATRIX, MATRIX, 1, out), locked_empty),
    "tensordot by name": Case(
        lambda out: torch.tensordot(MATRIX, MATRIX, 1, out=out), locked_empty
    ),
    "norm by place": Case(lambda out: torch.norm(MATRIX, "fro", 1, False, out), locked_empty),
    "norm by name": Case(lambda out: torch.norm(MATRIX, dim=1, out=out), locked_empty),
    "index_select with a bad index": Case(
        lambda out: torch.index_select(MATRIX, 0, FAR, out=out), growable
    ),
    "gather with a bad index": Case(
        lambda out: torch.gather(MATRIX, 0, FAR.view(1, 2), out=out), growable
    ),
    "take with a bad index": Case(lambda out: torch.take(MATRIX, FAR, out=out), growable),
    "scatter with a bad index": Case(
        lambda out: torch.scatter(MATRIX, 0, FAR.view(1, 2), MATRIX[:1, :2], out=out), growable
    ),
    "inv of a singular matrix": Case(
        lambda out: torch.linalg.inv(torch.zeros(4, 4), out=out), growable
    ),
    "cholesky of a negative matrix": Case(
        lambda out: torch.linalg.cholesky(-MATRIX[:2, :2], out=out), growable
    ),
    "sort with a wrong index dtype": Case(
        lambda values, indices: torch.sort(MATRIX, out=(values, indices)), growable, growable
    ),
    "floor_divide by zero": Case(
        lambda out: torch.floor_divide(torch.ones(8, dtype=torch.long), 0, out=out),
        lambda: torch.zeros(2, dtype=torch.long),
    ),
}


# Nothing is resized in this one before it fails, on some releases.
MAY_BE_RIGHT = {"floor_divide by zero", "cholesky of a negative matrix"}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", FAILING)
def test_a_failing_out_leaves_the_output_as_it_was(name: str) -> None:
    bare = [_state(out) == before for out, before in FAILING[name]()]
    if name not in MAY_BE_RIGHT:
        assert not all(bare), "plain torch got it right: this proves nothing"
    with install("out"):
        for out, before in FAILING[name]():
            assert _state(out) == before


def test_the_exception_is_torchs_own_and_the_traceback_gains_one_line() -> None:
    def depth(error: BaseException) -> int:
        frame, count = error.__traceback__, 0
        while frame is not None:
            frame, count = frame.tb_next, count + 1
        return count

    errors = []
    for names in ((), ("resize", "out")):
        installation = install(*names) if names else None
        for call in (
            lambda: torch.index_select(MATRIX, 0, FAR, out=torch.empty(0)),
            lambda: torch.add(MATRIX, 1, out=locked_empty()),
            lambda: torch.add(MATRIX, 1, out=3),  # type: ignore[call-overload]
            lambda: torch.add(MATRIX, 1, out=locked_empty().numpy()),  # type: ignore[call-overload]
            lambda: locked(1).resize_(9),
            lambda: locked(1).resize_("a"),  # type: ignore[arg-type]
            lambda: locked(1).resize_as_(3),  # type: ignore[arg-type]
            lambda: locked(1).set_(3, 4, 5, 6, 7),  # type: ignore[call-overload]
        ):
            with pytest.raises((RuntimeError, IndexError, TypeError)) as failure:
                call()
            errors.append(failure.value)
        if installation is not None:
            installation.uninstall()
    half = len(errors) // 2
    for bare, guarded in zip(errors[:half], errors[half:], strict=True):
        assert type(bare) is type(guarded)
        assert str(bare) == str(guarded)
        assert guarded.__cause__ is None
        assert guarded.__context__ is None
        assert depth(guarded) <= depth(bare) + 1


def test_a_failed_out_that_may_be_half_written_makes_backward_refuse() -> None:
    def spoil(out: torch.Tensor) -> None:
        with pytest.raises((RuntimeError, IndexError)):
            torch.index_select(torch.full((9,), 7.0), 0, torch.tensor([1, 2, 99]), out=out)

    def wrong_gradient() -> None:
        weight = torch.ones(3, requires_grad=True)
        saved = torch.tensor([1.0, 2, 3])
        product = (weight * saved).sum()
        spoil(saved)
        product.backward()

    wrong_gradient()  # plain torch says nothing
    with install("out"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong_gradient()


# --- the guard `out`: success


def test_out_none_passes_by_name_and_by_place() -> None:
    with install("out"):
        assert torch.add(torch.ones(2), 1, out=None).tolist() == [2, 2]
        assert torch.tensordot(MATRIX, MATRIX, 1, None).shape == (3, 3)
        assert torch.norm(torch.ones(4), "fro", 0, False, None).item() == 2
        assert torch.arange(3, out=None).tolist() == [0, 1, 2]
        assert torch.zeros(2, 2, out=None).shape == (2, 2)


def test_the_result_is_the_output_that_was_given() -> None:
    with install("out"):
        out = torch.empty(3, 3)
        assert torch.add(MATRIX, 1, out=out) is out
        assert torch.tensordot(MATRIX, MATRIX, 1, out) is out
        assert torch.norm(MATRIX, "fro", 1, False, out[0]).shape == (3,)
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        result = torch.max(MATRIX, 1, out=(values, indices))
        assert result.values is values
        assert result.indices is indices
        q, r = torch.empty(3, 3), torch.empty(3, 3)
        assert torch.linalg.qr(MATRIX, out=(q, r)).R is r


class Recording(torch.Tensor):
    """A subclass that notes what it is called with."""

    calls: list[tuple[str, bool]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        cls.calls.append((getattr(func, "__name__", ""), isinstance(out, cls)))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def shared(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype).share_memory_()  # type: ignore[no-any-return]


def add_into_shared() -> Any:
    out = shared(3)
    result = torch.add(torch.arange(3.0), 1, out=out)
    return result is out, out, out.is_shared(), out._version


def shrink_shared() -> Any:
    out = shared(50)
    result = torch.add(torch.arange(3.0), 1, out=out)
    return result is out, out, out.stride(), out.untyped_storage().nbytes(), out._version


def view_of_shared() -> Any:
    base = shared(4, 4)
    result = torch.mul(torch.ones(2, 2), 3, out=base[1:3, 1:3])
    return result, base


def conjugated_shared() -> Any:
    base = shared(3, dtype=torch.complex64)
    torch.add(torch.tensor([1 + 2j, 3 - 1j, 2j]), 1j, out=base.conj())
    return base


def negated_shared() -> Any:
    base = shared(3, dtype=torch.complex64)
    torch.add(torch.ones(3), 1, out=base.conj().imag)
    return base


def max_into_shared() -> Any:
    out = (shared(3), shared(3, dtype=torch.long))
    result = torch.max(MATRIX, 1, out=out)
    return type(result).__name__, result[0] is out[0], result[1] is out[1], out


def named_tuple_of_shared() -> Any:
    pair = namedtuple("pair", "values indices")  # noqa: PYI024
    out = pair(shared(3), shared(3, dtype=torch.long))
    result = torch.max(MATRIX, 1, out=out)
    return type(result).__name__, result[0] is out[0], out[1]


def input_is_output() -> Any:
    out = shared(3, 3).add_(MATRIX)
    torch.mm(out, out, out=out)
    return out


def grows_within_shared_storage() -> Any:
    base = shared(100)
    out = base[:0]
    result = torch.add(torch.ones(5), 1, out=out)
    return result is out, out, base


def parameter_in_shared_memory() -> Any:
    out = shared(2).requires_grad_()
    return torch.add(torch.ones(2), 1, out=out)


def inference_tensor_in_shared_memory() -> Any:
    with torch.inference_mode():
        out = shared(2)
    return torch.add(torch.ones(2), 1, out=out)


def inside_inference_mode() -> Any:
    with torch.inference_mode():
        out = shared(2)
        return torch.add(torch.ones(2), 1, out=out) is out, out


def bad_index_with_room() -> Any:
    return torch.index_select(torch.ones(10), 0, FAR, out=shared(100)[:0])


def wrong_dtype_in_shared_memory() -> Any:
    return torch.add(torch.ones(2), 1.5, out=shared(2, dtype=torch.long))


def subclass_in_shared_memory() -> Any:
    out = shared(2).as_subclass(Recording)
    Recording.calls = []
    result = torch.add(torch.ones(2), 1, out=out)
    calls = list(Recording.calls)
    return calls, type(result).__name__, result is out


def overlapping_in_shared_memory() -> Any:
    return torch.add(torch.ones(3, 3), 1, out=shared(3).expand(3, 3))


SHARED = (
    add_into_shared,
    shrink_shared,
    view_of_shared,
    conjugated_shared,
    negated_shared,
    max_into_shared,
    named_tuple_of_shared,
    input_is_output,
    grows_within_shared_storage,
    parameter_in_shared_memory,
    inference_tensor_in_shared_memory,
    inside_inference_mode,
    bad_index_with_room,
    wrong_dtype_in_shared_memory,
    subclass_in_shared_memory,
    overlapping_in_shared_memory,
)


def _what_happens(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001  whatever torch raises has to stay the same
        return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("call", SHARED, ids=lambda call: call.__name__)
def test_an_output_in_shared_memory_behaves_as_without_the_guard(call: Callable[[], Any]) -> None:
    bare = _what_happens(call)
    with install("out"):
        assert _what_happens(call) == bare


GROWING_SHARED = {
    "add": "torch.add(torch.ones(5000), 1, out=torch.zeros(4).share_memory_())",
    "max": "torch.max(torch.ones(5000, 2), 1, out=(torch.zeros(4).share_memory_(), "
    "torch.zeros(4, dtype=torch.long).share_memory_()))",
    "tensordot": "torch.tensordot(torch.ones(90, 2), torch.ones(2, 90), 1, "
    "torch.zeros(4).share_memory_())",
    "the input": "(lambda t: torch.mm(t, torch.ones(2, 5000), out=t))"
    "(torch.zeros(2, 2).share_memory_())",
    "a view of the input": "(lambda t: torch.mm(t.view(1, 4), torch.ones(4, 5000), out=t))"
    "(torch.zeros(4).share_memory_())",
}


@pytest.mark.parametrize("name", GROWING_SHARED)
def test_an_output_in_shared_memory_that_would_have_to_grow_does_not_kill_the_process(
    name: str,
) -> None:
    program = f"""
        import sys, torch, torchguard
        if sys.argv[1:]:
            torchguard.install("out")
        try:
            {GROWING_SHARED[name]}
        except torchguard.errors.NonResizableStorageError as error:
            print(error)
    """
    assert run_python(program).returncode < 0, "plain torch survived: this proves nothing"
    printed = output_of(program, "guarded")
    assert "in shared memory" in printed
    assert "share_memory_()" in printed
