"""The fixture that looks for what torchguard leaves behind can find something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

import torchguard
from conftest import residue
from support.child_process import output_of

if TYPE_CHECKING:
    import pytest


def test_an_installed_guard_is_residue() -> None:
    assert residue() == []
    with torchguard.install("resize", "out"):
        found = "\n".join(residue())
    assert "torch.Tensor.resize_ is new" in found
    assert "torch.add was replaced" in found
    assert "torch.linalg.inv was replaced" in found
    assert "still installed: ('resize', 'out')" in found
    assert "TorchScript builtins" in found
    assert residue() == []


def test_what_others_set_remove_and_enter_is_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, *_: Any) -> Any:
            raise NotImplementedError

    monkeypatch.setattr(torch.Tensor, "resize_", torch.Tensor.resize_)
    assert [line.split(" is")[0] for line in residue()] == ["torch.Tensor.resize_"]
    monkeypatch.undo()
    monkeypatch.delattr(torch.linalg, "inv")
    assert residue() == ["torch.linalg.inv is gone"]
    monkeypatch.undo()
    with Mode():
        found = residue()
    assert found == ["1 modes are left on the torch function stack"]


def test_what_a_scope_leaves_is_residue_until_uninstall() -> None:
    import torch._dynamo.output_graph  # noqa: F401, PLC0415

    assert residue() == []
    with torchguard.guarded("out", "checks"):
        pass
    found = "\n".join(residue())
    assert "torch.add was replaced" in found
    assert "torch._dynamo.output_graph.OutputGraph.call_user_compiler was replaced" in found
    torchguard.uninstall()
    assert residue() == []


def test_uninstall_leaves_dynamos_tables_as_they_were() -> None:
    """With what Dynamo has added to them when it was imported, such as its ``any()``."""
    program = """
        import torch, torch._dynamo, torchguard
        from torch._dynamo import trace_rules
        from torch._dynamo.variables.builder import VariableBuilder
        from torchguard.patching.guards import GUARDS

        def known():
            return set(trace_rules.get_torch_obj_rule_map()), set(VariableBuilder._id_dispatch())

        rules, ids = known()
        assert any in rules
        torchguard.install(*GUARDS)
        torchguard.uninstall()
        now, ids_now = known()
        # Torch itself replaces this one while Dynamo is imported.
        assert {getattr(each, "__name__", each) for each in rules ^ now} <= {"manual_seed"}
        assert ids_now == ids
    """
    output_of(program)
