"""The record of what a step adds on a GPU is what is counted now, and so is the page."""

from __future__ import annotations

import json

import costs


def test_the_record_and_the_page_are_current() -> None:
    found = costs.counted()
    assert found == json.loads(costs.RECORD.read_text(encoding="utf-8"))
    assert costs.table(found) in costs.PAGE.read_text(encoding="utf-8")


def test_nothing_waits_but_what_reads() -> None:
    record = json.loads(costs.RECORD.read_text(encoding="utf-8"))
    for rows in record.values():
        waits = {name: row[1] for name, row in rows.items() if row[1]}
        assert waits == {
            "transaction, skip_nonfinite": 1,
            'install("checks")': 1,
            'install("all")': 1,
        }


def test_a_transaction_copies_by_one_launch_a_dtype() -> None:
    record = json.loads(costs.RECORD.read_text(encoding="utf-8"))
    launches = {what: rows["transaction"][0] for what, rows in record.items()}
    assert launches == {
        "decoder, AdamW fused": 0,
        "decoder, AdamW foreach": 1,
        "convolutions, AdamW fused": 2,  # buffers of two dtypes
        "convolutions, AdamW foreach": 3,
    }
