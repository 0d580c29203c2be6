"""The doctor on the torch at hand: a file of its own, without the planted defects."""

from __future__ import annotations

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from torchguard.defects import runner
from torchguard.defects.catalog import all_defects
from torchguard.defects.diagnosis import doctor

pytestmark = pytest.mark.slow


def test_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the torch at hand every row has an answer, and every guard closes its defect."""
    # C++ that an earlier run has compiled is used again, which a doctor does not do by itself.
    own = runner._environment
    kept = {"TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    monkeypatch.setattr(runner, "_environment", lambda folder: own(folder) | kept)
    report = doctor()
    assert [row.id for row in report.rows] == [row.id for row in all_defects()]
    unanswered = [row for row in report.rows if row.bare.status in {"timeout", "broken"}]
    assert unanswered == []
    assert report.failed == ()
    assert report.exit_status == 0
    # A table in which everything is absent would show nothing of the guards: these two defects
    # are live on every torch there is.
    closed = {row.id for row in report.rows if row.guarded.status == "closed"}
    assert closed >= {"resize-locked", "resize-shared"}
