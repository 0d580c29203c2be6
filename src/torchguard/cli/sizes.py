"""Sizes from a file: .npy, .txt, .csv and .json."""

from __future__ import annotations

import csv
import io
import json
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.histogram import Sizes

FORMATS = ("npy", "txt", "csv", "json")
_NPY = b"\x93NUMPY"


def read_sizes(
    stream: BinaryIO, name: str, kind: str | None = None, column: str | None = None
) -> Sizes:
    """Read sizes from an open file; ``kind`` is one of ``FORMATS``, None to tell by the content."""
    content = stream.read()
    if kind is None:
        kind = _kind(content, column)
    if column is not None and kind in {"npy", "txt"}:
        raise ValueError(f"{name}: a {kind} file has no columns")
    if kind == "npy":
        return _from_npy(content, name)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text: {error}") from None
    if kind == "txt":
        lines = enumerate(text.splitlines(), start=1)
        return [_integer(word, f"{name}:{n}") for n, line in lines for word in line.split()]
    return _from_csv(text, name, column) if kind == "csv" else _from_json(text, name, column)


def _kind(content: bytes, column: str | None) -> str:
    if content.startswith(_NPY):
        return "npy"
    start = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in {b"[", b"{"}:
        return "json"
    # A text begins with a number; what does not has the names of its columns there.
    named = not start.split()[0].lstrip(b"+-").isdigit() if start else False
    return "csv" if column is not None or named or b"," in start else "txt"


def _from_npy(content: bytes, name: str) -> NDArray[np.int64]:
    try:
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{name}: not a .npy file of integers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        found = getattr(array, "dtype", "an archive")
        raise ValueError(f"{name}: expected integers, found {found}")
    return array.reshape(-1)


def _integer(text: Any, where: str) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {text!r} is not an integer") from None


def _from_csv(text: str, name: str, column: str | None) -> list[int]:
    lines = csv.reader(io.StringIO(text, newline=""))
    rows = [(lines.line_num, row) for row in lines if row]
    if not rows:
        return []
    header = rows[0][1]
    if column is None and len(header) > 1:
        raise ValueError(f"{name}: which column? pass --column with one of {', '.join(header)}")
    if column is not None and column not in header:
        raise ValueError(f"{name}: there is no column {column!r}; there are {', '.join(header)}")
    place = 0 if column is None else header.index(column)
    if column is not None or not header[0].strip().lstrip("+-").isdigit():
        rows = rows[1:]  # without the names of the columns
    sizes = []
    for number, row in rows:
        if place >= len(row):
            raise ValueError(f"{name}:{number}: {len(row)} columns, expected {place + 1} or more")
        sizes.append(_integer(row[place], f"{name}:{number}"))
    return sizes


def _from_json(text: str, name: str, column: str | None) -> list[int] | dict[int, float]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not JSON: {error}") from None
    if isinstance(document, dict) and column is not None:
        if column not in document:
            raise ValueError(f"{name}: there is no {column!r}; there are {', '.join(document)}")
        document, column = document[column], None
    if isinstance(document, dict):
        # JSON has no integer keys: a histogram {"128": 5} comes with texts.
        return {_integer(size, f"{name}: a key"): count for size, count in document.items()}
    if not isinstance(document, list):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument's type
            f"{name}: expected a list of sizes or {{size: how often}}"
        )
    if column is not None or any(isinstance(entry, dict) for entry in document[:1]):
        document = [_field(entry, column, f"{name}[{i}]") for i, entry in enumerate(document)]
    return document


def _field(entry: Any, column: str | None, where: str) -> Any:
    if not isinstance(entry, dict) or column is None or column not in entry:
        names = ", ".join(entry) if isinstance(entry, dict) else "no names"
        raise ValueError(f"{where}: which field? pass --column with one of its names: {names}")
    return entry[column]
