"""What a call costs under each guard when nothing fails.

A tensor grows once only, so each call gets a fresh one of 16 elements; making it is timed as a
statement of its own and taken off both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import Comparison, installed, measure
from benchmarks.program import Benchmark, Results, Setting
from torchguard import guarded, rollback_on_error, safe_resize_, safe_set_, uninstall

KIB, MIB = 2**10, 2**20

RESIZE = installed("resize")
OUT = installed("out")
BOTH = installed("resize", "out")
OVERLAP, CHECKS = installed("overlap"), installed("checks")


def comparisons(device: str) -> Iterator[Comparison]:
    """Yield every row, in the order of the record."""
    names: dict[str, Any] = {
        "torch": torch,
        "safe_resize_": safe_resize_,
        "safe_set_": safe_set_,
        "guarded": guarded,
        "rollback_on_error": rollback_on_error,
        "t": torch.zeros(32, 32, device=device),
        "empty": torch.empty(0, device=device),
        "storage": torch.zeros(32, 32, device=device).untyped_storage(),
        **{name: torch.ones(10, device=device) for name in ("a", "b", "out")},
    }
    large = names | {name: torch.ones(MIB // 4, device=device) for name in ("a", "b")}
    yield from _not_growing(names)
    yield from _growing(device)
    out, set_ = "torch.add(a, b, out=out)", "empty.set_(storage, 0, (32, 32), (32, 1))"
    safe_set = set_.replace("empty.set_(", "safe_set_(empty, ")
    yield Comparison("set-helper", "set_, by safe_set_()", names, set_, safe_set)
    yield Comparison("set-install", "set_, by install()", names, set_, set_, RESIZE)
    what = 'torch.add of 10 elements {} out=, install("out")'
    add = "torch.add(a, b)"
    yield Comparison("add-without-out", what.format("without"), names, add, add, OUT)
    yield Comparison("add-with-out", what.format("with"), names, out, out, OUT)
    for name, call in (("plain", "a * b"), ("in-place", "a.copy_(b)"), ("out", out)):
        what = f"{call} of 10 elements inside guarded()"
        yield Comparison(f"guarded-{name}", what, names, call, call, guarded)
    copy = "a.copy_(b)"
    what = "entering and leaving guarded(), with a * b inside"
    yield Comparison("guarded-enter", what, names, "a * b", "with guarded(): a * b")
    for name, size, given, data in (
        ("rollback-small", "10 elements", names, ""),
        ("rollback-data-small", "10 elements", names, ", data=True"),
        ("rollback-data-1mb", "1 MB", large, ", data=True"),
    ):
        scope = f"rollback_on_error(a{data})"
        what = f"{copy} of {size} inside {scope}"
        yield Comparison(name, what, given, copy, f"with {scope}: {copy}")
    for name, call in (("view", "a.view(2, 5)"), ("sum", "a.sum()")):
        what = f'{call}, which nothing patches, install("resize", "out")'
        yield Comparison(f"not-patched-{name}", what, names, call, call, BOTH)
    if device == "cpu":
        yield from _overlap()
        yield from _checks()


def _overlap() -> Iterator[Comparison]:
    """Yield calls in which nothing overlaps, and a shift next to the same with a clone."""
    names: dict[str, Any] = {name: torch.ones(10) for name in ("x", "y", "w")}
    names |= {"z": torch.ones(3), "torch": torch, "h": torch.ones(16, 64)}
    for call in (
        "x.add_(y)", "x.add_(1.0)", "x.zero_()", "x[2:5] = 1.0", "x[2:5] = z",
        "torch.add(x, y, out=w)", "torch.add(x, y)", "x * y",
    ):  # fmt: skip
        what = f'{call}, install("overlap")'
        yield Comparison(f"overlap-{call}", what, names, call, call, OVERLAP)
    shift = "h[:, 1:] = h[:, :-1]"
    what = f'{shift}, install("overlap"), next to the same with .clone()'
    yield Comparison("overlap-shift", what, names, f"{shift}.clone()", shift, OVERLAP)


def _checks() -> Iterator[Comparison]:
    """Yield calls with indices in range."""
    labels = torch.randint(0, 32000, (64,))
    labels[0] = -100
    names: dict[str, Any] = {"functional": functional, "weight": torch.randn(1000, 768)}
    names |= {"many": torch.randint(0, 1000, (16384,)), "few": torch.tensor([1, 2, 3])}
    names |= {"logits": torch.randn(64, 32000), "labels": labels}
    for what, call in (
        ("embedding, 16,384 ids, 768 columns", "functional.embedding(many, weight)"),
        ("embedding, 3 ids, 768 columns", "functional.embedding(few, weight)"),
        ("cross_entropy, 64 rows, 32,000 classes", "functional.cross_entropy(logits, labels)"),
    ):
        yield Comparison(f"checks-{what}", f'{what}, install("checks")', names, call, call, CHECKS)


def _not_growing(names: Mapping[str, Any]) -> Iterator[Comparison]:
    within = "resize_, to a quarter and back, within the storage"
    for name, what, sizes in (
        ("same-size", "resize_, same size", ("32, 32",)),
        ("within-storage", within, ("16, 16", "32, 32")),
    ):
        plain = "; ".join(f"t.resize_({size})" for size in sizes)
        safe = "; ".join(f"safe_resize_(t, {size})" for size in sizes)
        helper, install, n = f"{what}, by safe_resize_()", f"{what}, by install()", len(sizes)
        yield Comparison(f"{name}-helper", helper, names, plain, safe, calls=n)
        yield Comparison(f"{name}-install", install, names, plain, plain, RESIZE, calls=n)


def _growing(device: str) -> Iterator[Comparison]:
    make = f"torch.empty(16, device={device!r})"
    for size, label in ((KIB, "1 KB"), (MIB, "1 MB"), (64 * MIB, "64 MB")):
        names = {"torch": torch, "safe_resize_": safe_resize_, "n": 16 + size // 4}
        name = f"grow-{label.replace(' ', '').lower()}"
        for suffix, also, call in (("", "", ""), ("-fill", ", and filling it", ".zero_()")):
            if size < MIB and suffix:
                continue
            yield Comparison(
                name + suffix,
                f"resize_, growing by {label}{also}",
                names,
                f"{make}.resize_(n){call}",
                f"safe_resize_({make}, n){call}",
                making=make,
            )


def run(setting: Setting) -> Results:
    """Measure every row."""
    uninstall()
    return {"rows": measure(comparisons(setting.device), setting, block_seconds=4e-3)}


BENCHMARK = Benchmark("resize", "What does a call cost under a guard when nothing fails?", run)
