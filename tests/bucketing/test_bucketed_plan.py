"""A plan that save_plan wrote: the next process starts without work, and only where it may."""

from __future__ import annotations

import itertools
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of, run_ranks
from support.plans import CHANGES, program
from torchguard import Buckets, PaddingLeakError, bucketed
from torchguard.bucketing.decorator import leak_check, output_shapes
from torchguard.bucketing.decorator.auto import read_plan, write_plan


class Work:
    """How often the function ran for a check, and how often sizes were derived."""

    def __init__(self) -> None:
        self.checked = self.derived = 0

    def taken(self) -> tuple[int, int]:
        """Return both, and begin anew."""
        found = self.checked, self.derived
        self.checked = self.derived = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count checks and derivations."""
    counted = Work()
    check: Any = vars(leak_check)["run_undoing_mutations"]
    derive = output_shapes.OutputShapes._derive

    def checking(*args: Any, **kwargs: Any) -> Any:
        counted.checked += 1
        return check(*args, **kwargs)

    def deriving(*args: Any, **kwargs: Any) -> Any:
        counted.derived += 1
        return derive(*args, **kwargs)

    monkeypatch.setattr(leak_check, "run_undoing_mutations", checking)
    monkeypatch.setattr(output_shapes.OutputShapes, "_derive", deriving)
    return counted


def conv(x: torch.Tensor) -> torch.Tensor:
    """(B, 1, T) -> (B, 1, (T - 1) // 2 + 1): zeros beside the data change nothing."""
    return torch.nn.functional.conv1d(x, torch.ones(1, 1, 3), stride=2, padding=1)


OPTIONS: Any = {"dims": {"x": {2: "t"}}}


def shown(recorded: Any) -> list[str]:
    return [str(each.message) for each in recorded if "bucketed:" in str(each.message)]


@pytest.fixture
def path(tmp_path: Path, work: Work) -> Path:
    """A plan of ``conv`` with buckets 8 and 16, both proven."""
    first = bucketed(conv, buckets=[8, 16], **OPTIONS)
    for length in (5, 12):
        assert torch.equal(first(torch.ones(1, 1, length)), conv(torch.ones(1, 1, length)))
    path = tmp_path / "plan.json"
    first.save_plan(path)
    checked, derived = work.taken()
    assert checked >= 8
    assert derived == 2
    return path


def run_again(path: Path, function: Any = conv, **options: Any) -> list[str]:
    """Make the same calls with the plan; return the warnings."""
    again = bucketed(function, plan=path, **{**OPTIONS, **options})
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for length in (5, 12, 7, 11):
            x = torch.randn(1, 1, length)
            assert torch.equal(again(x), function(x))
    return shown(recorded)


class TestStartsWithoutWork:
    def test_the_next_function_checks_and_derives_nothing(self, path: Path, work: Work) -> None:
        assert run_again(path) == []
        assert work.taken() == (0, 0)

    def test_formulas_of_a_check_that_failed_are_saved(self, tmp_path: Path, work: Work) -> None:
        """The next process raises the same error, and derives nothing on the way to it."""
        first = bucketed(lambda x: x.mean(2), buckets=[8], **OPTIONS)
        with pytest.raises(PaddingLeakError):
            first(torch.randn(1, 1, 5))
        first.save_plan(tmp_path / "plan.json")
        assert work.taken()[1] == 1
        again = bucketed(lambda x: x.mean(2), plan=tmp_path / "plan.json", **OPTIONS)
        with pytest.raises(PaddingLeakError):
            again(torch.randn(1, 1, 5))
        assert work.taken()[1] == 0

    def test_another_process_does_so_too(self, tmp_path: Path) -> None:
        """Names are hashed otherwise there; runs are counted by the frames that Python enters."""
        source = """
        import os, sys, torch
        from torch import nn
        from torchguard import bucketed

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(50, 4)
                self.kinds = {"relu", "gelu", "none"}
            def forward(self, ids):
                mask = (ids > 0)[..., None]
                return self.embed(ids) * mask if "relu" in self.kinds else None

        entered = 0
        def count(frame, event, argument):
            global entered
            entered += event == "call" and frame.f_code is Model.forward.__code__

        path = sys.argv[1]
        given = {"plan": path} if os.path.exists(path) else {"buckets": [8, 16]}
        model = bucketed(Model(), dims={"ids": {1: "t"}}, **given)
        sys.setprofile(count)
        for length in (5, 12, 7):
            model(torch.ones(2, length, dtype=torch.long)).sum().backward()
        sys.setprofile(None)
        model.save_plan(path)
        print(entered, list(model.stats().relies_on_fill_0))
        """
        path = str(tmp_path / "plan.json")
        runs = [output_of(source, path, folder=tmp_path).split(maxsplit=1) for _ in range(2)]
        assert int(runs[0][0]) > 3
        assert int(runs[1][0]) == 3  # the calls alone
        assert runs[0][1] == runs[1][1]

    def test_relies_on_zero_is_kept(self, path: Path, work: Work) -> None:
        again = bucketed(conv, plan=path, **OPTIONS)
        again(torch.ones(1, 1, 5))
        assert again.stats().relies_on_fill_0 == ("x",)
        assert work.taken() == (0, 0)

    def test_more_padding_than_was_proven_is_checked(self, path: Path, work: Work) -> None:
        again = bucketed(conv, plan=path, **OPTIONS)
        again(torch.ones(1, 1, 1))
        assert work.taken()[0] > 0

    @pytest.mark.parametrize("asked", [False, True])
    def test_a_function_that_changes_while_it_is_checked(
        self, asked: bool, tmp_path: Path, work: Work
    ) -> None:
        """The proof is of the function as it was before; the changed one is checked again."""
        state = {"mode": "new"}

        def changing(x: torch.Tensor) -> torch.Tensor:
            state["mode"] = "changed"
            return 2 * x

        options: Any = {"dims": {"x": {0: "t"}}}
        first = bucketed(changing, buckets=[8], **options)
        first(torch.ones(3))
        if asked:
            state["mode"] = "new"
            first.verify(torch.ones(3))
        first.save_plan(tmp_path / "plan.json")
        for mode, is_proven in (("new", True), ("changed", False)):
            work.taken()
            state["mode"] = mode
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                bucketed(changing, plan=tmp_path / "plan.json", **options)(torch.ones(3))
            assert (work.taken()[0] == 0) == is_proven, mode

    def test_a_plan_that_is_saved_again_keeps_what_was_not_used(
        self, path: Path, work: Work
    ) -> None:
        again = bucketed(conv, plan=path, **OPTIONS)
        again(torch.ones(1, 1, 5))
        again.save_plan(path)
        assert run_again(path) == []
        assert work.taken() == (0, 0)

    def test_sizes_that_no_formula_gives_are_kept(self, tmp_path: Path, work: Work) -> None:
        def branches(x: torch.Tensor) -> torch.Tensor:
            return x * torch.ones(int(x.shape[2]))  # a symbol becomes the number it has now

        for wanted in ((True, True), (False, False)):
            given: Any = {} if wanted[0] else {"plan": tmp_path / "plan.json"}
            wrapped = bucketed(branches, **OPTIONS, **(given or {"buckets": [8]}))
            for length in (1, 5, 6):
                x = torch.ones(1, 1, length)
                assert torch.equal(wrapped(x), branches(x))
            if wanted[0]:
                wrapped.save_plan(tmp_path / "plan.json")
            checked, derived = work.taken()
            assert (checked > 0, derived > 0) == wanted

    def test_verify_checks_whatever_the_plan_says(self, path: Path, work: Work) -> None:
        bucketed(conv, plan=path, **OPTIONS).verify(torch.ones(1, 1, 5))
        assert work.taken()[0] > 0

    def test_always_is_always(self, path: Path, work: Work) -> None:
        run_again(path, check_padding="always")
        assert work.taken()[0] > 0


class TestWhatHasChanged:
    """A changed function, torch or ladder makes it work again, and one line says what changed."""

    def test_the_function(self, path: Path, work: Work) -> None:
        def other(x: torch.Tensor) -> torch.Tensor:
            return 2 * conv(x)

        (line,) = run_again(path, other)
        assert "is new" in line or "changed" in line
        assert work.taken()[0] > 0

    @pytest.mark.parametrize("change", ["a helper", "a method", "a global", "p of a dropout"])
    def test_a_part_is_named(self, change: str, tmp_path: Path, work: Work) -> None:
        options: Any = {"dims": {"ids": {1: "t"}}}
        ids = torch.randint(1, 50, (2, 5))
        first = bucketed(program().make().eval(), buckets=[8], **options)
        first(ids)
        first.save_plan(tmp_path / "plan.json")
        work.taken()
        changed = program(CHANGES[change]).make().eval()
        again = bucketed(changed, plan=tmp_path / "plan.json", **options)
        leaks = change in ("a helper", "a method")
        name = {
            "a helper": "helper",
            "a method": r"Model\.shift",
            "a global": "helper",
            "p of a dropout": r"self\.inner\.drop",
        }[change]
        with pytest.warns(UserWarning, match=rf"plan\.json: .*{name}.* changed: what the plan"):  # noqa: PT031
            if leaks:
                with pytest.raises(PaddingLeakError):
                    again(ids)
            else:
                again(ids)
        checked, derived = work.taken()
        assert checked > 0
        assert leaks or derived > 0

    def test_a_bias_of_zeros_has_hidden_a_leak(self, tmp_path: Path) -> None:
        """Padding with 0 is neutral for a convolution, until its bias is trained."""

        def model() -> Any:
            torch.manual_seed(0)
            made = nn.Sequential(*[nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)])
            made.insert(1, nn.ReLU())
            made.state_dict()["0.bias"].zero_()
            return made

        options: Any = {"dims": ({2: "t"},), "fill": {"input": 0.0}}
        x = -0.1 * torch.ones(1, 1, 5)
        untrained = bucketed(model(), buckets=[8], check_padding="first", **options)
        with torch.no_grad():
            untrained[0].weight.fill_(1)
            untrained(x)
        untrained.save_plan(tmp_path / "plan.json")
        trained = model()
        with torch.no_grad():
            trained[0].weight.fill_(1)
            trained[0].bias.fill_(0.5)
            again = bucketed(trained, plan=tmp_path / "plan.json", **options)
            with (
                pytest.warns(UserWarning, match=r"self\.0 changed"),
                pytest.raises(PaddingLeakError),
            ):
                again(x)

    @pytest.mark.parametrize("name", ["torch", "python", "torchguard"])
    def test_a_version(self, name: str, path: Path, work: Work) -> None:
        document = json.loads(path.read_text())
        document["kept"][name] = "2.0.0"
        path.write_text(json.dumps(document))
        with pytest.warns(UserWarning, match=f"{name} is .*, and was 2.0.0"):
            assert run_again(path) == []
        checked, derived = work.taken()
        assert checked > 0
        assert derived == 2

    def test_the_ladder(self, path: Path, work: Work) -> None:
        document = json.loads(path.read_text())
        document["buckets"] = {"t": [8, 32]}
        path.write_text(json.dumps(document))
        with pytest.warns(UserWarning, match="the buckets are t: 8 32, and were t: 8 16"):
            assert run_again(path) == []
        checked, derived = work.taken()
        assert checked > 0
        assert derived == 1  # 8 is proven still

    @pytest.mark.parametrize("options", [{"side": "left"}, {"fill": {"x": 0.0}}])
    def test_an_option(self, options: Any, path: Path, work: Work) -> None:
        run_again(path, lambda x: 2 * x, **options)
        assert work.taken()[0] > 0

    def test_what_can_not_be_told_is_not_kept(self, tmp_path: Path, work: Work) -> None:
        numbers = itertools.count()

        def counts(x: torch.Tensor) -> torch.Tensor:
            next(numbers)
            return 2 * x

        first = bucketed(counts, buckets=[8], **OPTIONS)
        first(torch.ones(1, 1, 5))
        with pytest.warns(UserWarning, match=r"keeps no proof .* itertools\.count"):
            first.save_plan(tmp_path / "plan.json")
        work.taken()
        assert run_again_short(tmp_path / "plan.json", counts) == []
        assert work.taken()[0] > 0


