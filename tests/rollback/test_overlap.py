"""install("overlap"): a call that reads what it writes is numpy's."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchguard
from support.child_process import run_command
from support.compiled import Counting
from support.modes import DispatchMode, FunctionMode
from torchguard import OverlapWarning
from torchguard.equivalence.operands import memory_of, shares_memory

pytestmark = pytest.mark.filterwarnings("ignore::torchguard.OverlapWarning")


@pytest.fixture
def on() -> Any:
    with torchguard.install("overlap"):
        yield


def addresses(tensor: torch.Tensor) -> set[int]:
    """Every byte, one by one."""
    found = set()
    for index in itertools.product(*map(range, tensor.shape)):
        first = tensor.data_ptr() + tensor.element_size() * sum(
            place * step for place, step in zip(index, tensor.stride(), strict=True)
        )
        found |= set(range(first, first + tensor.element_size()))
    return found


def views(buffer: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    def view(dims: list[tuple[int, int]], offset: int, narrow: bool) -> torch.Tensor | None:
        base = buffer.view(torch.int16) if narrow else buffer
        sizes, steps = [size for size, _ in dims], [step for _, step in dims]
        last = offset + sum((size - 1) * step for size, step in dims)
        if last >= base.numel():
            return None
        return base.as_strided(sizes, steps, offset)

    dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)
    made = st.builds(view, dims, st.integers(0, 40), st.booleans())
    return made.filter(lambda each: each is not None)  # type: ignore[return-value]


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    memories = memory_of(one), memory_of(other)
    return all(memories) and shares_memory(*memories)  # type: ignore[arg-type]


BUFFER = torch.zeros(64, dtype=torch.int32)


@given(views(BUFFER), views(BUFFER))
def test_shared_memory_is_decided_exactly(one: torch.Tensor, other: torch.Tensor) -> None:
    expected = bool(addresses(one) & addresses(other))
    assert share(one, other) is expected
    assert share(other, one) is expected


LINES = (
    "x -= x[:, :1]",
    "x -= x[0]",
    "x[:, 1:] = x[:, :-1]",
    "x[:, :-1] = x[:, 1:]",
    "x[1:] = x[:-1]",
    "x[:, 0] += x[0, 0]",
    "x //= x[:, -1:]",
    "x[:, :3] *= x[:, 1:4]",
    "x[:4, :4] = x[:4, :4].T",
    "x[0, x[0] % 4] = 7",
    "x[[1, 2]] = x[[0, 1]]",
    "x[:, 1:] = x[:, :-1]; x[:, 0] = 5",  # a buffer of observations
)


def array_and_tensor(line: str, shape: tuple[int, int]) -> tuple[Any, torch.Tensor]:
    array = np.random.default_rng(0).integers(1, 100, shape)
    tensor = torch.from_numpy(array.copy())
    exec(line, {"x": array})  # noqa: S102
    with contextlib.suppress(RuntimeError):  # torch refuses what it sees to overlap
        exec(line, {"x": tensor})  # noqa: S102
    return array, tensor


def wrong_lines() -> set[str]:
    return {
        line
        for line, shape in itertools.product(LINES, [(4, 5), (7, 9), (33, 65), (300, 40)])
        for array, tensor in [array_and_tensor(line, shape)]
        if not np.array_equal(tensor.numpy(), array)
    }


@pytest.mark.parametrize("scope", [torchguard.install, torchguard.guarded])
def test_each_line_computes_what_numpy_computes(scope: Any) -> None:
    """Most are wrong without the guard."""
    with scope("overlap"):
        assert wrong_lines() == set()
    assert len(wrong_lines()) > len(LINES) / 2


def test_under_a_mode_the_lines_are_right_and_it_sees_no_more() -> None:
    """A default device is a mode of torch functions."""
    with torchguard.install("overlap"), torch.device("cpu"):
        assert wrong_lines() == set()
    with FunctionMode() as bare:
        wrong_lines()
    with torchguard.install("overlap"), FunctionMode() as guarded:
        wrong_lines()
    assert guarded.seen == bare.seen


class Items(list[Any]):
    """A subclass of list, as modules and user code have them."""


# What test_overlap_sweep.py does not make: lists, several outputs or operands; (written, read).
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "addmm_": lambda b, r: b.addmm_(r.t(), r),
    "cat, rotated": lambda b, r: torch.cat([r[:, 4:], r[:, :4]], 1, out=b),
    "copy_ of its transpose": lambda b, r: b.copy_(r.t()),
    "addcmul_": lambda b, r: b.addcmul_(r[:, :1], r[:1]),
    "sort": lambda b, r: torch.sort(r, out=(b.t(), torch.empty_like(b, dtype=torch.int64))),
    "where": lambda b, r: torch.where(r > 0, r[:, :1], r[:1], out=b),
    "clamp_": lambda b, r: b.clamp_(min=r[:, :1]),
    "foreach": lambda b, r: torch._foreach_sub_([b[0], b[1]], [r[1], r[0]]),
    "foreach with a scalar tensor": lambda b, r: torch._foreach_mul_([b[0], b[1]], r[0, 0]),
    "a subclass of list": lambda b, r: torch._foreach_sub_(
        Items([b[0], b[1]]), Items([r[1], r[0]])
    ),
    "a mask": lambda b, r: b.__setitem__(True, r.t()),
    "a mask of a tensor": lambda b, r: b.__setitem__(torch.tensor(True), r.t()),
    "two outputs": lambda b, r: torch.max(r, 0, out=(b[0], torch.empty(8, dtype=torch.int64))),
}
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.clone,
    lambda t: torch.zeros(8, 20, dtype=torch.float64)[:, 3:19:2].copy_(t),  # noqa: PLW0108
    lambda t: torch.zeros(8, 8, dtype=torch.float64).t().copy_(t),
)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_computes_what_it_computes_of_a_copy(name: str) -> None:
    """In layouts whose loops walk otherwise: dense, with gaps, transposed."""
    start = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layout in LAYOUTS:
        found, expected = layout(start), layout(start)
        CALLS[name](expected, expected.clone())
        with torchguard.install("overlap"):
            CALLS[name](found, found)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        yield


@pytest.mark.usefixtures("error", "on")
def test_nothing_is_said_where_nothing_overlaps() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    x[::2] += x[1::2]
    x[1:] -= x[:1]
    x[:, ::2] *= x[:, 1::2]
    x.add_(x)
    x *= x
    x.copy_(x)
    x[0] = x[1]
    x[x > 1e9] = 0
    x[:] = x
    torch.add(x, 1, out=x)
    torch.mul(x, x, out=x)
    torch._foreach_add_([x[0], x[1]], [x[0], x[1]])
    torch.nn.functional.relu_(x)
    x.resize_(2)


@pytest.mark.usefixtures("error", "on")
def test_an_error_comes_before_anything_is_written() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    before, version = x.clone(), x._version
    with pytest.raises(OverlapWarning, match=r"__isub__.*\(3, 1\).*\(3, 4\).*x -= x\[:, :1\]"):
        x -= x[:, :1]
    assert torch.equal(x, before)
    assert x._version == version


def test_each_call_of_a_line_is_named_once_with_its_shapes() -> None:
    """Two functions, and one function twice; each once, and as often as it is an error."""

    def line(x: torch.Tensor) -> Any:
        return x[1:].sub_(x[:-1]), x[2:].copy_(x[:-2]), x[3:].sub_(x[:-3])

    with torchguard.install("overlap"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for size in (12, 12, 15):
            line(torch.arange(float(size)))
    expected = [("sub_", "(11,)"), ("copy_", "(10,)"), ("sub_", "(9,)")]
    for said, (name, shape) in zip(caught, expected, strict=True):
        text = str(said.message)
        assert re.match(rf"torchguard: {name} reads .* of shape {re.escape(shape)}", text)
        assert ".clone()" in text
        assert "x[1:].sub_(x[:-1])" in text
        assert said.filename == __file__
    with torchguard.install("overlap"), warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        for size in (12, 15):
            with pytest.raises(OverlapWarning, match=rf"sub_ reads .* \({size - 1},\)"):
                line(torch.arange(float(size)))


def test_the_warnings_module_decides_what_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind filters of a context, which Python 3.14 keeps elsewhere than in a list."""

    def explicit(text: str, category: type[Warning], *_: Any, **__: Any) -> None:
        raise category(text)

    monkeypatch.setattr(warnings, "warn_explicit", explicit)
    x = torch.arange(12.0)
    with torchguard.install("overlap"), pytest.raises(OverlapWarning, match="sub_ reads"):
        x[1:].sub_(x[:-1])
    assert torch.equal(x, torch.arange(12.0))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a value of another shape": lambda x: x.__setitem__(True, x.expand(5, 1, 3, 4)),
    "shapes that do not broadcast": lambda x: x.sub_(x[:, :2]),
    "rows that do not fit": lambda x: x.__setitem__(slice(2), x[1:, :2]),
    "an output that overlaps itself": lambda x: torch.add(x, 1, out=x[:1].expand(3, 4)),
    "a leaf": lambda x: x.requires_grad_().mul_(x[:, :1]),
    "a list of another length": lambda x: torch._foreach_add_([x[0], x[1]], [x[1]]),
}


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_is_refused_raises_what_pytorch_raises(name: str, action: Any) -> None:
    """The warning comes before it, unless filters make an error of it; no event is counted."""
    call = REFUSED[name]
    with pytest.raises(Exception) as plain:  # noqa: PT011
        call(torch.ones(3, 4))
    with torchguard.install("overlap"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, OverlapWarning)
        with pytest.raises(plain.type) as guarded:
            call(torch.ones(3, 4))
    assert len(caught) <= (action == "always")
    assert str(guarded.value) == str(plain.value)
    assert guarded.value.__cause__ is None


