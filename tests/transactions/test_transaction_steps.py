"""transaction(): after the commit, what is refused or reported, replay, and steps that succeed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchguard
from support.child_process import END_RANK, output_of
from support.training import KINDS, Failure, Training, begin, changed, fingerprint
from torchguard.transactions.hooks import step_is_compiled

# ---- after the commit ----


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_an_exception_after_the_step_leaves_a_step_that_counts() -> None:
    """The scaler is updated, so the next step works; a note says so."""
    training = begin()
    before = [each.tolist() for each in training.model.parameters()]
    with pytest.raises(Failure) as raised:
        with training.step:
            training.forward_backward()
            training.scaler.step(training.optimizer)
            raise Failure
    assert "this training step counts" in "".join(notes_of(raised.value))
    assert training.step.committed
    assert [each.tolist() for each in training.model.parameters()] != before
    training.scheduler.step()
    training.optimizer.zero_grad()
    with training.step:
        training.whole_step()


def test_a_scheduler_that_raises_midway_is_as_it_was_before_its_step() -> None:
    class Torn(torch.optim.lr_scheduler.LambdaLR):
        fails = False

        def get_lr(self) -> list[Any]:
            if self.fails:
                raise Failure  # the counters are advanced already
            return super().get_lr()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = Torn(optimizer, lambda epoch: 0.5**epoch)
    step = torchguard.transaction(model, optimizer, scheduler=scheduler)
    scheduler.fails = True
    with pytest.raises(Failure) as raised:
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    assert "Torn is as it was" in "".join(notes_of(raised.value))
    scheduler.fails = False
    scheduler.step()
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_two_optimizers_step_together_or_not_at_all() -> None:
    """The first has stepped when the second one raises: it goes back, fused or not."""
    for options in KINDS.values():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.Adam(each.parameters(), **options) for each in (first, second)]
        step = torchguard.transaction([first, second], optimizers)
        before = [each.tolist() for each in first.parameters()]
        with pytest.raises(Failure):
            with step:
                first(torch.ones(1, 2)).sum().backward()
                optimizers[0].step()
                assert [each.tolist() for each in first.parameters()] != before
                raise Failure
        assert [each.tolist() for each in first.parameters()] == before
        assert not any(optimizers[0].state.values())


# ---- never silent ----


def test_parameters_written_outside_of_step_are_named_or_put_back() -> None:
    """They are copied on entry once a compiled function has a step in it: its hooks do not run."""
    training = begin()
    bias = training.model.head.bias
    before = bias.detach().clone()
    with pytest.raises((torchguard.UnrecoverableStepError, Failure)) as raised:
        with training.step:
            with torch.no_grad():
                bias.add_(1)
            raise Failure
    if step_is_compiled():
        assert isinstance(raised.value, Failure)
        assert torch.equal(bias, before)
    else:
        assert isinstance(raised.value, torchguard.UnrecoverableStepError)
        assert "use undo='copy'" in str(raised.value)
        assert isinstance(raised.value.__cause__, Failure)


def test_an_optimizer_that_the_transaction_does_not_know_is_named() -> None:
    training = begin()
    stranger = torch.optim.SGD(training.model.head.parameters(), lr=0.1, fused=True)
    with pytest.raises(torchguard.UnrecoverableStepError, match="pass every optimizer"):
        with training.step:
            training.forward_backward()
            stranger.step()
            raise Failure


def test_several_modules_and_optimizers_may_be_any_iterable() -> None:
    """As the annotations say: the values of a dict, a generator; a Sequential is one module."""
    models = {"first": nn.Sequential(nn.Linear(2, 2)), "second": nn.Linear(2, 2)}
    optimizers = (torch.optim.SGD(each.parameters(), 0.1) for each in models.values())
    step = torchguard.transaction(models.values(), optimizers)
    assert step.training.modules == tuple(models.values())
    assert len(step.optimizers) == 2
    one = torchguard.transaction(models["first"], step.optimizers[0])
    assert one.training.modules == (models["first"],)


@pytest.mark.parametrize("several", [False, True])
def test_one_of_what_also_names_needs_no_list(several: bool) -> None:
    count, ema = torch.zeros(()), nn.Sequential(nn.Linear(2, 2))
    expected = copy.deepcopy(ema.state_dict())
    training = begin()
    for each in (count, torch.zeros(3), ema):
        step = torchguard.transaction(
            training.model, training.optimizer, also=[each] if several else each
        )
        with pytest.raises(Failure), step:
            with torch.no_grad():
                for tensor in [each] if isinstance(each, Tensor) else each.parameters():
                    tensor.add_(1)
            raise Failure
        if isinstance(each, Tensor):
            assert not each.any()
    assert all(torch.equal(value, expected[name]) for name, value in ema.state_dict().items())


def test_what_cannot_be_undone_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="LBFGS"):
        torchguard.transaction(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="no shape yet"):
        torchguard.transaction(nn.LazyLinear(1), optimizer)
    with pytest.raises(TypeError, match="model is of type int"):
        torchguard.transaction(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="undo is 'some'"):
        torchguard.transaction(model, optimizer, undo="some")  # type: ignore[arg-type]


def test_scopes_of_torch_that_the_block_has_not_left_are_closed() -> None:
    """An interrupt inside of ``torch.autocast.__exit__`` leaves autocast on, and its counter."""
    model = nn.Linear(2, 2)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(Failure), step:
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
        torch.set_grad_enabled(False)
        raise Failure
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_a_retry_within_the_except_clause_after_a_checkpointed_forward_failed() -> None:
    """Up to torch 2.11 its hooks on saved tensors stay as long as the exception lives."""
    model = nn.Linear(2, 2)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(2, 2, requires_grad=True)

    def fail(_: Tensor) -> Tensor:
        raise Failure

    def nested(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(fail, x, use_reentrant=False)
        return out

    try:
        with step:
            checkpoint(nested, x, use_reentrant=False)
    except Failure:
        with step:
            model(x).exp().sum().backward()
    assert x.grad is not None


def test_the_hooks_of_optimizers_go_with_the_last_transaction() -> None:
    """Optimizers are watched while there is a transaction, and cost nothing after it."""
    program = """
    import gc, torch, torchguard
    from torch.optim import optimizer
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    def watched():
        return len(optimizer._global_optimizer_pre_hooks)
    before = watched()
    steps = [torchguard.transaction(model, sgd) for _ in range(2)]
    print(watched() - before)
    del steps[0]
    gc.collect()
    print(watched() - before)
    del steps[0]
    gc.collect()
    print(watched() - before)
    torchguard.transaction(model, sgd)
    """
    assert output_of(program).split() == ["1", "1", "0"]


def test_stats_count_what_was_put_back() -> None:
    """By kind; what the block has left alone is not among it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        with pytest.raises(Failure), step:
            model(torch.ones(4, 2)).sum().backward()
            raise Failure
    one = {"gradients": 4, "buffers": 3, "RNG states": 1}
    assert step.stats().put_back == {kind: 2 * count for kind, count in one.items()}
    assert step.stats().rollbacks == {"Failure": 2}
    np.random.rand()  # noqa: NPY002 - the global one
    with pytest.raises(Failure), step:
        np.random.rand()  # noqa: NPY002 - the global one
        raise Failure
    assert step.stats().put_back["RNG states"] == 3
    with pytest.raises(Failure), step:
        model(torch.ones(4, 2)).sum().backward()
        step.training.optimizers[0].step()
        raise Failure
    assert step.stats().put_back == {kind: 2 * count for kind, count in one.items()} | {
        "RNG states": 3
    }  # the last one was a commit


