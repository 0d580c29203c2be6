"""step.run(parts=): rows are cut as rows; what can be read in two ways is named and not cut."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import torchguard

# B batch, F features, S length of a sequence
B, F = 4, 3


class Training:
    """A model of seeded weights and its transaction."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(F, F)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = torchguard.transaction(self.model, optimizer)
        self.seen: list[Any] = []

    def run(self, batch: Any, loss_of: Callable[[nn.Module, Any], Any], **options: Any) -> Any:
        def noted(part: Any) -> Any:
            self.seen.append(part)
            return loss_of(self.model, part)

        loss = self.step.run(noted, batch, **options)
        return loss.item(), [p.tolist() for p in self.model.parameters()]


def zero(model: nn.Module, _: Any) -> torch.Tensor:
    """A loss that takes whatever it is given."""
    return model(torch.ones(1, F)).sum() * 0  # type: ignore[no-any-return]


def halves(batch: Any, **options: Any) -> list[Any]:
    training = Training()
    training.run(batch, zero, parts=2, **options)
    return training.seen


def assert_refused(batch: Any, message: str, **options: Any) -> str:
    """A TypeError names it before the loss is called."""
    training = Training()
    with pytest.raises(TypeError, match=message) as caught:
        training.run(batch, zero, retry="halve", **options)
    assert not training.seen
    return str(caught.value)


@dataclass
class Sample:
    ids: torch.Tensor
    texts: list[str]


class Pair(NamedTuple):
    ids: torch.Tensor
    scale: float


X = torch.arange(1.0, B * F + 1).reshape(B, F) / 10
IMAGES = [torch.ones(F, 2 + n, 2) * n for n in range(B)]  # of F channels
BOXES = [torch.ones(n, 4) for n in (2, 1, 3, 2)]


