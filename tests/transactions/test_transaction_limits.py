"""What a transaction takes, what it refuses, and what it says of what stays."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import run_python


def setup() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Unseen(torch.optim.Optimizer):
    """Does not call ``Optimizer.__init__``, which puts the hooks around ``step()``."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(parameters)}], {}, {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_what_cannot_be_undone_or_understood_is_refused() -> None:
    def refused(error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            torchguard.transaction(*args, **options)

    model, optimizer = setup()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    refused(TypeError, "missing 1 required positional argument: 'optimizer'", model)
    refused(ValueError, "SGD has no parameter of the model", model, setup()[1])
    refused(TypeError, "model is of type int", 3, optimizer)
    refused(TypeError, "scaler is of type StepLR.*scheduler=", model, optimizer, scheduler)
    refused(TypeError, "LBFGS", model, torch.optim.LBFGS(model.parameters()))
    refused(TypeError, "scaler has 2 GradScalers, expected one", model, optimizer, [scaler] * 2)
    unseen = Unseen(model.parameters())
    refused(TypeError, r"Unseen.step\(\) calls no hooks of torch.optim", model, unseen)
    refused(ValueError, "no shape yet", nn.LazyLinear(1), optimizer)
    refused(ValueError, "undo is 'some'", model, optimizer, undo="some")
    match = "skip_nonfinite=True with a GradScaler"
    refused(ValueError, match, model, optimizer, scaler, skip_nonfinite=True)
    holding, item = nn.Linear(2, 1), torch.eye(2).to_sparse()
    holding.register_buffer("adjacency", item.to_sparse_csr())
    match = r"adjacency is a sparse tensor \(torch.sparse_csr\).*to_dense\(\).*plain attribute"
    refused(TypeError, match, nn.Sequential(model, holding), optimizer)
    refused(TypeError, match, model, optimizer, also=holding)
    refused(TypeError, "a tensor of also= is a sparse", model, optimizer, also=item)
    in_backward = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    refused(TypeError, "weight inside backward", model, optimizer)


@pytest.mark.parametrize(
    "made_by",
    [torch.optim.SparseAdam, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)],
)
def test_sparse_gradients_are_restored_where_a_block_finds_some(made_by: Any) -> None:
    """Of ``nn.Embedding(sparse=True)``; SGD keeps a sparse momentum too."""
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = made_by(table.parameters())
    step = torchguard.transaction(table, optimizer)

    def backward(*rows: int) -> None:
        table(torch.tensor(rows)).sum().backward()

    def state() -> list[Any]:
        kept = [v for v in optimizer.state[table.weight].values() if isinstance(v, torch.Tensor)]
        return [each.detach().to_dense().tolist() for each in (table.weight, *kept)]

    with step:
        backward(0, 1)
        optimizer.step()
        optimizer.zero_grad()
    with step:
        backward(0, 3, 3)
    accumulated, before = cast("Any", table.weight.grad).to_dense().tolist(), state()
    for with_step in (False, True):
        with pytest.raises(ZeroDivisionError), step:
            backward(1, 4)
            cast("Any", table.weight.grad).mul_(2)
            if with_step:
                optimizer.register_step_post_hook(lambda *_: 1 / 0)
                optimizer.step()
            raise ZeroDivisionError
        assert cast("Any", table.weight.grad).to_dense().tolist() == accumulated
        assert state() == before


@pytest.mark.filterwarnings("ignore::torchguard.errors.TrainingSetupWarning")
def test_several_modules_and_optimizers_may_be_any_iterable() -> None:
    """An optimizer may have some of the parameters, and others besides."""
    models = {"first": nn.Sequential(nn.Linear(2, 2)), "second": nn.Linear(2, 2)}
    optimizers = [
        torch.optim.SGD([next(each.parameters()), torch.ones(1)], 0.1) for each in models.values()
    ]
    for model, given in ((models.values(), optimizers), (models["first"], optimizers[:1])):
        step = torchguard.transaction(model, iter(given), iter([torch.amp.GradScaler("cpu")]))
        with pytest.raises(KeyError), step:
            models["first"][0].eval()  # type: ignore[index]
            raise KeyError
        assert models["first"][0].training  # type: ignore[index]


HOOKS = """
import torch, torchguard
from torch.optim import optimizer as o

seen = []
handles = [o.register_optimizer_step_pre_hook(lambda each, *_: seen.append(type(each).__name__)),
           o.register_optimizer_step_post_hook(lambda each, *_: seen.append(type(each).__name__))]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torchguard.transaction(model, optimizer)
assert seen == [], seen
step.run(lambda x: model(x).mean(), torch.ones(1, 2))
assert step.committed
print(*seen)
"""


def test_hooks_of_the_program_see_no_optimizer_of_ours() -> None:
    assert run_python(HOOKS).stdout.split() == ["SGD", "SGD"]


