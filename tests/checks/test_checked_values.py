"""Every operator with every bad value: checked raises, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchguard
from support.compiled import Counting
from torchguard.errors import IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError

N = 5
LONG = torch.iinfo(torch.int64)
BOTH = (-1, N, LONG.min, LONG.max)
WRAPS = (-N - 1, N, LONG.min, LONG.max)


def along_dim() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What take_along_dim() refuses and takes: later releases count from the end."""
    try:
        torch.take_along_dim(torch.zeros(N), torch.tensor([-1]), 0)
    except RuntimeError:
        return BOTH, (0, N - 1)
    return WRAPS, (-N, N - 1)


class Case(NamedTuple):
    name: str
    call: Callable[[Tensor], Any]
    """Takes the values that are checked."""

    bad: tuple[Any, ...]
    good: tuple[Any, ...] = (0, N - 1)
    error: type[Exception] = IndexOutOfRangeError
    dtype: torch.dtype = torch.int64
    compiles: bool = True
    """Whether Dynamo puts it into a graph; else the eager check stands between two graphs."""


def rows() -> Tensor:
    return torch.arange(N * 3.0).reshape(N, 3)


def along(name: str, *more: Any) -> Callable[[Tensor], Any]:
    """Call a method with an index into its first dim."""
    return lambda i: getattr(rows(), name)(
        0, i, *(each(i) if callable(each) else each for each in more)
    )


def like(index: Tensor) -> Tensor:
    return torch.ones(len(index), 3)


def set_rows(index: Tensor) -> Tensor:
    x = rows()
    x[index] = 1.0
    return x


def ctc(targets: Tensor) -> Tensor:
    log_probs = torch.zeros(4, 1, 2 * N)[..., :N].log_softmax(-1)
    lengths = torch.tensor([4]), torch.tensor([2])
    return functional.ctc_loss(log_probs, targets[None], *lengths, zero_infinity=True)


