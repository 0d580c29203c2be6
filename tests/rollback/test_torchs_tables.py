"""Torch's own tables of functions, filled while the guard ``out`` is installed or before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.child_process import output_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

QUANTIZES = """
    import contextlib
    import torch
    from torchguard import install

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = torch.mul(torch.add(self.linear(x), x), x)
            return torch.matmul(torch.cat([y, y]), x.t())

    def quantized(guard):
        with guard():
            from torch.ao.quantization import get_default_qconfig_mapping
            from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
            x = torch.randn(2, 4)
            prepared = prepare_fx(Model().eval(), get_default_qconfig_mapping(), (x,))
            prepared(x)
            return [node.name for node in convert_fx(prepared).graph.nodes]

    guards = [lambda: install("out", "resize", only_if_needed=False), contextlib.nullcontext]
    first, second = map(quantized, guards[::-1])
    assert first == second
    assert {"add", "dequantize"} <= {name.rstrip("_0123456789") for name in first}, first
    assert "torchguard" not in torch.ao.quantization.quantize_fx._prepare_fx.__code__.co_filename
"""


def test_quantization_replaces_what_it_replaces_without_the_guard() -> None:
    """It was imported before: what it binds under the guard is a replacement."""
    output_of(QUANTIZES)


IMPORTED_UNDER_GUARDS = """
    import contextlib, json, sys, torch
    from torchguard import install, installed

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = torch.mul(torch.add(self.linear(x), x), x)
            return torch.matmul(torch.cat([y, y]), x.t()), torch.bmm(y[None], y[None].mT)

    names = json.loads(sys.argv[1])
    with install(*names, only_if_needed=False) if names else contextlib.nullcontext():
        from torch.ao.quantization import default_qconfig, get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
        torch.manual_seed(0)
        x = torch.randn(2, 4)
        mapping = get_default_qconfig_mapping().set_object_type(torch.matmul, None)
        prepared = prepare_fx(Model().eval(), mapping, (x,))
        prepared(x)
        converted = convert_fx(prepared)
        assert names != ["all"] or "recompute" in installed()  # tried when Dynamo was imported
        nodes = [(node.op, node.name) for node in converted.graph.nodes]
        print("RESULT", json.dumps([nodes, [each.tolist() for each in converted(x)]]))
"""


def _quantized(*names: str) -> str:
    return output_of(IMPORTED_UNDER_GUARDS, json.dumps(names)).partition("RESULT")[2]


def test_quantization_imported_under_a_guard_converts_what_it_converts_without() -> None:
    """What it binds at import, and what the program puts into a mapping, are replacements."""
    expected = _quantized()
    assert "dequantize" in expected
    for names in (["out"], ["overlap"], ["checks"], ["out", "overlap", "checks"], ["all"]):
        assert _quantized(*names) == expected, names


LATER = """
import pathlib, sys, torch, torchguard
from torch._dynamo.testing import CompileCounter

path = pathlib.Path(sys.argv[1], "y.pt")

def frames():
    def function(x):
        y = x + 1
        torch.save(y, path)  # a graph break
        return y * 2

    counter = CompileCounter()
    torch.compile(function, backend=counter)(torch.ones(3))
    return counter.frame_count

bare = frames()
with torchguard.guarded():
    pass
with torchguard.install("save", only_if_needed=False):
    print(bare, frames())
"""


def test_rooms_imported_after_the_first_patch_are_no_frames_of_dynamos(tmp_path: Path) -> None:
    assert output_of(LATER, str(tmp_path)).split() == ["2", "2"]
