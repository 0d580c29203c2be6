"""checkpoint_folder(group=): a kill or an error on a rank leaves the old checkpoint or the new."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from support.child_process import JOIN_RANKS, run_ranks

# To start Python and torch costs seconds, so the ranks fork before they join a group: a child
# for each point at which the victim ends.
KILLED = (
    JOIN_RANKS.partition("dist.init_process_group")[0]
    + """
import io, time, warnings
from pathlib import Path
import torch.distributed.checkpoint as dcp
import torchguard, torchguard.checkpoint.folder

warnings.simplefilter("ignore")
folder = Path(sys.argv[0]).parent
points, fsync, save = 0, os.fsync, torch.save
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree"}


def point():
    global points
    points -= 1
    if not points:
        os._exit(9)  # as SIGKILL does: nothing is flushed and nothing is cleaned up


def change(event, arguments):
    opens = event == "open" and str(arguments[0]).startswith(str(folder))
    flags = arguments[2] if opens else None
    if event in CHANGES or isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        point()


def counted_fsync(descriptor):
    point()
    fsync(descriptor)


def counted_save(value, stream, *arguments, **options):
    whole = io.BytesIO()
    save(value, whole, *arguments, **options)
    for part in (whole.getvalue()[:700], whole.getvalue()[700:]):  # half of it is written
        stream.write(part)
        stream.flush()
        point()


def state(fill):
    more = {str(each): torch.full((200,), fill) for each in range(world_size)}
    return {"b": {"c": torch.full((3, 5), fill), **more}, "n": int(fill)}


def write(path, fill):
    with torchguard.checkpoint_folder(path, group=True) as new:
        dcp.save(state(fill), checkpoint_id=new)


