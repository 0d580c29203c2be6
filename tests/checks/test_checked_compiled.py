"""What is compiled, and what is on a device, in a scope; the latter rehearsed on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchguard
from support.child_process import output_of
from support.compiled import Counting
from support.small_training import everything
from torchguard.checks import calls, graph_pass
from torchguard.errors import IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.arange(12.0).reshape(4, 3)
GOOD, BAD = torch.tensor([0, 3]), torch.tensor([0, -1])
SCOPES: list[Any] = [lambda: torchguard.guarded("checks"), lambda: torchguard.install("checks")]


def select(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index) * 2


@pytest.mark.parametrize("scope", SCOPES)
def test_each_side_of_a_scope_has_its_own_graph(scope: Any) -> None:
    """One each, however often scopes are entered; the one outside is the one without checks."""
    backend = Counting("aot_eager")
    compiled = torch.compile(select, backend=backend)
    compiled(X, GOOD)
    for _ in range(3):
        with scope():
            assert compiled(X, GOOD).equal(2 * X[GOOD])
            with pytest.raises(IndexOutOfRangeError):
                compiled(X, BAD)
        compiled(X, GOOD)
    assert len(backend.graphs) == 2
    bare, checked = backend.graphs
    assert "clamp" in str(checked)
    assert set(bare) < set(checked)
    with scope(), torch.compiler.set_stance("fail_on_recompile"):
        compiled(X, GOOD)


@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_shapes(dynamic: bool | None) -> None:
    """The range is that of the call's sizes, in as many graphs as without."""
    counts = []
    for scope in (False, True):
        torch.compiler.reset()
        backend = Counting("aot_eager")
        compiled = torch.compile(lambda x, i: x[i] + x.take(i), backend=backend, dynamic=dynamic)
        x = torch.arange(30.0)
        with torchguard.guarded("checks") if scope else torch.no_grad():
            for size in (5, 6, 7, 8):
                index = torch.arange(-size, size)
                assert compiled(x[:size], index).equal(2 * x[:size][index])
                if scope:
                    for bad in (-size - 1, size):
                        with pytest.raises(IndexOutOfRangeError, match=f"{-size} to {size - 1}, "):
                            compiled(x[:size], torch.cat((index, torch.tensor([bad])))[1:])
        counts.append(len(backend.graphs))
    assert counts[0] == counts[1]


def test_with_verified_in_either_order() -> None:
    """The checks are in the graph that is verified; the verdict is equal."""
    inside = torchguard.verified(select, backend="aot_eager")
    with torchguard.guarded("checks"):
        inside(X, GOOD)
        with pytest.raises(IndexOutOfRangeError):
            inside(X, BAD)
    outside = torchguard.verified(torchguard.guarded("checks")(select), backend="aot_eager")
    outside(X, GOOD)
    for checked in (inside, outside):
        assert {graph.status for graph in checked.stats().graphs} == {"verified"}


def test_graph_breaks_and_transforms() -> None:
    """Between two graphs the eager check stands; inside of vmap nothing is checked."""

    def broken(x: Tensor, index: Tensor) -> Tensor:
        y = x[index]
        torch._dynamo.graph_break()
        return y.sum() + torch.bincount(index).sum()

    def mapped(x: Tensor, index: Tensor) -> Tensor:
        return torch.vmap(lambda row, i: row[i])(x, index[:, None])[:, 0] + x[index, 0]  # type: ignore[no-any-return]

    index = torch.tensor([0, 1, 2, 2])
    with torchguard.guarded("checks"):
        assert torch.compile(broken, backend="aot_eager")(X, index) == X[index].sum() + 4
        for bad in (-5, 4):
            with pytest.raises(IndexOutOfRangeError):
                torch.compile(broken, backend="aot_eager")(X, torch.tensor([bad]))
        compiled = torch.compile(mapped, backend="aot_eager")
        assert compiled(X, index).equal(mapped(X, index))
        grad = torch.func.grad(lambda x: x[index].sum())
        assert torch.compile(grad, backend="aot_eager")(X).equal(grad(X))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool])
