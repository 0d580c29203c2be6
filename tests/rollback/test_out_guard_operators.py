"""The guard ``out`` over torch's database of operators, and torch's tables of functions."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.child_process import output_of
from torchguard import get_original as torch_has
from torchguard import install
from torchguard.patching.guards import GUARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# --- the same with and without the guard, over torch's own database of operators


def _patched_out_functions() -> dict[str, Any]:
    return {path: torch_has(path) for path in GUARDS["out"].replacements()}


def _live(path: str) -> Any:
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def _op_samples() -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the function and one sample of each operator that takes ``out=``."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    by_function = {id(function): path for path, function in _patched_out_functions().items()}
    for operator in op_db:
        path = by_function.get(id(operator.op))
        if path is None or not operator.supports_out:
            continue
        dtypes = operator.dtypes
        dtype = next(
            (each for each in (torch.float32, torch.int64, torch.complex64) if each in dtypes),
            None,
        )
        if dtype is None:
            continue
        torch.manual_seed(0)
        try:
            samples = operator.sample_inputs("cpu", dtype, requires_grad=False)
            chosen = [sample for _, sample in zip(range(1), samples, strict=False)]
        except Exception:  # noqa: BLE001, S112  a generator that needs what is not built in here
            continue
        for sample in chosen:
            yield path, operator.op, sample


def _outputs(result: Any, size: Callable[[torch.Tensor], tuple[int, ...]]) -> Any:
    """Make an ``out=`` for what a call returned, or None if it returns something else."""
    if isinstance(result, torch.Tensor):
        return torch.full(size(result), 1, dtype=result.dtype)
    if isinstance(result, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in result):
        return tuple(torch.full(size(t), 1, dtype=t.dtype) for t in result)
    return None


def _record(call: Callable[..., Any], sample: Any, out: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call(sample.input, *sample.args, out=out, **sample.kwargs)
        except Exception as error:  # noqa: BLE001
            return {"error": f"{type(error).__name__}: {error}"}
    results = result if isinstance(result, (tuple, list)) else (result,)
    outs = out if isinstance(out, tuple) else (out,)
    return {
        "type": type(result),
        "is out": [one is other for one, other in zip(results, outs, strict=False)],
        "shapes": [(each.shape, each.stride(), each._version) for each in outs],
        "values": list(outs),
        # Deprecation warnings come once in a process, so they can't be compared.
        "warnings": [
            (each.category, str(each.message)) for each in warned if "resized" in str(each.message)
        ],
    }


SIZES: dict[str, Callable[[torch.Tensor], tuple[int, ...]]] = {
    "right": lambda tensor: tuple(tensor.shape),
    "wrong": lambda tensor: (*tensor.shape, 2),
    "empty": lambda _: (0,),
}


def _record_all(
    samples: list[tuple[str, Any, Any]], expected: list[Any]
) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Call each operator as the program sees it, patched or not, with outputs of three sizes."""
    return {
        (number, path, size): _record(_live(path), sample, out)
        for number, ((path, _, sample), result) in enumerate(zip(samples, expected, strict=True))
        for size, make in SIZES.items()
        if (out := _outputs(result, make)) is not None
    }


def _result(function: Callable[..., Any], sample: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001  not every sample runs everywhere
            return None


@pytest.mark.slow
def test_operators_with_out_give_the_same_with_and_without_the_guard() -> None:
    samples = list(_op_samples())
    expected = [_result(function, sample) for _, function, sample in samples]
    bare = _record_all(samples, expected)
    with install("out"):
        guarded = _record_all(samples, expected)
    differing = []
    for key, before in bare.items():
        after = guarded[key]
        values, others = before.pop("values", []), after.pop("values", [])
        if before != after:
            differing.append((key[1:], before, after))
        if "empty" in key[1]:
            continue  # whatever was in memory
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True, msg=key[1])
    assert differing == []
    assert len({path for _, path, _ in bare}) > 200
    assert (
        sum(
            any("resized" in text for _, text in each.get("warnings", ())) for each in bare.values()
        )
        > 100
    )
    assert sum("error" in each for each in bare.values()) < len(bare) / 5


def test_what_the_guard_patches_takes_out() -> None:
    functions = _patched_out_functions()
    assert len(functions) > 300
    takers = 0
    for path, function in functions.items():
        if inspect.isfunction(function):
            assert "out" in inspect.signature(function).parameters, path
            continue
        with pytest.raises((TypeError, RuntimeError, ValueError)) as refusal:
            function(out=object())
        # torch names an unknown keyword; a builtin that takes it names something else.
        assert "unexpected keyword argument 'out'" not in str(refusal.value), path
        takers += 1
    assert takers > 300


# --- torch's own tables of functions


QUANTIZES = """
    import torch
    from torchguard import install, uninstall
    if {early}:
        import torch.ao.quantization.quantize_fx
    if {guarded}:
        install("out", "resize", only_if_needed=False)
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = torch.mul(torch.add(self.linear(x), x), x)
            return torch.matmul(torch.cat([y, y]), x.t())

    x = torch.randn(2, 4)
    prepared = prepare_fx(Model().eval(), get_default_qconfig_mapping(), (x,))
    prepared(x)
    for node in convert_fx(prepared).graph.nodes:
        print(node.name)
    uninstall()
    assert "torchguard" not in torch.ao.quantization.quantize_fx._prepare_fx.__code__.co_filename
"""


@pytest.fixture(scope="module")
def quantized_on_bare_torch() -> str:
    """Quantize in a process without guards: the reference for both orders of imports."""
    return output_of(QUANTIZES.format(early=False, guarded=False))


@pytest.mark.parametrize("early", [True, False])
def test_quantization_replaces_what_it_replaces_without_the_guard(
    early: bool, quantized_on_bare_torch: str
) -> None:
    assert "add" in quantized_on_bare_torch
    assert "dequantize" in quantized_on_bare_torch
    assert output_of(QUANTIZES.format(early=early, guarded=True)) == quantized_on_bare_torch


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
