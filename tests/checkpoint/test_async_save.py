"""dcp.async_save: a state that changes while another thread copies it is not saved by any rank."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import state_dict_saver

from support.child_process import JOIN_RANKS, run_ranks

PROGRAM = (
    JOIN_RANKS
    + '''
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torchguard
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

folder = Path(sys.argv[0]).parent


class Slow(DefaultStager):
    """Copies the first tensor, waits to be told, and copies the second."""

    def __init__(self):
        self.go, self.first = threading.Event(), threading.Event()

    def stage(self, state):
        def copy():
            copied = {"a": state["a"].clone()}
            self.first.set()
            self.go.wait(60)
            return {**copied, "b": state["b"].clone()}

        return ThreadPoolExecutor(1).submit(copy)

    def close(self):
        pass

    def synchronize_staging(self):
        pass


def attempt(name, torn_on=(), stager=None):
    state = {"a": torch.full((8,), 1.0), "b": torch.full((8,), 1.0)}
    stager = stager or Slow()
    response = dcp.async_save(state, checkpoint_id=folder / name, async_stager=stager)
    if isinstance(stager, Slow):
        stager.first.wait(60)
        if rank in torn_on:
            state["b"].add_(1)
        stager.go.set()
    response.staging_completion.result()
    state["a"].add_(1)
    error = None
    try:
        response.upload_completion.result()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    dist.barrier()
    loaded = {"a": torch.zeros(8), "b": torch.zeros(8)}
    whole = (folder / name / ".metadata").exists()
    if whole:
        dcp.load(loaded, checkpoint_id=folder / name)
    result[name] = [error, whole, loaded["a"][0].item(), loaded["b"][0].item()]
    dist.barrier()


result = {}
attempt("bare", torn_on=(0, 1))
with torchguard.install("save"):
    attempt("right")
    attempt("default", stager=DefaultStager(StagingOptions(False, False, True, False)))
    attempt("torn", torn_on=(1,))
print(json.dumps(result))
'''
)


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(state_dict_saver.async_save).parameters,
    reason="async_save of this torch copies before it returns",
)
def test_a_state_that_changes_while_it_is_copied(tmp_path: Path) -> None:
    """Bare DCP saves the mix, and a change on one rank is raised on all."""
    ranks: list[dict[str, Any]] = run_ranks(PROGRAM, tmp_path)
    for each in ranks:
        assert each["bare"] == [None, True, 1.0, 2.0]
        assert each["right"] == each["default"] == [None, True, 1.0, 1.0]
        error, whole, *_ = each["torn"]
        assert error.startswith("TornSaveError: async_save: obj['b'] was changed in place")
        assert not whole
