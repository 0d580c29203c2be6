"""load_state_dict of modules and optimizers: what torch does on success, nothing on failure."""

from __future__ import annotations

import copy
import io
import re
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

import torchguard
from support.small_training import bits
from support.ways import outcome_of
from torchguard._torch import version_of
from torchguard.errors import TorchGuardWarning


def by_install(model: Any, state: Any, **options: Any) -> None:
    with torchguard.install("load"):
        model.load_state_dict(state, **options)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 2))
    )
    model.register_buffer("unsaved", torch.ones(2), persistent=False)
    model.register_parameter("none", None)
    return model


def other_state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        name: torch.randn_like(value) if value.is_floating_point() else value + 7
        for name, value in make_model().state_dict().items()
    }


def contents(module: nn.Module) -> Any:
    """Everything a module holds: objects by identity, tensors bit for bit."""

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return id(value)
        held = "meta" if value.is_meta else bits(value)
        return id(value), held, version_of(value), value.requires_grad

    return {
        (name, kind, key): of(value)
        for name, each in module.named_modules()
        for kind in ("_parameters", "_buffers", "_modules")
        for key, value in getattr(each, kind).items()
    }


def ended(call: Callable[[], Any]) -> tuple[Any, str | None]:
    error, result = outcome_of(call)
    return result, None if error is None else f"{type(error).__name__}: {error}"


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda s: None,
    "missing": lambda s: s.pop("2.0.bias", None),
    "unexpected": lambda s: s.update(more=torch.ones(1)),
    "in a module that is none": lambda s: s.update({"9.weight": torch.ones(1)}),
    "shape": lambda s: s.update({"2.1.weight": torch.ones(9, 9)}),
    "first shape": lambda s: s.update({"0.weight": torch.ones(9, 9)}),
    "no tensor": lambda s: s.update({"2.0.weight": "text"}),
    "dtype": lambda s: s.update({"0.weight": torch.ones(3, 2, 1).double()}),
    "complex": lambda s: s.update({"0.weight": torch.ones(3, 2, 1) * 1j}),
    "sparse": lambda s: s.update({"2.1.weight": torch.ones(5, 2).to_sparse()}),
    "older checkpoint": lambda s: s.pop("1.num_batches_tracked", None),
    "one element": lambda s: s.update({"1.num_batches_tracked": torch.tensor([3])}),
    "not contiguous": lambda s: s.update({"2.0.weight": torch.rand(4, 4).t()}),
    "meta": lambda s: s.update({"2.0.weight": torch.ones(4, 4, device="meta")}),
}


