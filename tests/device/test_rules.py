"""What the fake device models, so that the other tests here say something."""

from __future__ import annotations

import ctypes
import os
import signal

import fake_device as fake
import pytest
import torch
from torch import nn


def test_the_host_can_not_read_its_memory() -> None:
    address = torch.ones(4, device="cuda").data_ptr()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_memory_runs_out_and_fresh_memory_is_garbage() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    kept = torch.ones(2, device="cuda")
    with fake.failing(1), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        kept.add(1).add(2)  # the second allocation
    with fake.capacity(fake.memory()[0]), pytest.raises(torch.OutOfMemoryError):
        kept.resize_(1000)
    assert kept.shape == (1000,)  # as on a GPU: the shape is set before the memory runs out


def test_two_devices_do_not_mix() -> None:
    one, other = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        one + other
    assert torch.equal(one + torch.tensor(1.0), other.to("cuda:0") + 1)
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1


def test_an_access_that_waits_for_no_other_stream_is_a_race() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(side):
        x.add_(1)
    number = f"{side.stream_id}"
    assert fake.races() == [
        f"aten::add on stream {number} {does} what aten::fill_ wrote on stream 0, without waiting"
        for does in ("reads", "writes")
    ]
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)
    assert x.tolist() == [3, 3, 3]
    assert fake.races() == []


def test_a_copy_to_the_host_arrives_when_something_has_waited() -> None:
    x = torch.ones(3, device="cuda")
    on_host = x.to("cpu", non_blocking=True)
    assert on_host.tolist() != [1, 1, 1]
    torch.cuda.synchronize()
    assert on_host.tolist() == [1, 1, 1]


def test_generators_have_a_seed_and_an_offset() -> None:
    torch.cuda.manual_seed(5)
    on_host, before = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    assert not torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(on_host, torch.get_rng_state())
    torch.cuda.set_rng_state(before)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))


def test_a_bad_index_ends_the_context() -> None:
    embedding = nn.Embedding(4, 2).cuda()
    with fake.asserting():
        embedding(torch.tensor([9], device="cuda"))  # the host does not know it yet
        for call in (torch.cuda.synchronize, embedding.weight.sum):
            with pytest.raises(RuntimeError, match="device-side assert triggered"):
                call()
    assert embedding.weight.sum().isfinite()


def test_a_graph_runs_when_it_is_replayed_and_moves_no_version_counter() -> None:
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x.add_(1) * 2
    version = x._version
    assert x.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert doubled.tolist() == [4, 4, 4]
    assert x._version == version
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.sum().item()


def test_launches_and_waits_are_counted() -> None:
    tensors = [torch.ones(n, device="cuda") for n in (2, 3)]
    before = fake.counts()
    torch._foreach_add_(tensors, 1.0)
    assert fake.counts().since(before)[:2] == (1, 0)
    torch._foreach_copy_([*tensors, torch.ones(1)], [*tensors, torch.zeros(1)])  # one by one
    launches: list[str] = []
    with fake.noting(launches):
        assert tensors[0].sum().item() == 4
    assert launches == ["aten::sum", "aten::item"]
    assert fake.counts().since(before).waits == 1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_lists_of_some_dtypes_can_not_be_copied_at_once(dtype: torch.dtype) -> None:
    tensors = [torch.zeros(2, device="cuda").to(dtype)]
    with pytest.raises(NotImplementedError, match="foreach_tensor_copy"):
        torch._foreach_copy_(tensors, tensors)
