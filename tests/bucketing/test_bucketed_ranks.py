"""bucketed(group=): two processes take the bucket of the longer one."""

from __future__ import annotations

from typing import Any

import pytest

from support.child_process import JOIN_RANKS, run_ranks

pytestmark = pytest.mark.slow

# Each rank prints one line of JSON.
WORKER = (
    JOIN_RANKS
    + """
from torch import nn
from torchguard import Buckets, bucketed

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

# What one rank sees in the first turn and the other in the second is no leak of either.
runs = []

def jumps(x, weight):
    runs.append(x)
    leaks = 4 < len(runs) <= 7 if rank else len(runs) <= 4
    return x.sum() * weight / (x.shape[0] if leaks else 1)

jumping = bucketed(
    jumps, dims={"x": {0: "t"}}, buckets=Buckets([4, 8]), fill={"x": 0.0}, group=True
)
jumping.verify(torch.ones(3), torch.ones((), requires_grad=True))
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
)


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


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # What one rank can't run is an error on both.
        ("errors", [["ValueError", "RuntimeError"], ["ValueError", "TypeError"]]),
        # DDP training equals training without padding.
        ("trained", [True, True]),
        # Ranks check together: four calls; one check: four runs, two on each of two sets of data.
        ("ran", [4 + 4 + 4, 4 + 4 + 4]),
        # A rank that leaks waits for the others as often.
        ("waiting", ["PaddingLeakError", "RuntimeError"]),
        # Jumps of two ranks are not added up.
        ("jumps", ["forgiven", "forgiven"]),
        # Padding that grows on any rank is proven by all.
        ("growing", 2 * [[9, 1, 5, 1, 1]]),
    ],
)
def test_ranks_agree(key: str, expected: list[Any], results: list[dict[str, Any]]) -> None:
    assert [result[key] for result in results] == expected


@pytest.mark.parametrize(("key", "leaks"), [("leak", 1), ("neutral", 0)])
def test_a_leak_on_one_rank_is_an_error_on_both(
    key: str, leaks: int, results: list[dict[str, Any]]
) -> None:
    """Also where 0 is not neutral for one rank, and is for the other."""
    other = results[1 - leaks][key]
    assert other.startswith("RuntimeError: bucketed: the check of <lambda>() has")
    assert results[leaks][key].startswith("PaddingLeakError")
