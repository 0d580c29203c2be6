"""is_consistent, check_consistent, repair_: whether a shape fits its memory."""

from __future__ import annotations

import collections.abc
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from support import kinds
from support.kinds import Kind, Wrapper, locked, named, plain, state
from support.ways import differences, ends_the_process, outcome_of
from torchguard import InconsistentTensorError, check_consistent, repair_
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")


def corrupt(shape: tuple[int, ...] = (100,)) -> torch.Tensor:
    """A tensor whose shape lies, made as torch makes it."""
    tensor = locked([1.0, 2.0])
    assert outcome_of(lambda: tensor.resize_(shape)).error is not None
    return tensor


def shrunk(tensor: torch.Tensor | None = None) -> torch.Tensor:
    tensor = torch.ones(4096) if tensor is None else tensor
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_every_kind_is_consistent_to_begin_with(kind: Kind) -> None:
    tensor = kind.make()
    before = state(tensor)
    kinds.CALLS.clear()
    assert is_consistent(tensor)
    check_consistent(tensor)
    assert repair_(tensor) is tensor
    assert kinds.CALLS == []
    assert differences(before, state(tensor)) == {}


@pytest.mark.parametrize(
    "kind", **named(tuple(k for k in kinds.STRIDED if k.make().numel() and k.can_grow))
)
def test_every_kind_whose_storage_shrank_is_found_and_repaired(kind: Kind) -> None:
    tensor = kind.make()
    dtype, type_ = tensor.dtype, type(tensor)
    shrunk(tensor)
    kinds.CALLS.clear()
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match="the storage holds 0"):
        check_consistent(tensor)
    assert repair_(tensor) is tensor
    assert kinds.CALLS == []
    assert is_consistent(tensor)
    assert tensor.dtype == dtype
    assert type(tensor) is type_
    with torch._C.DisableTorchFunction():
        assert tensor.shape == (0,)


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: corrupt((100,)), 800),
        (lambda: corrupt((3, 4)), 96),
        (lambda: corrupt((-1,)), None),
        (lambda: corrupt((2**62, 4)), None),
        (lambda: shrunk(torch.ones(3)), 12),
        (lambda: shrunk(torch.ones(8)[3:5]), 20),
        (lambda: shrunk(torch.ones(3).expand(5, 3)), 12),
        (lambda: shrunk(torch.tensor(1.0)), 4),
        (lambda: shrunk(torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint32)), 12),
    ],
)
def test_what_torch_left_corrupt_is_found(
    make: Callable[[], torch.Tensor], needed: int | None
) -> None:
    tensor = make()
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError) as caught:
        check_consistent(tensor)
    message = str(caught.value)
    assert message.startswith("obj: shape ")
    assert f"stride {tensor.stride()}" in message
    assert f"storage offset {tensor.storage_offset()}" in message
    assert "torchguard.repair_()" in message
    if needed is not None:
        assert f"{needed} bytes needed" in message
    repaired = repair_(tensor)
    assert repaired is tensor
    assert is_consistent(tensor)
    assert tensor.stride() == (1,)
    assert tensor.storage_offset() == 0


def test_strides_that_overflowed_are_found_without_being_followed() -> None:
    tensor = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="overflow"):
        tensor.resize_(0, 5, 10, 10, 2**58)
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match="a negative stride"):
        check_consistent(tensor)
    assert repair_(tensor).tolist() == [0, 1, 2, 3]


def test_a_view_of_all_that_fits_to_the_last_byte_is_consistent() -> None:
    storage = torch.zeros(10).untyped_storage()
    fits = torch.empty(0).set_(storage, 1, (2, 3), (6, 1))
    assert is_consistent(fits)
    storage.resize_(39)
    assert not is_consistent(fits)
    assert is_consistent(torch.empty(0).set_(storage, 100, (0,), (1,)))


def test_access_to_what_is_found_kills_the_process_and_finding_it_does_not() -> None:
    def access() -> None:
        shrunk(torch.ones(10)).clone()

    assert ends_the_process(access)
    assert not ends_the_process(lambda: is_consistent(shrunk(torch.ones(10))))


def test_repair_shows_the_bytes_there_are() -> None:
    tensor = corrupt((5, 5))
    assert repair_(tensor).tolist() == [1, 2]
    parameter = torch.nn.Parameter(torch.arange(4.0))
    parameter.untyped_storage().resize_(9)
    assert repair_(parameter).shape == (2,)
    assert parameter.requires_grad
    with torch.inference_mode():
        inference = torch.arange(4.0)
    inference.untyped_storage().resize_(8)
    assert repair_(inference).shape == (2,)


def test_four_bits_to_an_element_count_as_such() -> None:
    packed = torch.quantize_per_channel(
        torch.ones(3, 5), torch.ones(3), torch.zeros(3), 0, torch.quint4x2
    )
    assert is_consistent(packed)
    packed.untyped_storage().resize_(2)
    assert not is_consistent(packed)


