"""Which figure of which record says what a function costs: the rows of ``docs/project/costs.md``.

The README and the pages of the functions show some of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.bench_end_to_end import by_guard
from benchmarks.tables import Row, filled, markdown, of_device

Newest = Callable[[str, str], dict[str, Any] | None]
"""Takes a benchmark and a device; returns its newest record, or None."""

HEADER = ("", "PyTorch → with torchguard", "ratio", "memory")


@dataclass(frozen=True)
class Cost:
    """A row: templates over the result of this id in a benchmark's newest record."""

    what: str
    benchmark: str
    id: str
    time: str = "{baseline_ns.median:time} → {guarded_ns.median:time}"
    ratio: str = "{ratio.median:times}"
    memory: str = ""
    """Filled from the same result, or from that of ``memory_id`` in the part ``memory``."""

    part: str = "rows"
    memory_id: str = ""

    def cells(self, newest: Newest, device: str) -> tuple[str, ...] | None:
        """Return the row's cells; None if no record has it."""
        record = newest(self.benchmark, device)
        rows = [] if record is None else of_device(record, self.part, device)
        if record is not None and self.benchmark == "end_to_end":
            rows = [{**row, "id": row["guard"]} for row in by_guard(record, device)]
        found = next((row for row in rows if row.get("id", row.get("what")) == self.id), None)
        if record is None or found is None:
            return None
        counted = of_device(record, "memory", device) if self.memory_id else [{**found, "id": ""}]
        named = (row for row in counted if row.get("id", row.get("what")) == self.memory_id)
        memory: Any = next(named, {})
        shown = self.what, self.time, self.ratio
        return *(filled(each, found) for each in shown), filled(self.memory, memory)