def test_an_optimizer_that_steps_inside_backward_is_refused() -> None:
    """It has stepped before it is known whether the step succeeds."""
    in_backward = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    model = nn.Linear(2, 2)
    in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(TypeError, match="weight inside backward"):
        torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_model_that_fsdp_has_sharded_is_refused() -> None:
    """One rank has a part of each parameter only."""
    program = f"""
    import os, socket, torch, torch.distributed as dist, torchguard
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=0, world_size=1)
    device = torch.device("cpu")
    whole = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=device)
    parts = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(parts[0], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    for model in (whole, parts):
        try:
            torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
        except TypeError as error:
            print(str(error).partition(".")[0])
            assert "load_sharded after a restart" in str(error)
    dist.destroy_process_group()
    {END_RANK}
    """
    # Gloo of torch 2.8 writes to standard output too.
    found = [line for line in output_of(program).splitlines() if not line.startswith("[Gloo]")]
    assert found == [
        "transaction: model is sharded by FSDP",
        "transaction: 0 is sharded by FSDP",
    ]


def test_without_copies_the_guarantee_is_weak_and_a_torn_step_raises() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1).expand(3))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    step = torchguard.transaction([], optimizer, undo="none")
    assert step.guarantee.startswith("weak")
    assert begin().step.guarantee.startswith("strong")
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with pytest.raises(torchguard.UnrecoverableStepError):
        with step:
            optimizer.step()


# ---- replay ----


def test_replay_runs_twice_and_leaves_one_run() -> None:
    """The same gradients, buffers and random numbers as after one run."""
    plain_run, replayed = begin(), begin()
    torch.manual_seed(1)
    plain_run.forward_backward()
    torch.manual_seed(1)
    runs = 0
    for _ in replayed.step.replay(2):
        replayed.forward_backward()
        runs += 1
    assert runs == 2
    for (name, one), (_, other) in zip(
        plain_run.model.named_parameters(), replayed.model.named_parameters(), strict=True
    ):
        gradients = [None if each.grad is None else each.grad.tolist() for each in (one, other)]
        assert gradients[0] == gradients[1], name
    buffers = [dict(each.model.named_buffers()) for each in (plain_run, replayed)]
    for name, buffer in buffers[0].items():
        assert buffer.tolist() == buffers[1][name].tolist(), name


def test_replay_names_the_first_gradient_that_differs() -> None:
    training = begin()
    before = fingerprint(training)
    with pytest.raises(torchguard.errors.ReplayMismatchError, match=r"gradient of model.head.bias"):
        for run in training.step.replay(2):
            training.forward_backward()
            dict(training.model.named_parameters())["head.bias"].grad[0] += run * 1e-3  # type: ignore[index]
    assert changed(training, before) == []


def test_replay_of_code_that_raises_leaves_nothing() -> None:
    training = begin()
    before = fingerprint(training)
    with pytest.raises(Failure):
        for _ in training.step.replay(2):
            training.forward_backward()
            raise Failure
    assert changed(training, before) == []


# ---- success ----


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_succeed_have_the_bits_of_plain_code(kind: str) -> None:
    plain_run, guarded = Training(kind), Training(kind)
    for training in (plain_run, guarded):
        torch.manual_seed(1)
        for _ in range(3):
            if training is guarded:
                with training.step:
                    training.whole_step()
            else:
                training.whole_step()
    for one, other in zip(
        plain_run.model.state_dict().values(), guarded.model.state_dict().values(), strict=True
    ):
        assert one.tolist() == other.tolist()
    assert (
        plain_run.optimizer.state_dict()["param_groups"]
        == guarded.optimizer.state_dict()["param_groups"]
    )
    assert guarded.step.stats().commits == 3
    assert guarded.step.stats().microseconds > 0
