"""``python -m torchguard plan``: lengths in, buckets out."""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import sys
import sysconfig
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


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["plan", *arguments])
    status: int = options.command(options)
    return status


@pytest.fixture(scope="module")
def docstrings() -> list[int]:
    """Words per docstring of part of the standard library: a text that every machine has."""
    texts = []
    for name in ("argparse.py", "inspect.py", "subprocess.py"):
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), name).read_text(encoding="utf-8"))
        texts += [
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        ]
    return [len(text.split()) for text in texts if text]


@pytest.fixture
def lengths(docstrings: list[int], tmp_path: Path) -> str:
    """The file with these lengths."""
    path = tmp_path / "in.txt"
    path.write_text("\n".join(map(str, docstrings)))
    return str(path)


def test_text(docstrings: list[int], lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It plans for the lengths of a real text."""
    options = ("--buckets", "6", "--batch", "4", "--multiple-of", "8", "--cost", "quadratic")
    assert run(lengths, *options) == 0
    shown = capsys.readouterr().out
    seen = batch_maxima(docstrings, 4, "test")
    buckets = Buckets.fit(seen, 6, cost="quadratic", multiple_of=8)
    for text in (
        f"{len(docstrings):,} lengths",
        "6 buckets: " + " ".join(map(str, buckets)),
        f"waste: {100 * buckets.waste(seen, 'quadratic'):.1f} % (quadratic cost)",
        "powers of two",
        "multiples of 64",
    ):
        assert text in shown
    for count in range(1, 16):  # the table of other counts
        fitted = Buckets.fit(seen, count, cost="quadratic", multiple_of=8)
        assert f"{count:>4} {100 * fitted.waste(seen, 'quadratic'):>7.1f} %" in shown


@pytest.mark.parametrize("cost", ["linear", "quadratic"])
def test_tokens(
    cost: str, docstrings: list[int], lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the batches of a sampler, and its lines run as they are."""
    power = 1 if cost == "linear" else 2
    assert run(lengths, "--tokens", str(4096 if power == 1 else 1 << 20), "--cost", cost) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "BucketBatchSampler(" in line)
    names: dict[str, object] = {"lengths": docstrings, "BucketBatchSampler": BucketBatchSampler}
    exec(line.strip(), names)  # noqa: S102 - what users paste
    sampler = names["sampler"]
    assert isinstance(sampler, BucketBatchSampler)
    assert f"{len(sampler):,} batches an epoch" in shown
    slots = 0
    for batch in sampler:
        longest = max(docstrings[index] for index in batch)
        size = min(size for size in sampler.batch_sizes if size >= longest)
        slots += sampler.batch_sizes[size] * size**power
    useful = sum(length**power for length in docstrings)
    assert f"those that are not full: {100 * (slots / useful - 1):.1f} %" in shown


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
    ("content", "message"),
    [
        (b"10\n2x\n", "nor a text of integers: invalid literal for int() with base 10: '2x'"),
        (b"\xff\xfe1", "nor a text of integers: 'utf-8' codec can't decode"),
        (npy([1.5]), "expected integers"),
    ],
)
def test_bad_file(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file and what is wrong with it."""
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        run(str(path))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert message in shown


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ((), "", "sizes is empty"),
        ((), "1 0", "sizes[1] is 0"),
        (("--maximum", "5"), "10", "--maximum is 5, but standard input has a length of 10"),
        (("--multiple-of", "x"), "1", "argument --multiple-of: 'x' is no whole number from 1 on"),
        (("--batch", "3"), "1 2", "batch_size is 3, expected at most 2"),
        (("--tokens", "8"), "9", "one item of bucket 9 costs 9: pass tokens=9 or more"),
        (("--tokens", "8", "--batch", "2"), "1 2", "give one of them"),
        (("--buckets", "0"), "1", "argument --buckets: '0' is no whole number from 1 on"),
        (("--cost", "cubic"), "1", "argument --cost"),
        (("missing.txt",), "", "No such file"),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...],
    content: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad usage ends with 2, and names the option as it is typed."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Buckets.fit" not in shown or "--tokens" in arguments
    assert "_count" not in shown


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
def test_lines_to_paste(
    tokens: bool, docstrings: list[int], lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They make a loader and a model that goes through it, checked and counted by its mask."""
    option = ["--tokens", "4096"] if tokens else []
    assert run(lengths, "--buckets", "3", *option) == 0
    shown = capsys.readouterr().out
    pasted = shown.partition("the dimension that varies:")[2]
    for text in ("mask=", "mask_key=", "fill={'labels': -100}"):
        assert text in pasted
    rows = [{"input_ids": [1] * n, "labels": [2] * n} for n in docstrings]
    names: dict[str, Any] = {
        name: getattr(torchguard, name) for name in ("bucketed", "BucketCollator")
    }
    names |= {"BucketBatchSampler": BucketBatchSampler, "lengths": docstrings, "dataset": rows}
    names |= {"model": Model(), "DataLoader": torch.utils.data.DataLoader}
    exec(textwrap.dedent(pasted.strip("\n")).replace("=True", "=False"), names)  # noqa: S102
    for batch in itertools.islice(names["loader"], 3):
        assert torch.isfinite(names["model"](**batch))
    stats = names["model"].stats()
    assert stats.calls == 3
    assert stats.proven or tokens  # of similar length, and none is shorter than its bucket
    assert stats.waste > 0


def test_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the largest bucket."""
    path = tmp_path / "in.txt"
    path.write_text("3 5 9 12 30 41 60 61 62")
    assert run(str(path), "--buckets", "4", "--maximum", "500") == 0
    assert re.search(r"4 buckets: .* 500\n", capsys.readouterr().out)
