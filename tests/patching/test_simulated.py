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
    import numpy, torch, torch.fx.experimental.symbolic_shapes, torch.utils.checkpoint
    import torch.multiprocessing, torch.optim, torch.utils._device
    sys.path.insert(0, {path!r})
    compiled = {compiled!r}
    if compiled:
        torch.compile(lambda x: x, backend="aot_eager")(torch.ones(1))
        torch.compiler.reset()
    from support import simulated
    simulated.run({names!r}, compiled=compiled)
"""

FEW = (
    "nothing",
    "gone torch._C._jit_get_schemas_for_operator",
    "the version counter stays",
    "the generator of checkpoint() is renamed",
    "F.embedding calls another builtin",
    "load_state_dict copies otherwise",
)


def _answers(names: list[str], *, compiled: bool) -> dict[str, dict[str, str]]:
    path = simulated.__file__.rpartition("/support/")[0]
    printed = output_of(_PROGRAM.format(path=path, compiled=compiled, names=names))
    answers = {name: found for name, found, _ in map(json.loads, printed.splitlines())}
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


def test_a_changed_name_is_protected_against_or_said() -> None:
    answers = _answers(list(FEW), compiled=False)
    assert set(answers["nothing"].values()) == {"protects"}
    assert _wrong(answers) == []
    for change in FEW[1:]:
        if change != "load_state_dict copies otherwise":  # copies are made
            assert any(answer.startswith("says so") for answer in answers[change].values()), change


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_changed_name_is_protected_against_or_said(compiled: bool) -> None:
    table = simulated.COMPILED if compiled else simulated.EAGER
    answers = _answers(list(table), compiled=compiled)
    assert set(answers["nothing"].values()) == {"protects"}
    assert _wrong(answers) == []
    assert sum("absent" in found for found in answers.values()) <= 2  # noqa: PLR2004  on old releases
