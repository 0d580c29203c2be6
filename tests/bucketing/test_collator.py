"""BucketCollator: ragged samples become batches at their bucket's size, and at its rows."""

from __future__ import annotations

import collections
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from torchguard import BucketBatchSampler, BucketCollator, Buckets

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKETS = Buckets([4, 8, 16])


def rows(count: int) -> dict[int, int]:
    return dict.fromkeys(BUCKETS, count)


def ragged() -> list[dict[str, Any]]:
    return [
        {
            "ids": torch.arange(length),
            "labels": np.arange(length),
            "types": [1] * length,
            "audio": {"wave": torch.ones(2, 3 * length)},
            "weight": 1.0,
        }
        for length in (3, 5, 2)
    ]


RAGGED = BucketCollator(
    {"t": BUCKETS, "s": Buckets([16])},
    {
        "ids": {1: "t"},
        "labels": {-1: "t"},
        "types": {1: "t"},
        "audio": {"wave": {2: "s"}},
        "weight": None,
    },
    fill={"labels": -100, "audio": {"wave": "repeat-last"}},
    mask_key={"t": "mask"},
)


def test_samples_of_different_length_are_padded_each() -> None:
    """Rows of length 3, 5 and 2: torch's own collate function says they must be equally long."""
    samples = ragged()
    batch = RAGGED(samples)
    assert [each["ids"].shape[0] for each in samples] == [3, 5, 2]  # left as they are
    assert isinstance(samples[0]["types"], list)
    assert batch["ids"].tolist() == [
        [0, 1, 2, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["labels"].tolist()[2] == [0, 1] + [-100] * 6
    assert batch["types"].tolist()[0] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert torch.equal(batch["audio"]["wave"], torch.ones(3, 2, 16))
    assert batch["weight"].shape == (3,)
    assert batch["mask"].sum(1).tolist() == [3, 5, 2]
    assert batch["mask"].shape == (3, 8)


Pair = collections.namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - as torch's own tests do

# Makes a sample of a length, what to pad in it, and the shapes of a batch of 48 and 55.
NESTED: dict[str, tuple[Callable[[int], Any], Any, list[tuple[int, ...]]]] = {
    "tensor": (torch.ones, {1: "t"}, [(2, 64)]),
    "array": (np.ones, {1: "t"}, [(2, 64)]),
    "list": (lambda n: list(range(n)), {1: "t"}, [(2, 64)]),
    "list of lists": (lambda n: [[1, 2]] * n, {1: "t"}, [(2, 64, 2)]),
    "list of arrays": (lambda n: [np.ones(2)] * n, {1: "t"}, [(2, 64, 2)]),
    "square": (lambda n: {"x": torch.ones(n, n)}, {"x": {1: "t", 2: "t"}}, [(2, 64, 64)]),
    "tuple": (lambda n: (torch.ones(n), n), ({-1: "t"}, None), [(2, 64), (2,)]),
    "tuple in dict": (lambda n: {"a": (torch.ones(n), n)}, {"a": [{1: "t"}]}, [(2, 64), (2,)]),
    "dict in tuple": (lambda n: ({"a": [1] * n}, n), ({"a": {1: "t"}},), [(2, 64), (2,)]),
    "named tuple": (lambda n: Pair([1] * n, n), ({1: "t"},), [(2, 64), (2,)]),
    "user dict": (lambda n: collections.UserDict(x=[1] * n), {"x": {1: "t"}}, [(2, 64)]),
    "text": (lambda n: {"x": [1] * n, "text": "a" * n}, {"x": {1: "t"}}, [(2, 64)]),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NESTED)
def test_rows_of_48_and_55_in_every_nesting(name: str) -> None:
    make, dims, shapes = NESTED[name]
    collate = BucketCollator([64, 128], dims)
    batch = collate([make(48), make(55)])
    leaves = tree_leaves(batch.data if isinstance(batch, collections.UserDict) else batch)
    assert [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)] == shapes


def test_an_empty_list_has_the_dtype_of_the_others() -> None:
    """torch.as_tensor([]) is float32, and would make floats of all token ids."""
    batch = BucketCollator([4], {"x": {1: "t"}})([{"x": []}, {"x": [1, 2]}])
    assert batch["x"].dtype == torch.int64
    assert batch["x"].tolist() == [[0] * 4, [1, 2, 0, 0]]


# Rows of padding.


def test_rows_of_padding_are_samples_of_length_1() -> None:
    """All of them holds the fill, and the mask is True at one position."""
    dims = {"ids": {1: "t"}, "labels": {1: "t"}, "positions": {1: "t"}}
    fill = {"ids": 9, "labels": -100, "positions": "repeat-last", "label": -1, "w": 0.0}
    sizes = {4: 4, 8: 3, 16: 1}
    collate = BucketCollator(BUCKETS, dims, fill=fill, mask_key="mask", batch_sizes=sizes)
    row = {"ids": [1, 2], "labels": [1, 2], "positions": [0, 1], "label": 5, "w": 1.0, "text": "a"}
    batch = collate([row, row])
    assert batch["ids"].tolist() == [[1, 2, 9, 9]] * 2 + [[9] * 4] * 2
    assert batch["labels"].tolist() == [[1, 2, -100, -100]] * 2 + [[-100] * 4] * 2
    assert batch["positions"].tolist() == [[0, 1, 1, 1]] * 4
    assert batch["label"].tolist() == [5, 5, -1, -1]
    assert batch["w"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch["mask"].int().tolist() == [[1, 1, 0, 0]] * 2 + [[1, 0, 0, 0]] * 2
    assert batch["text"] == ["a", "a"]


def packed(h: torch.Tensor, mask: torch.Tensor, net: Any) -> torch.Tensor:
    lengths = mask.sum(1)
    given = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    found, _ = nn.utils.rnn.pad_packed_sequence(
        net(given)[0], batch_first=True, total_length=mask.shape[1]
    )
    return found


MIXERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "softmax": (
        nn.Identity,
        lambda h, mask, net: (h @ h.mT).masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ h,
    ),
    "GRU": (lambda: nn.GRU(8, 8, batch_first=True), packed),
}


def last_batch(side: Any, rows: int) -> dict[str, torch.Tensor]:
    """Two samples in a batch of so many rows."""
    samples = [{"ids": [3, 4, 5], "labels": [1, 2, 3], "kind": 1},
               {"ids": [9, 8, 7, 6, 5], "labels": [2, 1, 3], "kind": 2}]  # fmt: skip
    dims = {"ids": {1: "t"}, "labels": {1: "s"}}
    return BucketCollator(  # type: ignore[no-any-return]
        BUCKETS, {**dims}, fill={"labels": -100, "kind": -100}, side=side,
        mask_key={"t": "mask", "s": "label_mask"}, batch_sizes=dict.fromkeys(BUCKETS, rows),
    )(samples)  # fmt: skip


def trained(mixer: str, batch: dict[str, torch.Tensor], side: str) -> list[torch.Tensor]:
    """Return a loss and its gradients: a class for each sample, and a sequence of labels."""
    torch.manual_seed(0)
    make, mix = MIXERS[mixer]
    embedding, head, net = nn.Embedding(10, 8), nn.Linear(8, 5), make()
    logits = head(mix(embedding(batch["ids"]), batch["mask"], net))
    first = logits[:, 0 if side == "right" else -1]
    loss = functional.cross_entropy(first, batch["kind"], ignore_index=-100)
    if side == "right":  # as ctc_loss has it
        lengths = batch["mask"].sum(1), batch["label_mask"].sum(1)
        scores = logits.transpose(0, 1).log_softmax(-1)
        each = functional.ctc_loss(scores, batch["labels"], *lengths, reduction="none")
        loss = loss + (each * (batch["kind"] != -100)).sum()
    parameters = [*embedding.parameters(), *head.parameters(), *net.parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize(
    ("mixer", "side"), [("softmax", "right"), ("softmax", "left"), ("GRU", "right")]
)
def test_rows_of_padding_train_as_no_rows_do(mixer: str, side: Any) -> None:
    """A row without a real position makes NaN of the gradient of every weight."""
    filled, exact = (trained(mixer, last_batch(side, rows), side) for rows in (5, 2))
    for one, other in zip(filled, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_ragged_samples_in_the_workers() -> None:
    loader: Any = DataLoader(
        ragged() * 2,  # type: ignore[arg-type]
        batch_size=3,
        num_workers=2,
        collate_fn=pickle.loads(pickle.dumps(RAGGED)),  # noqa: S301
    )
    assert [batch["mask"].sum(1).tolist() for batch in loader] == [[3, 5, 2]] * 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from([0, -7, "repeat-last"]),
    st.sampled_from(["left", "right"]),
)
def test_ragged_samples_come_back_out_of_the_batch(
    lengths: list[int], fill: Any, side: Any
) -> None:
    rows = [{"x": torch.randn(2, length)} for length in lengths]
    collate = BucketCollator(BUCKETS, {"x": {2: "t"}}, fill={"x": fill}, side=side, mask_key="mask")
    batch = collate(rows)
    assert batch["x"].shape == (len(rows), 2, BUCKETS.bucket_for(max(lengths)))
    for row, padded, mask in zip(rows, batch["x"], batch["mask"], strict=True):
        assert torch.equal(padded[:, mask], row["x"])
        if fill != "repeat-last":
            assert (padded[:, ~mask] == fill).all()


def test_a_list_may_name_the_parts_of_a_tuple() -> None:
    """In dims and in fill; a named tuple keeps its type."""
    for sample in ((torch.ones(5), 1), Pair(torch.ones(5), 1)):
        padded = BucketCollator(BUCKETS, [{1: "t"}, None], fill=[7])([sample] * 2)
        assert padded[0].tolist() == [[1.0] * 5 + [7.0] * 3] * 2
        assert padded[1].tolist() == [1, 1]
        assert type(padded) is (Pair if type(sample) is Pair else list)


class Record:
    """What a collate function of the user's may return: no mapping, but it can be indexed."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __copy__(self) -> Record:
        return Record(**self.parts)

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.parts[key] = value


@pytest.mark.parametrize("make", [dict, Record])
def test_what_the_collate_function_keeps_is_not_changed(make: Callable[..., Any]) -> None:
    """The batch is copied, and the part is put into the copy."""
    kept = make(ids=torch.ones(2, 5), other=1)
    batch = BucketCollator(BUCKETS, {"ids": {1: "t"}}, collate_fn=lambda _: kept)([])
    assert type(batch) is make
    assert (batch["ids"].shape, kept["ids"].shape) == ((2, 8), (2, 5))
    assert batch["other"] == 1


@pytest.mark.parametrize(
    ("buckets", "dims", "options", "error", "message"),
    [
        (BUCKETS, {}, {}, ValueError, "names no dimension"),
        (BUCKETS, {"ids": 1}, {}, TypeError, r"dims\['ids'\] is 1"),
        (BUCKETS, {"ids": {1: 2}}, {}, TypeError, "expected {dim: name}"),
        ({"s": BUCKETS}, {"ids": {1: "t"}}, {}, ValueError, "no buckets for 't'"),
        ({"t": 8}, {"ids": {1: "t"}}, {}, TypeError, "buckets of 't' is 8, expected Buckets"),
        (BUCKETS, {"a": {1: "t"}}, {"collate_fn": list, "mask_key": "mask"}, ValueError,
         "mask_key and collate_fn are both given"),
        (BUCKETS, {"a": {1: "t", 2: "s"}}, {"mask_key": "mask"}, ValueError,
         r"mask_key is 'mask', expected .* \{axis: key\}, of s, t"),
        (BUCKETS, {"a": {1: "t"}}, {"fill": {"b": -100}}, ValueError,
         r"fill\['b'\] is given, which dims does not pad"),
        # It would name no part of the batch, so that padding held 0.
        *((BUCKETS, {"a": {1: "t"}}, {"fill": fill}, ValueError, "is given, which dims does")
          for fill in (-100, [-100], "repeat-last")),
    ],
)  # fmt: skip
def test_a_bad_collator_is_refused_at_once(
    buckets: Any, dims: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BucketCollator(buckets, dims, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_sizes": {4: 2}}, ValueError, "has the sizes 4, expected those of the buckets of"),
        ({"batch_sizes": [2, 2]}, TypeError, "expected sampler.batch_sizes"),
        ({"batch_sizes": rows(1)}, ValueError, "a batch of 2 rows is 4 long"),
        ({"batch_sizes": rows(3)}, ValueError, r"rows of padding to batch\['y'\] too"),
        ({"batch_sizes": rows(2)}, ValueError, r"rows of padding to batch\['y'\] too"),
        ({"batch_sizes": rows(3), "fill": {"z": 1}}, KeyError, r"fill\['z'\] is given, but the"),
        ({"batch_sizes": rows(2), "fill": {"y": 0.5}}, TypeError, "value=0.5 does not fit torch."),
    ],
)
def test_wrong_rows_are_refused_with_the_first_batch(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Not with the last one of an epoch, which alone has rows of padding."""
    samples = [{"ids": [1, 2], "y": 1}, {"ids": [1], "y": 2}]
    with pytest.raises(error, match=message):
        BucketCollator(BUCKETS, {"ids": {1: "t"}}, **options)(samples)


def test_rows_by_the_axis_of_the_sampler() -> None:
    """Of two axes the one that has its buckets."""
    dims, samples = {"b": {1: "s"}, "a": {1: "t"}}, [{"a": [1] * 3, "b": [1] * 7}]
    buckets = {"t": BUCKETS, "s": [8, 64]}
    batch = BucketCollator(buckets, dims, batch_sizes={4: 5, 8: 2, 16: 1})(samples)
    assert (batch["a"].shape, batch["b"].shape) == ((5, 4), (5, 8))
    made = BucketCollator(
        BUCKETS,
        {"ids": {1: "t"}},
        collate_fn=lambda _: Record(ids=torch.ones(2, 5)),
        batch_sizes=rows(3),
    )([])
    assert made["ids"].shape == (3, 8)


@pytest.mark.parametrize("longer", [max, lambda pair: pair[0]], ids=["the longer", "the source"])
def test_pairs_get_the_rows_of_the_longer_length(longer: Any) -> None:
    """A full batch is full; with the length of the source alone, nothing is refused."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.randint(1, 17, (200, 2), generator=random).tolist()
    samples = [{"x": torch.ones(s), "y": torch.ones(t)} for s, t in pairs]
    sampler = BucketBatchSampler(list(map(longer, pairs)), [4, 8, 16], tokens=64)
    collate = BucketCollator(
        [4, 8, 16], {"x": {1: "s"}, "y": {1: "t"}}, batch_sizes=sampler.batch_sizes,
        mask_key={"s": "seen", "t": "also"},
    )  # fmt: skip
    filled = 0
    for numbers in sampler:
        batch = collate([samples[number] for number in numbers])
        rows, size = batch["x"].shape
        assert batch["seen"].shape == (rows, size)
        assert batch["also"].shape == batch["y"].shape
        filled += rows - len(numbers)
        if longer is max:
            assert rows == sampler.batch_sizes[max(size, batch["y"].shape[1])]
    assert filled < 3 * 16 or longer is not max  # of the last batch of each bucket


def test_samples_of_another_structure_are_named() -> None:
    good: Any = {"ids": torch.ones(5), "audio": {"wave": torch.ones(2, 10)}}
    ids = {1: "t"}
    cases: list[tuple[list[Any], Any, type[Exception], str]] = [
        ([good], {"idz": ids}, KeyError, r"no samples\[0\]\['idz'\]; it has keys \['ids', '"),
        ([good], {"ids": {2: "t"}}, IndexError, "dims names its dimension 2"),
        ([good], {"audio": ids}, TypeError, r"batch\['audio'\] is of type dict"),
        ([good], {"ids": ids, "audio": {"wave": {2: "t"}}}, ValueError, "axis 't' is 5 in"),
        ([{"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(2)}],
         {"a": ids, "b": ids}, ValueError, r"axis 't' is 3 in samples\[1\]\['a'\] and 2 in"),
    ]  # fmt: skip
    for samples, dims, error, message in cases:
        with pytest.raises(error, match=message):
            BucketCollator(BUCKETS, dims)(samples)
    with pytest.raises(ValueError, match="the samples have 'audio' themselves"):
        BucketCollator(BUCKETS, {"ids": ids}, mask_key="audio")([good])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("count", [4, 6])
def test_the_rows_of_a_mask_are_padded_where_those_of_the_data_are(side: Any, count: int) -> None:
    """``dims`` names the batch, and ``batch_sizes`` adds rows to it."""
    collate = BucketCollator(
        {"b": Buckets([4]), "t": Buckets([8])},
        {"x": {0: "b", 1: "t"}},
        mask_key={"t": "mask"},
        batch_sizes={8: count},
        side=side,
    )
    batch = collate([{"x": torch.ones(5)}, {"x": torch.ones(3)}])
    assert batch["mask"].shape == (count, 8)
    there = batch["x"].any(1)
    assert torch.equal(batch["mask"][there], batch["x"][there] == 1)
    assert batch["mask"][~there].sum(1).tolist() == [1] * (count - 2)
