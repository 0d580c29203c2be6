"""``events()`` and the logger: what a guard did is counted by place, and logged once aloud."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

import torchguard
from torchguard import _events
from torchguard._events import counts, record, summary


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
    assert "resize: resize_ to 5 failed" in caplog.records[0].getMessage()
    assert counts() == {"rolled_back": 2, "file_kept": 1}
    assert "2 x rolled_back" in summary()


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
