"""install("overlap"), guarded(overlap=True): a call that reads what it writes is numpy's."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchguard
from torchguard import OverlapWarning
from torchguard._torch.overlap import is_elementwise, shares_memory

pytestmark = pytest.mark.filterwarnings("ignore::torchguard.OverlapWarning")

WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "install": lambda: torchguard.install("overlap"),
    "guarded": lambda: torchguard.guarded(overlap=True),
}


@pytest.fixture(params=WAYS)
def on(request: pytest.FixtureRequest) -> Any:
    with WAYS[request.param]():
        yield


# ---- which memory two views share ----


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


BUFFER = torch.zeros(64, dtype=torch.int32)


@given(views(BUFFER), views(BUFFER))
def test_shared_memory_is_decided_exactly(one: torch.Tensor, other: torch.Tensor) -> None:
    expected = bool(addresses(one) & addresses(other))
    assert shares_memory(one, other) is expected
    assert shares_memory(other, one) is expected


def test_what_is_too_hard_to_say_counts_as_shared() -> None:
    """Many dims with strides that have no common divisor: the search is bounded."""
    buffer = torch.zeros(200_000)
    strides = (11, 101, 1009, 10007)
    one = buffer.as_strided((9, 9, 9, 9), strides, 0)
    other = buffer.as_strided((9, 9, 9, 9), tuple(step + 2 for step in strides), 5)
    assert shares_memory(one, other) in {True, False}  # it ends
    assert not shares_memory(one, torch.zeros(3))


# ---- numpy is the second oracle ----

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


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("shape", [(4, 5), (7, 9), (33, 65), (300, 40)])
@pytest.mark.usefixtures("on")
def test_a_line_computes_what_numpy_computes(line: str, shape: tuple[int, int]) -> None:
    array, tensor = array_and_tensor(line, shape)
    assert np.array_equal(tensor.numpy(), array)


def test_without_the_guard_most_lines_are_wrong() -> None:
    wrong = {
        line
        for line, shape in itertools.product(LINES, [(7, 9), (33, 65), (300, 40)])
        for array, tensor in [array_and_tensor(line, shape)]
        if not np.array_equal(tensor.numpy(), array)
    }
    assert len(wrong) > len(LINES) / 2


REAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm into an operand": lambda b: torch.mm(b, b, out=b),
    "addmm_": lambda b: b.addmm_(b, b),
    "addmm_ of its transpose": lambda b: b.addmm_(b.t(), b),
    "cat, rotated": lambda b: torch.cat([b[:, 4:], b[:, :4]], 1, out=b),
    "cumsum, shifted": lambda b: torch.cumsum(b[:, :-1], 1, out=b[:, 1:]),
    "copy_ of its transpose": lambda b: b.copy_(b.t()),
    "index_copy_": lambda b: b.index_copy_(0, torch.tensor([0, 1]), b[1:3]),
    "index_add_": lambda b: b.index_add_(1, torch.tensor([0, 1]), b[:, 1:3]),
    "scatter_": lambda b: b.scatter_(1, torch.zeros_like(b, dtype=torch.int64), b),
    "masked_scatter_": lambda b: b.masked_scatter_(b > 0, b.t()),
    "lerp_": lambda b: b.lerp_(b[:1], 0.5),
    "addcmul_": lambda b: b.addcmul_(b[:, :1], b[:1]),
    "sort": lambda b: torch.sort(b, out=(b.t(), torch.empty_like(b, dtype=torch.int64))),
    "where": lambda b: torch.where(b > 0, b[:, :1], b[:1], out=b),
    "clamp_": lambda b: b.clamp_(min=b[:, :1]),
    "put_": lambda b: b.put_(torch.tensor([0, 1, 2]), b.view(-1)[1:4]),
    "foreach": lambda b: torch._foreach_sub_([b[0], b[1]], [b[1], b[0]]),
    "foreach with a scalar tensor": lambda b: torch._foreach_mul_([b[0], b[1]], b[0, 0]),
    "two outputs": lambda b: torch.max(b, 0, out=(b[0], torch.empty(8, dtype=torch.int64))),
    "as_strided windows": lambda b: b.view(-1)[:8].sub_(b.as_strided((8,), (2,), 1)),
}


@pytest.mark.parametrize("name", REAL)
def test_no_call_depends_on_how_the_loop_walks(name: str) -> None:
    """The same call on one tensor and on tensors of other layouts, whose loops walk otherwise."""
    torch.manual_seed(0)
    start = torch.randn(8, 8, dtype=torch.float64)
    results = []
    for layout in ("dense", "gaps", "transposed"):
        if layout == "dense":
            b = start.clone()
        elif layout == "gaps":
            b = torch.zeros(8, 20, dtype=torch.float64)[:, 3:19:2].copy_(start)
        else:
            b = torch.zeros(8, 8, dtype=torch.float64).t().copy_(start)
        try:
            with torchguard.install("overlap"):
                REAL[name](b)
        except RuntimeError as error:
            if "view" not in str(error):  # view(-1) of a layout that has none
                raise
            continue
        results.append(b)
    assert results
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


# ---- what is not copied, and said ----


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
    x[[1, 2]] = x[0]
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


def test_a_line_is_named_once() -> None:
    with torchguard.install("overlap"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for size in (3, 4, 5):
            x = torch.arange(12.0 * size).reshape(size, 12)
            x -= x[:, :1]  # the line
    assert len(caught) == 1
    assert caught[0].category is OverlapWarning
    assert caught[0].filename == __file__
    assert "x -= x[:, :1]" in str(caught[0].message)
    assert ".clone()" in str(caught[0].message)


@pytest.mark.usefixtures("on")
def test_what_overlaps_itself_is_refused_as_before() -> None:
    x = torch.zeros(1, 3).expand(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)


def test_a_version_counter_moves_as_before() -> None:
    plain, guarded = torch.zeros(3, 4), torch.zeros(3, 4)
    plain -= plain[:, :1].clone()
    with torchguard.install("overlap"):
        guarded -= guarded[:, :1]
    assert guarded._version == plain._version


# ---- memory, not identity ----


@pytest.mark.usefixtures("on")
def test_two_tensors_made_from_one_array() -> None:
    array = np.arange(6.0)
    one, other = torch.from_numpy(array), torch.from_numpy(array)
    one[1:] = other[:-1]
    assert one.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.usefixtures("on")
def test_dlpack_and_inference_tensors() -> None:
    one = torch.arange(6.0)
    torch.from_dlpack(one)[1:] = one[:-1]  # type: ignore[attr-defined]
    assert one.tolist() == [0, 0, 1, 2, 3, 4]
    with torch.inference_mode():
        x = torch.arange(12.0).reshape(3, 4)
        x -= x[:, :1]
    assert x.tolist() == [[0, 1, 2, 3]] * 3


# ---- autograd, transforms, subclasses, compiled code ----


@pytest.mark.usefixtures("on")
def test_gradients_are_those_of_the_program_with_copies() -> None:
    start = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    t = start * 1
    t.mul_(t[:, :1])
    t.pow(2).sum().backward()
    other = start.detach().clone().requires_grad_()
    u = other * 1
    u = u * u[:, :1].clone()
    u.pow(2).sum().backward()
    assert torch.equal(start.grad, other.grad)  # type: ignore[arg-type]


def shifted(row: torch.Tensor) -> torch.Tensor:
    row = row.clone()
    row[1:] = row[:-1]
    return row


@pytest.mark.usefixtures("on")
def test_a_shift_under_vmap() -> None:
    batch = torch.arange(80.0).reshape(8, 10)
    expected = torch.stack([shifted(row) for row in batch])
    assert torch.equal(torch.vmap(shifted)(batch), expected)


@pytest.mark.usefixtures("on")
def test_tensors_without_memory_pass() -> None:
    torch.ones(3, device="meta").add_(torch.ones(3, device="meta"))
    sparse = torch.eye(3).to_sparse()
    sparse.add_(sparse)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))


def computes(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x += 1
    torch.mul(x, 2, out=x)
    x[0] = x[1]
    return x


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_has_the_same_graphs(way: str) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run() -> None:
        with WAYS[way]():
            for _ in range(2):
                torch.compile(computes, backend=count, fullgraph=True)(torch.ones(3, 4))

    torch.compiler.reset()
    run()
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes]
    torch.compiler.reset()
    torch.compile(computes, backend=count, fullgraph=True)(torch.ones(3, 4))
    assert [str(node.target) for node in graphs[1].graph.nodes] == names
    if way == "guarded":  # what was compiled outside runs inside
        run()
        assert len(graphs) == 2


# ---- threads, and the set of elementwise operators ----


def test_a_scope_covers_its_own_thread() -> None:
    seen = []

    def other() -> None:
        x = torch.arange(512.0).reshape(8, 64)
        x[:, 1:] = x[:, :-1]
        seen.append(torch.equal(x[:, 1:], torch.arange(512.0).reshape(8, 64)[:, :-1]))

    with torchguard.guarded(overlap=True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        other()
    assert seen == [False, True]


@pytest.mark.parametrize(
    "name", sorted(name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_")
)
def test_an_elementwise_operator_is_right_on_the_same_elements(name: str) -> None:
    """What is in the set is never wrong where operand and result are the same elements."""
    method = getattr(torch.Tensor, name)
    if not is_elementwise(method):
        pytest.skip("not in the set")
    random.seed(0)
    start = torch.rand(33, 65)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float64, torch.int64, torch.bool):
            one, other = ((start * 9 + 1).to(dtype) for _ in range(2))
            try:
                expected = method(other, other.clone())
            except (RuntimeError, TypeError):
                continue
            assert torch.equal(method(one, one), expected)
