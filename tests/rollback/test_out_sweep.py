"""Every operator of torch's OpInfo database, with arguments that make it fail."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support.kinds import state
from support.sweep import InPlaceCase, by_name, in_place_cases, out_cases, places
from support.ways import differences, outcome_of
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    places()  # while nothing is installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def corrupted_operators(
    scope: Callable[[], AbstractContextManager[Any]], *, patched_only: bool = False
) -> tuple[dict[str, Any], int]:
    """Operators whose ``out`` differs after a failure, and how many failed."""
    where = places()  # taken outside of every scope
    corrupted: dict[str, Any] = {}
    failed = 0
    cases = out_cases()
    with scope():
        for case in cases:
            function = None
            if patched_only:
                function = case.function
                if id(function) not in where or where[id(function)][0] is torch.Tensor:
                    continue
                namespace, name = where[id(function)]
                function = getattr(namespace, name)
                if function is case.function:
                    continue
            outs = case.outs()
            before = [state(out) for out in outs]
            error = outcome_of(lambda: case.call(outs, function)).error  # noqa: B023
            changed = [differences(old, state(out)) for old, out in zip(before, outs, strict=True)]
            failed += error is not None
            if any(changed) or not all(is_consistent(out) for out in outs):
                corrupted[case.name] = changed
    return corrupted, failed


def test_more_than_300_operators_corrupt_their_output_on_torch() -> None:
    corrupted, failed = corrupted_operators(nullcontext)
    print(f"{len(out_cases())} operators with out=, {failed} fail, {len(corrupted)} corrupt")  # noqa: T201
    assert len(corrupted) > 300


@pytest.mark.parametrize("data", [False, True])
def test_no_operator_corrupts_its_output_inside_guarded(data: bool) -> None:
    corrupted, failed = corrupted_operators(lambda: torchguard.guarded(data=data))
    print(f"guarded: {failed} fail, {len(corrupted)} corrupt")  # noqa: T201
    assert corrupted == {}
    assert failed > 300


def test_no_patched_operator_corrupts_its_output_under_install() -> None:
    corrupted, failed = corrupted_operators(lambda: torchguard.install("out"), patched_only=True)
    print(f"install('out'): {failed} fail, {len(corrupted)} corrupt")  # noqa: T201
    assert corrupted == {}
    assert failed > 200


def test_an_operator_fails_inside_guarded_as_it_fails_on_torch() -> None:
    wrong = []
    for case in out_cases():
        torchs = outcome_of(lambda: case.call(case.outs())).error  # noqa: B023
        with torchguard.guarded():
            ours = outcome_of(lambda: case.call(case.outs())).error  # noqa: B023
        if type(torchs) is not type(ours):
            wrong.append((case.name, torchs, ours))
    assert wrong == []


def test_an_operator_with_room_in_out_gives_the_same_result_inside_guarded() -> None:
    wrong = []
    scopes: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
        nullcontext,
        torchguard.guarded,
    )
    for case in out_cases():
        results = []
        for scope in scopes:
            outs = tuple(torch.empty(0, dtype=dtype) for dtype in case.dtypes)
            torch.manual_seed(0)
            with scope():
                outcome = outcome_of(lambda: case.call(outs))  # noqa: B023
            given_back = outcome.result if isinstance(outcome.result, tuple) else (outcome.result,)
            same = [id(each) for each in given_back] == [id(out) for out in outs]
            shown = [(out.shape, out.stride(), out._version) for out in outs]
            results.append((type(outcome.error), same, shown))
        if results[0] != results[1]:
            wrong.append((case.name, results))
    assert wrong == []


def _try_in_place(
    case: InPlaceCase, scope: AbstractContextManager[Any]
) -> tuple[BaseException | None, dict[str, Any], torch.Tensor]:
    with torch.no_grad():
        tensor = case.args[0].clone()
    before = state(tensor)
    with scope:
        outcome = outcome_of(lambda: by_name(case.function)(tensor, *case.args[1:], **case.kwargs))
    return outcome.error, differences(before, state(tensor)), tensor


def test_a_failed_operator_has_changed_nothing_or_moved_the_version_on() -> None:
    silent: dict[str, list[str]] = {"torch": [], "guarded": [], "guarded(data=True)": []}
    failed = 0
    for case in in_place_cases():
        scopes: dict[str, AbstractContextManager[Any]] = {
            "torch": nullcontext(),
            "guarded": torchguard.guarded(),
            "guarded(data=True)": torchguard.guarded(data=True),
        }
        for name, scope in scopes.items():
            error, changed, _ = _try_in_place(case, scope)
            if error is None:
                continue
            failed += name == "torch"
            bumped = changed.pop("version", None) is not None
            if changed and (
                name == "guarded(data=True)" or not bumped or changed.keys() - {"bytes"}
            ):
                silent[name].append(f"{case.name}: {error!r} {changed}")
            elif name == "guarded(data=True)" and bumped:
                silent[name].append(f"{case.name}: {error!r} version moved on")
    print(f"{failed} in-place calls fail on torch,", {k: len(v) for k, v in silent.items()})  # noqa: T201
    assert silent["guarded"] == []
    assert silent["guarded(data=True)"] == []
    assert failed > 200
    assert len(silent["torch"]) >= 10


def test_the_inputs_of_the_sweep_are_as_they_were() -> None:
    tensors = [arg for case in out_cases() for arg in case.args if isinstance(arg, torch.Tensor)]
    assert len(tensors) > 300
    assert all(is_consistent(tensor) for tensor in tensors)
