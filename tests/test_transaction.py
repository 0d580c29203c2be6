"""transaction(): a training step that raises leaves the training as it was, bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from child_process import END_RANK, output_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard.transactions.state import TrainingSnapshot
from torchguard.transactions.step import Transaction


class Failure(Exception):  # noqa: N818  as pytest.raises(Failure) reads
    """What the tests raise."""


class Net(nn.Module):
    """Buffers of each kind, a parameter in two places, a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(32, 3)
        self.shared = nn.Linear(32, 3)
        self.shared.weight = self.head.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scratch: Tensor
        self.rows: Tensor
        self.register_buffer("scratch", torch.arange(4.0), persistent=False)
        self.register_buffer("rows", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("none", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.body(x)
        out: Tensor = self.frozen(self.head(hidden) + self.shared(hidden))
        return out


class Average:
    """An exponential moving average, as many write it: state_dict and load_state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for kept, parameter in zip(self.shadow, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept, loaded in zip(self.shadow, state["shadow"], strict=True):
            kept.copy_(loaded)


KINDS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Training:
    """A model and everything around it."""

    def __init__(self, kind: str = "fused", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, **KINDS[kind])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.average = Average(self.model)
        self.teacher = Net()
        self.counter = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.step: Transaction = torchguard.transaction(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            scheduler=self.scheduler,
            also=(self.average, self.teacher, self.counter, self.generator),
            **options,
        )

    def forward_backward(self) -> None:
        loss = self.model(torch.randn(4, 1, 6, 6, generator=self.generator)).square().mean()
        self.scaler.scale(loss).backward()

    def optimize(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update(self.model)
        self.optimizer.zero_grad()

    def whole_step(self) -> None:
        self.forward_backward()
        self.optimize()


def tensor_state(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    held = tensor.detach()
    return (
        id(tensor),
        tensor._version,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.untyped_storage()._cdata,
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        held.contiguous().view(-1).view(torch.uint8).tolist() if held.dim() else held.item(),
    )


def tree_state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_state(value)
    if isinstance(value, dict):
        return [
            (key if isinstance(key, (str, int)) else id(key), tree_state(v))
            for key, v in value.items()
        ]
    if isinstance(value, (list, tuple)):
        return [tree_state(each) for each in value]
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return id(value)


def fingerprint(training: Training) -> dict[str, Any]:
    """Everything that can be seen of a training, by name."""
    found: dict[str, Any] = {}
    for name, parameter in (
        *training.model.named_parameters(),
        *training.teacher.named_parameters("t"),
    ):
        found[f"parameter {name}"] = tensor_state(parameter)
        found[f"gradient {name}"] = tensor_state(parameter.grad)
        found[f"requires_grad {name}"] = parameter.requires_grad
    for name, module in (
        *training.model.named_modules(),
        *training.teacher.named_modules(prefix="t"),
    ):
        found[f"attributes {name}"] = {
            key: tree_state(value)
            for key, value in vars(module).items()
            if key not in {"_parameters"}
        }
        found[f"children {name}"] = [(key, id(each)) for key, each in module._modules.items()]
        found[f"parameters {name}"] = [(key, id(each)) for key, each in module._parameters.items()]
    found["optimizer"] = tree_state(
        {key: value for key, value in vars(training.optimizer).items() if key != "param_groups"}
    )
    found["groups"] = tree_state(training.optimizer.param_groups)
    found["scaler"] = tree_state(vars(training.scaler))
    found["scheduler"] = tree_state(vars(training.scheduler))
    found["average"] = [each.tolist() for each in training.average.shadow]
    found["counter"] = tensor_state(training.counter)
    found["generator"] = training.generator.get_state().tolist()
    found["random"] = (torch.get_rng_state().tolist(), random.getstate())
    found["numpy"] = np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    found["numpy place"] = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002
    return found


def changed(training: Training, before: dict[str, Any]) -> list[str]:
    after = fingerprint(training)
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def rebind(training: Training) -> None:
    training.model.head.bias.data = torch.zeros(3)


def register_buffer(training: Training) -> None:
    training.model.register_buffer("late", torch.zeros(2))


def register_hook(training: Training) -> None:
    training.model.head.register_forward_hook(lambda *_: None)


def remove_hook(training: Training) -> None:
    training.model.head._forward_hooks.clear()


def freeze(training: Training) -> None:
    training.model.head.bias.requires_grad_(False)


def unscale(training: Training) -> None:
    training.forward_backward()
    training.scaler.unscale_(training.optimizer)


def clear_state(training: Training) -> None:
    training.optimizer.state[training.model.head.bias]["exp_avg_new"] = torch.zeros(3)


CHANGES: dict[str, Callable[[Training], Any]] = {
    "forward": lambda t: t.model(torch.randn(4, 1, 6, 6)),
    "forward and backward": Training.forward_backward,
    "eval": lambda t: t.model.eval(),
    "freeze": freeze,
    "an attribute": lambda t: setattr(t.model, "new", 1),
    "a buffer is written": lambda t: t.model.scratch.add_(1),
    "a strided buffer is written": lambda t: t.model.rows.add_(1),
    "a buffer is replaced": lambda t: setattr(t.model, "scratch", torch.ones(4)),
    "a buffer is resized": lambda t: t.model.scratch.resize_(2),
    "a buffer grows": lambda t: t.model.scratch.resize_(400),
    "a buffer is registered": register_buffer,
    "a child is added": lambda t: t.model.add_module("late", nn.Linear(1, 1)),
    "a parameter has other memory": rebind,
    "a hook is registered": register_hook,
    "a hook is removed": remove_hook,
    "learning rate": lambda t: t.optimizer.param_groups[0].update(lr=7.0),
    "a group is added": lambda t: t.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "a key of the state": clear_state,
    "zero_grad": lambda t: t.optimizer.zero_grad(),
    "zero_grad in place": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "unscale": unscale,
    "the scale": lambda t: t.scaler.update(3.0),
    "the schedule": lambda t: t.scheduler.step(),
    "the average": lambda t: t.average.update(t.teacher),
    "the teacher": lambda t: nn.init.ones_(t.teacher.head.weight),
    "a tensor": lambda t: t.counter.add_(1),
    "a generator": lambda t: torch.rand(1, generator=t.generator),
    "torch draws": lambda t: torch.rand(1),
    "Python draws": lambda t: random.random(),  # noqa: S311
    "numpy draws": lambda t: np.random.rand(),  # noqa: NPY002
    "numpy draws a normal number": lambda t: np.random.randn(),  # noqa: NPY002
}


def begin(kind: str = "fused", **options: Any) -> Training:
    """A training after a step, with gradients of half a batch and a hook."""
    training = Training(kind, **options)
    training.model.head.register_forward_hook(lambda *_: None)
    with training.step:
        training.whole_step()
    training.model.shared.bias.requires_grad_(False)
    training.forward_backward()
    return training


@pytest.mark.parametrize("undo", ["auto", "copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_block_changes_is_as_it_was(change: str, undo: Any) -> None:
    """Each change alone, then an exception: nothing differs."""
    training = begin(undo=undo)
    before = fingerprint(training)
    error = Failure()
    with pytest.raises(Failure) as raised:
        with training.step:
            CHANGES[change](training)
            raise error
    assert raised.value is error
    assert changed(training, before) == []
    with training.step:
        training.whole_step()


UNDOS = [
    undo.__qualname__ for undo in begin(undo="copy").step.training.capture(parameters=True).undos()
]


@pytest.mark.parametrize("left_out", range(len(UNDOS)), ids=UNDOS)
def test_each_restored_item_is_needed(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one kind of state out of the undo: one of the changes above is seen then."""
    if UNDOS[left_out] == "clear_autocast_cache":
        pytest.skip("test_a_weight_that_autocast_has_cast_is_cast_again")
    undos = TrainingSnapshot.undos

    def without_one(self: TrainingSnapshot) -> Iterator[Callable[[], None]]:
        for place, undo in enumerate(undos(self)):
            if place != left_out:
                yield undo

    monkeypatch.setattr(TrainingSnapshot, "undos", without_one)

    def write_parameters(training: Training) -> None:
        training.optimizer.step()

    seen = []
    for change in (*CHANGES.values(), write_parameters):
        training = begin(undo="copy")
        before = fingerprint(training)
        with pytest.raises((Failure, torchguard.UnrecoverableStepError)):
            with training.step:
                change(training)
                training.step.saved[-1].stepped.clear()  # as if not every optimizer had stepped
                raise Failure
        seen += changed(training, before)
    assert seen


@pytest.mark.parametrize("torch_function", [True, False])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "state", "number"])
def test_what_was_replaced_by_its_equal_before_the_block_stays(
    kind: str, torch_function: bool
) -> None:
    """Two tensors of one element compare equal, and are two: what counts is identity."""
    model = nn.BatchNorm1d(1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=kind != "number", foreach=False)
    step = torchguard.transaction(model, optimizer)
    for _ in range(2):
        with step:
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.state[model.weight]
    new: Any
    if kind == "buffer":
        new = model.num_batches_tracked = model.get_buffer("num_batches_tracked").clone()
    elif kind == "parameter":
        model._parameters["bias"] = new = nn.Parameter(model.bias.detach().clone())
    elif kind == "state":
        state["step"] = new = state["step"].clone()
    else:
        state["step"] = new = float(state["step"])
    with contextlib.nullcontext() if torch_function else torch._C.DisableTorchFunction():
        with pytest.raises(Failure), step:
            raise Failure
    held = {
        "buffer": model._buffers["num_batches_tracked"],
        "parameter": model._parameters["bias"],
    }
    assert held.get(kind, state["step"]) is new


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_may_catch_what_the_step_raises_and_step_again(kind: str) -> None:
    plain_run, guarded = Training(kind), Training(kind)
    for training in (plain_run, guarded):
        torch.manual_seed(1)
        with training.step:
            training.model(torch.ones(4, 1, 6, 6)).sum().backward()
            if training is guarded:
                hook = training.optimizer.register_step_pre_hook(_fail)
                with contextlib.suppress(Failure):
                    training.optimizer.step()
                hook.remove()
            training.optimizer.step()
    for one, other in zip(plain_run.model.parameters(), guarded.model.parameters(), strict=True):
        assert one.tolist() == other.tolist()


