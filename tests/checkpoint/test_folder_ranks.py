"""checkpoint_folder(group=): a kill or an error on a rank leaves the old checkpoint or the new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

import torchguard
from support.child_process import JOIN_RANKS, run_ranks
from torchguard.checkpoint.folder import MARK

# To start Python and torch costs seconds, so the ranks fork before they join a group: a child
# for each point at which the victim ends.
KILLED = """
import datetime, os, sys, time, warnings
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torchguard, torchguard.checkpoint.ranks

warnings.simplefilter("ignore")
rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
way, victim, world_size = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
count, at = 0, 10**9


def point():
    global count
    count += 1
    if count == at:
        os._exit(9)  # as SIGKILL does: nothing is flushed and nothing is cleaned up


def change(event, arguments):
    if event == "open" and str(arguments[0]).startswith(str(root)):
        writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes:
            point()
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree"):
        point()


import io
fsync, save = os.fsync, torch.save


def counted_fsync(descriptor):
    point()
    fsync(descriptor)


def counted_save(value, stream, *arguments, **options):
    whole = io.BytesIO()
    save(value, whole, *arguments, **options)
    stream.write(whole.getvalue()[:700])
    stream.flush()
    point()  # half of it is written
    stream.write(whole.getvalue()[700:])
    stream.flush()
    point()


def state(fill):
    more = {str(each): torch.full((200,), fill) for each in range(world_size)}
    return {"b": {"c": torch.full((3, 5), fill), **more}, "n": int(fill)}


def write(name, fill):
    if way == "ours":
        with torchguard.checkpoint_folder(root / name, group=True) as new:
            dcp.save(state(fill), checkpoint_id=new)
    else:
        dcp.save(state(fill), checkpoint_id=root / name)


