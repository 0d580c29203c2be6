"""The doctor on a GPU, where some probes do something else; the GPU command runs this file."""

from __future__ import annotations

import pytest

from torchguard.defects.diagnosis import doctor

pytestmark = pytest.mark.cuda

ASK_FOR_A_GPU = ["cudagraph-shapes", "pad-reduction", "pad-dynamic"]


def test_what_asks_for_a_gpu_is_answered_and_closed() -> None:
    report = doctor(ASK_FOR_A_GPU, timeout=60)
    assert [row.id for row in report.rows if row.bare.status in {"timeout", "broken"}] == []
    assert report.failed == ()


def test_no_guard_leaves_a_defect_open() -> None:
    report = doctor(timeout=60)
    assert [(row.id, row.guarded.detail) for row in report.failed] == []