FUSED = Cost(
    "a training step in `transaction`, AdamW fused", "transaction", "decoder-transaction-fused",
    memory="no copies of parameters",
)  # fmt: skip
FOREACH = Cost(
    "a training step in `transaction`, AdamW foreach", "transaction", "decoder-transaction-foreach",
    memory="{held:bytes} of copies, parameters {parameters:bytes}", memory_id="decoder-foreach",
)  # fmt: skip
FIRST_CALL = Cost(
    "the first call of a `verified` transformer", "verified", "first-transformer",
    time="{plain_seconds.median:.1f} → {checked_seconds.median:.1f} s",
    part="first_calls",
)  # fmt: skip
WEIGHTS = Cost(
    "the first step of a `verified` model whose weights dominate", "verified", "weights", time="",
    ratio="", part="weights",
    memory="peak {plain_weights.median:.1f} → {checked_weights.median:.1f}× the weights",
)  # fmt: skip
WEIGHTS_DROPOUT = replace(WEIGHTS, what="the same, with dropout", id="weights, dropout")
FIRST_DROPOUT = replace(FIRST_CALL, what="the same, with dropout", id="first-transformer, dropout")
MANY_LENGTHS = replace(
    FIRST_CALL,
    what="the first call of a `verified` network, sequences of many lengths",
    id="first-lengths",
)
LATER_CALL = Cost("a later call of `verified`", "verified", "a call after the first")
ALL_GUARDS, ALL_COMPILED, WORST = (
    Cost(f'{step}, `install("all")`', "end_to_end", "all", time="", ratio=f"{{{of}:times}}")
    for step, of in (
        ("a training step of a decoder, eager", "decoder, training, eager"),
        ("the same, compiled", "decoder, training, compiled"),
        ("the slowest of twelve steps: {worst step}", "worst"),
    )
)
NOISE = Cost(
    "their noise: PyTorch against itself, the slowest of twelve steps: {worst step}", "end_to_end",
    "none", time="", ratio="{worst:times}",
)  # fmt: skip
RESIZE = (
    Cost("`safe_resize_`, the same size", "resize", "same-size-helper"),
    Cost("`safe_resize_`, growing by 1 MB", "resize", "grow-1mb"),
    Cost("`safe_set_`", "resize", "set-helper"),
    Cost('`resize_`, the same size, `install("resize")`', "resize", "same-size-install"),
    Cost('`torch.add` without `out=`, `install("out")`', "resize", "add-without-out"),
    Cost('`torch.add` with `out=`, `install("out")`', "resize", "add-with-out"),
    Cost("entering and leaving `guarded()`", "resize", "guarded-enter"),
    Cost("`rollback_on_error(a)`, 10 elements", "resize", "rollback-small"),
    Cost("`rollback_on_error(a, data=True)`, 1 MB", "resize", "rollback-data-1mb", memory="a copy"),
)
PYTHON = Cost(
    'the same, `against="python"`', "verified", 'a call after the first, against="python"'
)
VERIFIED = (FIRST_CALL, FIRST_DROPOUT, MANY_LENGTHS, WEIGHTS, WEIGHTS_DROPOUT, LATER_CALL, PYTHON)
OLD = "the old file on disk, until the new one is whole"
TRANSACTION = (
    FUSED,
    FOREACH,
    Cost("a step of a tiny network, AdamW fused", "transaction", "tiny-transaction-fused"),
    Cost("the same, AdamW foreach", "transaction", "tiny-transaction-foreach"),
    Cost("instead of it, both state dicts copied", "transaction", "tiny-deepcopy-foreach"),
)
CHECKPOINT = (
    Cost("`save` of 1 GB, `fsync=False`", "checkpoint", "save-1024MB", memory=OLD),
    Cost("`save` of 1 GB, default (`fsync=True`)", "checkpoint", "save-1024MB-fsync", memory=OLD),
    Cost("`load` of 1 GB, checksums compared", "checkpoint", "load-1024MB"),
    Cost("`load_state_dict` of ResNet-50", "checkpoint", "load_state_dict-resnet-50"),
    Cost("`checkpoint_folder`, 1 GB sharded", "checkpoint", "save-shards", memory=OLD),
    Cost("`load_sharded` of 1 GB", "checkpoint", "load-shards", memory="a tensor of a file"),
)
RECOMPUTE = (
    Cost('a step of a checkpointed transformer, `install("recompute")`', "recompute",
         "transformer-guard", memory="a copy of the buffers"),
    Cost("the same, ResNet-50", "recompute", "resnet-guard"),
    Cost("the same, a single block of width 8", "recompute", "block-guard"),
)  # fmt: skip
COSTS = (
    *TRANSACTION[:2],
    *CHECKPOINT,
    *VERIFIED,
    Cost("a call of `bucketed`, padded, 8 buckets", "buckets", "padded-8", part="overhead",
         memory="the padded inputs"),
    Cost("`sliced_assign` of a slice", "assign", "slice, 100,000 elements, eager, forward"),
    Cost("the same, compiled", "assign", "slice, 100,000 elements, compiled, forward"),
    RECOMPUTE[0],
    *RESIZE,
    Cost('`x.add_(y)` of 10 elements, `install("overlap")`', "resize", "overlap-x.add_(y)"),
    Cost('`embedding` of 16,384 ids, `install("checks")`', "resize",
         "checks-embedding, 16,384 ids, 768 columns"),
    Cost("`import torchguard` after `import torch`", "import", "import torchguard",
         time="{clock_ms.median:.1f} ms", ratio=""),
    ALL_GUARDS,
    ALL_COMPILED,
    WORST,
    NOISE,
)  # fmt: skip
"""The page's rows, in its order."""

README = (FUSED, replace(FIRST_DROPOUT, what=f"{FIRST_CALL.what} with dropout"), ALL_GUARDS)


def table(costs: Iterable[Cost], newest: Newest) -> str:
    """Lay the rows out, on a CPU and, if a record has them, on a GPU."""
    chosen = [*costs]
    here = [cost.cells(newest, "cpu") or (cost.what, "not measured yet", "", "") for cost in chosen]
    there = [cells for cost in chosen if (cells := cost.cells(newest, "cuda")) is not None]
    records = [newest(cost.benchmark, device) for cost in chosen for device in ("cpu", "cuda")]
    made = _made(filter(None, records))
    parts = [
        markdown(HEADER, here),
        f"On a GPU:\n\n{markdown(HEADER, there)}" if there else "Not tested on a GPU yet.",
        f"Medians of rounds, ratios too (not quotients of times): {made}." if made else "",
    ]
    return "\n\n".join(filter(None, parts))


def _made(records: Iterable[Row]) -> str:
    """Say with which PyTorch, on which machines and when the records were made."""
    days: dict[str, dict[str, None]] = {}
    for record in records:
        torch, hardware = record["versions"]["torch"], record["hardware"]
        machine = f"PyTorch {torch} on {hardware['cores']} cores of an {hardware['cpu']}"
        day = f"{machine}, {record['date'][:10]}"
        days.setdefault(day, {})[f"`{record['revision']}`"] = None
    return "; ".join(f"{day} ({', '.join(commits)})" for day, commits in days.items())
