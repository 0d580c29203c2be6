"""install("save", "load", "numpy"): torch's own names, beside the other guards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchguard

ALL: tuple[Any, ...] = ("resize", "out", "save", "load", "numpy")


def test_every_guard_at_once(tmp_path: Path) -> None:
    """Save, fail, load and share with all of them on."""
    path, model = tmp_path / "model.pt", torch.nn.Linear(2, 2)
    with torchguard.install(*ALL):
        torch.save(model.state_dict(), path)
        with torchguard.guarded():
            torch.save(model.state_dict(), path)
        state = torch.load(path)
        model.load_state_dict(state)
        weight = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({"weight": weight + 1, "bias": torch.ones(9)})
        assert torch.equal(model.weight, weight)
        frozen = np.zeros(2)
        frozen.flags.writeable = False
        torch.from_numpy(frozen).add_(1)
        assert frozen.tolist() == [0, 0]
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(torchguard.DamagedFileError, match=r"model\.pt"):
            torch.load(path)


def test_what_a_subclass_overrides_goes_on_working() -> None:
    class Renames(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            renamed = {key.removeprefix("old."): value for key, value in state_dict.items()}
            return super().load_state_dict(renamed, *args, **kwargs)

    model = Renames(2, 2)
    state = {f"old.{key}": torch.full_like(value, 3.0) for key, value in model.state_dict().items()}
    with torchguard.install("load"):
        model.load_state_dict(state)
    assert model.bias.tolist() == [3, 3]
    torchguard.load_state_dict(model, {key: value + 1 for key, value in state.items()})
    assert model.bias.tolist() == [4, 4]
