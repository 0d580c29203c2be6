"""transaction(group=): a step that fails on one of two ranks is taken back on both."""

from __future__ import annotations

from typing import Any

import pytest

from support.child_process import JOIN_RANKS, run_ranks
from support.slow import slow_except

WORKER = """
import signal, warnings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, TESTS)
import torchguard
from support.small_training import FailAt, InjectedError, bits

signal.signal(signal.SIGINT, signal.default_int_handler)
warnings.simplefilter("ignore")
result = {"usual": [], "torn": [], "not restored": [], "errors": [], "wrong": [], "rolled back": 0,
          "points": POINTS}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 1)
        self.unused = nn.Linear(2, 2)      # on every rank
        self.sometimes = nn.Linear(1, 1)   # on rank 1 alone

    def forward(self, x):
        out = self.head(self.drop(torch.relu(self.norm(self.first(x)))))
        return self.sometimes(out) if rank == 1 else out

class Training:
    def __init__(self, amp=False, guarded=True, **flags):
        torch.manual_seed(7)
        net = Net()
        self.ddp = DistributedDataParallel(net, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **flags)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=amp)
        if guarded:
            self.step = torchguard.transaction(
                self.ddp, self.optimizer, scaler=self.scaler if amp else None,
                scheduler=self.scheduler, group=True,
            )
        torch.manual_seed(rank)
        self.batches = list(torch.randn(3, 8, 4))

    def loss_of(self, x):
        return self.ddp(x).square().mean()

    def clip(self):
        nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.5)

    def run(self, number, loss_of=None, **options):
        return self.step.run(
            loss_of or self.loss_of, self.batches[number], before_step=self.clip, **options
        )

    def plain(self, number):
        self.scaler.scale(self.loss_of(self.batches[number])).backward()
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self, buffers=True):
        module = self.ddp.module
        return {
            "parameters": bits(dict(module.named_parameters())),
            "gradients": bits({name: p.grad for name, p in module.named_parameters()}),
            "buffers": bits(dict(module.named_buffers())) if buffers else None,
            "optimizer": bits(self.optimizer.state_dict()["state"]),
            "lr and scale": (self.scheduler.get_last_lr(), self.scaler.get_scale()),
            "random": bits(torch.get_rng_state()),
        }

def lost(state, expected):
    return [key for key in state if state[key] != expected[key]]

IMPLEMENTATIONS = {
    "foreach": dict(foreach=True), "loop-amp": dict(foreach=False, amp=True),
    "fused": dict(fused=True), "fused-amp": dict(fused=True, amp=True),
}

# 1. The same bits as DistributedDataParallel's own loop.
for name, flags in IMPLEMENTATIONS.items():
    ours, usual = Training(**flags), Training(guarded=False, **flags)
    for training in (ours, usual):
        torch.manual_seed(3 + rank)
        for number in range(3):
            training.run(number) if training is ours else training.plain(number)
    # Buffers are those of the first rank after our step; DDP sends them before the next forward.
    buffers = rank == 0
    result["usual"] += [f"{name}: {key}" for key in lost(ours.state(buffers), usual.state(buffers))]

# 2. A failure at each of some points, on one rank and then on the other.
def second_step(training, fault):
    with fault:
        return training.run(1)

for name, flags in IMPLEMENTATIONS.items():
    never = Training(**flags)
    never.run(0)
    counter = FailAt()
    second_step(never, counter)
    counts = [None, None]
    dist.all_gather_object(counts, counter.seen)
    end = never.state()
    for point in range(POINTS):
        failing = point % 2
        at = point * (counts[failing] - 1) // (POINTS - 1)
        training = Training(**flags)
        training.run(0)
        before = training.state()
        fault = FailAt(at if rank == failing else None, after=point % 4 > 1)
        found = "none"
        try:
            second_step(training, fault)
        except (InjectedError, torchguard.errors.PeerFailedError) as error:
            found = type(error).__name__
        where = f"{name}, point {point} of rank {failing}: {found}"
        committed = training.step.committed
        answers = [None, None]
        dist.all_gather_object(answers, committed)
        if answers[0] != answers[1]:
            result["torn"].append(where)
        if not committed:
            result["rolled back"] += 1
            result["not restored"] += [f"{where}: {key}" for key in lost(training.state(), before)]
            if found != ("InjectedError" if rank == failing else "PeerFailedError"):
                result["errors"].append(where)
            training.run(1)
            result["wrong"] += [f"{where}: {key}" for key in lost(training.state(), end)]

# 3. Out of memory on one rank: both run in parts of half the size.
training = Training(fused=True)
sizes = []
def limited(x):
    sizes.append(len(x))
    if rank == 0 and len(x) > 2:
        torch.empty(2**58)
    return training.loss_of(x)
for number in range(2):
    training.run(number, limited, retry="halve")
result["sizes"] = sizes

# 4. Out of memory on one rank, another error on the other: no rank tries again.
def different(x):
    raise ValueError("a bad batch") if rank == 1 else torch.OutOfMemoryError("out of memory")
try:
    training.run(0, different, retry="halve")
except Exception as error:
    result["different"] = type(error).__name__

# 4b. Out of memory on one rank, and its undo or that of the other one fails: no step is taken.
class Unwilling:
    def state_dict(self):
        return {"position": object()}
    def load_state_dict(self, _):
        raise RuntimeError("CUDA out of memory")
def short(x):
    return torch.empty(2**58) if rank == 0 and len(x) > 2 else training.loss_of(x)
for tears in (0, 1):
    also = Unwilling() if rank == tears else ()
    torn = torchguard.transaction(training.ddp, training.optimizer, group=True, also=also)
    try:
        torn.run(short, training.batches[0], retry="halve")
    except Exception as error:
        result["torn undo"] = [*result.get("torn undo", ()), type(error).__name__]

# 5. Ctrl-C on one rank, in its forward.
before = training.state()
def interrupted(x):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return training.loss_of(x)
try:
    training.run(0, interrupted)
except BaseException as error:
    result["interrupted"] = type(error).__name__
result["unchanged"] = training.state() == before
result["handler"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
training.run(0)

# 6. What can't be done is refused.
def refused(model, **options):
    try:
        torchguard.transaction(
            model, torch.optim.SGD(model.parameters(), lr=1.0), group=True, **options
        )
    except ValueError as error:
        return str(error)

result["no ddp"] = refused(nn.Linear(2, 2))
synchronised = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
synchronised.module[1] = nn.SyncBatchNorm(2)  # DDP itself takes it on a GPU alone
result["sync norm"] = refused(synchronised)
hooked = DistributedDataParallel(nn.Linear(2, 2))
hooked.register_comm_hook(None, lambda state, bucket: bucket)
result["hook"] = refused(hooked)
table = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
result["sparse"] = refused(table)
static = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
result["static"] = refused(static)
print(json.dumps(result))
"""


