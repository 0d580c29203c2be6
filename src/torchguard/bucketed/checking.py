"""Check one call: the padded answer has to be the real one."""

from __future__ import annotations

import contextlib
from typing import Any

from torchguard.bucketed.cutting import Cutter
from torchguard.bucketed.isolation import eager, modules_of, other_last_digits
from torchguard.bucketed.plans import Place, Plan, told
from torchguard.bucketed.ranks import agree
from torchguard.bucketed.trees import Path
from torchguard.bucketed.variants import COMPILING
from torchguard.bucketed.verification import (
    Arguments,
    Run,
    compared,
    other_filler,
    ran,
    with_other_last_digits,
)
from torchguard.errors import PaddingLeakError

__all__ = ["check"]


_NOTHING, _LEAK, _FAILED = range(3)
"""What a check has found, the gravest last."""

_TURNS = 4
"""How often a leak has to be seen. A right function that jumps looks like one now and then."""


class _NothingElse(Exception):  # noqa: N818 - it is an answer, not an error
    """There are no other last digits to check with."""


def check(cutter: Cutter, plan: Plan, owner: tuple[Any, ...], given: Arguments) -> None:
    """Raise unless padding leaves the answer and the gradients as they are.

    A leak is one if it is there with other last digits in the weights as well. All ranks of a
    group take as many turns as the one that takes most.

    Args:
        cutter: knows what runs and what it is given, and cuts what it returns.
        plan: how.
        owner: what it is given first, ``self``.
        given: the call, not padded.

    Raises:
        PaddingLeakError: padding changes something.
        RuntimeError: it does so on another rank only.
    """
    group = cutter.planner.options.group
    leak: PaddingLeakError | None = None
    found = _LEAK  # as long as every turn has seen one
    for turn in range(_TURNS):
        error: Exception | None = None
        try:
            _check_once(cutter, plan, owner, given, turn)
            found = _NOTHING
        except PaddingLeakError as padding_leaks:
            leak = leak or padding_leaks
        except Exception as failure:  # noqa: BLE001 - it has to wait for the other ranks
            if turn == 0:  # later, a turn that can't be taken excuses nothing
                found, error = _FAILED, failure
        gravest = found if group is None else agree(group, [found])[0]
        if error is not None:
            raise error
        if gravest == _NOTHING:
            return
        if gravest == _FAILED:
            break
    if leak is not None and found == _LEAK:
        raise leak
    raise RuntimeError(
        f"bucketed: the check of {cutter.name} has failed on another rank; its own error says why"
    )


def _check_once(
    cutter: Cutter, plan: Plan, owner: tuple[Any, ...], given: Arguments, turn: int
) -> None:
    """Check with what is given; from the second turn on with other last digits in the weights.

    Raises:
        PaddingLeakError: padding changes something.
        _NothingElse: it changes nothing, and nothing was other than in the first turn.
    """
    args, kwargs = given
    source, planner = cutter.source, cutter.planner
    whole = Arguments((*owner, *args), kwargs)
    function = source.function
    modules = modules_of(function, (*owner, *args))
    names = {each.path_in(len(owner)): each.label for each in plan.inputs}

    def once(fills: Any, parameters: Any = None) -> Run:
        def prepare(given: Arguments) -> Arguments:
            real = given.args[len(owner) :]
            if fills is None:
                changed, named = planner.unpadded(plan, real, given.kwargs)
            else:
                changed, named = planner.padded(plan, real, given.kwargs, fills)
            return Arguments((*owner, *changed), named)

        def cut(output: Any) -> Any:
            return output if fills is None else cutter.cut(plan, output, owner, args, kwargs)

        return ran(
            function,
            whole,
            prepare=prepare,
            cut=cut,
            names=names,
            modules=modules,
            parameters=parameters,
        )

    with COMPILING, eager(), contextlib.ExitStack() as scope:
        is_new = turn == 0
        if turn > 0:
            given, is_new = with_other_last_digits(given, turn)
            whole = Arguments((*owner, *given.args), given.kwargs)
            held = (each for module in modules for each in module.parameters(recurse=False))
            weights = [*held, *once(None).parameters]
            is_new |= scope.enter_context(other_last_digits(weights, turn))
        # All runs before the first comparison: on several ranks the function may wait for the
        # others in it, and all make as many.
        without = once(None)
        padded = once({}, without.parameters)
        fills = _other_fills(plan, args, kwargs)
        other = None
        if fills or planner.options.group is not None:
            other = once(fills, without.parameters)
    compared(without, padded, what=told(plan), function=cutter.name, modules=modules)
    if other is not None:
        labels = ", ".join(each.label for each in plan.inputs if (each.place, each.path) in fills)
        what = f"{told(plan)}; with another value in the padding of {labels}"
        compared(padded, other, what=what, function=cutter.name, modules=modules)
    if not is_new:
        raise _NothingElse


def _other_fills(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[tuple[Place, Path], Any]:
    """Return other values for the padding of inputs for which nobody has said what it means."""
    fills = {}
    for each in plan.inputs:
        if not each.declared and each.shape != each.padded(plan.buckets):
            fill = other_filler(each.of(args, kwargs))
            if fill is not None:
                fills[each.place, each.path] = fill
    return fills
