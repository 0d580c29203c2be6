"""The scripts of docs/tutorials/survive.md, killed and short of memory, and resumed each time."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import torchguard
from support.child_process import output_of
from support.document import blocks
from support.slow import slow_except
from support.small_training import bits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "survive.md"
SCRIPTS = {
    each.kind: each.code for each in blocks(PAGE.read_text("utf-8")) if each.language == "py"
}

PROGRAM = f"""
import json, sys
from pathlib import Path
import torch._dynamo  # which each optimizer would import
sys.path.insert(0, {str(ROOT / "tests")!r})
import torchguard
from support.survivor import Script, survive

options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
given = ["--steps", str(options["steps"]), "--every", str(options["every"]), *options["given"]]
calm, killed = (
    Script(folder / options["script"], folder / name, given, options["ranks"])
    for name in ("calm", "killed")
)
whole = calm.run(memory=options.get("memory"))
assert not any(whole.codes), whole
result = {{"calm": whole.lines, "counts": whole.counts}}
if options["kills"]:
    names = ("share", "kills", "seed", "number")
    result["killed"] = survive(killed, whole.counts, *map(options.get, names))
for kill in options["then"]:
    outcome = killed.run(kill and tuple(kill))
    result.setdefault("then", []).append([outcome.codes, outcome.lines])
print(json.dumps(result))
"""

KILLED: dict[str, dict[str, Any]] = {
    "in each phase": {"steps": 8, "every": 1, "share": 0.4, "kills": 4},
    "often": {"kills": 25},
    "foreach": {"kills": 8, "given": ["--optimizer", "foreach"]},
    "scaler": {"kills": 8, "given": ["--precision", "float16"]},
    "workers": {
        "kills": 8,
        "given": ["--workers", "2", "--optimizer", "foreach", "--precision", "float16"],
    },
    "one of two ranks": {"kills": 8, "ranks": 2},
    # No checkpoint comes before the end, except those of the interrupts.
    "by Ctrl-C": {"steps": 12, "every": 12, "share": 0.2, "kills": 6, "number": signal.SIGINT},
}


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    """Run a script once without a failure, and once killed; return what both have printed."""
    for name, code in SCRIPTS.items():
        (folder / name).write_text(code, encoding="utf-8")
    default = {
        "script": "train.py", "steps": 40, "every": 2, "share": 0.1, "kills": 0, "seed": 3,
        "ranks": 1, "given": [], "number": signal.SIGKILL, "then": [],
    }  # fmt: skip
    printed = output_of(PROGRAM, json.dumps({**default, **options}), str(folder))
    return json.loads(printed.splitlines()[-1])  # type: ignore[no-any-return]


def states(run: Path) -> list[Any]:
    """The last checkpoints of all ranks; the script does not seed the generators of Python."""
    found = [torchguard.load(file) for file in sorted((run / "newest").glob("rank-*.pt"))]
    return [bits({**each, "random": each["random"]["cpu"]}) for each in found]


@pytest.mark.parametrize("name", slow_except(KILLED, "in each phase"))
def test_killed_it_trains_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    """Both runs have printed the same, and have ended with the same checkpoints."""
    options = KILLED[name]
    runs = trained(tmp_path, **options)
    lines = runs["calm"].items()
    if options.get("number") == signal.SIGINT:  # one that comes before a print() is not lost
        assert runs["killed"].items() <= lines
    else:
        assert runs["killed"].items() == lines
    assert len(lines) == options.get("steps", 40)
    assert states(tmp_path / "killed") == states(tmp_path / "calm")
    assert len(states(tmp_path / "calm")) == options.get("ranks", 1)
    scales = {line.split()[-1] for line in runs["calm"].values()}
    assert len(scales) == (5 if "float16" in options.get("given", ()) else 1)  # grows, overflows


@pytest.mark.slow
def test_pytorch_alone_is_the_same_only_if_nothing_fails(tmp_path: Path) -> None:
    def run(name: str, script: str, **options: Any) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        return trained(tmp_path / name, script=script, steps=12, every=3, **options)

    expected = run("guarded", "train.py")["calm"]
    moments = [("forward", 5500, signal.SIGKILL), ("save", 20, signal.SIGKILL), None]
    alone = run("alone", "plain.py", then=moments)
    assert alone["calm"] == expected
    (killed, resumed, torn) = alone["then"]
    assert (killed[0], resumed[0], torn[0]) == ([-signal.SIGKILL], [-signal.SIGKILL], [1])
    assert killed[1].items() <= expected.items()  # up to step 6, whose checkpoint is whole
    assert list(resumed[1]) == ["7", "8", "9"]
    assert not resumed[1].items() & expected.items()  # other activations are dropped
    short = run("short", "plain.py", memory=3)["calm"]
    assert 0 < len(short) < len(expected)
    after = min(int(step) for step in expected if step not in short)
    assert not any(short[step] == expected[step] for step in short if int(step) > after)
