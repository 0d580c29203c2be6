"""``events()`` and the logger: what a guard did is counted by place, and logged once aloud."""

from __future__ import annotations

import logging
import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import torchguard
from torchguard import _events
from torchguard._events import counts, record, summary
from torchguard.errors import TorchGuardWarning, TrainingSetupWarning


@pytest.fixture(autouse=True)
def _no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the events of other tests."""
    monkeypatch.setattr(_events, "_events", {})


def test_events_are_counted_by_kind_guard_and_line(caplog: pytest.LogCaptureFixture) -> None:
    """The first of a line is a warning, later ones are DEBUG; each record has its event."""
    caplog.set_level(logging.DEBUG, "torchguard")
    line = sys._getframe().f_lineno + 2
    for size in (5, 6):
        record("rolled_back", "resize", f"resize_ to {size} failed")
    record("file_kept", "save", "the disk is full")
    first, second = torchguard.events()
    assert (first.kind, first.guard, first.message, first.count) == (
        *("rolled_back", "resize", "resize_ to 6 failed", 2),
    )
    assert first.where.endswith(f"test_events.py:{line}")
    assert first.first <= first.last <= second.first
    assert second.count == 1
    levels = [entry.levelname for entry in caplog.records]
    assert levels == ["WARNING", "DEBUG", "WARNING"]
    assert caplog.records[1].torchguard == first  # type: ignore[attr-defined]
    said = caplog.records[0].getMessage()
    assert said.startswith("torchguard: resize: resize_ to 5 failed (")
    assert said.endswith(
        " See https://torchguard.github.io/torchguard/reference/messages.html#rolled-back"
    )
    assert counts() == {"rolled_back": 2, "file_kept": 1}
    assert "2 x rolled_back" in summary()


def test_an_event_that_something_else_says_is_logged_at_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python's handler of last resort writes what has level WARNING to stderr, as warnings do."""
    caplog.set_level(logging.DEBUG, "torchguard")
    x = torch.arange(6.0).reshape(2, 3)
    with torchguard.install("overlap"), pytest.warns(torchguard.OverlapWarning):
        x -= x[:, :1]
    wrong = torchguard.verified(backend=lambda *_: lambda x: (x * 3,))(lambda x: x * 2)
    with pytest.warns(torchguard.MiscompilationWarning):
        wrong(torch.ones(2))
    with torchguard.install("checks"), pytest.raises(IndexError):
        torch.nn.functional.one_hot(torch.tensor([5]), 3)
    net = torch.nn.Linear(2, 2)
    with pytest.warns(TrainingSetupWarning):
        torchguard.transaction(net, torch.optim.SGD([net.weight], lr=0.1))
    ours: list[Any] = [entry for entry in caplog.records if entry.name == "torchguard"]
    kinds = [(entry.levelname, entry.torchguard.kind) for entry in ours]
    told = ("overlap", "miscompiled", "out_of_range", "training_setup")
    assert kinds == [("INFO", kind) for kind in told]
    assert _first_event("overlap").guard == "overlap"
    assert "one_hot" in _first_event("out_of_range").message
    assert "lambda" in _first_event("miscompiled").message


def test_each_kind_has_an_advice_and_the_page_gives_it() -> None:
    page = Path(__file__).parents[2].joinpath("docs/reference/events.md").read_text("utf-8")
    assert set(_events.WHAT_TO_DO) == set(get_args(_events.Kind))
    for kind, advice in _events.WHAT_TO_DO.items():
        assert re.search(rf"^\| `{kind}` \| .* \| {re.escape(advice)} \|$", page, re.MULTILINE)


def test_nothing_happened_is_an_empty_tuple_and_an_empty_summary() -> None:
    assert torchguard.events() == ()
    assert summary() == ""
    assert logging.getLogger("torchguard").handlers == []


def test_at_most_a_thousand_places_are_told_apart() -> None:
    for line in range(1005):
        record("overlap", "overlap", "copied", where=f"generated.py:{line}")
    found = torchguard.events()
    assert len(found) == 1001
    assert (found[-1].where, found[-1].count) == ("elsewhere", 5)