# PyTorch computes each right in every layout: an element is read for all places and keeps its
# value when its own place is written, or an operator reads each element before it writes it, of
# which test_overlap_sweep.py has the others.
RIGHT: dict[str, Callable[[torch.Tensor], Any]] = {
    "x.fill_(x[2, 2])": lambda x: x.fill_(x[2, 2]),
    "x.masked_fill_(m, x[2, 2])": lambda x: x.masked_fill_(x > 5, x[2, 2]),
    "x.index_fill_(0, i, x[2, 2])": lambda x: x.index_fill_(0, torch.tensor([0, 2]), x[2, 2]),
    "x[:, 0] = x[2, 0]": lambda x: x.__setitem__((slice(None), 0), x[2, 0]),
    "x[1:] = x[2]": lambda x: x.__setitem__(slice(1, None), x[2]),
    "x[:, :] = x[:, 1:2]": lambda x: x.__setitem__((slice(None),) * 2, x[:, 1:2]),
    "x[x > 5] = x[2, 2]": lambda x: x.__setitem__(x > 5, x[2, 2]),
    "torch.maximum(x, x[1], out=x)": lambda x: torch.maximum(x, x[1], out=x),
    "torch.where(m, x, x[1], out=x)": lambda x: torch.where(x > 5, x, x[1], out=x),
    "torch.cumsum(x, 0, out=x)": lambda x: torch.cumsum(x, 0, out=x),
    "torch.addmm(x, a, b, out=x)": lambda x: torch.addmm(x, x.t() * 2, x * 3, out=x),
}


