"""Every operator of torch's OpInfo database: calls that fail, and calls that do not."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from contextlib import nullcontext
from operator import attrgetter
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torchguard
from support.kinds import empty_locked, state
from support.sweep import OutCase, by_name, out_cases, places
from support.ways import differences, outcome_of
from torchguard._torch import operator_schemas, patch, schemas
from torchguard.patching.guards import GUARDS
from torchguard.rollback.consistency import is_consistent
from torchguard.rollback.overlap import NAMESPACES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "guarded": torchguard.guarded,
    "install": lambda: torchguard.install("out"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    places()  # while nothing is installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cases(scope: str) -> list[OutCase]:
    """Return the operators that a scope guards; asked inside it."""
    is_bare = scope == "torch"
    return [c for c in out_cases() if is_bare or by_name(c.function) is not c.function]


@functools.cache
def failures(scope: str) -> dict[str, tuple[type[BaseException] | None, dict[str, Any]]]:
    """How each operator ends whose outputs can't grow, and what has changed about these."""
    found: dict[str, Any] = {}
    with SCOPES[scope]():
        for case in cases(scope):
            outs = case.outs()
            before = [state(out) for out in outs]
            error = outcome_of(lambda: case.call(outs)).error  # noqa: B023
            changed = [differences(old, state(out)) for old, out in zip(before, outs, strict=True)]
            is_spoiled = any(changed) or not all(is_consistent(out) for out in outs)
            found[case.name] = type(error), changed if is_spoiled else {}
    return found


def corrupted(scope: str) -> dict[str, Any]:
    return {name: changed for name, (_, changed) in failures(scope).items() if changed}


def test_more_than_300_operators_corrupt_their_output_on_torch() -> None:
    assert len(corrupted("torch")) > 300


@pytest.mark.parametrize("scope", [*SCOPES][1:])
def test_no_operator_corrupts_its_output_and_each_fails_as_on_torch(scope: str) -> None:
    assert corrupted(scope) == {}
    ends = {name: end for name, (end, _) in failures(scope).items()}
    assert ends == {name: failures("torch")[name][0] for name in ends}
    assert sum(issubclass(end, BaseException) for end in ends.values() if end) > 200


SIZES: dict[str, Callable[[torch.Tensor], tuple[int, ...]]] = {
    "right": lambda tensor: tuple(tensor.shape),
    "wrong": lambda tensor: (*tensor.shape, 2),
    "empty": lambda _: (0,),
}


def with_room(case: OutCase, size: str, result: Any) -> dict[str, Any]:
    """All that can be seen of a call whose outputs can grow."""
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    outs = tuple(torch.full(SIZES[size](each), 1, dtype=each.dtype) for each in results)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ended = outcome_of(lambda: case.call(outs))
    if ended.error is not None:
        return {"error": f"{type(ended.error).__name__}: {ended.error}"}
    back = ended.result if isinstance(ended.result, (tuple, list)) else (ended.result,)
    texts = [str(each.message) for each in warned]
    return {
        "type": type(ended.result),
        "is out": [one is other for one, other in zip(back, outs, strict=False)],
        "shapes": [(each.shape, each.stride(), each._version) for each in outs],
        "values": list(outs),
        # Deprecation warnings come once in a process, so they can't be compared.
        "warnings": [text for text in texts if "resized" in text],
    }


@pytest.mark.slow
def test_an_operator_with_room_in_out_is_as_on_torch() -> None:
    """Results, their identity, versions, warnings, error messages."""
    results = {}
    for case in out_cases():
        torch.manual_seed(0)
        results[case.name] = case.function(*case.args, **case.kwargs)
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for scope in ("torch", "guarded", "install"):
        with SCOPES[scope]():
            found[scope] = {
                (case.name, size): with_room(case, size, results[case.name])
                for case in cases(scope)
                for size in SIZES
            }
    bare = found.pop("torch")
    wrong = []
    for calls in found.values():
        for key, after in calls.items():
            before = dict(bare[key])
            values, others = before.pop("values", []), after.pop("values", [])
            if before != after:
                wrong.append((key, before, after))
            elif "empty" not in key[0]:  # whatever was in memory
                for value, other in zip(values, others, strict=True):
                    torch.testing.assert_close(
                        value, other, rtol=0, atol=0, equal_nan=True, msg=str(key)
                    )
    assert wrong == []
    assert len(found["install"]) > 3 * 200
    assert sum(bool(each.get("warnings")) for each in bare.values()) > 100
    assert sum("error" in each for each in bare.values()) < len(bare) / 5


