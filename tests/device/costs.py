"""Count what torchguard adds to a training step on the simulated device.

    FAKE_DEVICE=cuda PYTHONPATH=tests/device/startup:src:. python tests/device/costs.py

writes ``costs.json`` and the table of docs/project/costs.md. The counts are exact, so
``test_costs.py`` compares them with what is counted now.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import fake_device as fake
import torch
from benchmarks.models import Convolutions, Decoder, DecoderSize
from torch.nn import functional

import torchguard

RECORD = fake.HERE / "costs.json"
PAGE = fake.HERE.parents[1] / "docs" / "project" / "costs.md"
BEGIN = "<!-- begin: counts, written by tests/device/costs.py -->"
END = "<!-- end: counts -->"
GUARDS = ("resize", "out", "overlap", "checks", "setitem", "save", "load", "numpy", "recompute")
KINDS = ("fused", "foreach")

Counted = dict[str, list[int]]
"""By scope: launches, waits and bytes at the peak, added to those of the step without it."""


def trainings() -> Iterator[tuple[str, torch.nn.Module, Callable[[Any], torch.Tensor]]]:
    """Yield the models of the benchmarks, of a small size: what is counted depends on none."""
    ids = torch.randint(64, (2, 8), device="cuda")
    images, classes = torch.randn(2, 3, 16, 16, device="cuda"), torch.zeros(2, device="cuda").long()

    def of_decoder(model: Any) -> torch.Tensor:
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    yield "decoder", Decoder(DecoderSize(64, 8, 16, 1, 2)).cuda(), of_decoder
    network = Convolutions((1,), 4).cuda()
    yield "convolutions", network, lambda model: functional.cross_entropy(model(images), classes)


def scopes(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield what a step runs within."""
    transaction = torchguard.transaction
    yield "transaction", transaction(model, optimizer)
    yield "transaction, skip_nonfinite", transaction(model, optimizer, skip_nonfinite=True)
    for guard in (*GUARDS, "all"):
        yield f'install("{guard}")', guard


def pairs(model: Any, loss_of: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what PyTorch has too, or what pads: the loss without it, and with it."""
    checkpoint = torch.utils.checkpoint.checkpoint
    yield (
        "safe_checkpoint beside checkpoint",
        lambda: loss_of(lambda x: checkpoint(model, x, use_reentrant=False)),
        lambda: loss_of(lambda x: torchguard.safe_checkpoint(model, x)),
    )
    if not isinstance(model, Decoder):
        return
    ids = torch.randint(64, (2, 7), device="cuda")
    padded = torchguard.bucketed(model, dims={"ids": {1: "t"}}, buckets=[8])
    yield "bucketed, 7 tokens in 8", lambda: model(ids).sum(), lambda: padded(ids).sum()


def count(step: Callable[[], None]) -> list[int]:
    """Return launches, waits and the bytes at the peak of a step."""
    gc.collect()
    torch.cuda.synchronize()
    fake.reset_peak()
    used, before = fake.memory()[0], fake.counts()
    step()
    found = fake.counts().since(before)
    return [found.launches, found.waits, fake.memory()[1] - used]


def counted() -> dict[str, Counted]:
    """Count every scope over every training, after three steps."""
    torch.manual_seed(0)
    found: dict[str, Counted] = {}
    for what, model, loss_of in trainings():
        for kind in KINDS:
            options: Any = {kind: True}
            optimizer = torch.optim.AdamW(model.parameters(), **options)

            def plain(
                loss_of: Any = loss_of, model: Any = model, optimizer: Any = optimizer
            ) -> None:
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(3):
                plain()
            without = count(plain)
            rows: Counted = {"PyTorch": without}
            for name, scope in scopes(model, optimizer):

                def step(scope: Any = scope, plain: Any = plain) -> None:
                    with contextlib.nullcontext() if isinstance(scope, str) else scope:
                        plain()

                is_guard = isinstance(scope, str)
                needed = scope == "all"
                installed = torchguard.install(scope, only_if_needed=needed) if is_guard else None
                with installed or contextlib.nullcontext():
                    for _ in range(3):
                        step()
                    now = count(step)
                rows[name] = [after - before for after, before in zip(now, without, strict=True)]
            for name, bare, ours in pairs(model, loss_of):
                before, after = (_of_loss(each, plain) for each in (bare, ours))
                rows[name] = [now - then for now, then in zip(after, before, strict=True)]
            found[f"{what}, AdamW {kind}"] = rows
    return found


def _of_loss(loss: Callable[[], torch.Tensor], step: Callable[..., None]) -> list[int]:
    """Count a step with another loss, warm."""
    for _ in range(3):
        step(lambda _: loss())
    return count(lambda: step(lambda _: loss()))


def table(found: dict[str, Counted]) -> str:
    """Lay the record out: launches, waits, bytes at the peak."""
    header = ["", *found]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for name in next(iter(found.values())):
        mark = "" if name == "PyTorch" else "+"
        counts = [rows.get(name) for rows in found.values()]
        cells = ["" if each is None else ", ".join(f"{mark}{n}" for n in each) for each in counts]
        label = name if name == "PyTorch" else f"`{name}`"
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write record and page."""
    found = counted()
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:begin]}\n\n{table(found)}\n\n{page[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
