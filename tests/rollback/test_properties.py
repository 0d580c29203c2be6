"""Drawn tensors, operations and arguments: what succeeds is torch's, what fails changes nothing."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torchguard
from support import kinds
from support.kinds import Kind, empty_locked, state, values
from support.ways import BARE, GUARDED, HELPERS, INSTALLED, Way, differences, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.filterwarnings("ignore")

SAFE_TO_TRY = tuple(kind for kind in kinds.ALL if not kind.kills and kind.name != "wrapper")

lengths = st.one_of(
    st.integers(0, 6),
    st.integers(-3, 3),
    st.sampled_from([10, 1000, 2**31, 2**58, 2**62, 2**63 - 1, -(2**63), 2**64]),
)
odd = st.sampled_from([None, "2", 1.5, True, b"2", (2,), [3, 1], torch.tensor(2), object])
sizes = st.one_of(
    st.lists(lengths, max_size=5).map(tuple),
    st.tuples(st.lists(lengths, max_size=5)),
    st.tuples(st.lists(lengths, max_size=5).map(tuple)),
    st.lists(st.one_of(lengths, odd), max_size=3).map(tuple),
)
formats = st.sampled_from(
    [
        None,
        None,
        None,
        torch.contiguous_format,
        torch.channels_last,
        torch.channels_last_3d,
        torch.preserve_format,
        "channels_last",
    ]
)
each_kind = st.sampled_from(SAFE_TO_TRY)
each_way = st.sampled_from([HELPERS, INSTALLED, GUARDED])


def compare(kind: Kind, way: Way, call: Callable[[Way, torch.Tensor], Any]) -> None:
    """Do it on torch and on a twin with a guard, and compare all there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin, tensor = kind.make(), kind.make()
        with kind.scope():
            torchs = outcome_of(lambda: call(BARE, twin))
        before = state(tensor)
        with way.scope(), kind.scope():
            ours = outcome_of(lambda: call(way, tensor))
    assert type(ours.error) is type(torchs.error), (ours.error, torchs.error)
    if torchs.error is None:
        assert (ours.result is tensor) is (torchs.result is twin)
        changed = differences(values(twin), values(tensor))
        changed.pop("bytes", None)
        changed.pop("parts", None)
        assert changed == {}
    elif kind.has_metadata:
        assert differences(before, state(tensor)) == {}


def fills_memory(size: Any) -> bool:
    """Whether the row pointers of a compressed tensor might get that long; torch writes them all.

    A strided tensor of such a size has memory that is never touched.
    """
    flat = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    return any(type(length) is int and 10 < length < 2**40 for length in flat)


@settings(max_examples=400)
@given(each_kind, each_way, sizes, formats)
def test_resize(kind: Kind, way: Way, size: Any, memory_format: Any) -> None:
    assume(not (kind in kinds.COMPRESSED_KINDS and fills_memory(size)))
    options = {} if memory_format is None else {"memory_format": memory_format}
    compare(kind, way, lambda each, tensor: each.resize_(tensor, *size, **options))


templates = st.one_of(
    each_kind.map(lambda kind: kind.make()),
    st.lists(st.integers(0, 40), max_size=5).map(lambda size: torch.empty(size, device="meta")),
    st.sampled_from([2**40, 2**58]).map(lambda length: torch.empty(1).expand(length)),
    odd,
)


@settings(max_examples=300)
@given(each_kind, each_way, templates, formats)
def test_resize_as(kind: Kind, way: Way, template: Any, memory_format: Any) -> None:
    compare(
        kind,
        way,
        lambda each, tensor: each.resize_as_(tensor, template, memory_format=memory_format),
    )


def _sources() -> Any:
    return st.sampled_from(
        [
            lambda t: torch.zeros(8, dtype=t.dtype, device=t.device).untyped_storage(),
            lambda t: torch.zeros(8, dtype=t.dtype, device=t.device),
            lambda _: empty_locked(torch.float32, 16).untyped_storage(),
            lambda _: torch.zeros(8, dtype=torch.int8),
            lambda _: torch.zeros(8, device="meta").untyped_storage(),
            lambda t: t.untyped_storage() if t.layout is torch.strided and not t.is_nested else 1,
            lambda _: "storage",
            lambda _: torch.zeros(3).numpy(),
        ]
    )


@settings(max_examples=400)
@given(
    each_kind,
    each_way,
    _sources(),
    st.one_of(st.just(()), st.tuples(lengths), st.tuples(st.one_of(lengths, odd))),
    st.lists(st.one_of(lengths, lengths, odd), max_size=3),
    st.one_of(st.none(), st.lists(lengths, max_size=3)),
)
def test_set(
    kind: Kind, way: Way, source: Any, offset: tuple[Any, ...], size: list[Any], stride: Any
) -> None:
    def call(each: Way, tensor: torch.Tensor) -> Any:
        given_ = source(tensor)
        if not offset:
            return each.set_(tensor, given_)
        if stride is None:
            return each.set_(tensor, given_, *offset, size)
        return each.set_(tensor, given_, *offset, size, stride)

    compare(kind, way, call)