def _fail(*_: Any) -> None:
    raise Failure


def test_a_weight_that_autocast_has_cast_is_cast_again() -> None:
    """The block casts a weight that it has changed; autocast would keep that cast."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchguard.transaction(model, optimizer, undo="copy")
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x).detach().clone()
        torch.clear_autocast_cache()
        with pytest.raises(Failure):
            with step:
                with torch.no_grad():
                    model.weight.add_(1)
                assert not torch.equal(model(x), expected)
                raise Failure
        assert torch.equal(model(x), expected)


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


def test_parameters_written_outside_of_step_are_not_restored_silently() -> None:
    training = begin()
    with pytest.raises(torchguard.UnrecoverableStepError, match="undo='copy'") as raised:
        with training.step:
            with torch.no_grad():
                training.model.head.bias.clamp_(0, 1)
            raise Failure
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


def test_what_cannot_be_undone_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="LBFGS"):
        torchguard.transaction(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="no shape yet"):
        torchguard.transaction(nn.LazyLinear(1), optimizer)
    with pytest.raises(TypeError, match="model is a int"):
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
            print(str(error).partition(",")[0])
    dist.destroy_process_group()
    {END_RANK}
    """
    assert output_of(program).splitlines() == [
        "transaction: model is sharded by FSDP",
        "transaction: 0 is sharded by FSDP",
    ]


def test_without_copies_the_guarantee_is_weak_and_a_torn_step_is_told() -> None:
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
    with pytest.raises(torchguard.ReplayMismatchError, match=r"gradient of model.head.bias"):
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
