"""Which buckets each axis has: a ladder of its own, or shapes that it shares with another axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torchguard.bucketing.buckets import Buckets, as_buckets
from torchguard.bucketing.pairs import PairBuckets

__all__ = ["GivenBuckets", "all_sizes", "buckets_by_axes"]

GivenBuckets: TypeAlias = Buckets | PairBuckets | Literal["auto"]


def buckets_by_axes(
    axes: Sequence[str], given: Any, operation: str, *, auto: bool = False
) -> dict[tuple[str, ...], GivenBuckets]:
    """Read ``buckets=``: one for every axis, or ``{axis: buckets, (axis, axis): pairs}``.

    Args:
        axes: the names, in the order of ``dims``.
        given: ``Buckets`` or a list of sizes for every axis, ``PairBuckets`` or a list of pairs
            for the two axes that there are, or a dict of them.
        operation: for errors.
        auto: whether ``"auto"`` is taken.

    Returns:
        Buckets by the axes that they are for: one axis, or two.

    Raises:
        TypeError: neither buckets nor ``"auto"``.
        ValueError: an axis without buckets, with two of them, or that ``dims`` does not name.
    """
    axes, listed = tuple(axes), ", ".join(axes)
    by_axes: dict[tuple[str, ...], GivenBuckets] = {}
    what = f"{operation}: buckets" + (f" of {axes[0]!r}" if auto and len(axes) == 1 else "")
    if not isinstance(given, Mapping):
        read = _read(given, what, " or 'auto'" if auto else " or {axis: Buckets}")
        if not isinstance(read, PairBuckets):
            return {(axis,): read for axis in axes}
        if len(axes) != 2:  # noqa: PLR2004
            raise ValueError(
                f"{operation}: buckets are pairs, but dims names {', '.join(map(repr, axes))}: "
                + (
                    "pass Buckets, or name the other axis in dims as well"
                    if len(axes) == 1
                    else "say which two they are for, {(axis, axis): pairs, axis: buckets}"
                )
            )
        return {axes: read}
    for key, value in given.items():
        names = key if isinstance(key, tuple) else (key,)
        what = ", ".join(map(repr, names))
        for name in names:
            if name not in axes:
                raise ValueError(f"{operation}: buckets names {name!r}, but dims has {listed}")
            if names.count(name) > 1 or any(name in others for others in by_axes):
                raise ValueError(f"{operation}: buckets has {name!r} twice")
        read = _read(value, f"{operation}: buckets of {what}", " or 'auto'" if auto else "")
        wanted = 2 if isinstance(read, PairBuckets) else 1
        if len(names) != wanted and not (read == "auto" and len(names) == 2):  # noqa: PLR2004
            raise ValueError(
                f"{operation}: buckets of {what} are for {wanted} axes: "
                + (
                    f"pass {{({what}): Buckets.fit_pairs(...)}}, or one Buckets for each"
                    if wanted == 1
                    else f"name both, {{({names[0]!r}, other): pairs}}"
                )
            )
        by_axes[names] = read
    missing = [axis for axis in axes if not any(axis in names for names in by_axes)]
    if missing:
        raise ValueError(f"{operation}: no buckets for {', '.join(map(repr, missing))}")
    return by_axes


def _read(given: Any, what: str, otherwise: str) -> GivenBuckets:
    """Return buckets, also from a list of sizes or of pairs."""
    if isinstance(given, PairBuckets):
        return given
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (list, tuple)):
        return PairBuckets((a, b) for a, b in given)
    if isinstance(given, str) and given == "auto" and "auto" in otherwise:
        return "auto"
    return as_buckets(given, what, otherwise)


def all_sizes(buckets: Mapping[tuple[str, ...], Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis' bucket.

    Args:
        buckets: what :func:`buckets_by_axes` returned, without ``"auto"``.
        sizes: of the axes.

    Raises:
        ValueError: no bucket is large enough.
    """
    found: dict[str, int] = {}
    for axes, each in buckets.items():
        if isinstance(each, PairBuckets):
            found |= zip(axes, each.bucket_for(*(sizes[axis] for axis in axes)), strict=True)
        elif axes[0] in sizes:
            found[axes[0]] = each.bucket_for(sizes[axes[0]])
    return found
