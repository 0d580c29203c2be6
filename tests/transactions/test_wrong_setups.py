"""The silent training errors of TrainCheck, each as a small program with its right twin.

The errors are those of https://www.usenix.org/conference/osdi25/presentation/jiang, by the names of
its artifact. A program keeps the cause and none of the code. An error that PyTorch
has fixed is made by a function that does the same wrong.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import JOIN_RANKS, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "training" / "setup-warnings.md"
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def loop(optimizer_of: Callable[[Any], Any], *, clears: bool = True) -> str:
    model = net()
    optimizer = optimizer_of(model.parameters())
    step = torchguard.transaction(model, optimizer)
    for _ in range(3):
        with step:
            model(X).square().mean().backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return step.guarantee


class Traced(torch.optim.Optimizer):
    """An update that was traced once; it updates the parameters that had a gradient then."""

    def __init__(self, parameters: Any, *, traced_early: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.traced: list[Any] | None = [] if traced_early else None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.traced is None:
            self.traced = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for each in self.traced:
            each.data.sub_(each.grad, alpha=0.1)


def pictures(rows: int) -> None:
    """A processor that joins the texts of a batch into one row."""
    model = net()
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"pixel_values": X, "input_ids": torch.ones(rows, 8)}
    loss_of = lambda b: (model(b["pixel_values"] + b["input_ids"])).square().mean()  # noqa: E731
    for _ in range(2):
        step.run(loss_of, batch, retry="halve")


def without_autocast(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    """A compiler that loses the regions of autocast."""
    for node in reversed(graph.graph.nodes):
        if "autocast" in str(node.target):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def compiled(backend: Any) -> None:
    linear = nn.Linear(8, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x)  # type: ignore[no-any-return]

    torchguard.verified(f, backend=backend)(X)


def frozen_but(kind: Any) -> None:
    """Freeze all but the layers of a kind."""
    model = net()
    for each in model:
        each.requires_grad_(isinstance(each, kind))
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("90 of 106 parameters are frozen" in step.guarantee) == (kind is nn.BatchNorm1d)


SGD = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731

# The wrong program, the right one, and what the wrong one says.
ALONE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "stackoverflow-60335387": (
        lambda: loop(SGD, clears=False), lambda: loop(SGD),
        "TrainingSetupWarning: transaction: the gradients that SGD has used in its first step were",
    ),
    "pytorch-115607": (
        lambda: loop(lambda p: Traced(p, traced_early=True)),
        lambda: loop(lambda p: Traced(p, traced_early=False)),
        "TrainingSetupWarning: transaction: Traced.step() did not move 5 trainable parameters",
    ),
    "pytorch-forum-84911": (
        lambda: frozen_but(nn.BatchNorm1d), lambda: frozen_but(nn.Module),
        "TrainingSetupWarning: transaction: only norms are trained; 90 of 106 parameters are",
    ),
    "transformers-34204": (
        lambda: pictures(1), lambda: pictures(4),
        "TypeError: run: can't split batch['input_ids'] of shape (1, 8): expected 4",
    ),
    "lightning-thunder-725": (
        lambda: compiled(without_autocast), lambda: compiled("eager"), "MiscompilationWarning",
    ),
}  # fmt: skip


def said(program: Callable[[], Any]) -> list[str]:
    """Return the warnings and the error of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program()
        except (TypeError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]
    return [f"{each.category.__name__}: {each.message}" for each in caught]


@pytest.mark.usefixtures("fresh_reports")
@pytest.mark.parametrize("name", ALONE)
def test_an_error_of_one_process_is_said_and_its_right_twin_is_not(name: str) -> None:
    wrong, right, message = ALONE[name]
    assert said(right) == []
    (found,) = said(wrong)
    assert found.replace("torchguard: ", "", 1).startswith(message)


# ---- the errors that torchguard does not find ----


def evaluated_first(wrong: bool) -> bool:
    """``spectral_norm`` estimates the norm of a weight in a forward in training, and not before."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    nn.init.orthogonal_(layer.weight)
    model = nn.utils.spectral_norm(layer)
    x = torch.randn(4, 64)
    if not wrong:
        for _ in range(10):
            model(x)
    model.eval()
    return bool(model(x).abs().mean() < 2)


class Attention(nn.Module):
    """An attention whose dropout is a number that ``eval()`` does not reach."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.qkv, self.wrong = nn.Linear(8, 24), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        dropout = 0.5 if self.training or self.wrong else 0.0
        attention = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return attention[:, 0]