def run_again_short(path: Path, function: Any) -> list[str]:
    again = bucketed(function, plan=path, **OPTIONS)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        again(torch.ones(1, 1, 5))
    return shown(recorded)


class TestFile:
    @pytest.mark.parametrize(
        "text",
        [
            "", "{", "[]", "3", "null", '"text"', "{}", '{"format": "torchguard plan"}',
            '{"format": "torchguard plan", "version": 0, "buckets": {}, "kept": {}}',
            '{"format": "torchguard plan", "version": 1, "buckets": {"t": [0]}, "kept": {}}',
            '{"format": "torchguard plan", "version": 1, "buckets": {"t": [8]}}',
        ],
    )  # fmt: skip
    def test_a_foreign_file_is_refused(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json' is not a plan"):
            bucketed(conv, plan=path, **OPTIONS)

    def test_a_torn_file_is_refused(self, path: Path) -> None:
        whole = path.read_text()
        for length in range(0, len(whole) - 2, 97):
            path.write_text(whole[:length])
            with pytest.raises(ValueError, match="is not a plan"):
                bucketed(conv, plan=path, **OPTIONS)

    @pytest.mark.parametrize("name", ["torch", "functions", "proofs", "formulas", "ladder"])
    def test_a_damaged_file_is_refused(self, name: str, path: Path) -> None:
        document = json.loads(path.read_text())
        del document["kept"][name]
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError, match="is damaged"):
            bucketed(conv, plan=path, **OPTIONS)

    def test_a_write_that_fails_leaves_the_old_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = path.read_text()

        def fails(*_: Any, **__: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", fails)
        with pytest.raises(OSError, match="No space"):
            write_plan(path, {("t",): Buckets([4])}, {}, {})
        assert path.read_text() == before
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    def test_several_writers_leave_one_whole_file(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        write_plan(path, {("t",): Buckets([1])}, {}, {})

        def write(number: int) -> None:
            for _ in range(30):
                write_plan(path, {("t",): Buckets([number])}, {}, {"large": "x" * 100_000})

        writers = [threading.Thread(target=write, args=(number,)) for number in (2, 3, 4)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            assert set(read_plan(path).buckets) == {"t"}
        assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]

    def test_what_the_command_writes_is_taken(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from torchguard.__main__ import main  # noqa: PLC0415

        lengths, ladder = tmp_path / "lengths.txt", tmp_path / "ladder.json"
        lengths.write_text(" ".join(map(str, [10, 10, 11, 90, 100])))
        main(["plan", str(lengths), "--buckets", "2", "--json", str(ladder)])
        line = capsys.readouterr().out.splitlines()[-1].strip()
        names: Any = {"bucketed": torchguard.bucketed, "model": lambda input_ids: 2 * input_ids}
        wrapped = eval(line.replace("compile=True", "compile=None"), names)  # noqa: S307
        wrapped(torch.ones(1, 50))
        assert wrapped.stats().hits == {(100,): 1}
        wrapped.save_plan(ladder)  # in place of what the command wrote
        assert run_names(ladder) == {(100,): 1}


def run_names(path: Path) -> Any:
    again = bucketed(lambda ids: 2 * ids, dims={"ids": {1: "t"}}, plan=path)
    again(torch.ones(1, 50))
    return again.stats().hits


RANKS = """
import datetime, json, os, sys, warnings
import torch, torch.distributed as dist
import torchguard.bucketing.decorator.prove as leak_check
from torchguard import bucketed

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
pairs, run = [], leak_check.run_undoing_mutations
leak_check.run_undoing_mutations = lambda *a, **k: (pairs.append(1), run(*a, **k))[1]

def double(x):
    return 2 * x

folder = os.path.dirname(os.path.abspath(__file__))
def ran(**given):
    before = len(pairs)
    wrapped = bucketed(double, dims=({0: "t"},), group=True, **given)
    for lengths in ((5, 3), (9, 12)):
        wrapped(torch.ones(lengths[rank]))
    return wrapped, len(pairs) - before

first, checked = ran(buckets=[8, 16])
path = os.path.join(folder, "plan.json")  # both ranks write it
first.save_plan(path)
own = os.path.join(folder, f"plan{rank}.json")
first.save_plan(own)
dist.barrier()
_, again = ran(plan=path)
if rank == 1:
    document = json.load(open(own))
    document["kept"]["proofs"] = {}
    json.dump(document, open(own, "w"))
_, differing = ran(plan=own)
print(json.dumps({"ran": [checked, again, differing]}))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_check_together_or_not_at_all(tmp_path: Path) -> None:
    """A rank whose plan has no proof makes the other one check as well: a check has collectives."""
    for each in run_ranks(RANKS, tmp_path):
        checked, again, differing = each["ran"]
        assert checked > 0
        assert again == 0
        assert differing == checked


COMPILED = """
import json, os, sys, warnings
import torch
from torch._dynamo.utils import counters
import torch._inductor.cpp_builder as cpp_builder
from torchguard import bucketed
import torchguard.bucketing.decorator.prove as leak_check

runs = {"g++": 0, "checks": 0}
build, run = cpp_builder.run_compile_cmd, leak_check.run_undoing_mutations
def building(command, *args, **kwargs):
    runs["g++"] += " -E " not in command  # the preprocessor, for a hash of torch's headers
    return build(command, *args, **kwargs)
def running(*args, **kwargs):
    runs["checks"] += 1
    return run(*args, **kwargs)
cpp_builder.run_compile_cmd, leak_check.run_undoing_mutations = building, running

path = sys.argv[1]
given = {"plan": path} if os.path.exists(path) else {"buckets": [8, 16]}
def function(x):
    return torch.sin(2 * x) + x
wrapped = bucketed(function, dims=({1: "t"},), compile=True, **given)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for length in (5, 12, 7):
        x = torch.randn(2, length)
        torch.testing.assert_close(wrapped(x), function(x))
    wrapped.save_plan(path)
found = counters["inductor"]
print(json.dumps({
    "missed": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
    "hit": found["fxgraph_cache_hit"],
    **runs,
    "said": [str(each.message) for each in said if "bucketed:" in str(each.message)],
}))
"""


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the folder of Inductor's caches for processes that begin later."""
    return lambda name: monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path, caches: Callable[[str], None]) -> None:
    """With empty caches of its own: everything comes out of the plan."""
    path = tmp_path / "plan.json"
    results = []
    for name in ("first", "second"):
        caches(name)
        results.append(json.loads(output_of(COMPILED, str(path)).splitlines()[-1]))
    first, second = results
    assert first["checks"] > 0
    assert first["missed"] == 2
    assert second["checks"] == 0
    if not hasattr(torch.compiler, "save_cache_artifacts"):
        assert "no torch.compiler.save_cache_artifacts" in first["said"][0]
        assert second["missed"] == 2
        return
    assert first["said"] == second["said"] == []
    assert second["missed"] == 0
    assert second["hit"] == 2
    assert second["g++"] == 0