def test_a_divisor_that_is_the_number_zero(dtype: torch.dtype) -> None:
    """An empty batch; where nothing is divided there is no error."""

    def call(x: Tensor, items: Tensor) -> Tensor:
        return x // len(items) + x % len(items)

    compiled = torch.compile(call, backend="aot_eager", dynamic=False)
    x, empty = torch.tensor([0, 1]).to(dtype), torch.empty(0, 2)
    with torchguard.guarded("checks"):
        with pytest.raises(ZeroDivisorError, match=r"floordiv at .*compiled\.py:\d+: other: "):
            compiled(x, empty)
        torch.testing.assert_close(compiled(x[:0], empty), call(x[:0], empty))
        torch.testing.assert_close(compiled(x, X), call(x, X))
        compiled(x.float(), empty)


FAR = torch.tensor([0, 9])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor be on a device that can't be read without waiting."""
    with torchguard.guarded("checks"):  # its self-tests are of values on a CPU
        torch.compile(torch.sin, backend="eager")(X)
    for module in (calls, graph_pass):
        monkeypatch.setattr(module, "is_on_cpu", lambda _: False)


on_device = pytest.mark.usefixtures("device")


@on_device
def test_a_kernel_gets_clamped_values_and_the_error_comes_at_the_end() -> None:
    """With the line of the call, which is not on the stack any more."""
    with pytest.raises(IndexOutOfRangeError) as raised, torchguard.guarded("checks"):
        assert X[FAR].equal(X[torch.tensor([0, 3])])
        X.index_select(0, torch.tensor([1]))
    line = test_a_kernel_gets_clamped_values_and_the_error_comes_at_the_end.__code__.co_firstlineno
    where = f"x[index] at test_checked_compiled.py:{line + 4}: "
    assert str(raised.value) == f"{where}index: expected -4 to 3, got 0 to 9"
    x = X.clone()
    with pytest.raises(IndexOutOfRangeError), torchguard.guarded("checks"):
        x[FAR] = -1.0
    assert x[3].equal(torch.full((3,), -1.0))


@on_device
@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__float__", "__bool__"])
def test_no_value_leaves_the_device_before_the_flags_are_read(read: str) -> None:
    with torchguard.guarded("checks"):
        found = X.take(FAR + 90)[0]
        with pytest.raises(IndexOutOfRangeError):
            getattr(found, read)()
        getattr(found, read)()  # what was raised once is not raised again


@on_device
def test_when_the_flags_are_read() -> None:
    """At the end of each scope, inside of another too; after another exception they are not."""
    with torchguard.guarded("checks"):
        with pytest.raises(IndexOutOfRangeError), torchguard.guarded("checks"):
            functional.embedding(FAR, X)
    with pytest.raises(KeyError), torchguard.guarded("checks"):
        functional.embedding(FAR, X)
        raise KeyError


