"""What knows torch's functions, by value, by name or by kind, knows what replaces them.

Each reader gives its facts on bare torch and under guards: they have to be the same.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import typing
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from torchguard import install, uninstall

pytestmark = pytest.mark.filterwarnings("ignore")

F = nn.functional
X = torch.arange(12.0).reshape(3, 4)
GUARDS: Any = ("resize", "out", "overlap", "numpy", "save", "load", "recompute")


def functions() -> dict[str, Any]:
    return {
        "mean": torch.mean, "add": torch.add, "norm": torch.norm, "cat": torch.cat,
        "vector_norm": torch.linalg.vector_norm, "add_": torch.Tensor.add_,
        "resize_": torch.Tensor.resize_, "setitem": torch.Tensor.__setitem__,
    }  # fmt: skip


uninstall()
EARLY = {function: name for name, function in functions().items()}
ENCODER = nn.TransformerEncoderLayer(4, 2, activation=F.relu, batch_first=True).eval()


def late() -> dict[Any, str]:
    return {function: name for name, function in functions().items()}


def handled(table: dict[Any, str]) -> list[str | None]:
    """By PyTorch's documented way to extend it: a table of handlers."""
    seen = []

    class Handled(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(table.get(func))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    t = torch.ones(4).as_subclass(Handled)
    torch.add(torch.mean(t), torch.norm(t))
    t.add_(1).resize_(2, 2)
    t[0] = 1
    torch.cat([t, torch.linalg.vector_norm(t)[None, None].expand(2, 2)])
    return seen


def per_sample_gradients() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    call_for_per_sample_grads(model)(X).sum().backward()
    return [parameter.grad_sample.tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]


def traced(function: Callable[..., Any]) -> list[Any]:
    graph = torch.fx.symbolic_trace(function)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return [[EARLY.get(each) for each in targets], [late().get(each) for each in targets]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation, self.join, self.relu = F.gelu, torch.add, F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.activation(x), self.relu(x))


def compiled(function: Callable[..., Any]) -> list[Any]:
    targets: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        targets.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(X.clone())
    return [result.tolist(), [type(each) for each in targets], [EARLY.get(t) for t in targets]]


def partials() -> list[Any]:
    partial = functools.partial(torch.mean, dim=0)
    copies = copy.copy(partial), copy.deepcopy(partial), pickle.loads(pickle.dumps(partial))  # noqa: S301
    return [(each.func == torch.mean, each(X).tolist()) for each in copies]


def saved() -> list[bool]:
    file = io.BytesIO()
    torch.save({"model": Model(), "functions": functions()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [loaded["model"].activation == F.gelu, loaded["functions"] == functions()]


def dispatched() -> list[Any]:
    single: Any = functools.singledispatch(torch.add)
    single.register(int, lambda a, b: a - b)
    return [single(1, 2), single(X, 1).tolist(), single.__name__, single.__doc__]


def remembered() -> list[Any]:
    table = weakref.WeakKeyDictionary({torch.norm: 1})
    return [table[torch.norm], sorted(typing.get_type_hints(torch.norm))]


READERS: dict[str, Callable[[], Any]] = {
    "a table of handlers, filled before": lambda: handled(EARLY),
    "a table of handlers, filled after": lambda: handled(late()),
    "sets and lists": lambda: [
        f in {*EARLY} and f in frozenset(EARLY) and f in [*EARLY] for f in late()
    ],
    "per-sample gradients": per_sample_gradients,
    "torch.fx": lambda: traced(lambda x: torch.add(torch.mean(x), torch.norm(x)) + x.add_(1)),
    "TorchScript": lambda: torch.jit.script(Model()).code,
    "TransformerEncoderLayer": lambda: [
        nn.TransformerEncoderLayer(4, 2, activation=F.gelu).activation_relu_or_gelu,
        copy.deepcopy(ENCODER).activation == F.relu,
    ],
    "functools.partial": partials,
    "functools.singledispatch": dispatched,
    "weak references and hints": remembered,
    "torch.save": saved,
    "multiprocessing": lambda: [ForkingPickler.loads(ForkingPickler.dumps(f)) == f for f in late()],
    "masked tensors": lambda: torch.masked.mean(X, mask=X > 3).item(),
    "nested tensors": lambda: F.linear(
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        torch.ones(2, 3),
    ).sum().item(),
    "torch.func": lambda: torch.func.grad(lambda x: torch.mean(x) * torch.norm(x))(X).tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_functions_finds_the_same_under_guards(name: str) -> None:
    bare = READERS[name]()
    with install(*GUARDS, only_if_needed=False):
        assert READERS[name]() == bare


OPERATIONS: list[Any] = [torch.add, torch.norm]
COMPILED: dict[str, Callable[[Any], Any]] = {
    "functions": lambda x: torch.add(x, torch.mean(x)) + torch.norm(x),
    "a table": lambda x: torch.add(x, len(EARLY[torch.mean])),
    "another table": lambda x: x + 1 if torch.add in {torch.add: 1} else x,
    "functions kept": lambda x: OPERATIONS[0](x, OPERATIONS[1](x)),
    "a method of the class": lambda x: torch.Tensor.add_(x, 1),
    "map": lambda x: torch.stack(list(map(torch.mean, [x, x]))),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_calls_originals_and_knows_them_in_tables(name: str) -> None:
    bare = compiled(COMPILED[name])
    with install(*GUARDS, only_if_needed=False):
        assert compiled(COMPILED[name]) == bare


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_knows_replacements_in_a_frozenset() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x) if torch.add in known else x

    known = frozenset([torch.add, torch.mul])
    try:
        bare = compiled(add)
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch does not trace a frozenset of functions")
    with install(*GUARDS, only_if_needed=False):
        known = frozenset([torch.add, torch.mul])
        if torch.__version__ < "2.9":  # a limit of the page
            with pytest.raises(torch._dynamo.exc.Unsupported):
                compiled(add)
        else:
            assert compiled(add) == bare
