"""is_consistent, check_consistent: whether a shape fits its memory."""

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
from support.ways import differences, outcome_of
from torchguard import InconsistentTensorError, check_consistent
from torchguard.rollback.consistency import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")


def corrupt(shape: tuple[int, ...] = (100,)) -> torch.Tensor:
    """A tensor whose shape lies, made as torch makes it."""
    tensor = locked([1.0, 2.0])
    assert outcome_of(lambda: tensor.resize_(shape)).error is not None
    return tensor


def shrunk(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize("kind", **named(kinds.ALL))
def test_every_kind_is_consistent_to_begin_with(kind: Kind) -> None:
    tensor = kind.make()
    before = state(tensor)
    kinds.CALLS.clear()
    assert is_consistent(tensor)
    check_consistent(tensor)
    assert kinds.CALLS == []
    assert differences(before, state(tensor)) == {}


@pytest.mark.parametrize(
    "kind", **named(tuple(k for k in kinds.STRIDED if k.make().numel() and k.can_grow))
)
def test_every_kind_whose_storage_shrank_is_found(kind: Kind) -> None:
    tensor = shrunk(kind.make())
    kinds.CALLS.clear()
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match="the storage holds 0"):
        check_consistent(tensor)
    assert kinds.CALLS == []


def test_the_offset_of_a_lazy_view_counts_in_inference_mode() -> None:
    """There torch's operator for the offset answers with that of a resolved copy, 0."""
    view = shrunk(torch.ones(4, dtype=torch.complex64)[2:].conj(), 24)
    with torch.inference_mode():
        assert not is_consistent(view)


@pytest.mark.parametrize(
    "make",
    [
        lambda: corrupt((100,)),
        lambda: corrupt((-1,)),
        lambda: corrupt((2**62, 4)),
        lambda: shrunk(torch.ones(8)[3:5]),
        lambda: shrunk(torch.ones(3).expand(5, 3)),
        lambda: shrunk(torch.tensor(1.0)),
        lambda: shrunk(torch.nn.Parameter(torch.arange(4.0)), 9),
    ],
)
def test_what_torch_left_corrupt_is_found_and_emptied(make: Callable[[], torch.Tensor]) -> None:
    """By the line that the message tells."""
    tensor = make()
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match=r"^obj: shape ") as caught:
        check_consistent(tensor)
    assert f"stride {tensor.stride()}" in str(caught.value)
    assert f"storage offset {tensor.storage_offset()}" in str(caught.value)
    remedy = "tensor.set_(tensor.untyped_storage(), 0, (0,), (1,))"
    assert f"Under torch.no_grad(), {remedy} empties it" in str(caught.value)
    with torch.no_grad():
        exec(remedy)  # noqa: S102  a line of the message
    assert is_consistent(tensor)
    assert tensor.shape == (0,)


def test_strides_that_overflowed_are_found_without_being_followed() -> None:
    tensor = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="overflow"):
        tensor.resize_(0, 5, 10, 10, 2**58)
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match="a negative stride"):
        check_consistent(tensor)
    tensor.set_(tensor.untyped_storage(), 0, (4,), (1,))
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_view_of_all_that_fits_to_the_last_byte_is_consistent() -> None:
    storage = torch.zeros(10).untyped_storage()
    fits = torch.empty(0).set_(storage, 1, (2, 3), (6, 1))
    assert is_consistent(fits)
    storage.resize_(39)
    assert not is_consistent(fits)
    assert is_consistent(torch.empty(0).set_(storage, 100, (0,), (1,)))


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "part", "name"),
    [
        (lambda: plain().to_sparse(), lambda t: t._values(), r"\._values\(\)"),
        (lambda: plain().to_sparse_csr(), lambda t: t.col_indices(), r"\.col_indices\(\)"),
        (lambda: Wrapper(plain()), lambda t: t.wrapped, r"\.wrapped"),
        (_jagged, lambda t: t.values(), r"\.(_values|values\(\))"),
    ],
    ids=["COO", "CSR", "wrapper", "jagged"],
)
def test_what_is_made_of_other_tensors_is_as_good_as_its_parts(
    make: Callable[[], torch.Tensor], part: Callable[[Any], torch.Tensor], name: str
) -> None:
    tensor = make()
    shrunk(part(tensor))
    assert not is_consistent(tensor)
    with pytest.raises(InconsistentTensorError, match=f"obj: {name} has shape"):
        check_consistent(tensor)


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
        loop: list[Any] = [good]
        loop += [loop, bad]
        paths: dict[str, Any] = {
            "obj": bad,
            "obj[1]": [good, bad],
            "obj[1][1]": (good, [good, bad]),
            "obj['b'][3]": {"a": good, "b": {3: bad}},
            "obj['weight']": collections.OrderedDict(weight=bad),
            "obj.second": Pair(good, bad),
            "obj.tensors[2]": Record("x", [good, good, bad]),
            "obj[1].tensors[0]": [Record("x", []), Record("y", [bad])],
            "obj[2]": loop,
        }
        for path, obj in paths.items():
            assert self.path(obj) == path

    def test_lead_into_modules_unseen_by_subclasses(self) -> None:
        norm = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        check_consistent(norm)
        shrunk(norm[1].running_var)  # type: ignore[arg-type]
        assert eval(self.path(norm), {"obj": norm}) is norm[1].running_var  # noqa: S307
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(plain().as_subclass(kinds.Watching))
        with torch._C.DisableTorchFunction():
            module.weight.grad = gradient = plain()
        kinds.CALLS.clear()
        check_consistent(module)
        shrunk(gradient)
        assert self.path(module) == "obj.weight.grad"
        assert self.path({"m": [module]}) == "obj['m'][0].weight.grad"
        assert kinds.CALLS == []

    def test_lead_into_optimizers(self) -> None:
        optimizers = []
        for _ in range(6):
            parameter = torch.nn.Parameter(torch.ones(3))
            parameter.grad = torch.ones(3)
            optimizers.append(torch.optim.Adam([parameter]))
            optimizers[-1].step()
        check_consistent(optimizers)
        shrunk(optimizers[5].state[parameter]["exp_avg_sq"])
        assert self.path(optimizers) == "obj[5].state[0]['exp_avg_sq']"
        shrunk(parameter)
        assert self.path(optimizers[5]) == "obj.param_groups[0]['params'][0]"

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

    def test_ignore_what_is_no_tensor(self) -> None:
        check_consistent([1, "text", None, print, {"a": object()}, torch.Size([2]), plain()])
        check_consistent({})
        check_consistent(torch.nn.ReLU())


def test_tensors_of_torch_func_count_as_consistent() -> None:
    def body(row: torch.Tensor) -> torch.Tensor:
        assert is_consistent(row)
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
