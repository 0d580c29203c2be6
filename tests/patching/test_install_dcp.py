"""install("save", "load") before torch.distributed.checkpoint is imported, and off again."""

from __future__ import annotations

from pathlib import Path

from support.child_process import output_of


def test_what_is_imported_later_is_guarded_once_and_put_back(tmp_path: Path) -> None:
    program = f"""
    import sys, torch, torchguard
    assert "torch.distributed.checkpoint" not in sys.modules
    torchguard.install("save", "load")
    import torch.distributed.checkpoint as dcp
    dcp.save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
    for save in (dcp.save, dcp.state_dict_saver.save):
        try:
            save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
        except torchguard.errors.SaveError:
            print("raised")
    guarded = dcp.save
    torchguard.uninstall()
    assert dcp.save is dcp.state_dict_saver.save is not guarded
    assert dcp.load is dcp.state_dict_loader.load
    dcp.save({{"a": torch.ones(2)}}, checkpoint_id={str(tmp_path)!r})
    """
    assert output_of(program).split() == ["raised", "raised"]