@pytest.mark.usefixtures("error")
@pytest.mark.parametrize("size", [3, pytest.param(70, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_line_that_is_right(name: str, size: int) -> None:
    start = torch.randint(1, 9, (size, size), generator=torch.Generator().manual_seed(0)).double()
    wide = torch.zeros(size, size, 2, dtype=torch.float64)
    for layout in (
        torch.zeros_like(start), torch.zeros_like(start).t(), wide[..., 1], wide[..., 0].t(),
    ):  # fmt: skip
        plain = layout.copy_(start)
        try:
            RIGHT[name](plain)
        except RuntimeError as refused:  # dense tensors, which torch refuses in some cases
            assert "single memory location" in str(refused)  # noqa: PT017
            continue
        expected = plain.clone()
        layout.copy_(start)
        with torchguard.install("overlap"):
            RIGHT[name](layout)
        assert torch.equal(layout, expected)


@pytest.mark.usefixtures("on")
def test_a_mask_is_no_such_value() -> None:
    x = torch.rand(70, 70, generator=torch.Generator().manual_seed(0)) > 0.5
    expected = x.clone().masked_fill_(x[:1].clone(), value=False)
    with pytest.warns(OverlapWarning):
        x.masked_fill_(x[:1], value=False)
    assert torch.equal(x, expected)


@pytest.mark.usefixtures("error")
def test_fake_tensors_are_not_asked_where_they_lie() -> None:
    torch.set_warn_always(True)
    try:
        with torch._subclasses.FakeTensorMode():
            fake = torch.zeros(3, 4)
        lines: tuple[Callable[[], Any], ...] = (
            lambda: fake.__setitem__(0, fake[1]),
            lambda: fake.__setitem__(slice(1, None), fake[:-1]),
            lambda: fake.copy_(fake[:1]),
            lambda: fake.sub_(fake[:, :1]),
            lambda: torch.mul(fake, fake[0], out=fake),
            lambda: torchguard.sliced_assign_(fake, 0, fake[1]),
        )
        with torchguard.install("overlap"), warnings.catch_warnings():
            warnings.simplefilter("error")
            for line in lines:
                line()
    finally:
        torch.set_warn_always(False)


def test_a_dispatch_mode_sees_the_operators_of_the_line() -> None:
    rows = torch.tensor(1)
    found = []
    for names in ((), ("overlap",)):
        x = torch.arange(12.0).reshape(3, 4)
        with (
            torchguard.install(*names) if names else contextlib.nullcontext(),
            DispatchMode() as seen,
        ):
            x[0] = x[1]
            x[rows] = x[0]
            x[:, 0] += x[:, 1]
            x[x > 3] = 7
        found.append(seen.seen)
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [["-c"], pytest.param(["-"], marks=pytest.mark.slow)])
def test_the_line_of_what_is_typed_is_named(given: list[str]) -> None:
    program = 'import torch, torchguard\ntorchguard.install("overlap")\nx = torch.ones(3, 4)\n'
    program += "x -= x[:, :1]\n"
    command = [sys.executable, *given, *([program] if given == ["-c"] else [])]
    done = run_command(command, program)
    assert re.search(r"<(stdin|string)>:4: OverlapWarning", done.stderr), done.stderr


@pytest.mark.usefixtures("on")
def test_other_tensors_on_the_same_memory() -> None:
    """Of numpy, of dlpack, and inference tensors."""
    array = np.arange(6.0)
    one, other = torch.from_numpy(array), torch.from_numpy(array)
    one[1:] = other[:-1]
    assert one.tolist() == [0, 0, 1, 2, 3, 4]
    one = torch.arange(6.0)
    torch.from_dlpack(one)[1:] = one[:-1]  # type: ignore[attr-defined]
    assert one.tolist() == [0, 0, 1, 2, 3, 4]
    with torch.inference_mode():
        x = torch.arange(12.0).reshape(3, 4)
        x -= x[:, :1]
    assert x.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.usefixtures("on")
def test_gradients_are_those_of_the_program_with_copies() -> None:
    """And the version counter moves as there."""
    found = []
    for copied in (False, True):
        start = torch.arange(12.0, requires_grad=True)
        t = start.view(3, 4) * 1
        t.mul_(t[:, :1].clone() if copied else t[:, :1])
        t.pow(2).sum().backward()
        found.append((start.grad.tolist(), t._version))  # type: ignore[union-attr]
    assert found[0] == found[1]


@pytest.mark.usefixtures("on")
def test_a_sparse_tensor_passes() -> None:
    sparse = torch.eye(3).to_sparse()
    sparse.add_(sparse)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))