def run(name, number, store_port):
    global count, at
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store_port),
                      GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(str(root / ("store-" + name)), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size,
                            timeout=datetime.timedelta(seconds=60))
    write(name, 1.0)
    if rank == victim:
        sys.addaudithook(change)
        os.fsync, torch.save = counted_fsync, counted_save
        count, at = 0, number
    try:
        write(name, 2.0)
    except BaseException as error:
        (root / f"error-{name}-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


ended = []
number = 1
while True:
    name = f"{way}-{victim}-{number}-link"
    child = os.fork()
    if not child:
        run(name, number, port)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (root / f"status-{name}-{rank}").write_text(str(status))
    others = [root / f"status-{name}-{each}" for each in range(world_size)]
    while not all(each.exists() and each.read_text() for each in others):
        time.sleep(0.01)
    if int(others[victim].read_text()) != 9:
        break
    number += 1
"""


def killed(folder: Path, way: str, victim: int, world_size: int) -> list[float | None]:
    """Return what each folder holds after a kill: a step, 0 for a mix, None for nothing."""
    program = folder / "killed.py"
    program.write_text(KILLED)
    arguments = [str(folder), way, str(victim), str(world_size)]
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", str(program), str(rank), "0", *arguments],
                         stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=400)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    folders = sorted(folder.glob(f"store-{way}-{victim}-*"))
    return [holds(folder / each.name.removeprefix("store-"), world_size) for each in folders]


def holds(path: Path, world_size: int) -> float | None:
    more = {str(each): torch.zeros(200) for each in range(world_size)}
    state: dict[str, Any] = {"b": {"c": torch.zeros(3, 5), **more}, "n": 0}
    try:
        state_dict_loader.load(state, checkpoint_id=path)
    except BaseException:  # noqa: BLE001  CheckpointException is one
        return None
    found = {float(state["n"])}
    for each in state["b"].values():
        found |= set(each.flatten().tolist())
    return found.pop() if len(found) == 1 else 0.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("victim", "world_size"),
    [(0, 2), (1, 2), (0, 4), (3, 4)],  # ranks 1 and 2 of four do what rank 3 does
)
def test_a_kill_at_each_change_of_the_disk(tmp_path: Path, victim: int, world_size: int) -> None:
    """Bare DCP, killed in the same way, leaves folders that do not load or hold a mix."""
    ours = killed(tmp_path, "ours", victim, world_size)
    assert len(ours) > (15 if victim == 0 else 3)
    assert set(ours) <= {1.0, 2.0}
    assert 1.0 in ours
    bare = killed(tmp_path, "bare", victim, world_size)
    assert len(bare) > 3
    assert None in bare or 0.0 in bare
    # The next save removes what is left.
    with torchguard.checkpoint_folder(tmp_path / f"ours-{victim}-1-link") as new:
        (new / "a.txt").write_text("a")
    left = [each for each in tmp_path.iterdir() if each.name.startswith(".torchguard")]
    for each in left:
        assert (each / MARK).exists()


PROGRAM = (
    JOIN_RANKS
    + """
import inspect, resource, signal
from pathlib import Path
import torchguard
import torch.distributed.checkpoint as dcp

folder = Path(sys.argv[0]).parent
last = world_size - 1


def attempt(name, body, path=None):
    path = folder / (path or name)
    try:
        with torchguard.checkpoint_folder(path, group=True, keep=2) as new:
            body(new)
        said = None
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    names = sorted(each.name for each in folder.iterdir())
    saved = path / f"{last}.pt"
    left = [each for each in names if "torchguard" in each]
    result[name] = [said, saved.exists() and torch.load(saved).tolist(), left]
    dist.barrier()


def own(fill, size=3):
    return lambda new: torch.save(torch.full((size,), fill), new / f"{rank}.pt")


def raises(new):
    own(2.0)(new)
    if rank == last:
        raise ValueError("no more")


def unpicklable(new):
    other = (lambda: 0) if rank == last else 1
    dcp.save({"a": torch.ones(3), f"b{rank}": other}, checkpoint_id=new)


def limited(new):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        own(2.0, 10_000)(new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


result = {}
attempt("first", own(1.0), "link")
attempt("raises", raises, "link")
attempt("unpicklable", unpicklable, "link")
attempt("limited", limited, "link")
attempt("second", own(3.0), "link")
attempt("step-1", own(1.0))
attempt("again", own(2.0), "step-1")

# A rank that sees another file system.
elsewhere = folder / "elsewhere" / str(rank)
elsewhere.mkdir(parents=True)
try:
    with torchguard.checkpoint_folder(elsewhere / "link", group=True) as new:
        own(1.0)(new)
    result["unseen"] = None
except torchguard.errors.SaveError as error:
    result["unseen"] = str(error)

with torchguard.install("save", "load"):
    state = lambda fill: {"a": torch.full((4,), fill)}
    with torchguard.checkpoint_folder(folder / "guarded", group=True) as new:
        dcp.save(state(1.0), checkpoint_id=new)
    dcp.save(state(2.0), checkpoint_id=folder / "guarded")
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id=folder / "guarded")
    result["guarded"] = loaded["a"].tolist()
    dcp.save(state(1.0), checkpoint_id=folder / "plain")
    try:
        dcp.save(state(2.0), checkpoint_id=folder / "plain")
        result["plain"] = None
    except torchguard.errors.SaveError as error:
        result["plain"] = str(error)
    try:
        dcp.load({"a": torch.zeros(4).half()}, checkpoint_id=folder / "plain")
        result["dtype"] = None
    except RuntimeError as error:
        result["dtype"] = str(error)
# The older order of arguments, a writer or a reader first, is one that torch still takes.
older = {"a": torch.zeros(2)}
with torchguard.install("save", "load"):
    dcp.save({"a": torch.ones(2)}, dcp.FileSystemWriter(folder / "older"))
    dcp.load(older, dcp.FileSystemReader(folder / "older"))
    try:
        dcp.save({"a": torch.zeros(2)}, dcp.FileSystemWriter(folder / "older"))
        result["older"] = None
    except torchguard.errors.SaveError:
        result["older"] = older["a"].tolist()

# A planner of the user's keeps its options.
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
nested = {"inner": {"a": torch.ones(2)}, "b": torch.ones(2)}
dcp.save(nested, checkpoint_id=folder / "nested",
         planner=DefaultSavePlanner(flatten_state_dict=False))
loaded = {"inner": {"a": torch.zeros(2)}, "b": torch.zeros(2)}
with torchguard.install("load"):
    dcp.load(loaded, checkpoint_id=folder / "nested",
             planner=DefaultLoadPlanner(flatten_state_dict=False))
result["nested"] = loaded["b"].tolist()

# Each rank for itself, with metadata of its own; since 2.9.
result["apart"] = "not here"
if "use_collectives" in inspect.signature(dcp.save).parameters:
    mine = {"a": torch.full((4,), float(rank)), f"only {rank}": torch.ones(2)}
    with torchguard.checkpoint_folder(folder / "apart", group=True) as new:
        dcp.save(mine, checkpoint_id=new, use_collectives=False)
    loaded = {name: torch.zeros_like(each) for name, each in mine.items()}
    torchguard.load_sharded(loaded, folder / "apart")
    same = all(torch.equal(mine[name], each) for name, each in loaded.items())
    dcp.save(mine, checkpoint_id=folder / "no manifest", use_collectives=False)
    dist.barrier()
    whole = bool(torchguard.verify_checkpoint(folder / "no manifest"))
    dist.barrier()
    shard = folder / "no manifest" / f"__{last}_0.distcp"
    if rank == 0:
        data = bytearray(shard.read_bytes())
        data[data.find(torch.full((4,), float(last)).numpy().tobytes())] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    faults = torchguard.verify_checkpoint(folder / "no manifest").faults
    result["apart"] = [same, whole, len(faults)]
    with torchguard.install("save"):
        try:
            dcp.save(mine, checkpoint_id=folder / "no manifest", use_collectives=False)
            result["apart"].append("written over")
        except torchguard.errors.SaveError:
            result["apart"].append("refused")

first = dist.new_group([0])
try:
    with torchguard.checkpoint_folder(folder / "of one", group=first):
        result["stranger"] = None
except (ValueError, TypeError) as error:
    result["stranger"] = str(error)
dist.barrier()
print(json.dumps(result))
"""
)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("folder")
    return run_ranks(PROGRAM, folder, request.param)


def test_all_ranks_commit(ranks: Any) -> None:
    for each in ranks:
        assert each["first"] == [None, [1.0] * 3, []]
        assert each["second"] == [None, [3.0] * 3, []]


@pytest.mark.parametrize(
    ("case", "says"),
    [("raises", "ValueError: no more"), ("unpicklable", "CheckpointException"), ("limited", "")],
)
def test_one_rank_that_raises_stops_all(ranks: Any, case: str, says: str) -> None:
    for each in ranks:
        said, holds, left = each[case]
        assert said is not None
        assert says in said
        assert (holds, left) == ([1.0] * 3, [])


def test_a_name_with_a_number_is_written_once(ranks: Any) -> None:
    for each in ranks:
        assert each["step-1"][:2] == [None, [1.0] * 3]
        assert "is a checkpoint already" in each["again"][0]
        assert each["again"][1] == [1.0] * 3


def test_a_rank_that_does_not_see_the_folder_is_refused(ranks: Any) -> None:
    for each in ranks:
        assert "does not see" in each["unseen"]


def test_install_reaches_dcp(ranks: Any) -> None:
    for each in ranks:
        assert each["guarded"] == [2.0] * 4
        assert "checkpoint_folder(link, group=True)" in each["plain"]
        assert "a is torch.float16, saved was torch.float32" in each["dtype"]


def test_install_takes_the_older_order_of_arguments(ranks: Any) -> None:
    assert [each["older"] for each in ranks] == [[1.0, 1.0]] * len(ranks)


def test_install_takes_the_planner_of_the_caller(ranks: Any) -> None:
    assert [each["nested"] for each in ranks] == [[1.0, 1.0]] * len(ranks)


def test_ranks_that_save_without_collectives(ranks: Any) -> None:
    for each in ranks:
        assert each["apart"] in ("not here", [True, True, 1, "refused"])


def test_a_rank_outside_of_the_group_is_refused(ranks: Any) -> None:
    assert ranks[0]["stranger"] is None
    for each in ranks[1:]:
        assert "not in group" in each["stranger"]