def test_what_the_guard_patches_takes_out() -> None:
    functions = {path: patch.original(path) for path in GUARDS["out"].replacements()}
    assert len(functions) > 300
    for path, function in functions.items():
        if inspect.isfunction(function):
            assert "out" in inspect.signature(function).parameters, path
            continue
        with pytest.raises((TypeError, RuntimeError, ValueError)) as refusal:
            function(out=object())
        # torch names an unknown keyword; a builtin that takes it names something else.
        assert "unexpected keyword argument 'out'" not in str(refusal.value), path


# ---- every builtin that has an overload with out=, in OpInfo or not ----


def builtins_with_out() -> Iterator[tuple[str, str, Any]]:
    """Each builtin in the namespaces of users, and an overload of its operator that has ``out``."""
    for namespace in NAMESPACES:
        for name, value in sorted(vars(namespace).items()):
            if isinstance(value, BuiltinFunctionType) and not name.startswith("__"):
                for schema in operator_schemas(name):
                    if any(argument.is_out for argument in schema.arguments):
                        yield f"{namespace.__name__}.{name}", name, schema


def values_for(kind: Any, tensor: torch.Tensor, number: int) -> Any:
    """A value of the type of an argument."""
    if kind.kind() == "TensorType":
        return tensor
    if kind.kind() == "ListType":
        one = values_for(kind.getElementType(), tensor, number)
        return list(tensor.shape) if one is number else [one, one]
    of_numbers = {"IntType": number, "NumberType": number, "FloatType": 0.5, "BoolType": True}
    return {**of_numbers, "StringType": "sum", "OptionalType": None}.get(kind.kind())


def calls_with_out(schema: Any) -> Iterator[tuple[list[Any], dict[str, Any], int]]:
    """Arguments that may be right, and how many outputs there are."""
    tensors = (
        torch.ones(3, 3),
        torch.ones(3),
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, 3, 4, 4),
    )
    needed = [a for a in schema.arguments if not a.has_default_value() and not a.is_out]
    outs = sum(argument.is_out for argument in schema.arguments)
    for tensor, number in itertools.product(tensors, (0, 1, 2)):
        values = [(each, values_for(each.type, tensor, number)) for each in needed]
        yield (
            [value for each, value in values if not each.kwarg_only],
            {each.name: value for each, value in values if each.kwarg_only},
            outs,
        )


def spoiled_by(path: str, schema: Any) -> bool | None:
    """Whether a call leaves outputs that can't grow changed; None if no call of ours works."""
    for args, kwargs, count in calls_with_out(schema):
        for dtype in (torch.float32, torch.int64):
            function = attrgetter(path.removeprefix("torch."))(torch)
            room = [torch.empty(0, dtype=dtype) for _ in range(count)]
            if outcome_of(lambda: function(*args, **kwargs, out=one_or_all(room))).error:  # noqa: B023
                continue
            if not all(each.numel() for each in room):
                continue
            outs = [empty_locked(dtype) for _ in range(count)]
            before = [state(out) for out in outs]
            outcome_of(lambda: function(*args, **kwargs, out=one_or_all(outs)))  # noqa: B023
            return any(differences(old, state(out)) for old, out in zip(before, outs, strict=True))
    return None


def one_or_all(outs: list[torch.Tensor]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)


@pytest.mark.slow
@pytest.mark.parametrize("scope", [*SCOPES][1:])
def test_no_builtin_with_out_corrupts_it(scope: str) -> None:
    overloads = list(builtins_with_out())
    bare = {(path, str(schema)): spoiled_by(path, schema) for path, _, schema in overloads}
    with SCOPES[scope]():
        found = {(path, str(schema)): spoiled_by(path, schema) for path, _, schema in overloads}
    assert [each for each, spoiled in found.items() if spoiled] == []
    assert [each for each in bare if (bare[each] is None) != (found[each] is None)] == []
    spoiled = {path for (path, _), is_spoiled in bare.items() if is_spoiled}
    assert len(spoiled) > 200
    assert spoiled >= {"torch.expand_copy", "torch.slice_scatter", "torch._chunk_cat"}


def test_asking_what_takes_out_is_seen_by_no_mode() -> None:
    class Counts(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            raise AssertionError(func)

    schemas._has_python_out.cache_clear()
    with Counts() as mode:
        assert schemas.has_python_out(patch.original("torch.view_copy"))
        assert not schemas.has_python_out(patch.original("torch.rand_like"))
    assert mode.calls == 0