POINTS = (4, 16)  # of each implementation, at which a step fails


@pytest.fixture(scope="module", params=slow_except(POINTS, "4"))
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    tests = f"TESTS = {str(request.path.parent.parent)!r}\nPOINTS = {request.param}\n"
    return run_ranks(JOIN_RANKS + tests + WORKER, tmp_path_factory.mktemp("ranks"))


def test_without_a_failure_it_is_the_usual_loop_of_ddp(results: list[dict[str, Any]]) -> None:
    assert [result["usual"] for result in results] == [[], []]


def test_a_failure_on_one_rank_takes_the_step_back_on_both(results: list[dict[str, Any]]) -> None:
    """And trying again gives what a run that never failed gives."""
    for result in results:
        for wrong in ("torn", "not restored", "errors", "wrong"):
            assert result[wrong] == []
        # Of four implementations; after the commit a step counts, and is done.
        assert result["rolled back"] > 4 * result["points"] * 0.6


def test_out_of_memory_another_error_and_an_interrupt(results: list[dict[str, Any]]) -> None:
    """On one rank: both run smaller parts, unless the other one has another error."""
    assert results[0]["sizes"] == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert results[1]["sizes"] == [8, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [result["different"] for result in results] == ["OutOfMemoryError", "ValueError"]
    torn = [result.get("torn undo") for result in results]
    assert torn == [
        ["UnrecoverableStepError", "RuntimeError"],  # the second is its own: out of memory again
        ["PeerFailedError", "UnrecoverableStepError"],
    ]
    assert [result["interrupted"] for result in results] == ["PeerFailedError", "KeyboardInterrupt"]
    assert all(result["unchanged"] and result["handler"] for result in results)


def test_what_would_leave_a_rank_waiting_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "without a DistributedDataParallel" in result["no ddp"]
        assert "1 is a SyncBatchNorm, which communicates in its forward" in result["sync norm"]
        assert "communication hook" in result["hook"]
        assert "module.0 has sparse=True" in result["sparse"]
        assert "leave out static_graph=True" in result["static"]
