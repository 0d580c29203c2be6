"""The file of a plan: the buckets, the sizes seen, and what need not be worked out again.

JSON, so that it can be read, compared and edited. What was compiled is in it as text; with
that a plan is as trusted as code, because torch unpickles it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.pairs import PairBuckets, in_order

__all__ = ["PlanFile", "read_plan", "write_plan"]

_FORMAT = "torchguard plan"
_VERSION = 1


@dataclass(frozen=True)
class PlanFile:
    """What is in a plan."""

    path: str
    buckets: dict[Any, Buckets | PairBuckets] | Buckets
    """By axis, or by two axes that share them; or one ladder for every axis, which
    ``python -m torchguard plan`` has written."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What need not be worked out again, as :mod:`torchguard.bucketing.decorator.kept` spells it;
    empty where nothing was kept."""


def write_plan(
    path: str | os.PathLike[str],
    buckets: Mapping[tuple[str, ...], Buckets | PairBuckets],
    observed: Mapping[str, Mapping[int, int]],
    kept: Mapping[str, Any],
) -> None:
    """Write a plan, all of it or nothing: a reader never sees half a file.

    Args:
        path: where; a file that is there is replaced. Of several processes that write at the
            same time one wins.
        buckets: those of each axis, or of the two that share them.
        observed: for each axis how often each size was called.
        kept: what need not be worked out again.
    """
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "buckets": {
            axes[0]: each.sizes for axes, each in buckets.items() if isinstance(each, Buckets)
        },
        "pairs": [
            {"axes": axes, "shapes": each.shapes}
            for axes, each in buckets.items()
            if isinstance(each, PairBuckets)
        ],
        "observed": {axis: sorted(counts.items()) for axis, counts in observed.items()},
        "kept": kept,
    }
    # Before the file is opened: what JSON can't hold leaves the old plan as it is.
    text = json.dumps(document, indent=1) + "\n"
    target = Path(os.path.realpath(path))  # a link goes on pointing to the file
    # A name that no other process or rank has.
    unfinished = target.with_name(f"{target.name}.{secrets.token_hex(6)}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read what :func:`write_plan` wrote, or ``python -m torchguard plan --json``.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no plan.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text)
        if "sizes" in document:
            return PlanFile(os.fspath(path), Buckets.from_json(text))
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError("another format or version")  # noqa: TRY301
        buckets: dict[Any, Buckets | PairBuckets] = {
            axis: Buckets(sizes) for axis, sizes in document["buckets"].items()
        }
        for each in document["pairs"]:
            buckets[tuple(each["axes"])] = in_order(each["shapes"])
        return PlanFile(os.fspath(path), buckets, dict(document["kept"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"bucketed: {os.fspath(path)!r} is not a plan: {error}") from None
