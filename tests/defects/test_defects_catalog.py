"""The catalog: torchguard's own defects, then those of plug-ins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchguard
from support.child_process import output_of
from torchguard.cli.doctor import guards_as_code
from torchguard.defects import FAMILIES, BrokenDefect, Defect, all_defects
from torchguard.defects.catalog import built_in, find
from torchguard.defects.doctor import DoctorReport

OWN = [row for row in built_in() if isinstance(row, Defect)]


class TestOwn:
    def test_complete(self) -> None:
        """Every defect that a file of probes/ defines is in, by family and then by id."""
        keys = [(FAMILIES.index(row.family), row.id) for row in OWN]
        assert keys == sorted(keys)
        folder = Path(torchguard.__file__).parent / "defects" / "probes"
        written = [
            name
            for path in folder.glob("*.py")
            for name in re.findall(
                r"^@(?:\w+_defect|_miscompiled)\(\n(?:    .*\n)+\)\ndef (\w+)",
                path.read_text(encoding="utf-8"),
                flags=re.MULTILINE,
            )
        ]
        assert sorted(name.replace("_", "-") for name in written) == sorted(row.id for row in OWN)
        assert len(built_in()) == len(OWN) >= 37

    def test_texts(self) -> None:
        """Each says what goes wrong, where it is discussed, and what to do."""
        for row in OWN:
            assert 20 < len(row.summary) <= 90, row.id
            assert all(url.startswith("https://") for url in row.upstream), row.id
            assert row.guards or row.planned or row.advice, row.id

    def test_out_garbage(self) -> None:
        """Each guard restores what the row of a failing out= says that it restores."""
        import torch  # noqa: PLC0415 - of this file this test alone needs it

        from torchguard.defects.probes import failed_writes  # noqa: PLC0415 - imports torch

        found = find("out-garbage")
        assert guards_as_code(found.guards) == "guarded(data=True)"
        assert found.guarded_probe is not None
        assert found.guarded_probe() is None
        assert 'guarded() and install("out") restore shape and storage' in found.limits
        for scope in (torchguard.guarded, lambda: torchguard.install("out")):
            damages = set()
            for _, dtype, call in failed_writes._OUT_CASES:
                for out in (torch.empty(0, dtype=dtype), torch.full((3, 3), 77, dtype=dtype)):
                    version = out._version
                    with scope():
                        damage = failed_writes._damage_of(out, call)
                    damages.add(damage)
                    assert damage is None or out._version > version
            assert damages == {None, "data overwritten"}

    def test_detected(self) -> None:
        """A guard is said to detect a defect only where the damage is still done."""
        finders = ("check_consistent",)
        assert {row.id for row in OWN if row.only_detects} == {"storage-shrunk"}
        assert {row.id for row in OWN if row.guards == finders} == {"storage-shrunk"}


def test_the_front_door_imports_no_probe_and_the_catalog_no_compiler() -> None:
    program = """
        import sys, torchguard
        print(*(name for name in sys.modules if name.startswith("torchguard.defects.")))
        from torchguard.defects import all_defects
        all_defects()
        print("torch._dynamo" in sys.modules)
    """
    imported, *_, compiler = output_of(program).splitlines()  # a broken plug-in may print
    assert (imported, compiler) == ("", "False")


class TestPlugins:
    @pytest.mark.usefixtures("plugin")
    def test_order(self) -> None:
        """Defects of plug-ins come after torchguard's own, each once."""
        names = [row.id for row in all_defects()]
        assert names.index("resize-locked") < names.index("planted-absent")
        assert "planted-single" in names
        assert len(names) == len(set(names))

    @pytest.mark.usefixtures("plugin")
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("c-again:planted-live", "repeats an id that belongs to the entry point 'a-planted'"),
            ("d-not-one", "gives str, expected torchguard.defects.Defect"),
            ("e-missing", "fails to load: ModuleNotFoundError: No module named"),
            ("f-exits", "fails to load: SystemExit: bye"),
            ("g-wrong[0]", "guards is 'resize': it has to be a tuple of texts"),
            ("g-wrong[1]", "probe is 'absent': it has to be a function"),
        ],
    )
    def test_broken(self, report: DoctorReport, name: str, reason: str) -> None:
        """A plug-in that can't be used is a row that says why."""
        (broken,) = (row for row in all_defects() if row.id == name)
        assert isinstance(broken, BrokenDefect)
        assert reason in broken.reason
        assert "of the package planted" in broken.reason
        (shown,) = (row for row in report.rows if row.id == name)
        assert (shown.bare.status, shown.bare.detail) == ("broken", broken.reason)