def dropout_in_evaluation(wrong: bool) -> bool:
    model = Attention(wrong)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.run(lambda x: model(x).square().mean(), X[:, None].expand(4, 3, 8))
    model.eval()
    x = X[:, None].expand(4, 3, 8)
    return torch.equal(model(x), model(x))


def generates_too_much(wrong: bool) -> bool:
    """The limit is that of a prompt before it is cut to the length of the context."""
    context, new, prompt = 8, 3, list(range(20))
    kept = prompt[-context // 2 :]
    limit = new + len(prompt if wrong else kept)
    tokens, table = [*kept], nn.Embedding(32, 32)
    while len(tokens) < limit:
        tokens.append(int(table(torch.tensor(tokens[-1])).argmax()))
    return len(tokens) - len(kept) <= new


def initialized_again(wrong: bool) -> bool:
    """The function that ``apply`` calls for each module writes the weights below it too."""
    model, written = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2)), []

    def initialize(module: nn.Module) -> None:
        for each in module.parameters(recurse=wrong):
            each.data.normal_()
            written.append(each)

    model.apply(initialize)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.run(lambda x: model(x).square().mean(), X)
    return len(written) == len(list(model.parameters()))


class Stages(nn.Sequential):
    """A backbone that freezes its first stage whenever it is set to train."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[0].requires_grad_(False)
        return self


def first_stage_is_frozen(wrong: bool) -> bool:
    """Nobody has called ``train()``, which would be seen only by calling it."""
    torch.manual_seed(0)
    model: Any = Stages(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if not wrong:
        model.train()
    before = model[0].weight.detach().clone()
    for _ in range(3):
        step.run(lambda x: model(x).square().mean(), X)
    return torch.equal(model[0].weight, before)


NOT_SAID: dict[str, Callable[[bool], bool]] = {
    "pytorch-51800": evaluated_first, "transformers-33844": dropout_in_evaluation,
    "transformers-23723": generates_too_much, "transformers-17877": initialized_again,
    "mmpretrain-702": first_stage_is_frozen,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SAID)
def test_an_error_outside_of_the_training_step_is_not_said(name: str) -> None:
    program = NOT_SAID[name]
    assert (program(True), program(False)) == (False, True)
    assert said(lambda: program(True)) == said(lambda: program(False)) == []


RANKS = (
    JOIN_RANKS
    + '''
import random, warnings
import numpy as np
import torchguard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchguard.errors import ReplicasDisagreeError

torch.set_num_threads(1)
lost = rank == world_size - 1
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, *, forward=None, steps=3, after_backward=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agree = torchguard.replicas_agree(model, optimizer)
    for step in range(steps):
        (forward or (lambda _: model(x)))(step).square().mean().backward()
        after_backward()
        agree.gradients()
        optimizer.step()
        agree()
        optimizer.zero_grad()


def lossy_all_reduce(wrong):
    model = DDP(net())

    def after_backward():
        if wrong and lost:
            model.module[2].weight.grad.zero_()

    train(model, after_backward=after_backward)


def lossy_copy(wrong):
    """The weights go from one card to the next, by code that is not DDP's."""
    model = net()
    for each in model.parameters():
        dist.broadcast(each.data, 0)
        if wrong and lost:
            each.data.view(-1)[0] = 0

    def after_backward():
        for each in model.parameters():
            dist.all_reduce(each.grad)

    train(model, after_backward=after_backward)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copy(torch.autograd.Function):
    loses = False

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient * (0 if Copy.loses else 1)