def weighted(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor([float(each) for each in values])[:, None]


def rows_by(value: Any) -> Callable[[nn.Module, Any], Any]:
    """A loss in which each sample has a weight of its own, from what the batch holds for it."""

    def loss_of(model: nn.Module, batch: Any) -> Any:
        x, extra = (batch["x"], batch["extra"]) if isinstance(batch, dict) else batch
        weights = weighted(map(value, extra))
        return (model(x).square() * weights).sum() / len(x)

    return loss_of


def detection(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch
    scores = [model(image.mean((1, 2))) * t["boxes"].sum() for image, t in zip(*batch, strict=True)]
    return torch.stack(scores).square().mean() * len(images) / len(targets)


class TestRowsAreCutAsRows:
    @pytest.mark.parametrize(
        ("batch", "loss_of"),
        [
            *(
                ({"x": X, "extra": extra}, rows_by(value))
                for extra, value in [
                    ([[0], [1], [2], [0]], sum),
                    ([[1, 2, 3, 4], [3], [4, 5, 6], [7]], sum),
                    (tuple({"id": i} for i in range(B)), lambda e: e["id"]),
                    ([(1, "a"), (2, "b"), (3, "c"), (4, "d")], lambda e: e[0]),
                    ([torch.Size([i + 1]) for i in range(B)], lambda e: e[0]),
                    ([torch.ones(i + 1) for i in range(B)], torch.sum),
                    ([np.ones(i + 1) for i in range(B)], np.sum),
                    ([Sample(torch.ones(i), ["a"]) for i in range(B)], lambda e: len(e.ids)),
                    ([{"boxes": b, "label": 1} for b in BOXES], lambda e: len(e["boxes"])),
                    ([slice(i) for i in range(B)], lambda e: e.stop),
                    (["a", "bb", "ccc", "dddd"], len),
                    ((b"a", b"bb", b"ccc", b"dddd"), len),
                ]
            ),
            ((X, [[0], [1], [2], [0]]), rows_by(sum)),
            ((IMAGES, [{"boxes": each} for each in BOXES]), detection),
            ((tuple(IMAGES), tuple({"boxes": each} for each in BOXES)), detection),
            (
                [(boxes, n) for n, boxes in enumerate(BOXES)],
                lambda m, b: sum(m(boxes[:, :F]).sum() * n for boxes, n in b) / len(b),
            ),
            (
                {"text": ["a", "bb", "ccc", "dddd"], "label": [[0], [1], [2], [0]]},
                lambda m, b: m(weighted(map(len, b["text"])).expand(-1, F)).sum() / len(b["label"]),
            ),
            (
                {"x": X, "more": [torch.ones(B, 1), (torch.ones(B, 2), None, "every part")]},
                lambda m, b: (m(b["x"]) * b["more"][0] * b["more"][1][0][:, :1]).mean(),
            ),
        ],
    )
    @pytest.mark.parametrize("parts", [2, 3, 4])
    def test_parts_have_the_loss_and_the_weights_of_one(
        self, batch: Any, loss_of: Any, parts: int
    ) -> None:
        """Whatever holds the samples: the loss of each part meets the rows that belong to it."""
        one, many = Training().run(batch, loss_of), Training().run(batch, loss_of, parts=parts)
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)

    def test_containers_stay_what_they_are(self) -> None:
        batch = {
            "sample": Sample(torch.arange(4), ["a", "b", "c", "d"]),
            "pair": Pair(torch.arange(4), 0.5),
            "more": [torch.arange(4), (np.arange(4), None, "every part")],
            "temperature": torch.tensor(2.0),
            "tokens": BatchEncoding({"input_ids": torch.arange(8).reshape(4, 2)}),
        }
        first, second = halves(batch)
        assert type(first["sample"]) is Sample
        assert first["sample"].ids.tolist() == [0, 1]
        assert first["sample"].texts == ["a", "b"]
        assert type(first["pair"]) is Pair
        assert first["pair"].ids.tolist() == [0, 1]
        assert second["more"][1][0].tolist() == [2, 3]
        assert second["more"][1][1:] == (None, "every part")
        assert second["temperature"] is batch["temperature"]
        assert isinstance(second["tokens"], BatchEncoding)
        assert second["tokens"].input_ids.tolist() == [[4, 5], [6, 7]]
        assert second["tokens"].input_ids is second["tokens"]["input_ids"]
        assert len(batch["sample"].ids) == 4  # type: ignore[attr-defined]
        x = torch.arange(10).reshape(5, 2)
        first, second = halves(x)  # views of 3 and 2 samples
        assert first.data_ptr() == x.data_ptr()
        assert torch.equal(torch.cat([first, second]), x)

    def test_a_batch_of_one_is_never_cut(self) -> None:
        batch = {"x": torch.ones(1, F), "size": [224], "features": [torch.ones(1, 2)]}
        assert halves(batch) == [batch]
        assert halves(["a sample"]) == [["a sample"]]


class TestWhatCanBeReadInTwoWays:
    @pytest.mark.parametrize(
        ("extra", "split"),
        [
            ([224, 224], "split={'extra': False} if every part gets all"),
            ((224, 112), "split={'extra': True} if it has one entry for each sample"),
            ([0.5, None], "split={'extra': False}"),
            ([torch.tensor(1), torch.tensor(2)], "split={'extra': False}"),
            ([torch.ones(2, 4), torch.ones(2, 5)], "split={'extra': [True, True]} if each of them"),
            ([{"a": torch.ones(2)}, {"a": torch.ones(2), "n": 1}], "split={'extra': [True, True]}"),
        ],
    )
    def test_is_refused_by_name_and_decided_by_split(self, extra: Any, split: str) -> None:
        batch = {"x": torch.ones(2, F), "extra": extra}
        assert re.escape("batch['extra']") in re.escape(assert_refused(batch, re.escape(split)))
        assert [len(part["extra"]) for part in halves(batch, split={"extra": True})] == [1, 1]
        whole = halves(batch, split={"extra": False})
        assert all(part["extra"] is extra and len(part["x"]) == 1 for part in whole)

    @pytest.mark.parametrize(
        "batch",
        [
            [{"ids": torch.ones(B, 2)}, {"ids": torch.ones(B, 2)}],
            ([torch.ones(B), torch.ones(B)], [torch.ones(B), torch.ones(B)]),
            [[1, 2], [3, 4], [5, 6]],
            [(row, row) for row in X],
            list(zip(BOXES, X, strict=True)),
            [(row, n) for n, row in enumerate(X)],
            [{"x": row, "y": n} for n, row in enumerate(X)],
        ],
    )
    def test_a_batch_that_may_be_a_list_of_samples(self, batch: Any) -> None:
        assert "split=True if it has one entry for each sample" in assert_refused(batch, "batch is")
        assert sum(map(len, halves(batch, split=True))) == len(batch)

    def test_lists_of_tensors_alone(self) -> None:
        """Images of three channels, or three levels of features for three samples?"""
        batch = {"images": [torch.ones(3, 8, 8)] * 3}
        assert_refused(batch, r"batch\['images'\].*split=\{'images': \[True, True, True\]\}")
        fields, _ = halves(batch, split={"images": [True] * 3})
        assert [tuple(each.shape) for each in fields["images"]] == [(2, 8, 8)] * 3
        first, second = halves(batch, split={"images": True})
        assert (len(first["images"]), len(second["images"])) == (2, 1)

    def test_what_larger_batches_have_shown_holds_for_the_last_one(self) -> None:
        """The rest of an epoch has as many samples as an image has sizes."""
        training = Training()

        def batch(samples: int) -> dict[str, Any]:
            return {
                "x": torch.ones(samples, F),
                "size": (224, 224),
                "levels": [torch.ones(samples, 2), torch.ones(samples, 1)],
                "boxes": [
                    torch.ones(2 + n, 4) if samples > 2 else BOXES[0] for n in range(samples)
                ],
            }

        for samples in (8, 2):
            training.run(batch(samples), zero, parts=2)
        last = training.seen[-1]
        assert last["size"] == (224, 224)
        assert [len(each) for each in last["levels"]] == [1, 1]
        assert len(last["boxes"]) == 1

    def test_a_list_that_had_an_entry_for_each_sample_and_has_not(self) -> None:
        """Its length was that of the batch by chance."""
        training = Training()
        training.run({"x": torch.ones(3, F), "names": ["a", "b", "c"]}, zero, parts=2)
        with pytest.raises(
            TypeError, match=r"batch\['names'\], which has 3 entries, for 4 samples"
        ):
            training.run({"x": torch.ones(4, F), "names": ["a", "b", "c"]}, zero, parts=2)


class TestSplit:
    @pytest.mark.parametrize(
        ("batch", "split", "second"),
        [
            ((torch.ones(2, 1), [1, 2]), (True, False), (torch.ones(1, 1), [1, 2])),
            ((torch.ones(2, 1), [1, 2]), {1: True}, (torch.ones(1, 1), [2])),
            ({"x": X, "bias": torch.ones(1)}, {"bias": False}, {"x": X[2:], "bias": torch.ones(1)}),
            ({"bias": torch.ones(1), "x": X}, {"x": True, "bias": False}, None),
            ({"a": {"n": [1, 2], "m": 3}}, True, {"a": {"n": [2], "m": 3}}),
            ({"x": X, "graph": torch.eye(4).to_sparse()}, {"graph": False}, None),
            ({"x": torch.ones(2), "o": object()}, {"o": False}, None),
        ],
    )
    def test_says_what_is_cut(self, batch: Any, split: Any, second: Any) -> None:
        part = halves(batch, split=split)[1]
        if second is not None:
            torch.testing.assert_close(part, second)

    @pytest.mark.parametrize(
        ("batch", "split", "message"),
        [
            ({"x": X}, {"y": True}, r"split has 'y', and batch has \['x'\]"),
            ((X, X), (True,), r"split has 1 items, and batch has \[0, 1\]"),
            ({"x": X}, {"x": {"y": True}}, r"looks into batch\['x'\], which is a Tensor"),
            ({"x": X}, {"x": "rows"}, r"says 'rows' of batch\['x'\], expected True"),
            (X, 0.5, r"says 0.5 of batch"),
            (X, False, r"split is False"),
            ({"x": X, "n": [1, 2]}, {"x": True, "n": True}, r"\['n'\], which has 2 entries, for 4"),
            ({"x": X, "n": 2}, {"n": True}, r"batch\['n'\], of type int"),
        ],
    )
    def test_that_does_not_fit_is_named(self, batch: Any, split: Any, message: str) -> None:
        assert_refused(batch, message, split=split)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"x": X, "w": torch.ones(3)}, r"batch\['w'\] of shape \(3,\): expected 4"),
        ((torch.ones(4), [torch.ones(4), torch.ones(5)]), r"batch\[1\]\[1\] of shape \(5,\)"),
        ((torch.ones(4), torch.ones(5)), r"batch\[1\] of shape \(5,\)"),
        ({"x": torch.ones(4), "graph": torch.eye(4).to_sparse()}, r"\['graph'\], of type Tensor"),
        ({"x": torch.ones(4), "path": object()}, r"batch\['path'\], of type object"),
        ({"x": X, "d": collections.deque([1, 2, 3, 4])}, r"batch\['d'\], of type deque"),
        ({"x": X, "s": {1, 2, 3, 4}}, r"batch\['s'\], of type set"),
        ({"x": X, "r": range(4)}, r"batch\['r'\], of type range"),
        (
            {"x": X, "n": torch.nested.nested_tensor(list(X), layout=torch.jagged)},
            r"batch\['n'\], of type NestedTensor",
        ),
        (
            (torch.ones(4), nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])),
            r"batch\[1\], of type PackedSequence",
        ),
        ({"n": 3}, "found no tensor to split"),
        ({"a": ["a"] * 3, "b": ["b"] * 4}, r"\[3, 4\] entries.*split=\{'a': True\}"),
    ],
)
def test_what_can_not_be_cut_is_named(batch: Any, name: str) -> None:
    assert_refused(batch, name)