ITEMS: dict[str, Callable[[], Any]] = {
    "0-d": lambda: torch.zeros(()),
    "tensor": lambda: torch.zeros(3),
    "module": lambda: nn.Sequential(nn.Linear(2, 2)),
}
ALSO: dict[str, Callable[[list[Any]], Any]] = {
    "one": lambda items: items[0],
    "list": list,
    "tuple": tuple,
    "deque": collections.deque,
    "set": set,
    "values": lambda items: dict(enumerate(items)).values(),
}


@pytest.mark.parametrize("many", ALSO)
@pytest.mark.parametrize("kind", ITEMS)
def test_also_takes_one_or_several_in_any_container(kind: str, many: str) -> None:
    """A tensor is not its rows, and a Sequential is not its layers."""
    items = [ITEMS[kind]() for _ in range(1 if many == "one" else 2)]
    tensors = [t for each in items for t in (each.parameters() if kind == "module" else [each])]
    expected = copy.deepcopy(tensors)
    step = torchguard.transaction(*setup(), also=ALSO[many](items))
    with pytest.raises(KeyError), step, torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)
        raise KeyError
    assert all(map(torch.equal, tensors, expected))


def test_what_also_names_may_return_its_live_containers() -> None:
    """Also where nothing in them is a tensor."""

    class Counts:
        def __init__(self) -> None:
            self.bad, self.seen, self.by_name, self.kept = 0, [1], {"a": [1]}, (torch.ones(1), [1])

        def state_dict(self) -> Any:
            return vars(self)

        def load_state_dict(self, loaded: Any) -> None:
            vars(self).update(loaded)

    counts = Counts()
    step = torchguard.transaction(*setup(), also=counts)
    for _ in range(2):
        with pytest.raises(KeyError), step:
            counts.bad += 1
            counts.seen.append(2)
            counts.by_name["a"].append(2)
            counts.kept[1].append(2)
            raise KeyError
        assert (counts.bad, counts.seen, counts.by_name) == (0, [1], {"a": [1]})
        assert counts.kept[1] == [1]


def test_the_guarantee_names_writes_through_data_which_copies_put_back() -> None:
    """As SAM does: perturb the weights, run forward again."""
    model, optimizer = setup()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    assert ".data" in torchguard.transaction(model, fused).guarantee
    assert ".data" in torchguard.transaction(model, fused, undo="none").guarantee
    step = torchguard.transaction(model, optimizer, undo="copy")
    assert ".data" not in step.guarantee
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), step:
        model.weight.data.add_(1)
        raise KeyError
    assert torch.equal(model.weight, before)


def test_without_copies_the_guarantee_is_weak_and_a_torn_step_raises() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1).expand(3))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    step = torchguard.transaction([], optimizer, undo="none")
    assert step.guarantee.startswith("weak")
    assert torchguard.transaction([], optimizer).guarantee.startswith("strong")
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with pytest.raises(torchguard.UnrecoverableStepError):
        with step:
            optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_modules_of_torchscript_are_trained(inside: bool) -> None:
    """Their tensors are put back; a block of them may be checkpointed."""
    model: Any = torch.jit.script(nn.Linear(2, 2))
    if inside:
        model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2, requires_grad=True)
    torchguard.safe_checkpoint(model, x, use_reentrant=True).sum().backward()
    before = [(each.clone(), cast(torch.Tensor, each.grad).clone()) for each in model.parameters()]
    with pytest.raises(KeyError), torchguard.transaction(model, optimizer, undo="copy"):
        model(x).sum().backward()
        next(model.parameters()).data.zero_()
        raise KeyError
    for each, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(each, value)
        assert torch.equal(each.grad, gradient)


READ: list[int] = []


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset that notes what is read from it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        READ.append(index)
        return torch.ones(2)


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            READ.append(0)
            yield torch.ones(2)


class Stateful(torch.utils.data.DataLoader[Any]):
    """A loader with a position, as torchdata's StatefulDataLoader."""

    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


DATA: dict[str, Any] = {
    "DataLoader": lambda: torch.utils.data.DataLoader(Items(), shuffle=True),
    "endless DataLoader": lambda: torch.utils.data.DataLoader(Endless()),
    "Items": Items,
    "Endless": Endless,
    "Subset": lambda: torch.utils.data.Subset(Items(), [0]),
    "RandomSampler": lambda: torch.utils.data.RandomSampler(Items()),
    "BatchSampler": lambda: torch.utils.data.BatchSampler(range(9), 2, drop_last=False),
    "_SingleProcessDataLoaderIter": lambda: iter(torch.utils.data.DataLoader(Items())),
}


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("argument", ["also", "scheduler", "model", "optimizer"])
@pytest.mark.parametrize("name", DATA)
def test_data_is_not_read(name: str, argument: str, in_list: bool) -> None:
    """A TypeError names it; no item is read and no random number drawn."""
    model, optimizer = setup()
    data = DATA[name]()
    given: Any = {"model": model, "optimizer": optimizer, argument: [data] if in_list else data}
    READ.clear()
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=name.rpartition(" ")[2]) as caught:
        torchguard.transaction(**given)
    assert (READ, len(str(caught.value)) < 500) == ([], True)
    assert torch.equal(torch.get_rng_state(), before)
    assert argument != "also" or "state_dict() and load_state_dict()" in str(caught.value)


