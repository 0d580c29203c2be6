"""A call that fails, for every operator with ``out=`` of torch's own OpInfo database.

``out`` is an empty tensor in memory of another library (DLPack), so it can't grow, on a
CPU and on a GPU alike: each call with a result fails. Then: are shape, stride, offset, storage and
every byte of it as they were? Asked of plain torch, inside ``guarded()`` and under
``install("out")``; and of ``resize_``, ``resize_as_`` and ``set_`` under ``install()``. Nothing is
timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import dlpack

import torchguard
from benchmarks.harness import Scope
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Row, Table
from torchguard.rollback.consistency import is_consistent

NAMESPACES = (torch, torch.linalg, torch.special, torch.fft, torch.nn.functional)
PREFERRED = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64)
BYTES = 16  # of the memory that can't grow: one element of the largest dtype
QUICK = 12  # operators

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A call that takes ``out=`` (or a tensor to resize) which can't grow."""

    operator: str
    dtypes: tuple[torch.dtype, ...]
    """Of the outputs."""

    call: Call
    """Takes the outputs; torch's function is looked up by the name a user writes."""

    patched: bool
    """Whether ``install()`` patches that name."""

    guards: tuple[Any, ...] = ("out",)


@contextlib.contextmanager
def expecttest_stands_in() -> Iterator[None]:
    """Let ``torch.testing._internal`` be imported where expecttest is not installed.

    It only derives its own TestCase from expecttest's and asks whether expectations are to be
    written anew. Nothing here compares with an expectation, so an empty TestCase is all it needs;
    the stand-in is in ``sys.modules`` while the database is imported, and gone afterwards.
    """
    if importlib.util.find_spec("expecttest") is not None:
        yield
        return
    module = types.ModuleType("expecttest", "A stand-in: see benchmarks/bench_failures.py.")
    vars(module).update(TestCase=unittest.TestCase, ACCEPT=False)
    sys.modules["expecttest"] = module
    try:
        yield
    finally:
        del sys.modules["expecttest"]


