"""A call that fails, for every operator with ``out=`` of torch's own OpInfo database.

``out`` is an empty tensor in memory of another library (DLPack), so it can't grow on any device:
each call with a result fails. Then: are shape, stride, offset, storage and every byte of it as they
were? Asked of plain torch, inside ``guarded()`` and under ``install("out")``; and of ``resize_``,
``resize_as_`` and ``set_`` under ``install()``. Nothing is timed.
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
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import dlpack

import torchguard
from benchmarks.harness import Scope, installed
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.records import of_device
from benchmarks.tables import Row, Table
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from support.sweep import OutCase

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
    written anew: an empty TestCase is all it needs, while it is imported.
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
        from support.sweep import generate_out_cases, places  # noqa: PLC0415
    reachable = places()  # before anything is installed
    with installed("out")():
        patched = {
            key for key, (owner, name) in reachable.items() if id(getattr(owner, name)) != key
        }
    for each in generate_out_cases(device, BYTES):
        call = partial(_with_out, each)
        yield Case(each.name, each.dtypes, call, id(each.function) in patched)


def _with_out(case: OutCase, *outs: torch.Tensor) -> Any:
    return case.call(outs)


def _resizing(device: str) -> Iterator[Case]:
    template = torch.zeros(8, 8, device=device)
    storage = locked(torch.float32, device).untyped_storage()
    calls: dict[str, Call] = {
        "Tensor.resize_": lambda out: out.resize_(8, 8),
        "Tensor.resize_as_": lambda out: out.resize_as_(template),
        "Tensor.set_": lambda out: out.set_(storage, 0, (8, 8)),
    }
    for name, call in calls.items():
        yield Case(name, (torch.float32,), call, True, ("resize",))


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
    plain = tried(case, contextlib.nullcontext, device)
    guarded = tried(case, torchguard.guarded, device)
    under = tried(case, installed(*case.guards), device) if case.patched else "not patched"
    failed = plain != "did not fail"
    held = not any(each.startswith("corrupt") for each in (guarded, under))
    return {
        "torch": plain,
        "guarded": guarded,
        "installed": under,
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

    new = (case for case in cases(setting.device) if case.operator not in begun)
    few = itertools.islice(new, QUICK if setting.quick else None)
    made = (({"operator": case.operator}, partial(found, case)) for case in few)
    return {"rows": setting.collect(made)}


def _counts(record: Row, device: str) -> list[Row]:
    """Count how the calls ended, for each way to make them."""
    counts = list[Row]()
    ways = {"torch": "plain torch", "guarded": "`guarded()`", "installed": "`install()`"}
    for name, what in ways.items():
        found = [row[name].partition(" after ")[0] for row in of_device(record, "rows", device)]
        ended = {how: found.count(how) for how in ("corrupt", "as it was", "did not fail")}
        counts.append({"what": what, "calls": sum(ended.values()), **ended})
    return counts


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
                "as they were": "{as it was}",
                "did not fail": "{did not fail}",
            },
            lead="Each output is an empty tensor in memory that belongs to another library, so it "
            "can't grow. Compared are shape, stride, offset, storage and every byte.",
            rows=_counts,
        ),
        Table({"begun and not ended": "`{operator}`"}, rows="unfinished"),
    ),
)