@settings(max_examples=120)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3),
    strict=st.booleans(),
    assign=st.booleans(),
)
def test_equals_torch_or_changes_nothing(names: list[str], strict: bool, assign: bool) -> None:
    """Same result or same message as torch's on a copy; after a failure nothing has changed."""
    state: dict[str, Any] = OrderedDict(other_state())
    for name in names:
        CHANGES[name](state)
    ours, torchs = make_model(), make_model()
    before = contents(ours)
    given_flags = {k: getattr(v, "requires_grad", None) for k, v in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, error = ended(
            lambda: torchs.load_state_dict(copy.copy(state), strict=strict, assign=assign)
        )
        got, our_error = ended(
            lambda: torchguard.load_state_dict(ours, copy.copy(state), strict, assign)
        )
    assert our_error == error
    assert got == expected
    if error is not None:
        assert contents(ours) == before
        assert given_flags == {k: getattr(v, "requires_grad", None) for k, v in state.items()}
        return
    for (name, a), (_, b) in zip(
        ours.state_dict().items(), torchs.state_dict().items(), strict=True
    ):
        assert a.is_meta == b.is_meta, name
        assert a.is_meta or torch.equal(a.to_dense(), b.to_dense()), name


class Extra(nn.Linear):
    """Raises after it has written an attribute."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        self.stands = state
        raise ValueError("no")


def interrupting_hook(*_: Any) -> None:
    raise KeyboardInterrupt


def late_hook() -> nn.Module:
    last = nn.Linear(2, 2)
    last.register_load_state_dict_post_hook(interrupting_hook)
    return last


def overlapping() -> nn.Module:
    module = nn.Module()
    module.register_buffer("weight", torch.ones(1).expand(2))
    return module


LATE: dict[str, Callable[[], nn.Module]] = {
    "a hook": late_hook,
    "extra state": lambda: Extra(2, 2),
    "overlapping memory": overlapping,
    # In another order, which torch refuses; that it is the parameter itself is no reason.
    "a state in the memory of its parameter": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", LATE)
def test_what_raises_late_is_undone(name: str, assign: bool) -> None:
    """A loader, a hook, extra state or a copy that raises after others were written."""
    model, plain = (nn.Sequential(nn.Linear(2, 2), LATE[name]()) for _ in range(2))
    state = {
        key: torch.full_like(value, 7.0) if isinstance(value, torch.Tensor) else value
        for key, value in model.state_dict().items()
    }
    before, attributes, of_plain = contents(model), set(vars(model[1])), contents(plain)

    def given_to(target: Any) -> dict[str, Any]:
        if "in the memory" in name:
            return {**state, "1.weight": target[1].weight.detach().t()}
        return state

    _, error = ended(lambda: plain.load_state_dict(given_to(plain), assign=assign))
    assert contents(plain) != of_plain, "torch has loaded half"
    _, ours = ended(lambda: torchguard.load_state_dict(model, given_to(model), assign=assign))
    assert ours == error
    assert error is not None or assign
    if error is not None:
        assert contents(model) == before
        assert set(vars(model[1])) == attributes


def test_a_warning_that_is_an_error_is_undone() -> None:
    """A copy from complex to real warns after it has written."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {k: torch.full_like(v, 3.0) for k, v in model.state_dict().items()}
    state["1.weight"] = state["1.weight"].to(torch.complex64)
    before = contents(model)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            error = outcome_of(lambda: torchguard.load_state_dict(model, state)).error
    finally:
        torch.set_warn_always(always)
    assert error is not None
    assert contents(model) == before


def test_memory_stays_where_it_is() -> None:
    """What shares memory with a parameter sees what is loaded; strides stay."""
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2))
    model = model.to(memory_format=torch.channels_last)
    weight = model[1].weight = model[0].weight
    alias, strides = weight.detach(), weight.stride()
    state = {name: torch.rand(value.shape) for name, value in model.state_dict().items()}
    state["0.weight"] = state["1.weight"]
    state["0.bias"] = model[0].bias.detach()  # the parameter's own memory
    torchguard.load_state_dict(model, state)
    assert model[0].weight is model[1].weight is weight
    assert weight.stride() == strides
    assert torch.equal(alias, state["1.weight"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def trained(size: int = 4, kind: Any = torch.optim.Adam, **options: float) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(size)) for size in (size, (2, 3), ())]
    optimizer: torch.optim.Optimizer = kind(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def in_full(optimizer: torch.optim.Optimizer) -> str:
    return repr((optimizer.state_dict(), sorted(vars(optimizer)), len(optimizer.state)))


@pytest.mark.parametrize(
    "name",
    ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Rprop", "ASGD",
     "Adadelta", "Adafactor"],
)  # fmt: skip
def test_every_optimizer_takes_its_own_state(name: str) -> None:
    """Fresh and used ones, for every optimizer of torch: as torch itself does."""
    kind: Any = getattr(torch.optim, name)
    options: Any = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    state = trained(kind=kind, **options).state_dict()
    for target in (
        trained(kind=kind, **options),
        kind([nn.Parameter(torch.ones(size)) for size in (4, (2, 3), ())]),
    ):
        torchguard.load_state_dict(target, state)
        assert repr(target.state_dict()["state"]) == repr(state["state"])


def adding_hook(optimizer: Any, *_: Any) -> None:
    for each in (optimizer.param_groups[0], *optimizer.state.values()):
        each["added"] = 1
    raise RuntimeError("no")


FAULTS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    r"exp_avg of parameter 0 has shape \(3,\), expected \(4,\)": lambda _, state: state.update(
        trained(size=3).state_dict()
    ),
    # A fused step would write past the end of the one element.
    r"exp_avg of parameter 0 has shape \(\), expected \(4,\)": lambda _, state: state["state"][
        0
    ].update(exp_avg=torch.ones(())),
    "parameter groups": lambda _, state: state["param_groups"].append({"params": []}),
    "size of optimizer's group": lambda _, state: state["param_groups"][0]["params"].append(9),
    "param_groups": lambda _, state: state.pop("param_groups"),
    "KeyboardInterrupt": lambda target, _: target.register_load_state_dict_post_hook(
        interrupting_hook
    ),
    "RuntimeError: no": lambda target, _: target.register_load_state_dict_pre_hook(adding_hook),
}


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("message", FAULTS)
def test_a_failure_leaves_the_optimizer(message: str, used: bool) -> None:
    target, state = trained(), trained().state_dict()
    if not used:
        target.state.clear()
    FAULTS[message](target, state)
    groups, before = target.param_groups, in_full(target)
    contents = [dict(group) for group in groups]
    _, error = ended(lambda: torchguard.load_state_dict(target, state))
    assert error is not None
    assert re.search(message, error)
    assert target.param_groups is groups
    assert [dict(group) for group in groups] == contents
    assert in_full(target) == before


