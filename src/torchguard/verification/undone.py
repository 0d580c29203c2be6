"""One call, undone: what it can reach, how that is after a run, and what differs in two runs."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch

from torchguard._absent import ABSENT
from torchguard._torch import base_of
from torchguard.equivalence.compare import PYTHON, Difference, judge
from torchguard.equivalence.outcome import (
    Cotangents,
    Given,
    Outcome,
    Output,
    module_state_restored,
    outcome,
    rng_state_restored,
    saving_copies,
    sources_of,
)
from torchguard.equivalence.perturb import not_by_rounding
from torchguard.state.containers import Containers
from torchguard.state.process import GENERATORS, ThreadModes
from torchguard.state.tensors import Gradients, capture
from torchguard.state.walk import ATOMS, CONTAINERS, Kind, Reach, cells_of, has_attributes, paths

_PLAIN = (*ATOMS, torch.dtype, torch.device, torch.Size)


class Run(NamedTuple):
    """What a run has left, by path; afterwards everything is as before again."""

    reached: Reached
    left: Outcome
    results: dict[str, Any]
    state: dict[str, Any]
    """What it has changed of what it reaches."""

    writes: dict[str, int]
    """How often it has written a tensor in place."""


class Reached:
    """What a call can reach: arguments, closure, defaults, named globals, and what these hold."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            given = inspect.signature(called).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            given = {"args": args, "kwargs": kwargs}
        self._roots = {"self" if called is not function else "": function, **given}
        nodes = list(paths(self._roots, PROGRAM))
        self.before = dict(_leaves(nodes))
        self._nodes = [node for _, node in nodes]
        tensors = {id(n): (path, n) for path, n in reversed(nodes) if isinstance(n, torch.Tensor)}
        self.names = [path for path, _ in tensors.values()]
        self.tensors: list[torch.Tensor] = [tensor for _, tensor in tensors.values()]
        self.problem = next(filter(None, (_problem(path, node) for path, node in nodes)), None)

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        change: Callable[[Sequence[Any]], None] | None = None,
        keeps: bool = False,
    ) -> Run:
        """Run the call, and restore all that it has changed.

        Tensors, and what is sent backward, can be changed before. With ``keeps``, autograd saves
        copies.
        """
        with contextlib.ExitStack() as scope:
            scope.callback(ThreadModes.capture().restore)
            # Not isolated(): that changes the cache of autocast, on which Dynamo guards.
            scope.callback(torch.clear_autocast_cache)
            modules = [each for each in self._nodes if isinstance(each, torch.nn.Module)]
            scope.enter_context(module_state_restored(modules))
            scope.enter_context(rng_state_restored())
            scope.callback(self._snapshot())
            sources = sources_of(self.tensors)
            if change is not None:
                change(self.tensors)
            if keeps:
                scope.enter_context(saving_copies())
            results: dict[str, Any] = {}

            def read(returned: Any) -> tuple[None, list[Output]]:
                results.update(_leaves(paths({"result": returned}, PROGRAM)))
                return None, list(map(Output, results.values()))

            given = Given(self.tensors, args, kwargs, sources)
            left = outcome(function, given, Cotangents(retain_graph=True, change=change), read)
            left.outputs = []
            if left.error is not None:
                return Run(self, left, {}, {}, {})
            results = {path: _copied(leaf) for path, leaf in results.items()}
            written = {id(self.tensors[place]): count for place, count in left.writes.items()}
            now = dict(_leaves(paths(self._roots, PROGRAM)))
            state = {
                path: _copied(now.get(path, ABSENT))
                for path in {**self.before, **now}
                if _is_changed(self.before.get(path, ABSENT), now.get(path, ABSENT), written)
            }
            writes = {
                path: written.get(id(leaf), 0)
                for path, leaf in now.items()
                if isinstance(leaf, torch.Tensor) and leaf is self.before.get(path)
            }
        return Run(self, left, results, state, writes)

    def _snapshot(self) -> Callable[[], None]:
        saved = [capture(each, data=True, autograd=True) for each in self.tensors]
        histories = [each.grad_fn for each in self.tensors]
        gradients = Gradients(self.tensors)
        held = [each for each in self._nodes if isinstance(each, (*CONTAINERS, *GENERATORS))]
        held += [vars(each) for each in self._nodes if _is_object(each)]
        containers = Containers(held, skip=self.tensors, data=False)
        functions = [each for each in self._nodes if isinstance(each, FunctionType)]
        own = [each for each in functions if not _is_of_library(each)]
        cells = [cell for each in own for cell in cells_of(each).values()]
        contents = [cell.cell_contents for cell in cells]

        def restore() -> None:
            for cell, content in zip(cells, contents, strict=True):
                cell.cell_contents = content
            containers.restore()
            for tensor, history in zip(self.tensors, histories, strict=True):
                # Else the history of the run would stay in front of the one that is copied in.
                if tensor.grad_fn is not history and base_of(tensor) is None:
                    tensor.detach_()
            for each in saved:
                each.restore()
            gradients.restore()

        return restore


