"""If a release of PyTorch changes a private name, each guard protects or says that it does not.

Nothing is silent: a guard that is off stands in ``skipped`` with a warning, a function that can't
do what it promises warns or raises.
"""

from __future__ import annotations

import json

import pytest

from support import simulated
from support.child_process import output_of

_PROGRAM = """
    import sys
    import torch, torch.fx.experimental.symbolic_shapes, torch.utils.checkpoint
    import torch.multiprocessing, torch.optim, torch.utils._device
    sys.path.insert(0, {path!r})
    compiled = {compiled!r}
    if compiled:
        torch.compile(lambda x: x, backend="aot_eager")(torch.ones(1))
        torch.compiler.reset()
    from support import simulated
    simulated.run({names!r}, compiled=compiled)
"""

FEW: dict[str, set[str]] = {
    "nothing": set(),
    "gone torch._C._jit_get_schemas_for_operator": {"out", "overlap", "guarded()"},
    "the version counter stays": {"resize", "safe_resize_()", "rollback_on_error()", "guarded()"},
    "gone torch.Tensor._version": {
        *("resize", "recompute", "safe_resize_()", "rollback_on_error()", "guarded()"),
    },
    "checkpoint() applies another function": {"recompute"},
    "F.embedding calls another builtin": {"checks"},
    "load_state_dict copies otherwise": set(),
}
"""By change, what says that it does not protect; everything else protects."""


def _answers(names: list[str], *, compiled: bool) -> dict[str, dict[str, str]]:
    path = simulated.__file__.rpartition("/support/")[0]
    printed = output_of(_PROGRAM.format(path=path, compiled=compiled, names=names))
    answers = dict(map(json.loads, printed.splitlines()))
    assert answers.keys() == set(names)
    return answers


def _wrong(answers: dict[str, dict[str, str]]) -> list[str]:
    """What is silent, or takes down more than the guard that it concerns."""
    whole = {"import", "install", "process", "change"}
    return [
        f"{change}: {what}: {answer}"
        for change, found in answers.items()
        for what, answer in found.items()
        if answer.startswith("SILENT") or what in whole
    ]


def test_what_a_changed_name_breaks_says_so_and_nothing_else_is_broken() -> None:
    answers = _answers(list(FEW), compiled=False)
    for change, expected in FEW.items():
        wrong = {what: answer for what, answer in answers[change].items() if answer != "protects"}
        assert wrong.keys() == expected, (change, wrong)
        assert all(answer.startswith("says so: ") for answer in wrong.values()), (change, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_changed_name_is_protected_against_or_said(compiled: bool) -> None:
    table = simulated.COMPILED if compiled else simulated.EAGER
    answers = _answers(list(table), compiled=compiled)
    assert set(answers["nothing"].values()) == {"protects"}
    assert _wrong(answers) == []
    assert sum("absent" in found for found in answers.values()) <= 2