OUT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, out: torch.add(a, b, out=out),
    "cat": lambda a, b, out: torch.cat([a, b], out=out),
    "matmul": lambda a, b, out: torch.matmul(a, b, out=out),
    "index_select": lambda a, b, out: torch.index_select(a, 0, b.flatten().long(), out=out),
    "gather": lambda a, b, out: torch.gather(a, 0, b.long(), out=out),
    "sum": lambda a, b, out: torch.sum(a, -1, out=out),
    "inv": lambda a, b, out: torch.linalg.inv(a, out=out),
    "where": lambda a, b, out: torch.where(a > 0, a, b, out=out),
    "stack": lambda a, b, out: torch.stack([a, b], out=out),
}
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
outs = st.sampled_from(
    [
        lambda: torch.empty(0),
        lambda: torch.full((3,), 7.0),
        lambda: torch.full((2, 2), 7.0).t(),
        lambda: torch.full((8,), 7.0)[1::2],
        lambda: empty_locked(torch.float32),
        lambda: empty_locked(torch.float32, 16),
        lambda: torch.empty(0, dtype=torch.int64),
        lambda: torch.full((4,), 7, dtype=torch.bool),
        lambda: torch.empty(1).expand(4),
        lambda: torch.full((2,), 7.0, requires_grad=True),
        lambda: torch.empty(3, device="meta"),
        lambda: "out",
        lambda: (torch.empty(2),),
    ]
)
guards = st.sampled_from(
    [torchguard.guarded, lambda: torchguard.guarded(data=True), lambda: torchguard.install("out")]
)


@settings(max_examples=400)
@given(st.sampled_from(sorted(OUT)), shapes, shapes, st.integers(-2, 9), outs, guards)
def test_out(
    name: str,
    first: Any,
    second: Any,
    fill: int,
    make: Callable[[], Any],
    guard: Callable[[], AbstractContextManager[Any]],
) -> None:
    a, b = torch.ones(first), torch.full(second, float(fill))
    twin, out = make(), make()
    before = state(out) if isinstance(out, torch.Tensor) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = outcome_of(lambda: OUT[name](a, b, twin))
        with guard():
            ours = outcome_of(lambda: OUT[name](a, b, out))
    assert type(ours.error) is type(torchs.error), (ours.error, torchs.error)
    if not isinstance(out, torch.Tensor):
        return
    if torchs.error is None:
        assert ours.result is out
        assert differences(values(twin), values(out)) == {}
        return
    changed = differences(before, state(out))
    if "bytes" in changed:
        assert "version" in changed
    assert set(changed) <= {"bytes", "version"}


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda t, i, v: t.add_(v),
    "index_put_": lambda t, i, v: t.index_put_((i,), v),
    "accumulate": lambda t, i, v: t.index_put_((i,), v, accumulate=True),
    "index_copy_": lambda t, i, v: t.index_copy_(0, i, v),
    "index_add_": lambda t, i, v: t.index_add_(0, i, v),
    "index_fill_": lambda t, i, v: t.index_fill_(0, i, 3.0),
    "scatter_": lambda t, i, v: t.scatter_(0, i, v),
    "scatter_add_": lambda t, i, v: t.scatter_add_(0, i, v),
    "put_": lambda t, i, v: t.put_(i, v),
    "copy_": lambda t, i, v: t.copy_(v),
    "setitem": lambda t, i, v: t.__setitem__(i, v),
    "masked_scatter_": lambda t, i, v: t.masked_scatter_(t > 0, v),
    "foreach": lambda t, i, v: torch._foreach_mul_([t], [v]),
    "unsqueeze_": lambda t, i, v: t.unsqueeze_(int(i.sum())),
}
indices = st.lists(st.integers(-3, 6), max_size=4).map(
    lambda ns: torch.tensor(ns, dtype=torch.long)
)
PLAIN = tuple(
    kind
    for kind in kinds.STRIDED
    if kind.name != "meta" and "Parameter" not in kind.name and not kind.kills
)


@settings(max_examples=500)
@given(
    st.sampled_from(PLAIN),
    st.sampled_from(sorted(IN_PLACE)),
    indices,
    shapes,
    st.sampled_from([None, False, True]),
)
def test_in_place(
    kind: Kind, name: str, index: torch.Tensor, shape: Any, data: bool | None
) -> None:
    twin, tensor = kind.make(), kind.make()
    value = torch.ones(shape, dtype=twin.dtype)
    scope: AbstractContextManager[Any] = (
        nullcontext() if data is None else torchguard.guarded(data=data)
    )
    before = state(tensor)
    with warnings.catch_warnings(), kind.scope():
        warnings.simplefilter("ignore")
        torchs = outcome_of(lambda: IN_PLACE[name](twin, index, value))
        with scope:
            ours = outcome_of(lambda: IN_PLACE[name](tensor, index, value))
    assert type(ours.error) is type(torchs.error), (ours.error, torchs.error)
    if torchs.error is None:
        assert differences(values(twin), values(tensor)) == {}
        return
    if data is None:
        return  # torch itself; test_guarded.py shows what it leaves
    changed = differences(before, state(tensor))
    if data:
        assert changed == {}
    else:
        assert set(changed) <= {"bytes", "version"}
        if "bytes" in changed and "version" in before and before["version"] is not None:
            assert "version" in changed