class Parallel(nn.Module):
    """A norm that both ranks hold, between layers of which each has a part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for each in (self.up, self.down):
            each.weight.tensor_model_parallel = True  # as the layers of Megatron-LM do

    def forward(self, _):
        same = torch.linspace(-1, 1, 32).view(4, 8)
        return Sum.apply(self.down(torch.tanh(self.up(Copy.apply(self.norm(same))))))


def clipped_on_one_rank(wrong):
    model = Parallel()

    def after_backward():
        if not wrong or rank == 0:
            nn.utils.clip_grad_norm_(model.norm.parameters(), 1e-3)

    train(model, after_backward=after_backward, forward=model)


def two_cards(wrong):
    """A layer on two cards, and its gradient is lost on the way to one of them."""
    Copy.loses = wrong and lost
    model = Parallel()
    try:
        train(model, forward=model)
    finally:
        Copy.loses = False


def moved(wrong):
    """DDP keeps hooks of the parameters that it was made with; here a dtype stands for a device."""
    model = net()
    wrapped = DDP(model)
    model.double().float()
    train(wrapped if wrong else DDP(model))


def wrapped_now_and_then(wrong):
    model = net()
    wrapped = DDP(model)
    train(wrapped, forward=lambda step: (model if wrong and step % 2 else wrapped)(x))


def workers_with_one_seed(wrong):
    """Two workers of a loader, whose generators begin alike."""
    workers = [np.random.RandomState(10 * rank + (0 if wrong else n)) for n in range(2)]
    batch = torch.stack([torch.from_numpy(worker.rand(8)) for worker in workers])
    torchguard.replicas_agree(net()).batch(batch)


def expert_without_tokens(wrong):
    """A rank whose experts get no tokens leaves out the exchange, in which the others wait."""
    seconds = datetime.timedelta(seconds=2 if wrong else 60)
    group, tokens = dist.new_group(timeout=seconds), torch.ones(world_size, 8)
    try:
        if not (wrong and lost):
            dist.all_to_all_single(torch.empty_like(tokens), tokens, group=group)
    except RuntimeError:
        assert wrong


def sharded_later(wrong):
    """The optimizer holds parameters of before fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    torchguard.replicas_agree(
        model, early if wrong else torch.optim.SGD(model.parameters(), lr=0.1)
    )


def said(program, wrong):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(wrong)
        except ReplicasDisagreeError as error:
            return str(error)
    found = [str(e.message) for e in caught if e.category.__name__ == "TrainingSetupWarning"]
    return "; ".join(found) or None


programs = {
    "pytorch-84803": lossy_all_reduce, "pytorch-96600": lossy_copy, "baichuan2-86": two_cards,
    "deepspeed-1801": clipped_on_one_rank, "pytorch-104336": moved,
    "x-jxmnop-ddp-out-of-sync": wrapped_now_and_then,
    "stackoverflow-67180955": workers_with_one_seed, "fully_shard": sharded_later,
    "deepspeed-5794": expert_without_tokens,
}
result = {name: [said(each, True), said(each, False)] for name, each in programs.items()}
print(json.dumps(result))
'''
)

ON_RANKS: dict[str, str | None] = {
    "pytorch-84803": "2.weight.grad is not the same on all ranks",
    "pytorch-96600": "0.weight is not the same on all ranks",
    "baichuan2-86": "norm.weight.grad is not the same on all ranks",
    "deepspeed-1801": "norm.weight.grad is not the same on all ranks",
    "pytorch-104336": "0.weight.grad is not the same on all ranks",
    "x-jxmnop-ddp-out-of-sync": "0.weight.grad is not the same on all ranks",
    "stackoverflow-67180955": "twice in one batch",
    "fully_shard": "no optimizer has 4 trainable parameters of the model: 0.weight",
    "deepspeed-5794": None,
}


def test_the_page_names_each_error_and_where_it_is_said() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## TrainCheck")[2].partition("\n##")[0]
    said_in, _, not_said = text.partition("Not found")
    names = r"`((?:\w|-)+-(?:\d+|sync))`"
    found = {*ALONE, *(name for name, text in ON_RANKS.items() if text)} - {"fully_shard"}
    assert set(re.findall(names, said_in)) == found
    assert set(re.findall(names, not_said)) == {*NOT_SAID, "deepspeed-5794"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(RANKS, tmp_path_factory.mktemp("wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_an_error_of_several_ranks_is_said_and_its_right_twin_is_not(ranks: Any, name: str) -> None:
    for each in ranks:
        wrong, right = each[name]
        assert right is None
        assert wrong is None if ON_RANKS[name] is None else str(ON_RANKS[name]) in wrong
