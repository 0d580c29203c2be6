"""dcp.async_save with a stager that copies in a thread: a step meanwhile is an error, not a mix."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import staging, state_dict_loader, state_dict_saver

import torchguard
from torchguard.errors import TornSaveError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # DCP's: one process has no group
    pytest.mark.skipif(
        not hasattr(staging, "DefaultStager"), reason="this torch stages in the caller's thread"
    ),
]
STAGED = threading.Event()


class Slow:
    """An object that takes until the event to be copied, as a large model does."""

    def __deepcopy__(self, _: Any) -> Slow:
        STAGED.wait(60)
        return Slow()


def save(path: Path, *, steps_meanwhile: bool, guarded: bool = True) -> Any:
    """Save two tensors of step 1; write step 2 to the one that is staged last, if asked."""
    STAGED.clear()
    state: dict[str, Any] = {"a": torch.ones(4), "slow": Slow(), "b": torch.ones(4)}
    options = staging.StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False
    )
    with torchguard.install("save") if guarded else contextlib.nullcontext():
        stager = staging.DefaultStager(options)
        response: Any = state_dict_saver.async_save(state, checkpoint_id=path, async_stager=stager)
        if steps_meanwhile:
            state["b"].fill_(2)
        STAGED.set()
        response.staging_completion.exception(60)
        try:
            return response.upload_completion.result(60)
        finally:
            stager.close()


def test_a_write_while_it_is_staged(tmp_path: Path) -> None:
    with pytest.raises(TornSaveError, match=r"obj\['b'\] was changed .*staging_completion.result"):
        save(tmp_path / "torn", steps_meanwhile=True)
    assert not (tmp_path / "torn" / ".metadata").exists()


def test_without_a_write_it_is_saved(tmp_path: Path) -> None:
    save(tmp_path / "whole", steps_meanwhile=False)
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    state_dict_loader.load(state, checkpoint_id=tmp_path / "whole")
    assert state["a"].tolist() == state["b"].tolist() == [1.0] * 4


def test_bare_torch_saves_two_steps_in_one(tmp_path: Path) -> None:
    save(tmp_path / "mixed", steps_meanwhile=True, guarded=False)
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    state_dict_loader.load(state, checkpoint_id=tmp_path / "mixed")
    assert (state["a"].tolist(), state["b"].tolist()) == ([1.0] * 4, [2.0] * 4)
