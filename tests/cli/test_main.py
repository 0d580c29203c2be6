"""``python -m torchguard``: what is common to its commands, and the small ones: demo and verify."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import torchguard
from torchguard.__main__ import main
from torchguard.cli import DOCUMENTATION, demo
from torchguard.defects.catalog import built_in, built_in_ids

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("start", [["-m", "torchguard"], ["torchguard"]], ids=["module", "script"])
def test_nothing_that_prints_a_text_imports_torch(start: list[str], tmp_path: Path) -> None:
    """As ``--version`` does: torch takes seconds to import, and here it would raise."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    script = tmp_path / "torchguard"  # what pip makes of [project.scripts]
    script.write_text("import sys\nfrom torchguard.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    arguments = [str(script)] if start == ["torchguard"] else start

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *arguments, *more]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, cwd="/", env=environment
        )

    assert run("--version").stdout == f"torchguard {torchguard.__version__}\n"
    for command in ("", "demo", "doctor", "run", "plan", "fuzz"):
        assert run(*command.split(), "--help").stdout.startswith("usage: "), command
    assert "torch was imported" in run("run", "x.py").stderr  # the test can fail


def test_version_of_another_program(tmp_path: Path) -> None:
    """Another program's --version is its own."""
    program = tmp_path / "mine.py"
    program.write_text("import torchguard\nprint('mine 2')\n")
    for line in ([str(program), "--version"], [str(program), "-m", "torchguard", "--version"]):
        done = subprocess.run(
            [sys.executable, *line], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stdout == "mine 2\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help, and no command at all, lists the commands."""
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    shown, errors = capsys.readouterr()
    assert shown.startswith("usage: python -m torchguard")
    for command in ("demo", "doctor", "run", "plan", "fuzz"):
        assert f"\n    {command} " in shown
    assert "python -m torchguard doctor --only resize-locked" in shown
    assert f"documentation: {DOCUMENTATION}" in shown
    assert not errors


def test_help_of_the_doctor_has_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """They are read from the files of the probes: importing those takes seconds."""
    ids = sorted(row.id for row in built_in())
    assert built_in_ids() == ids
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert ", ".join(ids) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "invalid choice: 'docter'; did you mean 'doctor'?"),
        (["qwertz"], "invalid choice: 'qwertz'; choose from demo, doctor, run, plan, fuzz"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage ends with 2 and names the option."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- demo


ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [act.name for act in demo._ACTS]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the whole demo prints, and its picture."""
    picture = tmp_path_factory.mktemp("demo") / "losses.png"
    line = [sys.executable, "-m", "torchguard", "demo", "--picture", str(picture)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout, picture


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_an_act_loses_on_bare_torch_and_keeps_with_its_guard(
    shown: tuple[str, Path], number: int
) -> None:
    act = shown[0].split("\n\n")[number].splitlines()
    assert act[0].startswith(f"{number + 1}. ")
    assert act[2].startswith("   LOST  bare torch: ")
    assert act[3].startswith(f"   kept  {demo._ACTS[number].guard}: ")
    assert act[-1].endswith(f"/docs/{demo._ACTS[number].page}")
    assert (ROOT / "docs" / demo._ACTS[number].page).exists()


def test_it_says_what_was_lost_and_draws_the_losses(shown: tuple[str, Path]) -> None:
    text, picture = shown
    assert text.splitlines()[-1].startswith("Lost: 5 of 5 on bare torch, ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"the losses: {picture}" in text


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install matplotlib" in demo._drawn({}, str(tmp_path / "losses.png"))


def test_an_act_that_dies_is_lost() -> None:
    process: Any = subprocess.Popen(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    failed, text, _ = demo._ended(process)
    assert failed
    assert text == "the process ended with -9"


# --- verify


def test_whole_files_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.bool)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "model.safetensors")
    state_dict_saver.save(state, checkpoint_id=tmp_path / "dcp")
    paths = [tmp_path / name for name in ("new.pt", "old.pt", "model.safetensors", "dcp")]
    steps: list[tuple[int, int]] = []
    for path in paths:
        found = torchguard.verify_checkpoint(path, progress=lambda *each: steps.append(each))
        assert found
        assert found.size > 0
        assert steps[-1][0] > 0
    assert "has no checksums" in str(torchguard.verify_checkpoint(paths[2]))
    assert main(["verify", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("is whole") == len(paths)


def test_flips_in_a_shard_are_seen_and_the_tensor_is_named(tmp_path: Path) -> None:
    """Bare DCP loads what was flipped."""
    state = {"a": torch.arange(3000.0), "b": torch.arange(3000.0)}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    whole = shard.read_bytes()
    content = state["b"].numpy().tobytes()
    second = whole.find(content, whole.find(content) + 1)
    for place in range(second, second + 12_000, 1200):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        shard.write_bytes(data)
        (fault,) = torchguard.verify_checkpoint(tmp_path / "dcp").faults
        assert "does not hold what was written at b" in fault
    loaded = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    with pytest.raises(RuntimeError, match="no tensor has changed"):
        torchguard.load_sharded(loaded, tmp_path / "dcp")
    assert not loaded["a"].any()
    state_dict_loader.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert loaded["a"].any()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_that_is_cut_off(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    state = {"weight": torch.ones(300)}
    torch.save(state, path) if name == "a.pt" else save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["verify", str(path)]) == 1
    assert "NOT whole" in capsys.readouterr().out
    if name == "a.safetensors":
        assert "weight" in torchguard.verify_checkpoint(path).faults[0]


def test_a_file_that_an_index_lists_is_missed(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    for number in (1, 2):
        save_file({"ab"[number - 1]: torch.ones(2)}, tmp_path / f"model-{number}.safetensors")
    assert torchguard.verify_checkpoint(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    (fault,) = torchguard.verify_checkpoint(tmp_path).faults
    assert "model-2.safetensors is missing" in fault
    index.write_text("{}")
    assert "is damaged" in torchguard.verify_checkpoint(tmp_path).faults[0]


def test_a_sharded_save_that_was_stopped_is_not_whole(tmp_path: Path) -> None:
    """Before its metadata has its name, and when it has written over another one."""
    folder = tmp_path / "run" / "step-1"  # it may lie deeper than the path that is asked for
    state_dict_saver.save({"a": torch.ones(3)}, checkpoint_id=folder)
    (tmp_path / "run" / "notes.metadata.json").write_text("{}")  # of other programs
    assert torchguard.verify_checkpoint(tmp_path / "run")
    metadata = folder / ".metadata"
    (folder / ".metadata.tmp").write_bytes(metadata.read_bytes())
    assert "stopped before its end" in torchguard.verify_checkpoint(folder).faults[0]
    metadata.unlink()
    assert "has no .metadata" in torchguard.verify_checkpoint(folder).faults[0]
    assert not torchguard.verify_checkpoint(tmp_path / "run")


def test_what_is_no_checkpoint_or_is_not_there_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "a.pt")]) == 2
    assert "there is nothing at" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert "no checkpoint of a format" in torchguard.verify_checkpoint(path).faults[0]
    torch.save({"a": 1}, tmp_path / "older", _use_new_zipfile_serialization=False)
    found = torchguard.verify_checkpoint(tmp_path)
    assert found
    assert "notes.txt was not read" in str(found)
