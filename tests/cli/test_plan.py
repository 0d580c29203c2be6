"""``python -m torchguard plan``: every kind of file in, a ladder out."""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from support.terminal import Terminal
from torchguard import BucketBatchSampler, BucketCollator, bucketed
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.histogram import batch_maxima
from torchguard.cli import plan
from torchguard.cli.sizes import read_sizes


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["plan", *arguments])
    status: int = options.command(options)
    return status


@pytest.fixture(scope="module")
def docstrings() -> list[int]:
    """Words per docstring of part of the standard library: a text that every machine has."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = []
    for name in ("argparse.py", "ast.py", "doctest.py", "inspect.py", "shutil.py", "subprocess.py"):
        texts += [
            ast.get_docstring(node) or ""
            for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8")))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        ]
    return [len(text.split()) for text in texts if text]


def test_text(docstrings: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It plans for the lengths of a real text, and draws them."""
    pytest.importorskip("matplotlib")
    lengths, picture, ladder = (tmp_path / name for name in ("in.txt", "out.png", "out.json"))
    lengths.write_text("\n".join(map(str, docstrings)))
    options = ("--buckets", "6", "--batch", "4", "--multiple-of", "8", "--cost", "quadratic")
    assert run(str(lengths), *options, "--plot", str(picture), "--json", str(ladder)) == 0
    shown = capsys.readouterr().out
    seen = batch_maxima(docstrings, 4, "test")
    buckets = Buckets.fit(seen, 6, cost="quadratic", multiple_of=8)
    assert Buckets.from_json(ladder.read_text()) == buckets
    assert f"{len(docstrings):,} lengths" in shown
    assert "6 buckets: " + " ".join(map(str, buckets)) in shown
    assert f"waste: {100 * buckets.waste(seen, 'quadratic'):.1f} % (quadratic cost)" in shown
    assert "powers of two" in shown
    assert "multiples of 64" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("cost", ["linear", "quadratic"])
def test_tokens(
    cost: str, docstrings: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the batches of a sampler, and its lines run as they are."""
    path, tokens = tmp_path / "in.txt", 4096 if cost == "linear" else 1 << 20
    path.write_text("\n".join(map(str, docstrings)))
    assert run(str(path), "--tokens", str(tokens), "--cost", cost) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "BucketBatchSampler(" in line)
    names: dict[str, object] = {"lengths": docstrings, "BucketBatchSampler": BucketBatchSampler}
    exec(line.strip(), names)  # noqa: S102 - what users paste
    sampler = names["sampler"]
    assert isinstance(sampler, BucketBatchSampler)
    assert f"{len(sampler):,} batches an epoch" in shown
    price = {size: size if cost == "linear" else size**2 for size in sampler.batch_sizes}
    slots = sum(
        sampler.batch_sizes[size] * price[size]
        for batch in sampler
        for size in [min(s for s in price if s >= max(docstrings[index] for index in batch))]
    )
    useful = sum(length if cost == "linear" else length**2 for length in docstrings)
    assert f"those that are not full: {100 * (slots / useful - 1):.1f} %" in shown


def test_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the waste of 1 to 32 buckets."""
    sizes = [3 * size + size % 7 for size in range(1, 101)]
    path = tmp_path / "sizes.txt"
    path.write_text(" ".join(map(str, sizes)))
    run(str(path))
    shown = capsys.readouterr().out
    for count in range(1, 33):
        waste = Buckets.fit(sizes, count).waste(sizes)
        assert f"{count:>4} {100 * waste:>7.1f} %" in shown


FILES = {
    "sizes.txt": b"10 20\n20\n",
    "bom.txt": b"\xef\xbb\xbf10\r\n20\r\n20\r\n",
    "sizes.csv": b"name,length\na,10\nb,20\nc,20\n",
    "one.csv": b"10\n20\n20\n",
    "headed.csv": b"length\n10\n20\n20\n",
    "list.json": b"[10, 20, 20]",
    "objects.json": b'[{"length": 10}, {"length": 20}, {"length": 20}]',
    "column.json": b'{"length": [10, 20, 20]}',
    "histogram.json": b'{"10": 1, "20": 2}',
}


def npy(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


@pytest.mark.parametrize("name", [*FILES, "sizes.npy"])
@pytest.mark.parametrize("through", ["file", "standard input"])
def test_files(
    name: str,
    through: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It reads every kind of file."""
    content = FILES.get(name) or npy([10, 20, 20])
    named = name in {"sizes.csv", "objects.json", "column.json"}
    column = ["--column", "length"] if named else []
    if through == "file":
        path = tmp_path / name
        path.write_bytes(content)
        run(str(path), *column)
    else:
        stdin = io.TextIOWrapper(io.BytesIO(content))
        monkeypatch.setattr(sys, "stdin", stdin)
        run(*column)
    shown = capsys.readouterr().out
    assert shown.startswith("3 lengths from")
    assert "2 buckets: 10 20" in shown


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", b"10\n2x\n", None, "a.txt:2: '2x' is not an integer"),
        ("a.txt", b"10\n2.5\n", None, "a.txt:2: '2.5' is not an integer"),
        ("a.txt", b"\xff\xfe1", None, "not UTF-8"),
        ("a.txt", b"1", "length", "has no columns"),
        ("a.csv", b"a,b\n1,2\n", None, "which column? pass --column with one of a, b"),
        ("a.csv", b"a,b\n1,2\n", "c", "there is no column 'c'; there are a, b"),
        ("a.csv", b"a,b\n1,2\n3\n", "b", "a.csv:3: 1 columns, expected 2"),
        ("a.csv", b"a,b\n1,\n", "b", "a.csv:2: '' is not an integer"),
        ("a.json", b"[1,", None, "not JSON"),
        ("a.json", b"3", None, "expected a list"),
        ("a.json", b'{"a": [1]}', "b", "there is no 'b'; there are a"),
        ("a.json", b'[{"a": 1}]', None, "which field? pass --column with one of its names: a"),
        ("a.json", b'{"x": 1}', None, "'x' is not an integer"),
        ("a.npy", b"nothing", None, "not a .npy file"),
        ("a.npy", npy([1.5]), None, "found float64"),
        ("a.npy", npy(["a"]), None, "found <U1"),
    ],
)
def test_bad_file(name: str, content: bytes, column: str | None, message: str) -> None:
    """It says what is wrong with a file, and where."""
    with pytest.raises(ValueError, match=re.escape(message)):
        read_sizes(io.BytesIO(content), name, name.split(".")[1], column)


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ((), "", "sizes is empty"),
        ((), "1 0", "sizes[1] is 0"),
        (("--maximum", "5"), "10", "--maximum is 5, but standard input has a length of 10"),
        (("--batch", "3"), "1 2", "batch_size is 3, expected at most 2"),
        (("--tokens", "8"), "9", "one item of bucket 9 costs 9: pass tokens=9 or more"),
        (("--tokens", "8", "--batch", "2"), "1 2", "give one of them"),
        (("--buckets", "0"), "1", "argument --buckets"),
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
    """Bad usage ends with 2."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--json - prints the buckets alone."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"10 20")))
    run("--json", "-")
    shown = capsys.readouterr()
    assert json.loads(shown.out)["sizes"] == [10, 20]
    assert "2 buckets: 10 20" in shown.err