CASES = (
    Case("embedding", lambda i: functional.embedding(i, rows()), BOTH),
    Case(
        "embedding of int32", lambda i: functional.embedding(i, rows()), (-1, N), dtype=torch.int32
    ),
    Case("embedding_bag", lambda i: functional.embedding_bag(i[None], rows()), BOTH),
    Case("one_hot", lambda i: functional.one_hot(i, N), BOTH),
    Case("index_select", along("index_select"), BOTH),
    Case("gather", lambda i: torch.gather(rows(), 0, i[:, None]), BOTH),
    Case("take", lambda i: rows()[:, 0].take(i) + 1, WRAPS, (-N, N - 1)),
    Case("take_along_dim", lambda i: torch.take_along_dim(rows(), i[:, None], 0), *along_dim()),
    Case(
        "take_along_dim, flat", lambda i: torch.take_along_dim(rows(), i) + 1, (-1, 3 * N), (0, N)
    ),
    Case("x[index]", lambda i: rows()[i], WRAPS, (-N, N - 1)),
    Case("x[:, index]", lambda i: rows().T[:, i], WRAPS, (-N, N - 1)),
    Case("x[..., index, None]", lambda i: rows().T[..., i, None], WRAPS, (-N, N - 1)),
    Case("x[index] = v", set_rows, WRAPS, (-N, N - 1)),
    Case("index_put", lambda i: rows().index_put((i,), torch.ones(())), WRAPS, (-N, N - 1)),
    Case(
        "index_put, all by name",
        lambda i: torch.index_put(input=rows(), indices=(i,), values=torch.ones(())),
        WRAPS,
        (-N, N - 1),
    ),
    Case("index_add", along("index_add", like), BOTH),
    Case("index_copy", along("index_copy", like), BOTH),
    Case("index_copy_", along("index_copy_", like), BOTH),
    Case("index_fill", along("index_fill", 1.0), WRAPS, (-N, N - 1)),
    Case("index_reduce", along("index_reduce", like, "amax"), BOTH),
    Case("put", lambda i: rows()[:, 0].put(i, torch.ones(len(i))), WRAPS, (-N, N - 1)),
    Case("scatter", lambda i: rows().scatter(0, i[:, None], 1.0), BOTH),
    Case("scatter_add_", lambda i: rows().scatter_add_(0, i[:, None], like(i)), BOTH),
    Case("scatter_reduce", lambda i: rows().scatter_reduce(0, i[:, None], like(i), "sum"), BOTH),
    Case("nll_loss", lambda i: functional.nll_loss(rows().T[: len(i)], i), BOTH, (-100, 0, N - 1)),
    Case(
        "cross_entropy",
        lambda i: functional.cross_entropy(rows().T[: len(i)], i, ignore_index=-7),
        (-1, N, -100, LONG.max),
        (-7, 0, N - 1),
    ),
    Case("ctc_loss", ctc, BOTH, (1, N - 1), compiles=False),
    Case("bincount", lambda i: torch.bincount(i) + 1, (-1, LONG.min), compiles=False),
    Case(
        "repeat_interleave",
        lambda i: rows()[:2].repeat_interleave(i, 0),
        (-1, LONG.min),
        (0, 2),
        compiles=False,
    ),
    Case(
        "binary_cross_entropy",
        lambda p: functional.binary_cross_entropy(p, torch.ones(len(p))),
        (-0.1, 1.1, float("nan"), float("inf")),
        (0.0, 1.0),
        ValueOutOfRangeError,
        torch.float32,
    ),
    Case(
        "multinomial",
        lambda p: p.multinomial(1),
        (-0.1, float("nan"), float("inf")),
        (0.5, 1.5),
        ValueOutOfRangeError,
        torch.float32,
    ),
    *(
        Case(name, call, (0,), (1, LONG.min), ZeroDivisorError)
        for name, call in (
            ("//", lambda d: torch.arange(2) // d),
            ("%", lambda d: torch.arange(2) % d),
            ("1 // d", lambda d: 1 // d),
            ("1 % d", lambda d: 1 % d),
            ("fmod", lambda d: torch.fmod(torch.arange(2), d)),
            ("div", lambda d: torch.div(torch.arange(2), d, rounding_mode="trunc")),
        )
    ),
)


def _values(case: Case, *values: Any) -> Tensor:
    return torch.tensor(values, dtype=case.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager(case: Case) -> None:
    """A good value gives what it gives bare; a bad one raises, and says which it is."""
    good = _values(case, *case.good[-2:])
    torch.manual_seed(0)
    bare = case.call(good)
    with torchguard.guarded("checks"):
        torch.manual_seed(0)
        assert case.call(good).equal(bare)
        for value in case.bad:
            with pytest.raises(
                case.error, match=r"1 of 2 out of range, the first is \w.*\[(0, )?1(, 0)?\]"
            ):
                case.call(_values(case, case.good[-1], value))
        for value in case.good:
            case.call(_values(case, case.good[-1], value))


def _compiled(cases: Sequence[Case], backend: str) -> None:
    """Compile all cases as one function; one bad value raises, and compiles nothing again."""
    torch.compiler.reset()
    counting = Counting(backend)

    def call(values: list[Tensor]) -> Any:
        results = [case.call(values[place]) for place, case in enumerate(cases)]
        return results  # noqa: RET504 - more than a call, so that it has a frame to compile

    with torchguard.guarded("checks"):  # what is compiled before may be compiled once more
        pass
    compiled = torch.compile(call, backend=counting, dynamic=False)
    good = [_values(case, *case.good[-2:]) for case in cases]
    torch.manual_seed(0)
    bare, count = compiled(good), len(counting.graphs)
    with torchguard.guarded("checks"):
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(good), bare, rtol=0, atol=0, equal_nan=True)
        assert len(counting.graphs) == 2 * count
        for place, case in enumerate(cases):
            for value in (*case.bad, *case.good):
                given = [*good[:place], _values(case, case.good[-1], value), *good[place + 1 :]]
                if value in case.good:
                    compiled(given)
                    continue
                with pytest.raises(case.error) as raised:
                    compiled(given)
                if case.compiles:
                    assert "test_checked_values.py:" in str(raised.value)
        compiled(good)
    compiled(good)
    assert len(counting.graphs) == 2 * count


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if number % 4 == 0 else pytest.mark.slow, id=case.name)
        for number, case in enumerate(CASES)
    ],
)
def test_compiled(case: Case) -> None:
    """The same in compiled code."""
    _compiled([case], "aot_eager")


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """All in one graph, which takes less time to compile."""
    _compiled([case for case in CASES if case.compiles], "inductor")