def padding_hook(_: Any, state: dict[str, Any]) -> dict[str, Any]:
    for entry in state["state"].values():
        entry.update({k: nn.functional.pad(v, (0, 1)) for k, v in entry.items() if v.dim() == 1})
    return state


def test_a_state_that_a_hook_makes_fit_is_loaded() -> None:
    target, state = trained(size=5), trained(size=4).state_dict()
    target.register_load_state_dict_pre_hook(padding_hook)
    torchguard.load_state_dict(target, state)
    assert target.state[target.param_groups[0]["params"][0]]["exp_avg"].shape == (5,)


@pytest.mark.parametrize("load", [torchguard.load_state_dict, by_install])
def test_a_path_is_no_state(load: Any) -> None:
    with pytest.raises(TypeError, match=r"'model\.pt', expected what state_dict"):
        load(nn.Linear(2, 2), "model.pt")


def test_wrong_target() -> None:
    with pytest.raises(TypeError, match="target is of type dict"):
        torchguard.load_state_dict({}, {})  # type: ignore[arg-type]


def test_what_a_subclass_overrides_goes_on_working() -> None:
    class Renames(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            renamed = {key.removeprefix("old."): value for key, value in state_dict.items()}
            return super().load_state_dict(renamed, *args, **kwargs)

    model = Renames(2, 2)
    state = {f"old.{key}": torch.full_like(value, 3.0) for key, value in model.state_dict().items()}
    with torchguard.install("load"):
        model.load_state_dict(state)
    assert model.bias.tolist() == [3, 3]
    torchguard.load_state_dict(model, {key: value + 1 for key, value in state.items()})
    assert model.bias.tolist() == [4, 4]


def test_a_lazy_module_is_loaded_as_pytorch_does() -> None:
    model = nn.LazyLinear(3)
    torchguard.load_state_dict(model, nn.Linear(2, 3).state_dict())
    assert model.weight.shape == (3, 2)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_between_two_copies() -> None:
    """The state is loaded whole before the interrupt goes on; torch loads half of it."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    state = {k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()}
    copied = []

    class Interrupt(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.copy_:
                copied.append(func)
                if len(copied) == 3:
                    signal.raise_signal(signal.SIGINT)
            return func(*args, **(kwargs or {}))

    with Interrupt(), pytest.raises(KeyboardInterrupt):
        torchguard.load_state_dict(model, state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


class Float32Moments(torch.optim.Optimizer):
    """Keeps float32 moments of bfloat16 parameters, alone and in a list, as many packages do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, moment=torch.zeros(parameter.shape), past=[torch.zeros(1)])
            state["moment"] += parameter.grad / 3
            state["past"][0] += 1 / 3
            parameter.sub_(self.param_groups[0]["lr"] * state["moment"])


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), Float32Moments]
)
def test_moments_keep_the_dtype_in_which_they_were_saved(make: Any) -> None:
    """PyTorch casts them to the dtype of the parameter; steps after it are other ones."""
    ends = []
    for way in ("never stopped", "ours", "PyTorch"):
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = make([parameter])
        for number in range(3):
            parameter.grad = torch.full_like(parameter, 1 / 3 + number / 7)
            optimizer.step()
            if number == 0:
                parameter.data = parameter.data.bfloat16()  # as model.bfloat16() does
            if number == 1 and way != "never stopped":
                saved = optimizer.state_dict()
                optimizer = make([parameter])
                if way == "PyTorch":
                    optimizer.load_state_dict(saved)
                else:
                    torchguard.load_state_dict(optimizer, saved)
        state = optimizer.state[parameter]
        ends.append([each for each in state.values() if isinstance(each, torch.Tensor)])
        ends[-1] += [*state.get("past", ()), parameter.detach()]
    assert all(map(torch.equal, ends[0], ends[1]))
    assert [each.dtype for each in ends[0]] == [each.dtype for each in ends[1]]
    assert [each.dtype for each in ends[0]] != [each.dtype for each in ends[2]]


def test_adam_can_not_step_with_them_so_they_are_cast_with_a_warning() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    saved = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(4)
    saved.step()
    narrow = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    loaded = torch.optim.AdamW([narrow])
    with pytest.warns(
        TorchGuardWarning, match="can't step with the dtype in which its state was saved"
    ):
        torchguard.load_state_dict(loaded, saved.state_dict())
    assert loaded.state[narrow]["exp_avg"].dtype is torch.bfloat16
    assert loaded.state[narrow]["step"].item() == saved.state[parameter]["step"].item() == 1
    narrow.grad = torch.ones_like(narrow)
    loaded.step()