def computes(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x += 1
    torch.mul(x, 2, out=x)
    x[0] = x[1]
    return x


def test_compiled_code_has_the_same_graphs() -> None:
    backend = Counting("eager")
    for scope in (torchguard.guarded("overlap"), contextlib.nullcontext()):
        torch.compiler.reset()
        with scope:
            for _ in range(2):
                torch.compile(computes, backend=backend, fullgraph=True)(torch.ones(3, 4))
    assert len(backend.graphs) == 2
    assert backend.graphs[0] == backend.graphs[1]


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, torch.tensor])
def test_a_row_named_by_a_number_of_any_kind_is_a_view(kind: Any) -> None:
    x, rows = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        for i in range(3):
            x[kind(i)] += 1
            x[:, kind(1)] *= 2
            rows[rows[0, 0]] = 1  # an index that lies in what is written
    assert x.tolist() == [[1.0, 8.0], [1.0, 4.0], [1.0, 2.0]]
    assert rows.tolist() == [[1, 1], [1, 1], [0, 0]]
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(3, 2)
        fake[torch.tensor(1)] += 1


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ["ipow", "iand", "ior", "ixor", "ilshift", "irshift"])
def test_each_operator_that_assigns_reads_first(name: str) -> None:
    write: Any = getattr(operator, name)
    x = torch.tensor([[2, 5, 3], [1, 6, 2]])
    expected = write(x.clone(), x[:, 1:2].clone())
    assert write(x, x[:, 1:2]).equal(expected)


