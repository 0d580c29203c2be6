"""What torchguard says leads to its entry in ``docs/reference/messages.md``, and is in it."""

from __future__ import annotations

import logging
import pickle
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchguard
from torchguard import errors
from torchguard._public import address

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text(encoding="utf-8")
ENTRIES = {
    each.partition("\n")[0].lower().replace(" ", "-"): each for each in PAGE.split("\n### ")[1:]
}
ADDRESS = re.compile(r"\s+See (https://\S+/messages\.html#(\S+))$")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make_messages.py"))


def test_the_page_has_every_text_of_the_source(made: dict[str, Any]) -> None:
    assert made["page"]() == PAGE, "run python docs/make_messages.py"


def test_each_entry_says_what_to_do_and_how_to_silence_it(made: dict[str, Any]) -> None:
    warned = {each.entry for each in made["texts"]() if each.kind.endswith("Warning")}
    assert len(warned) > 30
    assert [name for name, text in ENTRIES.items() if "**What to do:** " not in text] == []
    warned |= {"overlap"}
    assert [name for name in warned if "\nSilence it: `" not in ENTRIES[name]] == []


def test_the_filter_of_an_entry_fits_its_text_and_no_other(made: dict[str, Any]) -> None:
    known = [each for each in made["texts"]() if each.kind.endswith("Warning")]
    known = [each for each in known if made["is_known"](each.text)]
    for each in known:
        silenced = {
            other.entry
            for other in known
            if re.match(made["filter_of"](each.text), f"torchguard: {other.text}", re.IGNORECASE)
        }
        assert silenced == {each.entry}


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('warn_user("a-new-one", "text")', r"texts without a heading \['a-new-one'\]"),
        ('return _Fault("a-new-one", f"text {1}")', r"texts without a heading \['a-new-one'\]"),
        ('warnings.warn("a text")', "new.py:2: .* does not go through message"),
        ('warnings.warn_explicit("a text", W, "f", 1)', "does not go through message"),
        ('logger.warning("a text")', "does not go through message"),
    ],
)
def test_a_new_message_without_an_entry_is_an_error(
    made: dict[str, Any], code: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "new.py").write_text(f"def f():\n    {code}\n", encoding="utf-8")
    texts, namespace = made["texts"](), made["page"].__globals__
    namespace["SOURCE"] = tmp_path
    try:
        with pytest.raises(ValueError, match=fault):
            namespace["texts"] = lambda: [*texts, *made["texts"]()]
            made["page"]()
    finally:
        namespace["texts"], namespace["SOURCE"] = made["texts"], made["SOURCE"]


# ---- what is said in a program ----


def _halved() -> None:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("out of memory")
        loss: torch.Tensor = model(x).mean()
        return loss

    model = nn.Linear(3, 1)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.run(loss_of, torch.ones(8, 3), retry="halve")


def _skipped() -> None:
    from torchguard.patching import install  # noqa: PLC0415

    install._warn_of({"x": "it leaves a tensor broken"})


def _miscompiled() -> None:
    function = torchguard.verified(backend=lambda *_: lambda x: (x * 3,))(lambda x: x * 2)
    function(torch.ones(2))


def _overlap() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with torchguard.guarded("overlap"):
        x -= x[:, :1]


def _not_cleared() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchguard.transaction(model, optimizer)
    for _ in range(2):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def _log_of_a_resize() -> None:
    with pytest.raises(RuntimeError):
        torchguard.safe_resize_(torch.from_numpy(np.zeros(4)), 5, 5)


SAID: dict[str, tuple[Callable[[], None], str]] = {
    "batch-halved": (_halved, "a batch of 8 samples ran out of memory; it was run in parts of 4"),
    "guard-skipped": (_skipped, "the guard 'x' is off, because it does not protect: it leaves"),
    "miscompiled": (_miscompiled, "the backend <lambda> (torch "),
    "overlap": (_overlap, "__isub__ reads memory that it writes"),
    "gradients-not-cleared": (_not_cleared, "transaction: the gradients that SGD has used"),
    "rolled-back": (_log_of_a_resize, "resize: safe_resize_ failed ("),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("entry", SAID)
def test_a_message_begins_with_the_project_and_ends_with_its_entry(
    entry: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchguard._events._events", {})
    caplog.set_level(logging.DEBUG, "torchguard")
    program, begins = SAID[entry]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    said = [str(each.message) for each in caught if "torchguard" in str(each.message)]
    said += [each.getMessage() for each in caplog.records if each.name == "torchguard"]
    assert any(each.startswith(f"torchguard: {begins}") for each in said)
    for each in said:
        found = ADDRESS.search(each)
        assert found is not None
        assert each.startswith("torchguard: ")
        assert found[1] == address(found[2])
        shown = re.findall(r"```(?:text|none)\n(.*?)\n```", ENTRIES[found[2]], re.DOTALL)
        texts = [line for block in shown for line in re.split(r"\n(?=\S)", block)]
        patterns = [
            ".*".join(map(re.escape, re.sub(r"^\w+Warning: ", "", text).split("…")))
            for text in texts
        ]
        assert any(re.match(pattern, each, re.DOTALL) for pattern in patterns)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_the_traceback_of_an_error_ends_with_its_entry() -> None:
    with pytest.raises(errors.NonResizableStorageError) as caught:
        torchguard.safe_resize_(torch.ones(4).share_memory_(), 1000)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):  # noqa: S301
        *text, last = "".join(traceback.format_exception(error)).splitlines()
        assert last == f"See {address('nonresizablestorageerror')}"
        assert sum("See http" in line for line in text) == 0
        assert "http" not in str(error)
    assert ENTRIES.keys() >= {
        each.__name__.lower()
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.TorchGuardError)
    }