def run(path, victim, number):
    global points
    store = dist.FileStore(f"{path}-store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    write(path, 1.0)
    if rank == victim:
        sys.addaudithook(change)
        os.fsync, torch.save, points = counted_fsync, counted_save, number
    try:
        write(path, 2.0)
    except BaseException:
        os._exit(1)
    os._exit(0)


def holds(path):
    '''A step, 0 for a mix.'''
    found = state(0.0)
    dcp.load(found, checkpoint_id=path)
    steps = {float(found["n"])}
    for each in found["b"].values():
        steps |= set(each.flatten().tolist())
    return steps.pop() if len(steps) == 1 else 0.0


def killed(victim):
    '''What the folder holds after a kill at each point.'''
    found = []
    while True:
        number = 1 + len(found)
        path = folder / f"{victim}-{number}" / "link"
        path.parent.mkdir(exist_ok=True)
        child = os.fork()
        if not child:
            run(path, victim, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (path.parent / f"status-{rank}").write_text(str(status))
        others = [path.parent / f"status-{each}" for each in range(world_size)]
        while not all(each.exists() and each.read_text() for each in others):
            time.sleep(0.01)
        if int(others[victim].read_text()) != 9:
            return found
        found.append(None if rank else holds(path))
        if not rank:  # the next save removes what is left
            with torchguard.checkpoint_folder(path) as new:
                (new / "a").write_text("a")
            assert not [each for each in os.listdir(path.parent) if "torchguard" in each]
    return found


print(json.dumps([killed(victim) for victim in (0, 1)]))
"""
)


@pytest.mark.slow
def test_a_kill_at_each_change_of_the_disk(tmp_path: Path) -> None:
    """The folder loads, and holds the old step or the new one, never a mix."""
    found: Any = run_ranks(KILLED, tmp_path)[0]
    for held, least in zip(found, (15, 3), strict=True):
        assert len(held) > least
        assert set(held) <= {1.0, 2.0}
        assert 1.0 in held


BEGIN = (
    JOIN_RANKS
    + """
import inspect, threading
from pathlib import Path
import torchguard
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

folder = Path(sys.argv[0]).parent
last = world_size - 1
result = {}


def said(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return None


def state(fill, size=3):
    return {name: torch.full((size,), fill) for name in ["a", *map(str, range(world_size))]}


def whole(path, body, **options):
    with torchguard.checkpoint_folder(path, group=True, **options) as new:
        body(new)


def held(path):
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id=path)
    return sorted({value for each in loaded.values() for value in each.tolist()})


def saves(fill):
    return lambda new: dcp.save(state(fill), checkpoint_id=new)


def raises(new):
    saves(2.0)(new)
    if rank == last:
        raise ValueError("no more")


def unpicklable(new):
    other = (lambda: 0) if rank == last else 1
    dcp.save({**state(2.0), f"b{rank}": other}, checkpoint_id=new)


def tried(body):
    error = said(whole, folder / "link", body)
    left = [each.name for each in folder.iterdir() if "torchguard" in each.name]
    dist.barrier()
    result[body.__name__] = [error, held(folder / "link"), left]


whole(folder / "link", saves(1.0))
tried(raises)
"""
)

PROGRAM = (
    BEGIN
    + """
class Later(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        go.wait(60)
        return super().write_data(plan, planner)


def background(new):
    global future
    future = dcp.async_save(state(2.0), storage_writer=Later(new), process_group=another)


go, another = threading.Event(), dist.new_group()
for body in (unpicklable, background):
    tried(body)
go.set()
said(future.result)
result["second"] = [said(whole, folder / "link", saves(3.0)), held(folder / "link")]
result["own"] = said(whole, folder / "own", lambda new: torch.save(rank, new / f"{rank}.pt"))
result["own"] = [result["own"], torch.load(folder / "own" / f"{rank}.pt")]
result["step"] = [said(whole, folder / "step-1", saves(fill)) for fill in (1.0, 2.0)]
result["step"] += [(folder / "step-1").is_symlink(), held(folder / "step-1")]

# A rank that sees another file system.
elsewhere = folder / "elsewhere" / str(rank)
elsewhere.mkdir(parents=True)
result["unseen"] = said(whole, elsewhere / "link", saves(1.0))

reader, writer = dcp.FileSystemReader(folder / "guarded"), dcp.FileSystemWriter(folder / "guarded")
with torchguard.install("save", "load"):
    whole(folder / "guarded", saves(1.0))
    result["guarded"] = []
    written = lambda fill: lambda _: dcp.save(state(fill), storage_writer=writer)
    for call in (saves(2.0), written(3.0), written(4.0), lambda path: saves(5.0)(f"{path}/")):
        call(folder / "guarded")
        dcp.load(loaded := state(0.0), storage_reader=reader)
        result["guarded"] += [held(folder / "guarded"), loaded["a"].tolist()]
    for fill in (6.0, 7.0):  # the user keeps three, and a save to the link keeps three too
        whole(folder / "guarded", saves(fill), keep=3)
    saves(8.0)(folder / "guarded")
    result["kept"] = sorted(each.name for each in folder.glob("guarded.*"))
    saves(1.0)(folder / "plain")
    calls = [saves(2.0), lambda path: dcp.async_save(state(2.0), checkpoint_id=path),
             lambda path: dcp.save(state(2.0), storage_writer=dcp.FileSystemWriter(path))]
    if hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"):  # it has torch's own dcp.save
        process = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        calls.append(lambda path: dcp.async_save(
            state(2.0), checkpoint_id=path, async_checkpointer_type=process))
    result["plain"] = [said(call, folder / "plain") for call in calls]
    half = {"a": torch.zeros(3).half()}
    result["dtype"] = said(dcp.load, half, checkpoint_id=folder / "plain")
    # A planner of the user's keeps its options.
    nested = {"inner": {"a": torch.ones(2)}, "b": torch.ones(2)}
    dcp.save(nested, checkpoint_id=folder / "nested",
             planner=DefaultSavePlanner(flatten_state_dict=False))
    loaded = {"inner": {"a": torch.zeros(2)}, "b": torch.zeros(2)}
    dcp.load(loaded, checkpoint_id=folder / "nested",
             planner=DefaultLoadPlanner(flatten_state_dict=False))
    result["nested"] = loaded["b"].tolist()

# Each rank for itself, with metadata of its own; since 2.9.
result["apart"] = "not here"
if "use_collectives" in inspect.signature(dcp.save).parameters:
    mine = {"a": torch.full((4,), float(rank)), f"only {rank}": torch.ones(2)}
    apart = lambda path: dcp.save(mine, checkpoint_id=path, use_collectives=False)
    whole(folder / "apart", apart)
    loaded = {name: torch.zeros_like(each) for name, each in mine.items()}
    torchguard.load_sharded(loaded, folder / "apart")
    same = all(torch.equal(mine[name], each) for name, each in loaded.items())
    said(apart, folder / "no manifest")
    before = bool(torchguard.verify_checkpoint(folder / "no manifest"))
    dist.barrier()
    shard = folder / "no manifest" / f"__{last}_0.distcp"
    if rank == 0:
        data = bytearray(shard.read_bytes())
        data[data.find(torch.full((4,), float(last)).numpy().tobytes())] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    faults = torchguard.verify_checkpoint(folder / "no manifest").faults
    with torchguard.install("save"):
        again = said(apart, folder / "no manifest")
    result["apart"] = [same, before, len(faults), str(again).partition(":")[0]]

first = dist.new_group([0])
def of_one():
    with torchguard.checkpoint_folder(folder / "of one", group=first) as new:
        torch.save(1, new / "a.pt")
result["stranger"] = said(of_one)
print(json.dumps(result))
"""
)


def test_one_of_two_ranks_that_raises_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    of_first, of_last = run_ranks(BEGIN + "print(json.dumps(result))\n", tmp_path)
    assert of_last["raises"] == ["ValueError: no more", [1.0], []]
    assert of_first["raises"][0].startswith("SaveError: checkpoint_folder: no rank has saved")
    assert of_first["raises"][1:] == [[1.0], []]


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.slow)])
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Three: the first makes the folder, the last one fails, and one neither."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("folder"), request.param)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("raises", "ValueError: no more"),
        ("unpicklable", "CheckpointException"),
        ("background", "async_save"),
    ],
)
def test_one_rank_that_raises_stops_all(ranks: Any, case: str, says: str) -> None:
    for each in ranks:
        said, holds, left = each[case]
        assert said is not None
        assert says in said
        assert (holds, left) == ([1.0], [])


def test_all_ranks_commit_or_are_refused(ranks: Any) -> None:
    """A name with a number is written once."""
    for rank, each in enumerate(ranks):
        assert each["second"] == [None, [3.0]]
        assert each["own"] == [None, rank]
        first, again, is_link, holds = each["step"]
        assert (first, is_link, holds) == (None, False, [1.0])
        assert "is a checkpoint already" in again
        assert "does not see" in each["unseen"]
        assert each["stranger"] is None if rank == 0 else "not in group" in each["stranger"]
        assert each["apart"] in ("not here", [True, True, 1, "SaveError"])


def test_install_reaches_dcp(ranks: Any) -> None:
    """With a planner, in a thread, and by a reader that is used again."""
    for each in ranks:
        expected = [[[fill], [fill] * 3] for fill in (2.0, 3.0, 4.0, 5.0)]
        assert each["guarded"] == [*itertools.chain(*expected)]
        assert each["kept"] == ["guarded.6", "guarded.7", "guarded.8"]
        for said in each["plain"]:
            assert "checkpoint_folder(link, group=True)" in said
        assert "a is torch.float16, saved was torch.float32" in each["dtype"]
        assert each["nested"] == [1.0, 1.0]
