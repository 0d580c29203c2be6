"""What happens to values on a device, rehearsed on a CPU that says it is another device.

The tests marked ``cuda`` need a CUDA GPU; where there is none they are not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchguard
from support.child_process import output_of
from torchguard.checks import check, graph
from torchguard.errors import IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError

X = torch.arange(12.0).reshape(4, 3)
BAD = torch.tensor([0, 9])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor be on a device that can't be read without waiting."""
    for module in (check, graph):
        monkeypatch.setattr(module, "is_on_cpu", lambda _: False)


on_device = pytest.mark.usefixtures("device")


@on_device
def test_a_kernel_gets_clamped_values_and_the_error_comes_at_the_end() -> None:
    """With the line of the call, which is not on the stack any more."""
    with pytest.raises(IndexOutOfRangeError) as raised, torchguard.checked():
        assert X[BAD].equal(X[torch.tensor([0, 3])])
        X.index_select(0, torch.tensor([1]))
    line = test_a_kernel_gets_clamped_values_and_the_error_comes_at_the_end.__code__.co_firstlineno
    where = f"x[index] at test_checked_devices.py:{line + 4}: "
    assert str(raised.value) == f"{where}index: expected -4 to 3, got 0 to 9"


@on_device
@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__float__", "__bool__"])
def test_no_value_leaves_the_device_before_the_flags_are_read(read: str) -> None:
    with torchguard.checked():
        found = X.take(BAD + 90)[0]
        with pytest.raises(IndexOutOfRangeError):
            getattr(found, read)()
        getattr(found, read)()  # what was raised once is not raised again


@on_device
def test_when_the_flags_are_read() -> None:
    """After each call with ``report="call"``; after another exception they are not."""
    with torchguard.checked(report="call"), pytest.raises(IndexOutOfRangeError):
        functional.embedding(BAD, X)
    with pytest.raises(KeyError), torchguard.checked():
        functional.embedding(BAD, X)
        raise KeyError


@on_device
def test_every_kind_of_value() -> None:
    """Labels that are ignored, probabilities with NaN, divisors, none of them a false alarm."""
    labels = torch.tensor([0, -100, 2, 1])
    with torchguard.checked():
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
        with pytest.raises(error), torchguard.checked():
            call()


@on_device
def test_many_calls_are_read_in_few_goes() -> None:
    """At most 512 wait, of all dtypes."""
    with torchguard.checked():
        X[BAD]
        with pytest.raises(IndexOutOfRangeError):
            for _ in range(check.Flags.MOST + 1):
                X[torch.tensor([0], dtype=torch.int32)]
        for _ in range(2 * check.Flags.MOST):
            X[torch.tensor([0])]


@on_device
def test_written_values_are_clamped_too() -> None:
    """As on a device, where nothing can be known before: the exception follows."""
    x = X.clone()
    with pytest.raises(IndexOutOfRangeError), torchguard.checked():
        x[BAD] = -1.0
    assert x[3].equal(torch.full((3,), -1.0))


@on_device
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_keeps_its_flags_in_the_scope() -> None:
    compiled = torch.compile(lambda x, i: x[i] + x.index_select(0, i), backend="aot_eager")
    good = torch.tensor([0, 3])
    with torchguard.checked():
        compiled(X, good)
    found = []
    line = r"devices\.py:\d+: index: expected -4 to 3"
    with pytest.raises(IndexOutOfRangeError, match=line), torchguard.checked():
        found.append(compiled(X, BAD))
        compiled(X, good)
    assert found[0].equal(2 * X[[0, 3]])
    with torchguard.checked(report="call"), pytest.raises(IndexOutOfRangeError):
        compiled(X, BAD)


@on_device
def test_a_bad_batch_never_reaches_the_weights() -> None:
    """The flags are read before ``optimizer.step()``, so that a transaction undoes the step."""
    embedding = torch.nn.Embedding(4, 3)
    optimizer = torch.optim.Adam(embedding.parameters())
    step = torchguard.transaction(embedding, optimizer)

    def train(ids: Tensor) -> None:
        with torchguard.checked(), step:
            optimizer.zero_grad()
            embedding(ids).sum().backward()
            optimizer.step()

    good = torch.tensor([0, 3])
    train(good)
    weight = embedding.weight.detach().clone()
    state = [value.clone() for value in optimizer.state[embedding.weight].values()]
    with pytest.raises(IndexOutOfRangeError):
        train(BAD)
    assert embedding.weight.equal(weight)
    after = optimizer.state[embedding.weight].values()
    assert all(new.equal(old) for new, old in zip(after, state, strict=True))
    train(good)
    assert not embedding.weight.equal(weight)


@on_device
def test_installed_reads_before_a_step_too() -> None:
    weight = torch.nn.Parameter(X.clone())
    optimizer = torch.optim.SGD([weight], 1.0)
    with torchguard.install("checks"):
        weight[BAD].sum().backward()
        with pytest.raises(IndexOutOfRangeError):
            optimizer.step()
    assert weight.equal(X)


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
    checked = output_of(_ON_CUDA.format(scope="torchguard.checked()", name=name), fresh=True)
    assert bare.split("\n")[:2] == ["died", "every call fails"]
    assert checked.split("\n")[:2] == ["checked", "goes on"]
