"""Torch's own tables of functions, filled while the guard ``out`` is installed or before."""

from __future__ import annotations

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
    first, second = map(quantized, guards[::{order}])
    assert first == second
    assert {{"add", "dequantize"}} <= {{name.rstrip("_0123456789") for name in first}}, first
    assert "torchguard" not in torch.ao.quantization.quantize_fx._prepare_fx.__code__.co_filename
"""


@pytest.mark.parametrize("order", [1, -1], ids=["imported under the guard", "imported before"])
def test_quantization_replaces_what_it_replaces_without_the_guard(order: int) -> None:
    output_of(QUANTIZES.format(order=order))


TABLES = """
    import importlib, sys, types
    import torch
    from torchguard import install
    from torchguard._torch import patch
    install("out", "resize", only_if_needed=False)
    names = sys.argv[1:]
    ours = {id(patch.replacement): path for path, patch in patch._table.items()}

    def found(value, depth=4):
        if id(value) in ours:
            yield ours[id(value)]
        elif depth and isinstance(value, dict):
            for pair in list(value.items()):
                yield from found(pair, depth - 1)
        elif depth and isinstance(value, (list, tuple, set, frozenset)):
            for each in list(value):
                yield from found(each, depth - 1)

    for name in names:
        module = importlib.import_module(name)
        for key, value in list(vars(module).items()):
            if not isinstance(value, types.ModuleType):
                for path in found(value):
                    print(name, key, path)
"""


def test_tables_of_modules_imported_later_hold_torchs_own_functions() -> None:
    names = (
        "torch._dynamo.variables.torch",
        "torch._inductor.lowering",
        "torch._inductor.fx_passes.split_cat",
        "torch._numpy._ufuncs",
        "torch._lazy.tensor_factory_functions",
        "torch.ao.quantization.fx._lower_to_native_backend",
    )
    assert output_of(TABLES, *names) == ""


def test_a_module_of_torch_that_is_imported_late_runs_the_hooks_of_others() -> None:
    program = """
        import wrapt
        import torch
        from torchguard import install, installed
        name = "torch._lazy.tensor_factory_functions"
        wrapt.register_post_import_hook(lambda module: print("hook", module.__name__), name)
        with install("out", only_if_needed=False):
            import torch._lazy.tensor_factory_functions as late
            assert "out" in installed()
            assert torch.add.__module__ == "torch"
            print(late.__spec__.name, late.__file__ is not None)
    """
    name = "torch._lazy.tensor_factory_functions"
    assert output_of(program) == f"hook {name}\n{name} True\n"


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
    assert "torchguard.checkpoint.saving" not in sys.modules
with torchguard.install("save", only_if_needed=False):
    print(bare, frames())
"""


def test_rooms_imported_after_the_first_patch_are_no_frames_of_dynamos(tmp_path: Path) -> None:
    assert output_of(LATER, str(tmp_path)).split() == ["2", "2"]
