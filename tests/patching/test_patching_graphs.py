"""A patched function is scripted, traced, exported and transformed as before."""

from __future__ import annotations

import copy
import re
import warnings
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import make_fx

import torchguard
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable


# --- TorchScript


def adds_and_norms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.add(x, y, alpha=2) + torch.norm(x, dim=1, keepdim=True)
    total = torch.nn.functional.gelu(total) + torch.tensordot(x, y, dims=1)
    total = total + torch.nn.functional.normalize(x) + torch.linalg.norm(y)
    return total + torch.special.erf(x) + torch.fft.ifft(torch.fft.fft(x)).real  # type: ignore[no-any-return]


def writes_into_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, y, out=out)
    values, indices = torch.max(x, 1)
    return out + values + indices


def resizes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros([1])
    out.resize_([3, 3])
    out.resize_as_(x)
    out.copy_(y)
    other = torch.zeros([2])
    other.set_(out)  # type: ignore[call-overload]
    return other


SCRIPTED: list[Callable[..., torch.Tensor]] = [adds_and_norms, writes_into_out, resizes]


SQUARE = (torch.arange(9.0).view(3, 3), torch.ones(3, 3))


@pytest.mark.parametrize("function", SCRIPTED, ids=lambda function: function.__name__)
def test_torchscript_compiles_the_same_program(function: Callable[..., torch.Tensor]) -> None:
    bare = torch.jit.script(function)
    expected = bare(*SQUARE)
    with install("resize", "out"):
        # TorchScript caches by function: a copy is compiled anew.
        bare_function: Any = function
        twin = FunctionType(
            bare_function.__code__, bare_function.__globals__, bare_function.__name__
        )
        twin.__annotations__ = function.__annotations__
        guarded = torch.jit.script(twin)
        assert _program(guarded) == _program(bare)
        torch.testing.assert_close(guarded(*SQUARE), expected)
        torch.testing.assert_close(bare(*SQUARE), expected)
    torch.testing.assert_close(guarded(*SQUARE), expected)


def _program(scripted: Any) -> str:
    return "\n".join(line.partition("#")[0] for line in str(scripted.inlined_graph).splitlines())


MODULES: list[Callable[[], nn.Module]] = [
    nn.GELU,
    nn.LogSigmoid,
    lambda: nn.AvgPool2d(2),
    nn.CosineSimilarity,
    nn.PairwiseDistance,
    lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
]


def test_torchscript_compiles_torchs_modules_as_before() -> None:
    for make in MODULES:
        bare = str(torch.jit.script(make()).code)
        with install("resize", "out"):
            assert str(torch.jit.script(make()).code) == bare


@pytest.mark.parametrize("function", SCRIPTED, ids=lambda function: function.__name__)
def test_jit_trace_records_the_same_graph_with_the_same_warnings(
    function: Callable[..., torch.Tensor],
) -> None:
    def trace() -> tuple[list[str], list[str], torch.Tensor]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            traced = torch.jit.trace(function, SQUARE)
        operators = [node.kind() for node in traced.inlined_graph.nodes()]
        texts = [f"{each.category.__name__}: {each.message}" for each in warned]
        return operators, texts, traced(*SQUARE)

    *bare, expected = trace()
    with install("resize", "out"):
        *guarded, found = trace()
    assert guarded == bare
    torch.testing.assert_close(found, expected)


# --- graphs: torch.fx, make_fx, torch.export, torch.func


def graph(module: Any) -> list[tuple[str, Any, str, str]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in module.graph.nodes]


def test_symbolic_trace_has_torchs_own_functions_as_targets() -> None:
    bare = torch.fx.symbolic_trace(adds_and_norms)
    with install("resize", "out"):
        guarded = torch.fx.symbolic_trace(adds_and_norms)
        assert graph(guarded) == graph(bare)
        assert guarded.code == bare.code
        torch.testing.assert_close(guarded(*SQUARE), adds_and_norms(*SQUARE))
        # So a pass over a graph finds what it asks for.
        targets = {node.target for node in guarded.graph.nodes}
        assert torchguard.get_original("torch.add") in targets
        assert torchguard.get_original("torch.nn.functional.gelu") in targets
        assert torch.add not in targets
    torch.testing.assert_close(guarded(*SQUARE), bare(*SQUARE))
    assert copy.deepcopy(guarded).code == bare.code


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("function", SCRIPTED[:2], ids=lambda function: function.__name__)
def test_make_fx_records_the_same_graph_and_guards(
    function: Callable[..., torch.Tensor], mode: str
) -> None:
    def trace() -> tuple[Any, str]:
        module = make_fx(function, tracing_mode=mode)(*SQUARE)  # type: ignore[arg-type]
        environment = getattr(module, "shape_env", None)
        guards = [] if environment is None else [str(each.expr) for each in environment.guards]
        return graph(module), str(sorted(set(guards)))

    try:
        bare = trace()
    except UnsupportedOperatorException as error:  # fft with symbolic sizes, on torch 2.6
        with install("resize", "out"), pytest.raises(type(error), match=re.escape(str(error))):
            trace()
        return
    with install("resize", "out"):
        guarded = trace()
    assert guarded == bare


def test_a_failure_under_make_fx_is_the_same_failure() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0])
        torch.add(x, 1, out=out)
        out.resize_(x.shape[0])
        out.resize_(2, x.shape[0])  # some releases can't do this with symbolic sizes
        return torch.add(x, torch.ones(x.shape[0] + 1), out=out.resize_as_(x))  # and none this

    def message() -> str:
        with pytest.raises(Exception) as failure:  # noqa: PT011  torch's own differs by release
            make_fx(failing, tracing_mode="symbolic")(torch.ones(10))
        return f"{type(failure.value).__name__}: {failure.value}".partition("\n")[0]

    bare = message()
    with install("resize", "out"):
        assert message() == bare


class Exported(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return adds_and_norms(x, y)


@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_same_program(strict: bool) -> None:
    def export() -> tuple[Any, str]:
        program = torch.export.export(Exported(), SQUARE, strict=strict)
        return graph(program), program.graph_module.code

    bare = export()
    with install("resize", "out"):
        assert export() == bare


def test_functorch_transforms_go_on_working() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.norm(torch.add(torch.matmul(weight, x), 1)) + torch.sum(torch.exp(weight))  # type: ignore[no-any-return]

    weight, batch = torch.rand(2, 3), torch.rand(4, 3)

    def everything() -> list[torch.Tensor]:
        return [
            torch.vmap(loss, in_dims=(None, 0))(weight, batch),
            torch.func.grad(loss)(weight, batch[0]),
            torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batch),
            torch.func.jvp(lambda w: loss(w, batch[0]), (weight,), (weight,))[1],
            torch.func.functionalize(writes_into_out)(*SQUARE),
        ]

    bare = everything()
    with install("resize", "out"):
        for one, other in zip(everything(), bare, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["out", "resize_", "set_"])
def test_what_is_odd_under_vmap_stays_as_odd(kind: str) -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        if kind == "out":
            return torch.index_select(x, 0, torch.tensor([0, 99]), out=out)
        if kind == "resize_":
            return out.resize_(50, 50)
        return out.set_(torch.from_numpy(np.ones(2, dtype=np.float32)).untyped_storage(), 0, (9,))  # type: ignore[call-overload, no-any-return]

    def message() -> str:
        try:
            return str(torch.vmap(failing)(torch.ones(2, 3)).shape)
        except Exception as error:  # noqa: BLE001  whatever torch raises has to stay the same
            return f"{type(error).__name__}: {error}"

    bare = message()
    with install("resize", "out"):
        assert message() == bare
