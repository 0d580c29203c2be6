"""Which graphs must not be run twice.

A graph is checked only if every operation in it is known to have no effect but on
tensors. Anything else is left unverified, with the operation as the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from torchguard._torch import has_only_results, operator_name

__all__ = ["graphs_of", "why_not_twice"]

# Operators of torch's own namespaces have effects on their tensors only.
_OPERATORS = {"aten", "prims", "inductor", "quantized", "quantized_decomposed", "torchvision"}

# Higher-order operators that do what the graphs they hold do.
_HIGHER_ORDER = {
    "associative_scan", "autograd_function_apply", "checkpoint", "cond", "dynamo_bypassing_wrapper",
    "flex_attention", "flex_attention_backward", "hints_wrapper", "inductor_compiled_code",
    "invoke_subgraph", "map", "map_impl", "scan", "tag_activation_checkpoint",
    "trampoline_autograd_apply", "triton_kernel_wrapper_functional",
    "triton_kernel_wrapper_mutation", "while_loop", "wrap", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
}  # fmt: skip

# Modules of functions that compute. einops tells Dynamo not to look into its functions.
_MODULES = {"torch", "_operator", "math", "cmath", "builtins", "einops"}


def graphs_of(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the graph and those that its higher-order operators hold."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield module


def why_not_twice(graph: fx.GraphModule, run_twice: Collection[str] = ()) -> str | None:
    """Name the operation because of which the graph must not be run again, or None.

    Args:
        graph: as Dynamo traced it.
        run_twice: names of custom operators of which the user knows that they may be.
    """
    for part in graphs_of(graph):
        for node in part.graph.nodes:
            reason = _reason(part, node, run_twice)
            if reason is not None:
                return reason
    return None


def _reason(graph: fx.GraphModule, node: fx.Node, run_twice: Collection[str]) -> str | None:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        if isinstance(module, fx.GraphModule):
            return None
        # torch._dynamo.config.inline_inbuilt_nn_modules is off.
        return f"a {type(module).__name__} is called as a whole, with state of its own"
    return _reason_of(node.target, run_twice) if node.op == "call_function" else None


def _reason_of(function: Any, run_twice: Collection[str]) -> str | None:
    name = operator_name(function)
    if name is None:
        return _reason_of_python(function)
    namespace, _, short = name.partition("::")
    if "c10d" in namespace:
        return f"{name} communicates with other processes"
    if namespace == "higher_order":
        return None if short in _HIGHER_ORDER else f"the operator {short} may have other effects"
    if namespace in _OPERATORS or name in run_twice:
        return None
    return _reason_of_custom(function, name)


def _reason_of_custom(function: Any, name: str) -> str | None:
    if not has_only_results(function):
        reason = "whose schema or effect token says that it does more than return something"
    elif _has_peers():
        reason = "which may communicate with other ranks"
    else:
        return None
    return f"{name} is a custom operator {reason}; where it may run twice: run_twice=[{name!r}]"


def _has_peers() -> bool:
    """Whether an operator could wait for another process, which its schema does not say."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _reason_of_python(function: Any) -> str | None:
    module = getattr(function, "__module__", None)
    if module is None:  # written in C++: torch.add, torch.Tensor.add_
        return None
    if module.startswith("torch.distributed"):
        return f"{module}.{function.__name__} communicates with other processes"
    if module.partition(".")[0] in _MODULES:
        return None
    name = getattr(function, "__qualname__", repr(function))
    return f"{module}.{name} is a function that Dynamo did not look into"