@pytest.mark.parametrize(("stream", "after"), [(Terminal(), 9.0), (io.StringIO(), -1.0)])
def test_no_bar(stream: io.StringIO, after: float) -> None:
    """There is no bar for quick work, or without a terminal."""
    with plan.progress_bar(stream, after=after) as show:
        show(1, 2)
    assert not stream.getvalue()


def test_bar() -> None:
    """Slow work has a bar, which is wiped at the end."""
    stream = Terminal()
    with plan.progress_bar(stream, after=-1.0) as show:
        show(16, 32)
        assert stream.getvalue().endswith("16 of 32 ladders")
    assert stream.getvalue().endswith(" \r")


def test_line_to_paste(
    docstrings: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line to paste works."""
    lengths, ladder = tmp_path / "in.txt", tmp_path / "out.json"
    lengths.write_text("\n".join(map(str, docstrings)))

    def double(input_ids: torch.Tensor) -> torch.Tensor:
        return 2 * input_ids

    for options, expected in (([], "buckets=["), (["--json", str(ladder)], "plan='")):
        assert run(str(lengths), "--buckets", "3", *options) == 0
        line = capsys.readouterr().out.splitlines()[-1].strip()
        assert expected in line
        names = {"bucketed": bucketed, "model": double}
        wrapped = eval(line.replace("True", "{'backend': 'eager'}"), names)  # noqa: S307
        assert wrapped(torch.ones(1, 3)).shape == (1, 3)
        assert next(iter(wrapped.stats().hits))[0] == Buckets.fit(docstrings, 3).bucket_for(3)


def test_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says why a maximum wastes more than the table."""
    lengths = tmp_path / "in.txt"
    lengths.write_text("3 5 9 12 30 41 60 61 62")
    assert run(str(lengths), "--buckets", "4") == 0
    assert "above the table" not in capsys.readouterr().out
    assert run(str(lengths), "--buckets", "4", "--maximum", "500") == 0
    shown = capsys.readouterr().out
    assert "above the table, which knows no length above 62; with --maximum 500, 4 more" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--buckets", "0"], "argument --buckets: '0' is no whole number from 1 on"),
        (["--multiple-of", "x"], "argument --multiple-of: 'x' is no whole number from 1 on"),
        (["--maximum", "10"], "--maximum is 10, but .* has a length of 62"),
    ],
)
def test_bad_option(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error names the option as it is typed."""
    lengths = tmp_path / "in.txt"
    lengths.write_text("3 5 62")
    with pytest.raises(SystemExit) as caught:
        run(str(lengths), *options)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown)
    assert "Buckets.fit" not in shown
    assert "_count" not in shown


def test_lists() -> None:
    """bucketed() takes lists of sizes."""
    x = torch.ones(3)
    for given in ([4, 8], (4, 8), range(4, 9, 4), {"t": [4, 8]}):
        wrapped = bucketed(lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=given)
        wrapped(x)
        assert wrapped.stats().hits == {(4,): 1}
    collate = BucketCollator([4, 8], {1: "t"})
    assert collate([x, torch.ones(5)]).shape == (2, 8)
    with pytest.raises(ValueError, match="Buckets"):
        bucketed(lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=[])