@pytest.mark.parametrize(("place", "of"), [(0, 49), (7, 23), (49, 0)])
def test_one_overlap_among_fifty_tensors(place: int, of: int) -> None:
    """It is found wherever it stands; the tensors lie in memory in another order."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    memory = torch.arange(50.0 * 8).view(50, 8)
    written = [memory[each, :6] for each in order]
    operands: list[torch.Tensor] = [torch.full((6,), float(each)) for each in range(50)]
    operands[place] = memory[order[of], 1:7]
    expected = [one - other for one, other in zip(written, operands, strict=True)]
    with torchguard.install("overlap"), pytest.warns(OverlapWarning):
        torch._foreach_sub_(written, operands)
    assert all(map(torch.equal, written, expected))


def shifts(x: Any) -> Any:
    x[:, 1:] = x[:, :-1]
    return x * 1


@pytest.mark.usefixtures("on")
def test_the_padding_check_compares_with_the_truth() -> None:
    buckets = torchguard.Buckets([8, 16])
    fast = torchguard.bucketed(dims={"x": {1: "t"}}, buckets=buckets, compile=False)(
        lambda x: shifts(x * 1)
    )
    x = torch.arange(15.0).reshape(3, 5)
    assert np.array_equal(fast(x), shifts(x.numpy().copy()))


def test_an_error_behind_a_filter_that_ignores_runs_nothing_twice() -> None:
    with torchguard.install("overlap"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", OverlapWarning)
        ones = torch.ones(2, 3)
        assert torch.vmap(lambda x: x.sub_(x[:1]))(ones.clone()).tolist() == (ones - 1).tolist()
        torch.manual_seed(0)
        x = torch.rand(3, 4)
        expected = x.clone().bernoulli_(x[:, :1].clone())
        after = torch.rand(1)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(3, 4).bernoulli_(x[:, :1]), expected)
        torch.manual_seed(0)
        again = torch.rand(3, 4)
        again.bernoulli_(again[:, :1])
        assert torch.equal(torch.rand(1), after)
