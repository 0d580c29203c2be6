"""``python -m torchguard plan``: lengths in, buckets out."""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from torchguard import BucketBatchSampler
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.histogram import batch_maxima
from torchguard.cli import plan

WORDS = (1 + np.random.default_rng(0).lognormal(2.0, 1.0, 400)).astype(int).tolist()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["plan", *arguments])
    status: int = options.command(options)
    return status


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """A file with lengths as those of texts."""
    path = tmp_path / "in.txt"
    path.write_text("\n".join(map(str, WORDS)))
    return str(path)


def test_text(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It plans for the lengths in a text."""
    options = ("--buckets", "6", "--batch", "4", "--multiple-of", "8", "--cost", "quadratic")
    assert run(lengths, *options, "--maximum", "500") == 0
    shown = capsys.readouterr().out
    seen = batch_maxima(WORDS, 4, "test")
    aligned: Any = {"cost": "quadratic", "multiple_of": 8, "maximum": 500}
    buckets = Buckets.fit(seen, 6, **aligned)
    for text in (
        f"{len(WORDS):,} lengths",
        "6 buckets: " + " ".join(map(str, buckets)),
        f"waste: {100 * buckets.waste(seen, 'quadratic'):.1f} % (quadratic cost)",
        "powers of two",
        "multiples of 64",
    ):
        assert text in shown
    assert buckets.sizes[-1] >= 500
    for count in range(1, 14):  # the table of other counts
        fitted = Buckets.fit(seen, count, **aligned)
        assert f"{count:>4} {100 * fitted.waste(seen, 'quadratic'):>7.1f} %" in shown


def npy(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"10 20\n20\n", b"\xef\xbb\xbf10\r\n20\r\n20\r\n", b"10,20,20\n", npy([10, 20, 20])],
)
def test_files(
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It reads a text and a file of numpy, and both from standard input."""
    path = tmp_path / "lengths"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for file in (str(path), "-"):
        run(file)
        shown = capsys.readouterr().out
        assert shown.startswith("3 lengths from")
        assert "2 buckets: 10 20" in shown


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ((), b"10\n2x\n", "standard input: neither a .npy file nor a text of integers"),
        ((), b"\xff\xfe1", "nor a text of integers: 'utf-8' codec can't decode"),
        ((), npy([1.5]), "expected integers"),
        ((), b"", "sizes is empty"),
        ((), b"1 0", "sizes[1] is 0"),
        (("--maximum", "5"), b"10", "--maximum is 5, but standard input has a length of 10"),
        (("--multiple-of", "x"), b"1", "argument --multiple-of: 'x' is no whole number from 1 on"),
        (("--batch", "3"), b"1 2", "batch_size is 3, expected at most 2"),
        (("--tokens", "8"), b"9", "one item of bucket 9 costs 9: pass tokens=9 or more"),
        (("--tokens", "8", "--batch", "2"), b"1 2", "give one of them"),
        (("--pairs",), b"1 2", "give --tokens too"),
        (("--pairs", "--tokens", "8"), b"1 2\n3 4 5 6\n", "4 in line 2, expected 2 columns"),
        (("--pairs", "--tokens", "8"), npy([1, 2]), "has shape (2,), expected 2 columns"),
        (("--buckets", "0"), b"1", "argument --buckets: '0' is no whole number from 1 on"),
        (("--cost", "cubic"), b"1", "argument --cost"),
        (("missing.txt",), b"", "No such file"),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...],
    content: bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad usage ends with 2, and names the option as it is typed."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Buckets.fit" not in shown or "--tokens" in arguments
    assert "_count" not in shown


@pytest.mark.parametrize("kind", ["text", "npy"])
def test_pairs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines to paste make the batches whose waste is shown, by axis."""
    random = np.random.default_rng(1)
    pairs = np.stack((WORDS, (np.array(WORDS) * random.lognormal(0, 0.3, len(WORDS))).clip(1)), 1)
    pairs = pairs.astype(np.int64)
    path = tmp_path / "pairs"
    if kind == "text":
        path.write_text("\n".join(f"{source},{target}" for source, target in pairs) + "\n")
    else:
        path.write_bytes(npy(pairs))
    assert run(str(path), "--pairs", "--tokens", "512", "--buckets", "4") == 0
    shown = capsys.readouterr().out
    assert f"target: {pairs[:, 1].min()} to {pairs[:, 1].max()}, median" in shown
    pasted = shown.partition("the dimensions that vary:")[2]
    rows = [{"input_ids": [1] * s, "labels": [2] * t} for s, t in pairs.tolist()]
    names: dict[str, Any] = {"pairs": pairs.tolist(), "dataset": rows}
    names |= {"BucketBatchSampler": BucketBatchSampler, "DataLoader": torch.utils.data.DataLoader}
    names["BucketCollator"] = torchguard.BucketCollator
    exec(textwrap.dedent(pasted.strip("\n")), names)  # noqa: S102
    padded = sum(b["input_ids"].numel() + b["labels"].numel() for b in names["loader"])
    shapes = {(b["input_ids"].shape, b["labels"].shape) for b in names["loader"]}
    names["sampler"].set_epoch(0)
    assert f"waste: {100 * (padded / pairs.sum() - 1):.1f} % of all tokens" in shown
    assert "rows of padding" in shown
    assert len(shapes) >= 4


class Model(torch.nn.Module):
    """Averages what is real, and takes labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """(B, T) three times -> a loss."""
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        hidden = hidden + hidden.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None]
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tokens", [False, True])
def test_lines_to_paste(tokens: bool, lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They make a loader and a model that goes through it, checked and counted by its mask."""
    option = ["--tokens", "65536", "--cost", "quadratic"] if tokens else []
    assert run(lengths, "--buckets", "3", *option) == 0
    shown = capsys.readouterr().out
    pasted = shown.partition("the dimension that varies:")[2]
    for text in ("mask=", "mask_key=", "fill={'labels': -100}"):
        assert text in pasted
    rows = [{"input_ids": [1] * n, "labels": [2] * n} for n in WORDS]
    names: dict[str, Any] = {
        name: getattr(torchguard, name) for name in ("bucketed", "BucketCollator")
    }
    names |= {"BucketBatchSampler": BucketBatchSampler, "lengths": WORDS, "dataset": rows}
    names |= {"model": Model(), "DataLoader": torch.utils.data.DataLoader}
    exec(textwrap.dedent(pasted.strip("\n")).replace("=True", "=False"), names)  # noqa: S102
    for batch in itertools.islice(names["loader"], 3):
        assert torch.isfinite(names["model"](**batch))
    if tokens:
        assert f"{len(names['sampler']):,} batches an epoch" in shown
    stats = names["model"].stats()
    assert stats.calls == 3
    assert stats.proven or tokens  # of similar length, and none is shorter than its bucket
    assert stats.waste > 0
