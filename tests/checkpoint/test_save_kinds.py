"""What ``torch.save`` can save, ``save()`` saves too, byte for byte."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import functools
import pathlib
import random
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import torchguard


class Plain:
    def __init__(self) -> None:
        self.weight, self.more = torch.ones(3), [torch.zeros(2)]


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.ones(2)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


class Subclass(torch.Tensor):
    pass


@dataclasses.dataclass
class Data:
    weight: torch.Tensor


def function() -> None:
    pass


def cyclic_object() -> Plain:
    found = Plain()
    found.more = [found]  # type: ignore[list-item]
    return found


def cyclic_list() -> list[Any]:
    found: list[Any] = [torch.ones(1)]
    found.append(found)
    return found


def adam() -> torch.optim.Optimizer:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


MAKES: dict[str, Any] = {
    "a Namespace": lambda: argparse.Namespace(lr=0.1, weight=torch.ones(2)),
    "None": lambda: None,
    "values without tensors": lambda: [
        *("x", 3, 1.5, 1j, b"x", bytearray(b"x"), {1}, range(3), slice(1, 2), ..., signal.SIGINT),
        *(np.float32(1), pathlib.PurePosixPath("a"), collections.Counter("ab"), re.compile("a")),
        *(torch.Size((1, 2)), torch.float32, torch.device("cpu"), dt.date(2026, 1, 2)),
    ],
    "an ndarray": lambda: np.arange(3),
    "an untyped storage": lambda: torch.ones(2).untyped_storage(),
    "a typed storage": lambda: torch.ones(2).storage(),
    "a TensorDataset": lambda: torch.utils.data.TensorDataset(torch.ones(3)),
    "a distribution": lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
    "a function": lambda: function,
    "a builtin": lambda: len,
    "a class": lambda: Plain,
    "a partial": lambda: functools.partial(function),
    "a plain object": Plain,
    "an object with slots": Slots,
    "an object that holds itself": cyclic_object,
    "a list that holds itself": cyclic_list,
    "a data class": lambda: Data(torch.ones(2)),
    "a named tuple": lambda: Pair(torch.ones(1), 2),
    "an OrderedDict": lambda: collections.OrderedDict(a=torch.ones(1)),
    "a defaultdict": lambda: collections.defaultdict(list, a=[torch.ones(2)]),
    "a deque": lambda: collections.deque([torch.ones(1)]),
    "a module": lambda: torch.nn.Linear(2, 2),
    "an optimizer": adam,
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a CSR tensor": lambda: torch.eye(3).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a jagged tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a meta tensor": lambda: torch.ones(2, device="meta"),
    "an inference tensor": inference_tensor,
    "Python's random state": random.getstate,
    "an exception": lambda: ValueError("x"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKES)
def test_the_file_is_that_of_torch(name: str, tmp_path: Path) -> None:
    obj = MAKES[name]()
    files = [tmp_path / folder / "model.pt" for folder in ("plain", "called", "installed")]
    for file in files:
        file.parent.mkdir()
    torch.save(obj, files[0])
    torchguard.save(obj, files[1])
    with torchguard.install("save"):
        torch.save(obj, files[2])
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
