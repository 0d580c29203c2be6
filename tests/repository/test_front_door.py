"""The public names: each comes from ``torchguard``, and is imported when it is first used."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of

STUB = Path(torchguard.__file__).with_suffix(".pyi")
TYPED = Path(__file__).parent / "typed" / "api.py"


def test_the_stub_has_the_same_names_from_the_same_modules() -> None:
    """Type checkers read the stub, Python the tables in __init__.py."""
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"torchguard.{module}" for name, module in torchguard._HOME.items()}  # type: ignore[attr-defined]
    assert imported == {**homes, "__version__": "torchguard._public", "errors": "torchguard"}
    [listed] = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(listed) == sorted(torchguard.__all__)


def test_the_typed_program_uses_every_public_name() -> None:
    """It is what mypy and pyright check."""
    text = TYPED.read_text(encoding="utf-8")
    body = text[text.index("def mutation") :]
    unused = [name for name in torchguard.__all__ if not re.search(rf"\b{name}\b", body)]
    assert unused == []


def test_public_objects_say_that_they_are_torchguards() -> None:
    """In a repr, in a traceback and in a pickle; errors that few catch are in one module."""
    homes = dict.fromkeys(torchguard.__all__[1:], "torchguard")  # after __version__
    for name, error in vars(torchguard.errors).items():
        if isinstance(error, type) and issubclass(error, (Exception, Warning)):
            homes.setdefault(name, "torchguard.errors")
    for name, home in homes.items():
        found = getattr(sys.modules[home], name)
        assert found.__module__ == home, name
        assert pickle.loads(pickle.dumps(found)) is found  # noqa: S301 - made here


def test_few_names_are_at_the_front_door_and_dir_shows_them_alone() -> None:
    """No folder is among them; ``errors`` has the exceptions that few catch."""
    assert len(torchguard.__all__) <= 40
    assert dir(torchguard) == sorted([*torchguard.__all__, "errors"])
    errors = [name for name in torchguard.__all__ if name.endswith(("Error", "Warning"))]
    assert len([name for name in errors if name != "OverlapWarning"]) <= 6
    assert torchguard.__doc__ is not None
    for name in torchguard.__all__[1:]:
        assert f"`{name}`" in torchguard.__doc__ or name in errors, name


def test_what_functions_return_can_be_named() -> None:
    """For annotations, which Python may evaluate."""
    for name in ("Transaction", "Bucketed", "BucketedModule", "Verified"):
        assert name not in torchguard.__all__
        assert isinstance(getattr(torchguard, name), type)
    with pytest.raises(TypeError):
        isinstance(1, torchguard.Verified)  # type: ignore[misc]


def test_importing_torchguard_imports_neither_torch_nor_a_room() -> None:
    program = (
        "import sys, torchguard; print(sorted(name for name in sys.modules "
        "if name.partition('.')[0] in ('torch', 'numpy', 'torchguard')))"
    )
    assert output_of(program, fresh=True) == "['torchguard', 'torchguard._public']\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("bucketd", "bucketed"), ("Bucket", "Buckets"), ("transactions_", "transaction")],
)
def test_a_name_that_is_misspelled_is_told_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"; did you mean torchguard\.{meant}\?$"):
        getattr(torchguard, typed)
    assert not hasattr(torchguard, "__wrapped__")  # far from all names


FRONT: Any = torchguard  # for what type checkers refuse
LENGTHS = [{"ids": torch.ones(length)} for length in (2, 3)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda *_: FRONT.SaveError, "it is torchguard.errors.SaveError"),
        (lambda model, _, step: step.run(torch.ones(2), model), "write run(loss_of, batch)"),
        (
            lambda model, _, step: step.run(lambda x: model(x).sum().item(), torch.ones(2)),
            "without .item()",
        ),
        (
            lambda model, optimizer, _: torchguard.transaction(optimizer, model),
            "write transaction(model, optimizer)",
        ),
        (
            lambda model, *_: torchguard.transaction(model, torch.optim.LBFGS(model.parameters())),
            "rollback_on_error(model, data=True)",
        ),
        (lambda *_: torchguard.BucketCollator([8], {"ids": {0: "t"}})(LENGTHS), "is the batch"),
        (lambda *_: torchguard.pad_to_bucket(torch.ones(9), 0, [4, 8]), "pad_to_bucket: x has 9"),
        (lambda *_: FRONT.install("resize,out"), "write install('resize', 'out')"),
    ],
)
def test_a_message_says_what_to_type(call: Callable[..., Any], text: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    step = torchguard.transaction(model, optimizer)
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        call(model, optimizer, step)
    assert text in str(raised.value)
    assert sum(step.stats().rollbacks.values()) == (text == "without .item()")