@on_device
def test_every_kind_of_value() -> None:
    """Labels that are ignored, probabilities with NaN, divisors, none of them a false alarm."""
    labels = torch.tensor([0, -100, 2, 1])
    with torchguard.guarded("checks"):
        loss = functional.cross_entropy(X, labels)
        functional.binary_cross_entropy(torch.tensor([0.0, 1.0]), torch.ones(2))
        X[torch.empty(0, dtype=torch.int64)]
        functional.one_hot(labels.clamp(0), 3)
        torch.bincount(labels.clamp(0))
        X.gather(0, labels.clamp(0)[:, None])
        assert (torch.arange(2) % torch.tensor([1, 2])).tolist() == [0, 1]
    assert loss.equal(functional.cross_entropy(X, labels))
    ones = torch.ones(1, 3)
    bad: tuple[tuple[type[Exception], Any], ...] = (
        (IndexOutOfRangeError, lambda: functional.cross_entropy(X, labels + 1)),
        (ValueOutOfRangeError, lambda: functional.binary_cross_entropy(ones * float("nan"), ones)),
        (ValueOutOfRangeError, lambda: (X - 1).multinomial(1)),
        (ZeroDivisorError, lambda: torch.arange(2) // torch.tensor([1, 0])),
    )
    for error, call in bad:
        with pytest.raises(error), torchguard.guarded("checks"):
            call()


@on_device
def test_many_calls_are_read_in_few_goes() -> None:
    """At most 512 wait, of all dtypes."""
    with torchguard.guarded("checks"):
        X[FAR]
        with pytest.raises(IndexOutOfRangeError):
            for _ in range(calls.Flags.MOST + 1):
                X[torch.tensor([0], dtype=torch.int32)]
        for _ in range(2 * calls.Flags.MOST):
            X[torch.tensor([0])]


@on_device
def test_compiled_code_keeps_its_flags_in_the_scope() -> None:
    compiled = torch.compile(lambda x, i: x[i] + x.index_select(0, i), backend="aot_eager")
    with torchguard.guarded("checks"):
        compiled(X, GOOD)
    found = []
    line = r"compiled\.py:\d+: index: expected -4 to 3"
    with pytest.raises(IndexOutOfRangeError, match=line), torchguard.guarded("checks"):
        found.append(compiled(X, FAR))
        compiled(X, GOOD)
    assert found[0].equal(2 * X[[0, 3]])


@on_device
def test_a_bad_batch_never_reaches_the_weights() -> None:
    """The flags are read before ``optimizer.step()``, so that a transaction undoes the step."""
    embedding = torch.nn.Embedding(4, 3)
    optimizer = torch.optim.Adam(embedding.parameters())
    step = torchguard.transaction(embedding, optimizer)

    def train(ids: Tensor) -> Any:
        with torchguard.guarded("checks"), step:
            optimizer.zero_grad()
            embedding(ids).sum().backward()
            optimizer.step()
        return everything(embedding, optimizer)

    before = train(GOOD)
    with pytest.raises(IndexOutOfRangeError):
        train(FAR)
    assert everything(embedding, optimizer) == before
    assert train(GOOD) != before


_ON_CUDA = """
import torch, torchguard
from torch.nn import functional
x = torch.arange(12.0, device="cuda").reshape(4, 3)
bad = torch.tensor([0, 9], device="cuda")
calls = {{
    "index": lambda: x[bad],
    "embedding": lambda: functional.embedding(bad, x),
    "cross_entropy": lambda: functional.cross_entropy(x[:2], bad),
    "multinomial": lambda: (x - 1).multinomial(1),
    "compiled": lambda: torch.compile(lambda x, i: x.index_select(0, i))(x, bad),
    "cudagraphs": lambda: torch.compile(lambda x, i: x[i], mode="reduce-overhead")(x, bad),
}}
try:
    with {scope}:
        calls[{name!r}]()
    torch.cuda.synchronize()
except torchguard.TorchGuardError as error:
    print("checked")
except RuntimeError as error:
    print("died" if "device-side assert" in str(error) else error)
try:
    for i in range(1000):
        assert (x + i).sum().item() == 66 + 12 * i
    print("goes on")
except RuntimeError:
    print("every call fails")
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", ["index", "embedding", "cross_entropy", "multinomial", "compiled", "cudagraphs"]
)
def test_cuda(name: str) -> None:
    """Bare torch is lost after a bad value; checked, a thousand further operations are right."""
    bare: Any = output_of(_ON_CUDA.format(scope="torch.no_grad()", name=name), fresh=True)
    checked = output_of(
        _ON_CUDA.format(scope='torchguard.guarded("checks")', name=name), fresh=True
    )
    assert bare.split("\n")[:2] == ["died", "every call fails"]
    assert checked.split("\n")[:2] == ["checked", "goes on"]