class TestTensorsMadeOfOthers:
    def test_sparse_tensors_are_as_good_as_their_parts(self) -> None:
        coo = plain().to_sparse()
        shrunk(coo._values())
        assert not is_consistent(coo)
        with pytest.raises(InconsistentTensorError, match=r"obj: \._values\(\) has shape"):
            check_consistent(coo)
        csr = plain().to_sparse_csr()
        shrunk(csr.col_indices())
        with pytest.raises(InconsistentTensorError, match=r"col_indices\(\) has shape"):
            check_consistent(csr)
        with pytest.raises(InconsistentTensorError, match=r"repair_\(\) on the one named"):
            repair_(csr)
        repair_(csr.col_indices())

    def test_uncoalesced_tensors_are_looked_at_too(self) -> None:
        indices = torch.tensor([[0, 0]])
        assert is_consistent(torch.sparse_coo_tensor(indices, torch.ones(2), (3,)))

    def test_wrappers_are_as_good_as_what_they_wrap(self) -> None:
        wrapper = Wrapper(plain())
        shrunk(wrapper.wrapped)
        with pytest.raises(InconsistentTensorError, match=r"obj: \.wrapped has shape"):
            check_consistent(wrapper)
        with pytest.raises(InconsistentTensorError, match=r"\.wrapped"):
            repair_(wrapper)
        repair_(wrapper.wrapped)
        assert wrapper.wrapped.shape == (0,)

    def test_jagged_tensors_are_as_good_as_their_values(self) -> None:
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        shrunk(jagged.values())
        assert not is_consistent(jagged)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    name: str
    tensors: list[torch.Tensor]


class TestPaths:
    def path(self, obj: Any) -> str:
        with pytest.raises(InconsistentTensorError) as caught:
            check_consistent(obj)
        return str(caught.value).partition(":")[0]

    def test_lead_through_containers(self) -> None:
        good, bad = plain(), corrupt()
        assert self.path(bad) == "obj"
        assert self.path([good, bad]) == "obj[1]"
        assert self.path((good, [good, bad])) == "obj[1][1]"
        assert self.path({"a": good, "b": {3: bad}}) == "obj['b'][3]"
        assert self.path(collections.OrderedDict(weight=bad)) == "obj['weight']"
        assert self.path(Pair(good, bad)) == "obj.second"
        assert self.path(Record("x", [good, good, bad])) == "obj.tensors[2]"
        assert self.path([Record("x", []), Record("y", [bad])]) == "obj[1].tensors[0]"

    def test_lead_into_modules(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        check_consistent(module)
        shrunk(module[1].running_var)  # type: ignore[arg-type]
        path = self.path(module)
        assert path.startswith("obj")
        assert eval(path, {"obj": module}) is module[1].running_var  # noqa: S307

    def test_lead_into_gradients(self) -> None:
        module = torch.nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        check_consistent(module)
        assert module.weight.grad is not None
        shrunk(module.weight.grad)
        assert self.path(module) == "obj.weight.grad"
        assert self.path({"m": [module]}) == "obj['m'][0].weight.grad"

    def optimizer(self) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        optimizer = torch.optim.Adam([parameter])
        optimizer.step()
        return optimizer

    def test_lead_into_optimizers(self) -> None:
        optimizer = self.optimizer()
        check_consistent(optimizer)
        parameter = optimizer.param_groups[0]["params"][0]
        shrunk(optimizer.state[parameter]["exp_avg"])
        assert self.path(optimizer) == "obj.state[0]['exp_avg']"
        shrunk(parameter)
        assert self.path(optimizer) == "obj.param_groups[0]['params'][0]"

    def test_lead_to_the_last_of_several_optimizers(self) -> None:
        optimizers = [self.optimizer() for _ in range(6)]
        [state_of] = optimizers[5].state.values()
        shrunk(state_of["exp_avg_sq"])
        assert self.path(optimizers) == "obj[5].state[0]['exp_avg_sq']"

    def test_lead_through_containers_that_are_made_when_asked_for(self) -> None:
        # Each list is gone when the next one is made, and that one has its id.
        class Lazy(collections.abc.Mapping[int, Any]):
            def __getitem__(self, key: int) -> Any:
                return [corrupt() if key == 9 else plain()]

            def __iter__(self) -> Iterator[int]:
                return iter(range(10))

            def __len__(self) -> int:
                return 10

        assert self.path(Lazy()) == "obj[9][0]"

    def test_end_where_containers_contain_themselves(self) -> None:
        loop: list[Any] = [plain()]
        loop.append(loop)
        check_consistent(loop)
        loop.append(corrupt())
        assert self.path(loop) == "obj[2]"

    def test_ignore_what_is_no_tensor(self) -> None:
        check_consistent([1, "text", None, print, {"a": object()}, torch.Size([2]), plain()])
        check_consistent({})
        check_consistent(torch.nn.ReLU())


def test_a_subclass_is_looked_at_unseen() -> None:
    watched = plain().as_subclass(kinds.Watching)
    with torch._C.DisableTorchFunction():
        watched.grad = plain()
    kinds.CALLS.clear()
    check_consistent({"a": watched})
    assert kinds.CALLS == []


def test_tensors_of_torch_func_count_as_consistent() -> None:
    def body(row: torch.Tensor) -> torch.Tensor:
        assert is_consistent(row)
        assert repair_(row) is row
        check_consistent(row)
        return row

    torch.vmap(body)(torch.ones(2, 3))
    torch.func.grad(lambda x: body(x).sum())(torch.ones(2))


def test_a_result_has_no_gradient_that_is_asked_for() -> None:
    """torch warns where .grad of a tensor is read that is no leaf."""
    result = torch.ones(3, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_consistent({"result": result})


def test_symbolic_sizes_are_not_compared() -> None:
    """A comparison would become a guard of the compiler."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    fake = mode.from_tensor(
        torch.ones(5, 7),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]),
    )
    before = len(environment.guards)
    assert is_consistent(fake)
    assert len(environment.guards) == before
