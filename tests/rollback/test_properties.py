"""Drawn tensors, operations and arguments: what succeeds is torch's, what fails changes nothing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import kinds
from support.kinds import Kind, empty_locked, state, values
from support.ways import BARE, GUARDED, HELPERS, INSTALLED, Way, differences, outcome_of

if TYPE_CHECKING:
    pass

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


templates = st.one_of(
    each_kind.map(lambda kind: kind.make()),
    st.lists(st.integers(0, 40), max_size=5).map(lambda size: torch.empty(size, device="meta")),
    st.sampled_from([2**40, 2**58]).map(lambda length: torch.empty(1).expand(length)),
    odd,
)

sources = st.sampled_from(
    [
        lambda t: torch.zeros(8, dtype=t.dtype, device=t.device).untyped_storage(),
        lambda t: torch.zeros(8, dtype=t.dtype, device=t.device),
        lambda _: empty_locked(torch.float32, 16).untyped_storage(),
        lambda _: torch.zeros(8, device="meta").untyped_storage(),
        lambda t: t.untyped_storage() if t.layout is torch.strided and not t.is_nested else 1,
        lambda _: torch.zeros(3).numpy(),
    ]
)
calls = st.one_of(
    st.tuples(st.just("resize_"), sizes, formats),
    st.tuples(st.just("resize_as_"), st.tuples(templates), formats),
    st.tuples(
        st.just("set_"),
        st.one_of(
            st.tuples(sources),
            st.tuples(sources, st.one_of(lengths, odd), st.lists(st.one_of(lengths, odd))),
            st.tuples(sources, lengths, *[st.lists(lengths, max_size=3)] * 2),
        ),
        st.none(),
    ),
)


def fills_memory(size: Any) -> bool:
    """Whether the row pointers of a compressed tensor might get that long; torch writes them all.

    A strided tensor of such a size has memory that is never touched.
    """
    flat = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    return any(type(length) is int and 10 < length < 2**40 for length in flat)


@settings(max_examples=200)
@given(each_kind, each_way, calls)
def test_resize_and_set(kind: Kind, way: Way, drawn: tuple[str, tuple[Any, ...], Any]) -> None:
    """Do it on torch and on a twin with a guard, and compare all there is."""
    operation, arguments, memory_format = drawn
    is_long = operation == "resize_" and fills_memory(arguments)
    assume(not (kind in kinds.COMPRESSED_KINDS and is_long))
    options = {} if memory_format is None else {"memory_format": memory_format}

    def call(way: Way, tensor: torch.Tensor) -> Any:
        first, *rest = arguments or (None,)
        made = (first(tensor), *rest) if operation == "set_" else arguments
        return getattr(way, operation)(tensor, *made, **options)

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