class Batches(collections.abc.Sequence):  # type: ignore[type-arg]
    """A dataset or a loader of the program's own."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        READ.append(index)
        return torch.ones(1)


@pytest.mark.parametrize("kind", ["generator", "map", "Batches"])
def test_what_makes_tensors_as_it_is_read_is_not_read(kind: str) -> None:
    kinds = {
        "generator": lambda: (each for each in Batches()),
        "map": lambda: map(torch.neg, Batches()),
        "Batches": Batches,
    }
    READ.clear()
    with pytest.raises(TypeError, match=f"also has <.*{kind}"):
        torchguard.transaction(*setup(), also=kinds[kind]())
    assert not READ


def test_a_loader_with_a_state_is_saved() -> None:
    loader = Stateful(Items())
    step = torchguard.transaction(*setup(), also=loader)
    READ.clear()
    with pytest.raises(KeyError), step:
        loader.position = 3
        raise KeyError
    assert loader.position == 0
    loader.position = 5
    state = step.state_dict()
    loader.position = 0
    step.load_state_dict(state)
    assert (loader.position, READ) == (5, [])


@pytest.mark.parametrize("undo", ["auto", "copy", "none"])
@pytest.mark.parametrize("kind", ["leaf", "with a gradient", "parameter", "frozen", "in a list"])
def test_a_tensor_in_also_has_its_gradient_flags_and_hooks_again(kind: str, undo: Any) -> None:
    """Run again after a failure, its gradient is that of one run."""
    model, optimizer = setup()
    prompt: Any = torch.zeros(2, requires_grad=kind != "frozen")
    if kind == "parameter":
        prompt = nn.Parameter(prompt.detach())
    if kind == "with a gradient":
        prompt.grad = torch.ones(2)
    gradient = prompt.grad
    also = [prompt, torch.zeros(())] if kind == "in a list" else prompt
    step = torchguard.transaction(model, optimizer, also=also, undo=undo)
    with pytest.raises(KeyError), step:
        prompt.requires_grad_()
        prompt.register_hook(lambda gradient: gradient * 2)
        prompt.register_post_accumulate_grad_hook(lambda _: None)
        model(torch.ones(1, 2) + prompt).sum().backward()
        with torch.no_grad():
            prompt.add_(1)
        prompt.requires_grad_(kind == "frozen")
        raise KeyError
    assert (prompt.tolist(), prompt.requires_grad) == ([0, 0], kind != "frozen")
    assert prompt.grad is gradient
    assert gradient is None or gradient.tolist() == [1, 1]
    assert not prompt._backward_hooks
    assert not prompt._post_accumulate_grad_hooks


@pytest.mark.parametrize("undo", ["auto", "copy"])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "number", "nested"])
def test_what_a_step_hangs_on_parameters_is_rolled_back(kind: str, there: bool, undo: Any) -> None:
    """Gradients of samples (opacus), or of higher precision (Megatron), add up in an attribute."""
    model, optimizer = setup()

    def add(parameter: Any, gradient: torch.Tensor) -> None:
        held = vars(parameter)
        if kind == "tensor":
            held.setdefault("main_grad", torch.zeros(gradient.shape)).add_(gradient)
        elif kind == "list":
            held.setdefault("grad_sample", []).append(gradient.clone())
        elif kind == "dict":
            by = held.setdefault("by", {})
            by["sum"] = by.get("sum", 0) + gradient
        elif kind == "number":
            held["times"] = held.get("times", 0) + 1
        else:
            held.setdefault("deep", [{"a": torch.zeros(gradient.shape)}])[0]["a"].add_(gradient)

    def hung() -> Any:
        return [str(vars(parameter)) for parameter in model.parameters()]

    for parameter in model.parameters():
        if there:
            add(parameter, torch.ones_like(parameter))
        parameter.register_hook(lambda gradient, p=parameter: add(p, gradient))
    before = hung()
    step = torchguard.transaction(model, optimizer, undo=undo)
    with pytest.raises(KeyError), step:
        model(torch.ones(1, 2)).sum().backward()
        assert hung() != before
        raise KeyError
    assert hung() == before
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert hung() != before


def test_marks_of_dynamo_on_parameters_stay() -> None:
    model, optimizer = setup()
    step = torchguard.transaction(model, optimizer)
    with pytest.raises(KeyError), step:
        torch._dynamo.mark_static_address(model.weight)
        raise KeyError
    assert hasattr(model.weight, "_dynamo_static_input_type")
