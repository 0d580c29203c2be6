"""bucketed(group=): two processes take the bucket of the longer one."""

from __future__ import annotations

from typing import Any

import pytest

from support.child_process import run_ranks

pytestmark = pytest.mark.slow

# Arguments: rank, port. Each prints one line of JSON.
WORKER = """
import datetime, importlib, json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torchguard import Buckets, PaddingLeakError, bucketed

leak_check = importlib.import_module("torchguard.bucketing.decorator.prove")
rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
graphs = []

def backend(graph, inputs):
    graphs.append([tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)])
    return graph.forward

result = {}
double = bucketed(
    lambda x: x * 2, dims=({0: "t"},), buckets=Buckets([4, 8, 16]), group=True,
    compile={"backend": backend},
)
for lengths in ((3, 9), (7, 2), (4, 4), (3, 10)):
    x = torch.arange(lengths[rank])
    assert torch.equal(double(x), 2 * x)
result["hits"] = [[list(sizes), count] for sizes, count in double.stats().hits.items()]
result["shapes"] = sorted(shapes[0][0] for shapes in graphs)

# A size that one rank has no bucket for is an error on both, and so is a bad call.
for lengths in ((3, 17), (3, None)):
    try:
        double(torch.ones(3) if lengths[rank] is None and rank == 0 else
               (torch.ones(lengths[rank]) if lengths[rank] else "text"))
    except Exception as error:
        result.setdefault("errors", []).append(type(error).__name__)

# Whether to check is decided together: the function of a check may wait for the other rank.
checks = []

def summed(x):
    checks.append(tuple(x.shape))
    dist.all_reduce(torch.zeros(1))
    return x * 2

together = bucketed(summed, dims=({0: "t"},), buckets=Buckets([8]), outputs={0: "t"}, group=True)
for lengths in ((8, 8), (8, 5), (6, 8), (8, 8)):
    x = torch.ones(lengths[rank])
    assert torch.equal(together(x), 2 * x)
result["ran"] = len(checks)

# What the check of one rank finds stops both: this one has nothing to pad.
leaky = bucketed(lambda x: x - x.mean(), dims=({0: "t"},), buckets=Buckets([8]), group=True)
try:
    leaky(torch.randn((8, 5)[rank]))
except Exception as error:
    result["leak"] = f"{type(error).__name__}: {error}"

# A rank that leaks makes as many collectives in its function as one that does not.
def waits(x, weight):
    total = x.sum() if rank == 1 else x.sum() / x.shape[0]
    dist.all_reduce(torch.zeros(3))
    return total * weight

waiting = bucketed(
    waits, dims={"x": {0: "t"}}, buckets=Buckets([4, 8]), fill={"x": 0.0}, group=True
)
try:
    waiting.verify(torch.ones(3), torch.ones((), requires_grad=True))
except Exception as error:
    result["waiting"] = type(error).__name__

# What one rank sees in the first turn and the other in the later ones is no leak of either.
checker = leak_check._Checker
pair, first = checker._pair, checker.first

def seen_by(self, case, turn):
    return PaddingLeakError(f"rank {rank}, turn {turn}") if (turn == 0) == (rank == 0) else None

checker._pair = lambda self, case, turn: (seen_by(self, case, turn), True)
checker.first = lambda self, case: leak_check._First(seen_by(self, case, 0), None, False)
double.verify(torch.arange(3))
checker._pair, checker.first = pair, first
result["jumps"] = "forgiven"

# Neutral for one rank and not for the other: both refuse, after as many runs.
largest = bucketed(lambda x: x.amax() * 0 if rank else x.amax(), dims=({0: "t"},),
                   buckets=Buckets([8]), group=True)
try:
    largest(torch.tensor([1.0, -1.0, 2.0]))
except Exception as error:
    result["neutral"] = f"{type(error).__name__}: {error}"

# The padding of the shortest rank decides when to prove again.
checks.clear()
growing = bucketed(summed, dims=({0: "t"},), buckets=Buckets([64]), outputs={0: "t"}, group=True)
result["growing"] = []
for lengths in ((60, 60), (59, 60), (60, 40), (64, 41), (41, 64)):
    checks.clear()
    growing(torch.ones(lengths[rank]))
    result["growing"].append(len(checks))

# Two dims: the longest of each rank together, which no rank may have.
pairs = bucketed(
    lambda x: x * 2, dims=({0: "b", 1: "t"},), buckets=[(4, 16), (16, 4), (8, 8)], group=True,
)
for shapes in (((3, 10), (4, 2)), ((2, 5), (7, 2)), ((16, 2), (3, 16))):
    x = torch.ones(shapes[rank])
    try:
        assert torch.equal(pairs(x), 2 * x)
    except ValueError as error:
        result["pairs_error"] = str(error)
result["pairs"] = [[list(sizes), count] for sizes, count in pairs.stats().hits.items()]

# DDP training against the same training without padding and without ranks.
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))

plain, padded = Model(), Model()
padded.load_state_dict(plain.state_dict())
wrapped = bucketed(
    padded, dims={"ids": {1: "t"}}, buckets=Buckets([4, 8, 16]), group=True,
    compile={"backend": "aot_eager"},
)
parallel = nn.parallel.DistributedDataParallel(wrapped)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, parallel)]
generator = torch.Generator().manual_seed(1)
for step in range(6):
    lengths = torch.randint(2, 17, (2,), generator=generator).tolist()
    batches = [torch.randint(0, 10, (2, length), generator=generator) for length in lengths]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = parallel(batches[rank]).square().mean()
    loss.backward()
    sum(plain(batch).square().mean() / 2 for batch in batches).backward()
    for optimizer in optimizers:
        optimizer.step()
for (name, a), b in zip(plain.named_parameters(), padded.parameters()):
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6, msg=name)
result["trained"] = True
print(json.dumps(result), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(WORKER, tmp_path_factory.mktemp("ranks"))


def test_both_ranks_take_the_bucket_of_the_longer(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["hits"] == [[[4], 1], [[8], 1], [[16], 2]]
        assert result["shapes"] == [4, 8, 16]


def test_both_ranks_take_the_pair_that_holds_either(results: list[dict[str, Any]]) -> None:
    """And where none does, the error names both sizes on both ranks."""
    for result in results:
        assert result["pairs"] == [[[4, 16], 1], [[8, 8], 1]]
        assert "axes 'b' and 't' are 16 and 16" in result["pairs_error"]


def test_what_one_rank_can_not_run_is_an_error_on_both(results: list[dict[str, Any]]) -> None:
    assert results[0]["errors"] == ["ValueError", "RuntimeError"]
    assert results[1]["errors"] == ["ValueError", "TypeError"]


def test_ddp_training_equals_training_without_padding(results: list[dict[str, Any]]) -> None:
    assert all(result["trained"] for result in results)


def test_ranks_check_together_or_not_at_all(results: list[dict[str, Any]]) -> None:
    # Four calls; one check: four runs, and two on each of two other sets of data.
    assert [result["ran"] for result in results] == [4 + 4 + 4, 4 + 4 + 4]


def test_a_rank_that_leaks_waits_for_the_others_as_often(results: list[dict[str, Any]]) -> None:
    assert [result["waiting"] for result in results] == ["PaddingLeakError", "RuntimeError"]


def test_jumps_of_two_ranks_are_not_added_up(results: list[dict[str, Any]]) -> None:
    assert [result["jumps"] for result in results] == ["forgiven", "forgiven"]


def test_a_leak_on_one_rank_is_an_error_on_both(results: list[dict[str, Any]]) -> None:
    assert results[0]["leak"].startswith("RuntimeError: bucketed: the check of <lambda>() has")
    assert results[1]["leak"].startswith("PaddingLeakError")


def test_a_rank_for_which_0_is_neutral_refuses_with_the_other(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["neutral"].startswith("PaddingLeakError")
    assert results[1]["neutral"].startswith("RuntimeError: bucketed: the check of <lambda>() has")


def test_padding_that_grows_on_any_rank_is_proven_by_all(results: list[dict[str, Any]]) -> None:
    assert [result["growing"] for result in results] == 2 * [[9, 1, 5, 1, 1]]