def by_transaction(model: nn.Module, state: Any, **options: Any) -> None:
    if options:
        model.load_state_dict(state, **options)  # PyTorch's, which leaves its mark
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step: Any = torchguard.transaction(model, optimizer)
    step.load_state_dict({**step.state_dict(), "models": {"0": state}})


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("then", [lambda s: s, copy.copy, copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("load", [torchguard.load_state_dict, by_install, by_transaction])
@pytest.mark.parametrize("make", [make_model, lambda: nn.LSTM(2, 2), lambda: nn.Linear(2, 2)])
def test_a_load_by_assignment_does_not_decide_the_next_one(
    make: Callable[[], nn.Module], load: Any, then: Callable[[Any], Any]
) -> None:
    state: Any = make().state_dict()
    marks = copy.deepcopy(state._metadata)
    load(make(), state, assign=True)
    assert load is by_transaction or state._metadata == marks
    model = make()
    held = list(model.parameters())
    load(model, then(state))
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert bits(model.state_dict()) == bits(state)


def test_a_mark_that_pytorch_left_is_not_followed() -> None:
    state = make_model().state_dict()
    make_model().load_state_dict(state, assign=True)
    state["0.weight"] = torch.ones(9, 9)  # a load that fails, too
    model = make_model()
    before = contents(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        torchguard.load_state_dict(model, state)
    assert contents(model) == before


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def linear_state() -> dict[str, Any]:
    return dict(nn.Linear(2, 2).state_dict())


def with_prefix(prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in linear_state().items()}


def compiled(model: nn.Module) -> Any:
    return torch.compile(model)


def state_of_a_step() -> Any:
    model = nn.Linear(2, 2)
    return torchguard.transaction(model, torch.optim.SGD(model.parameters())).state_dict()


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "of DDP": (lambda: nn.Linear(2, 2), lambda: with_prefix("module."), "'module.') removes it"),
    "of a part": (
        lambda: nn.Linear(2, 2),
        lambda: with_prefix("net.head."),
        "'net.head.') removes it",
    ),
    "of the module inside": (Wrapped, linear_state, "load into model.module"),
    "compiled": (
        lambda: nn.Linear(2, 2),
        lambda: with_prefix("_orig_mod."),
        "model._orig_mod.state_dict()",
    ),
    "into a compiled one": (lambda: compiled(nn.Linear(2, 2)), linear_state, "model._orig_mod"),
    "into a compiled layer": (
        lambda: nn.Sequential(compiled(nn.Linear(2, 2))),
        lambda: with_prefix("0."),
        "model._orig_mod",
    ),
    "a checkpoint": (
        lambda: nn.Linear(2, 2),
        lambda: {"epoch": 3, "model": linear_state()},
        "load state['model']",
    ),
    "of a transaction": (
        lambda: nn.Linear(2, 2),
        state_of_a_step,
        re.escape("load state['models']['0']"),
    ),
    "of an optimizer": (
        lambda: nn.Linear(2, 2),
        lambda: torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict(),
        "load it into the optimizer",
    ),
}


@pytest.mark.parametrize("load", [torchguard.load_state_dict, by_install])
@pytest.mark.parametrize("name", OTHERS)
def test_other_names_say_what_to_type(name: str, load: Any) -> None:
    """In one line more than PyTorch's message has."""
    make, state, text = OTHERS[name]
    text = text if "\\" in text else re.escape(text)
    with pytest.raises(RuntimeError) as plain:
        make().load_state_dict(state())
    with pytest.raises(RuntimeError, match=text) as ours:
        load(make(), state())
    assert str(ours.value).rpartition("\n\t")[0] == str(plain.value)
    with pytest.warns(UserWarning, match=text) as said:
        load(make(), state(), strict=False)
    assert [each.filename for each in said] == [__file__]


def test_what_loads_something_or_has_nothing_to_load_is_not_warned_of() -> None:
    renamed = nn.Linear(2, 2)
    renamed.register_load_state_dict_pre_hook(
        lambda m, state, *_: state.update(weight=state.pop("w"))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, state in (
            (nn.Linear(2, 2), {"weight": torch.ones(2, 2), "other": torch.ones(1)}),
            (nn.Linear(2, 2), {}),
            (nn.ReLU(), {"weight": torch.ones(1)}),
            (renamed, {"w": torch.ones(2, 2)}),
        ):
            torchguard.load_state_dict(model, state, strict=False)
    assert renamed.weight.sum() == 4


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (linear_state(), "that of a model, with weight, bias: load it into the model"),
        (
            {"model": {}, "optimizer": {"param_groups": [], "state": {}}},
            "load state['optimizer']",
        ),
        ({}, "got a dict with nothing"),
        ("model.pt", "torchguard.load(path)"),
    ],
)
def test_what_is_no_state_of_an_optimizer(state: Any, text: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for load in (torchguard.load_state_dict, by_install):
        with pytest.raises((KeyError, AttributeError)) as error:
            load(optimizer, state)
        assert text in error.value.args[0]