def test_a_logger_that_raises_does_not_hide_the_exception_of_the_program() -> None:
    """``record`` runs while an exception is on its way."""

    def refuse(_: logging.LogRecord) -> bool:
        raise OSError("the log server is gone")

    logger = logging.getLogger("torchguard")
    logger.addFilter(refuse)
    try:
        record("overlap", "overlap", "copied")
    finally:
        logger.removeFilter(refuse)
    assert counts() == {"overlap": 1}


def test_threads_lose_no_event() -> None:
    def work() -> None:
        for _ in range(200):
            record("overlap", "overlap", "copied", where="model.py:1")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts() == {"overlap": 1600}


def _first_event(kind: str) -> _events.Event:
    [event] = [each for each in torchguard.events() if each.kind == kind]
    assert event.where.rpartition(":")[0] == __file__
    assert event.count == 1
    return event


def test_a_block_that_is_rolled_back_is_an_event() -> None:
    tensor = torch.zeros(3)
    with pytest.raises(IndexError), torchguard.rollback_on_error(tensor, data=True):
        tensor[7] = 1
    assert _first_event("rolled_back").guard == "rollback_on_error"


def test_a_state_that_does_not_load_is_an_event_at_the_line_that_loads_it() -> None:
    line = sys._getframe().f_lineno + 2
    with pytest.raises(RuntimeError):
        torchguard.load_state_dict(torch.nn.Linear(2, 2), {"weight": torch.ones(3, 3)})
    (event,) = torchguard.events()
    assert event.where == f"{__file__}:{line}"


def test_a_file_that_is_kept_is_an_event(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):  # the second on Python 3.14
        torchguard.save(lambda: None, tmp_path / "model.pt")
    assert "model.pt" in _first_event("file_kept").message


def test_read_only_memory_that_is_copied_is_an_event() -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with torchguard.install("numpy"):
        torch.from_numpy(frozen)
    assert _first_event("copied_on_write").guard == "numpy"


def test_a_batch_that_is_halved_and_a_step_that_is_skipped_are_events() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torchguard.transaction(net, optimizer, skip_nonfinite=True)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss: torch.Tensor = net(part).mean()
        return loss * float("nan")

    with pytest.warns(TorchGuardWarning):
        step.run(loss_of, torch.ones(4, 2), retry="halve")
    assert _first_event("batch_halved").guard == "transaction"
    assert _first_event("step_skipped").guard == "transaction"
    assert _first_event("rolled_back").guard == "transaction"


def test_a_leak_is_an_event() -> None:
    mean = torchguard.bucketed(torch.mean, dims=({0: "t"},), buckets=[8])
    with pytest.raises(torchguard.PaddingLeakError):
        mean(torch.arange(5.0))
    assert _first_event("padding_leak").guard == "bucketed"


def test_plans_and_waste_are_tables_in_a_notebook() -> None:
    buckets = torchguard.Buckets([4, 8])
    assert "<tr><td>size</td><td>4</td><td>8</td></tr>" in html_of(buckets)
    double = torchguard.bucketed(lambda x: 2 * x, dims=({0: "t"},), buckets=buckets)
    double(torch.ones(3))
    shown = html_of(double.stats())
    assert "<tr><th>t</th><th>calls</th></tr><tr><td>4</td><td>1</td></tr>" in shown
    assert "1 calls, waste 33.3 %" in shown


def html_of(shown: Any) -> str:
    html: str = shown._repr_html_()
    return html


def test_events_and_reports_are_tables_in_a_notebook() -> None:
    record("file_kept", "save", "a <b> & c", "here.py:1")
    shown: Any = torchguard.events()
    assert "<td>a &lt;b&gt; &amp; c</td><td>here.py:1</td>" in shown._repr_html_()
    report: Any = torchguard.VerificationReport(())
    assert report._repr_html_().startswith("<table><tr><th>graph</th>")
    assert "another instance of this code" in report._repr_html_()
