"""A graph of Dynamo's: copies of it, its tensors, its place, its sizes, its side effects."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import torch
from torch import fx

from torchguard._torch import (
    has_only_results,
    is_kept_whole,
    operator_name,
    source_name,
    symbols_in,
)

SizesOf: TypeAlias = Callable[[Sequence[Any]], Hashable]
"""Reads the sizes from the inputs of a call."""


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of a size, or a number, that differs from call to call."""


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and those it holds, with what Dynamo has noted on them.

    Tensors and other values are shared with the original.
    """
    # Not copy.deepcopy(graph): that would copy the parameters, and compiled code has to read the
    # ones that are there.
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for name, value in vars(graph).items():
        vars(copied).setdefault(name, value)
    for old, new in zip(graph.graph.nodes, copied.graph.nodes, strict=True):
        # Dynamo takes it from the nodes that it made, at the end of the compilation: a weak
        # reference to a parameter, which forbids torch.utils.swap_tensors (model.half()).
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/output_graph.py#L3470
        new.meta.pop("grapharg", None)
        for name, value in getattr(old, "__dict__", {}).items():
            if not hasattr(new, name):
                setattr(new, name, value)  # where a placeholder comes from
    for name, child in graph.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph(child))
    return copied


def graphs_in(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graph and those that its higher-order operators hold."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def placeholders_of(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of the inputs."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def owned_tensors(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Return the tensors that the graph holds itself: the parameters of an optimizer."""
    found: dict[int, torch.Tensor] = {}
    for part in graphs_in(graph):
        for value in (attribute_of(part, node) for node in part.graph.nodes):
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
    return list(found.values())


def attribute_of(graph: fx.GraphModule, node: fx.Node) -> Any:
    """Return what a node reads from the graph that has it; None for other nodes."""
    value: Any = graph if node.op == "get_attr" else None
    for name in str(node.target).split(".") if value is not None else ():
        value = getattr(value, name, None)
    return value


def place_of(graph: fx.GraphModule) -> tuple[str, str]:
    """Return the function or module that was compiled, and ``file:first-last`` of its lines.

    A module of torch itself has no lines of the user's: then it is the module's class.
    """
    stacks = [
        re.findall(r'File "(.*)", line (\d+), in (.*)', node.stack_trace or "")
        for node in graph.graph.nodes
    ]
    # The outermost frame is what Dynamo compiled, or its rest after a graph break.
    outermost = [frames[0] for frames in stacks if frames]
    if outermost:
        file, _, name = outermost[-1]
        lines = [int(line) for its_file, line, its in outermost if (its_file, its) == (file, name)]
        first, last = min(lines), max(lines)
        resumed = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_\d+", name)
        place = f"{file}:{first}" if first == last else f"{file}:{first}-{last}"
        return resumed[1] if resumed else name, place
    for node in graph.graph.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            return getattr(kind, "__name__", str(kind)), "torch.nn"
    return "graph", "no line known"


def names_of(graph: fx.GraphModule) -> list[str]:
    """Return what the program calls each input; those it has no name for are numbered.

    Sizes and numbers that Dynamo made inputs are not counted.
    """
    names, unnamed = [], 0
    for node in placeholders_of(graph):
        name = source_name(node)
        for before, after in _SPELLINGS:
            name = re.sub(before, after, name)
        names.append(name.removeprefix("self.") or f"input {unnamed}")
        unnamed += not isinstance(node.meta.get("example_value"), SYMBOLIC)
    return names


# How Dynamo writes the variables and the attributes of modules.
_SPELLINGS = (
    (r"^L\['fn'\]\.__self__", "self"),
    (r"^[LG]\['(\w+)'\]", r"\1"),
    (r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1"),
)


# ---- the sizes of a call ----


def sizes_of(graph: fx.GraphModule) -> SizesOf | None:
    """Return what reads the sizes from the inputs of a call; None for a graph with static shapes.

    Dynamo gives a graph most symbols as integers of their own, the others as sizes of a tensor.
    """
    traced = [node.meta.get("example_value") for node in placeholders_of(graph)]
    given = symbols_in(value for value in traced if isinstance(value, torch.SymInt))
    places = [
        place
        for place, value in enumerate(traced)
        if isinstance(value, torch.SymInt) or symbols_in([value]) - given
    ]
    if not places:
        return None

    def sizes_in(value: Any) -> Hashable:
        return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else value

    return lambda inputs: tuple(sizes_in(inputs[place]) for place in places)


def numbers_in(graph: fx.GraphModule, examples: Sequence[Any]) -> list[int]:
    """Return the positions of the inputs that the graph reads as one number, on the CPU.

    Dynamo gives a graph each float that has differed between calls as a tensor without dims.
    """
    return [
        place
        for place, (node, example) in enumerate(zip(placeholders_of(graph), examples, strict=True))
        if any(user.op == "call_method" and user.target == "item" for user in node.users)
        and isinstance(example, torch.Tensor)
        and example.device.type == "cpu"
    ]


# ---- side effects ----

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


def why_not_twice(graph: fx.GraphModule) -> str | None:
    """Name the operation because of which the graph must not be run again, or None."""
    for part in graphs_in(graph):
        for node in part.graph.nodes:
            reason = None
            if node.op == "call_function":
                reason = _why_not_twice(node.target)
            elif node.op == "call_module":
                module = type(part.get_submodule(str(node.target)))
                # Others are there while torch._dynamo.config.inline_inbuilt_nn_modules is off.
                if not issubclass(module, fx.GraphModule):
                    name = module.__name__
                    reason = f"the module {name} is called as a whole, with state of its own"
            if reason is not None:
                return reason
    return None


def _why_not_twice(function: Any) -> str | None:
    # Most are torch.add or operator.mul: neither of torch.ops nor written in Python.
    name = None if isinstance(function, BuiltinFunctionType) else operator_name(function)
    if name is None:
        return _why_not_python_twice(function)
    namespace, _, short = name.partition("::")
    if "c10d" in namespace:
        return f"{name} communicates with other processes"
    if namespace == "higher_order":
        return None if short in _HIGHER_ORDER else f"the operator {short} may have other effects"
    if namespace in _OPERATORS:
        return None
    ranks = torch.distributed
    if not has_only_results(function):
        reason = "whose schema or effect token says that it does more than return something"
    elif ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        reason = "which may communicate with other ranks"  # its schema does not say
    else:
        return None
    return f"{name} is a custom operator {reason}"


def _why_not_python_twice(function: Any) -> str | None:
    module = getattr(function, "__module__", None)
    if module is None:  # written in C++: torch.add, torch.Tensor.add_
        return None
    if module.startswith("torch.distributed"):
        return f"{module}.{function.__name__} communicates with other processes"
    if module.partition(".")[0] in _MODULES or is_kept_whole(function):
        return None
    name = getattr(function, "__qualname__", repr(function))
    return f"{module}.{name} is a function that Dynamo did not look into"