def _is_changed(before: Any, now: Any, written: Container[int]) -> bool:
    if isinstance(now, torch.Tensor):
        return before is not now or id(now) in written
    return type(before) is not type(now) or bool(before != now)


def differences_of(
    reference: Run, candidate: Run, again: Callable[[int, Iterable[torch.Tensor]], Run]
) -> list[Difference]:
    """Compare two runs, of which one at most has raised.

    ``again`` makes the first one with its tensors, other than these, perturbed by a seed.
    """
    results = list({**reference.results, **candidate.results})
    state = list({**reference.state, **candidate.state})
    written = {path: n for path, n in reference.writes.items() if path in candidate.writes}

    def compared(run: Run) -> Outcome:
        before = run.reached.before
        after = [run.state.get(path, before.get(path, ABSENT)) for path in state]
        return replace(
            run.left,
            outputs=[_comparable(run.results.get(path, ABSENT)) for path in results],
            inputs=list(map(_comparable, after)),
            before=[before.get(path) if path in written else None for path in state],
            writes={place: written.get(path, 1) for place, path in enumerate(state)},
        )

    one, two = compared(reference), compared(candidate)
    found: Sequence[Difference] = judge(one, two, PYTHON)
    if found and all(each.small for each in found):
        tensors = [value for value in one.before if isinstance(value, torch.Tensor)]
        found = not_by_rounding(found, one, two, lambda seed: compared(again(seed, tensors)))
    names = {"outputs": results, "inputs": state, "gradients": reference.reached.names}
    return [
        replace(each, key=names[each.part][each.key]) if isinstance(each.key, int) else each
        for each in found
    ]


def _copied(leaf: Any) -> Any:
    """Copy a tensor, which the next run may write."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _comparable(leaf: Any) -> Any:
    # Dynamo may compute a float in another precision than Python.
    return torch.tensor(leaf, dtype=torch.float32) if isinstance(leaf, float) else leaf


# ---- what can be reached ----


def _is_object(node: Any) -> bool:
    return has_attributes(node) and not _is_of_library(type(node))


def _is_of_library(node: Any) -> bool:
    """Whether Python, PyTorch or this package has made a class or a function."""
    # Not __module__ of a function, which a wrapper takes from what it wraps.
    owner = node.__globals__.get("__name__") if isinstance(node, FunctionType) else node.__module__
    if str(owner).startswith("torchguard.defects."):
        return False  # a probe of the doctor is a program
    return str(owner).partition(".")[0] in {"torch", "torchguard", *sys.stdlib_module_names}


_ALL: frozenset[Kind] = frozenset(
    {"container", "object", "bound", "function", "module", "class", "tensor"}
)
PROGRAM = Reach(
    _ALL,
    named=(torch.Tensor, torch.nn.Module, type, *CONTAINERS),
    is_own=lambda node: not _is_of_library(node),
)
"""What a call can change: all that the program holds, and nothing inside of libraries."""


def _leaves(nodes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what is compared of each object itself: its value, its length, or its class."""
    for path, node in nodes:
        if isinstance(node, (torch.Tensor, *_PLAIN)):
            yield path, node
        elif isinstance(node, (set, frozenset)) and ATOMS.issuperset(map(type, node)):
            yield path, frozenset(node)
        elif isinstance(node, (*CONTAINERS, tuple)):
            yield f"len({path})", len(node)
        else:
            yield path, type(node).__qualname__


def _problem(path: str, node: Any) -> str | None:
    if isinstance(node, torch.optim.Optimizer):
        return f"{path} is an optimizer, whose steps can't be run twice"
    if isinstance(node, Iterator):
        return f"{path} is an iterator, which can't be read twice"
    return None
