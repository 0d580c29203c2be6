"""Inductor as it is, but for code: what its passes make of a graph is interpreted.

Random numbers depend on their seed, size and kind alone, as in its code. A compilation takes a
second in place of ten or more, and needs no compiler for C++.

    with inductor_without_code():
        verified()(model)(x)
    with inductor_without_code(fault):  # fault(graph, is_backward=...) may change each graph
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.compile_fx
from torch import fx

from torchguard.verification import random

aten = torch.ops.aten
_OF_ONE_OPERATOR = 4
"""How many nodes a graph of one random operator may come to: faults leave it alone."""


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        if name == "prims::inductor_seeds":
            out = torch.empty([args[0]], dtype=torch.int64, device=args[1])
            limits = torch.iinfo(torch.int64)
            return aten.randint.low_out(limits.min, limits.max, [args[0]], out=out)
        if name == "prims::inductor_lookup_seed":
            return args[0][args[1]]
        if name in {"prims::inductor_random", "prims::inductor_randint"}:
            place = 1 if name.endswith("random") else 3
            generator = torch.Generator().manual_seed(int(args[place]) % 2**32)
            size = [int(each) for each in args[0 if name.endswith("random") else 2]]
            if name.endswith("random"):
                return getattr(torch, args[2])(size, generator=generator)
            return torch.randint(int(args[0]), int(args[1]), size, generator=generator)
        return super().call_function(target, args, kwargs)


Fault = Callable[..., Any]


def _interpreted(
    graph: fx.GraphModule, _: Any, *, fault: Fault | None, is_backward: bool = False, **__: Any
) -> Any:
    operators = sum(node.op == "call_function" for node in graph.graph.nodes)
    if fault is not None and operators > _OF_ONE_OPERATOR:
        fault(graph, is_backward=is_backward)
        graph.recompile()
    interpreter = _Interpreter(graph)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        with torch.no_grad():
            return interpreter.run(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def inductor_without_code(fault: Fault | None = None) -> Iterator[None]:
    """Let inductor interpret graphs, each changed by the ``fault`` before."""
    original = torch._inductor.compile_fx.compile_fx
    torch._dynamo.reset()
    with (
        pytest.MonkeyPatch.context() as patch,
        # A hit in this cache would bring code back.
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        inner = functools.partial(_interpreted, fault=fault)
        compile_fx = functools.partial(original, inner_compile=inner)
        patch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
        patch.setattr(random, "_compiled", {})
        yield
    torch._dynamo.reset()