def locked(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return an empty tensor whose storage has 16 bytes of another library and can't grow."""
    owner = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    return dlpack.from_dlpack(owner).view(dtype)[:0]


def state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what has to be the same after a failure; the bytes are read from the storage."""
    storage = tensor.untyped_storage()
    with torch._C.DisableTorchFunction():
        held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        # A view of as many bytes as the storage says it has, whatever the tensor's shape says.
        content = bytes(held.cpu().tolist())
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        storage.data_ptr(), storage.nbytes(), content,
    )  # fmt: skip


def cases(device: str) -> Iterator[Case]:
    """Yield the resize family, then one call for each operator with ``out=``."""
    yield from _resizing(device)
    with expecttest_stands_in():
        from torch.testing._internal.common_methods_invocations import (  # noqa: PLC0415
            op_db,
        )
    names = {
        id(function): (namespace, name)
        for namespace in reversed(NAMESPACES)
        for name, function in vars(namespace).items()
        if callable(function)
    }
    with torchguard.install("out", only_if_needed=False):
        patched = {
            key for key, (namespace, name) in names.items() if id(getattr(namespace, name)) != key
        }
    torch.manual_seed(0)
    for op in op_db:
        if op.supports_out:
            found = next(_calls(op, names, patched, device), None)
            if found is not None:
                yield found


def _resizing(device: str) -> Iterator[Case]:
    template = torch.zeros(8, 8, device=device)
    storage = locked(torch.float32, device).untyped_storage()
    calls: dict[str, tuple[Any, ...]] = {
        "resize_": (8, 8),
        "resize_as_": (template,),
        "set_": (storage, 0, (8, 8)),
    }
    for name, arguments in calls.items():

        def call(out: torch.Tensor, name: str = name, given: Any = arguments) -> Any:
            return getattr(out, name)(*given)

        yield Case(f"Tensor.{name}", (torch.float32,), call, True, ("resize",))


def _calls(
    op: Any, names: dict[int, tuple[Any, str]], patched: set[int], device: str
) -> Iterator[Case]:
    for sample in _samples(op, device):
        try:
            result = op.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001, S112 - a sample that this build of torch can't compute
            continue
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        # Too large for the outputs, all of them: then the call has to fail.
        if not all(isinstance(each, torch.Tensor) and each.nbytes > BYTES for each in results):
            continue
        namespace, name = names.get(id(op.op), (None, ""))
        arguments = ((sample.input, *sample.args), sample.kwargs)
        look_up = partial(getattr, namespace, name) if namespace else partial(_itself, op.op)
        variant = f".{op.variant_test_name}" if op.variant_test_name else ""
        yield Case(
            f"{op.name}{variant}",
            tuple(each.dtype for each in results),
            partial(_with_out, look_up, arguments),
            id(op.op) in patched,
        )


def _itself(function: Call) -> Call:
    return function


def _with_out(
    look_up: Callable[[], Call],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    *outs: torch.Tensor,
) -> Any:
    args, kwargs = arguments
    return look_up()(*args, **kwargs, out=outs[0] if len(outs) == 1 else outs)


def _samples(op: Any, device: str) -> Iterator[Any]:
    supported = op.supported_dtypes(device)
    for dtype in [each for each in PREFERRED if each in supported][:2] or list(supported)[:2]:
        with contextlib.suppress(Exception):  # a sample that this build of torch can't make
            yield from op.sample_inputs(device, dtype, requires_grad=False)


def tried(case: Case, scope: Scope, device: str) -> str:
    """Make the call fail; say what has become of the outputs. Also used by the tests."""
    outs = [locked(dtype, device) for dtype in case.dtypes]
    before = [state(out) for out in outs]
    with scope():
        try:
            case.call(*outs)
        except Exception as error:  # noqa: BLE001 - each operator has errors of its own
            kind = type(error).__name__
        else:
            return "did not fail"
    if device == "cuda":
        torch.cuda.synchronize()
    if [state(out) for out in outs] == before and all(map(is_consistent, outs)):
        return "as it was"
    return f"corrupt after {kind}"


def outcome(case: Case, device: str) -> dict[str, Any]:
    """Try a case in plain torch and under both guards."""
    install: Scope = partial(torchguard.install, *case.guards, only_if_needed=False)
    plain = tried(case, contextlib.nullcontext, device)
    guarded = tried(case, torchguard.guarded, device)
    installed = tried(case, install, device) if case.patched else "not patched"
    failed = plain != "did not fail"
    held = not any(each.startswith("corrupt") for each in (guarded, installed))
    return {
        "torch": plain,
        "guarded": guarded,
        "installed": installed,
        "target": "outputs as they were" if failed else None,
        "verdict": ("holds" if held else "does not hold") if failed else None,
    }


def run(setting: Setting) -> Results:
    """Try every operator."""
    warnings.simplefilter("ignore")  # torch's own, about outputs that are resized
    # One that ended the process is not tried again: it has been named, and has no result.
    begun = {row["operator"] for row in setting.stream.known("begun")}

    def found(case: Case) -> dict[str, Any]:
        setting.stream.keep("begun", {"operator": case.operator, "device": setting.device})
        return outcome(case, setting.device)

    made: Iterator[Case] = (case for case in cases(setting.device) if case.operator not in begun)
    if setting.quick:
        made = itertools.islice(made, QUICK)
    found_of = (({"operator": case.operator}, partial(found, case)) for case in made)
    return {"rows": setting.collect(found_of)}


def _counts(record: Row, device: str) -> list[Row]:
    """Count how the calls ended, for each way to make them."""
    counts: list[Row] = []
    for name, what in (
        ("torch", "plain torch"),
        ("guarded", "`guarded()`"),
        ("installed", "`install()`"),
    ):
        rows = (row for row in record["rows"] if row["device"] == device)
        found = [row[name] for row in rows if row[name] != "not patched"]
        corrupt = sum(each.startswith("corrupt") for each in found)
        kept, no = found.count("as it was"), found.count("did not fail")
        counts.append(
            {"what": what, "calls": len(found), "corrupt": corrupt, "kept": kept, "no": no}
        )
    return counts


def _unfinished(record: Row, _: str) -> list[Row]:
    return [{"operator": name} for name in record.get("unfinished", [])]


BENCHMARK = Benchmark(
    "failures",
    "Does a failed call of any operator with `out=` leave its output as it was?",
    run,
    rounds=1,
    tables=(
        Table(
            {
                "with": "{what}",
                "calls": "{calls}",
                "corrupt": "{corrupt}",
                "as they were": "{kept}",
                "did not fail": "{no}",
            },
            lead="Each output is an empty tensor in memory that belongs to another library, so it "
            "can't grow. Compared are shape, stride, offset, storage and every byte.",
            rows=_counts,
        ),
        Table({"begun and not ended": "`{operator}`"}, rows=_unfinished),
    ),
)
