"""What is patched can be read, pickled, scripted, traced and overridden as before."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import pkgutil
import pydoc
import re
import warnings
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from child_process import output_of
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import make_fx

import torchguard
from torchguard import install
from torchguard.patching.guards import GUARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def everything_installed() -> Iterator[None]:
    with install("resize", "out", "verified", "save", "load", "numpy", "optimizer"):
        yield


# Read while nothing is installed: a guard looks for builtins of torch.
PATHS = [
    path
    for guard in GUARDS.values()
    if not guard.patches_dynamo  # what they patch is no function of torch's that anybody calls
    for path in guard.replacements()
]


def paths() -> list[str]:
    return PATHS


def live(path: str) -> Any:
    # torch.optim deletes the names of its modules, so attributes alone do not lead there.
    return pkgutil.resolve_name(path)


# --- names, signatures, docstrings


@pytest.mark.usefixtures("everything_installed")
def test_every_patched_function_has_a_readable_signature() -> None:
    for path in paths():
        signature = inspect.signature(live(path))
        assert str(signature).startswith("("), path
    assert len(paths()) > 300


def test_without_installing_most_signatures_can_not_be_read() -> None:
    def unreadable(path: str) -> bool:
        try:
            inspect.signature(live(path))
        except ValueError:
            return True
        return False

    assert sum(unreadable(path) for path in paths()) > 300


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("path", "signature"),
    [
        ("torch.add", "(input, other, *, alpha=1, out=None)"),
        ("torch.linalg.qr", "(A, mode='reduced', *, out=None)"),
        ("torch.tensordot", None),
        ("torch.norm", None),
        ("torch.nn.functional.normalize", None),
    ],
)
def test_signatures_are_torchs(path: str, signature: str | None) -> None:
    expected = signature or str(inspect.signature(torchguard.get_original(path)))
    assert str(inspect.signature(live(path))) == expected


@pytest.mark.usefixtures("everything_installed")
def test_methods_take_self_in_their_signatures() -> None:
    for name in ("resize_", "resize_as_", "set_"):
        parameters = list(inspect.signature(getattr(torch.Tensor, name)).parameters)
        assert parameters[0] == "self"
        assert len(parameters) > 1
        bound = inspect.signature(getattr(torch.ones(2), name)).parameters
        assert list(bound) == parameters[1:]


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("path", "arguments", "names"),
    [
        ("torch.max", (1, 2), {}),
        ("torch.max", (1,), {"dim": 0, "keepdim": True}),
        ("torch.min", (1, 2), {}),
        ("torch.argmax", (1, 0), {}),
        ("torch.argmax", (1,), {"dim": 0, "out": None}),
        ("torch.sum", (1, 0), {}),
        ("torch.sum", (1,), {"dim": 0, "out": None}),
        ("torch.mean", (1, 0), {}),
        ("torch.median", (1, 0), {}),
        ("torch.prod", (1,), {}),
        ("torch.softmax", (1, 0), {"out": None}),
        ("torch.take", (1, 2), {"out": None}),
        ("torch.isin", (1, 2), {"out": None}),
        ("torch.normal", (0.0, 1.0, (2,)), {}),
        ("torch.full", ((2,), 1), {"out": None}),
        ("torch.zeros", (2, 3), {"out": None}),
        ("torch.arange", (2, 3), {"out": None}),
        ("torch.nn.functional.gelu", (1,), {"out": None}),
        ("torch.nn.functional.linear", (1, 2), {"out": None}),
        ("torch.nn.functional.hardshrink", (1,), {"out": None}),
        ("torch.Tensor.resize_", (1, 2, 3), {"memory_format": None}),
        ("torch.Tensor.resize_", (1, (2, 3)), {}),
        ("torch.Tensor.set_", (1,), {}),
        ("torch.Tensor.resize_as_", (1, 2), {"memory_format": None}),
    ],
)
def test_a_signature_refuses_no_call_that_torch_takes(
    path: str, arguments: tuple[Any, ...], names: dict[str, Any]
) -> None:
    inspect.signature(live(path)).bind(*arguments, **names)


@pytest.mark.usefixtures("everything_installed")
def test_names_and_docstrings_are_torchs_and_lead_back_to_the_function() -> None:
    for path in paths():
        function, bare = live(path), torchguard.get_original(path)
        owner, _, name = path.rpartition(".")
        place = name
        if isinstance(live(owner), type):
            owner, _, kind = owner.rpartition(".")
            place = f"{kind}.{name}"
        assert function.__name__ == name
        assert function.__qualname__ == place
        assert function.__module__ == owner
        assert live(f"{function.__module__}.{function.__qualname__}") is function
        assert function.__doc__ == bare.__doc__
        assert f"function {function.__qualname__} at" in repr(function)


@pytest.mark.usefixtures("everything_installed")
def test_help_renders_every_patched_function() -> None:
    for path in paths():
        text = pydoc.render_doc(live(path), renderer=pydoc.plaintext)  # type: ignore[attr-defined]
        assert f"{path.rpartition('.')[2]}(" in text.replace("Tensor.", "")
        assert "torchguard" not in text
    text = pydoc.render_doc(torch.Tensor.resize_, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert "Resizes :attr:`self` tensor to the specified size" in text


# --- pickle, copy, save


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_patched_function_survives_pickle(protocol: int) -> None:
    for path in paths():
        function = live(path)
        assert pickle.loads(pickle.dumps(function, protocol)) is function  # noqa: S301
        assert copy.deepcopy(function) is function


def test_a_pickled_patched_function_is_torchs_own_where_nothing_is_installed() -> None:
    with install("resize", "out"):
        pickled = pickle.dumps({path: live(path) for path in paths()})
    loaded = pickle.loads(pickled)  # noqa: S301
    for path, function in loaded.items():
        assert function is torchguard.get_original(path)
        assert live(path) is function


def test_a_process_without_torchguard_can_load_what_was_pickled(tmp_path: Path) -> None:
    with install("resize", "out"):
        (tmp_path / "functions").write_bytes(
            pickle.dumps([torch.add, torch.Tensor.resize_, torch.norm, torch.linalg.qr])
        )
        (tmp_path / "model").write_bytes(pickle.dumps(nn.Sequential(nn.Linear(2, 2), nn.GELU())))
    printed = output_of(
        """
        import pickle, sys, torch
        add, resize_, norm, qr = pickle.load(open(sys.argv[1] + "/functions", "rb"))
        model = pickle.load(open(sys.argv[1] + "/model", "rb"))
        print(add is torch.add, resize_ is torch.Tensor.resize_, norm is torch.norm)
        print(qr is torch.linalg.qr, model(torch.ones(1, 2)).shape, "torchguard" in sys.modules)
        """,
        str(tmp_path),
    )
    assert printed.split() == ["True", "True", "True", "True", "torch.Size([1,", "2])", "False"]


def test_torchs_own_functions_taken_before_can_be_pickled_while_installed() -> None:
    bare = {path: live(path) for path in paths()}
    failing_anyway = {path for path, function in bare.items() if not _pickles(function)}
    with install("resize", "out"):
        failing = {path for path, function in bare.items() if not _pickles(function)}
    assert failing - failing_anyway == set()


def test_a_patched_function_that_was_kept_is_refused_by_pickle_after_uninstall() -> None:
    """Pickle stores a function by its name, where by then torch's own stands again."""
    with install("resize", "out"):
        kept = [torch.nn.functional.gelu, torch.add, torch.Tensor.resize_]
    for function in kept:
        with pytest.raises(pickle.PicklingError, match="not the same object"):
            pickle.dumps(function)


def _pickles(function: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(function))  # noqa: S301
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class Keeper(nn.Module):
    """A module that keeps functions of torch as attributes, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.activation = torch.nn.functional.gelu
        self.combine = torch.add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self.activation(self.layer(x)), x)


def test_tensors_and_modules_are_copied_and_saved_as_before() -> None:
    torch.manual_seed(0)
    made_before = Keeper()
    x = torch.rand(2, 3)
    expected = made_before(x)
    with install("resize", "out"):
        torch.manual_seed(0)
        for model in (made_before, Keeper()):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for each in (model, copy.deepcopy(model), loaded):
                torch.testing.assert_close(each(x), expected, rtol=0, atol=0)
        file = io.BytesIO()
        torch.save({"x": x, "view": x[1:], "state": made_before.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        assert torch.equal(saved["view"], x[1:])
        twin = copy.deepcopy(x)
        assert torch.equal(twin, x)
        assert twin is not x


# --- data loaders

LOADER = """
import sys, torch, torchguard
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        row = torch.full((3,), float(index))
        out = torch.empty(0)
        torch.mul(row, row, out=out)
        guarded = bool(torchguard.installed())
        return {"square": out.resize_(3), "index": index, "pair": (row, guarded)}

def install_in_worker(_):
    torchguard.install("resize", "out")

if __name__ == "__main__":
    how, guarded = sys.argv[1:]
    if guarded == "guarded":
        torchguard.install("resize", "out")
    start = install_in_worker if guarded == "guarded" and how == "spawn" else None
    loader = DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context=how,
                        worker_init_fn=start)
    for batch in loader:
        shared = batch["square"].is_shared()
        row = batch["pair"][0].sum().item()
        print(batch["square"].tolist(), batch["index"].tolist(), row, shared)
        print("installed", batch["pair"][1].tolist(), file=sys.stderr)
        assert batch["pair"][1].all().item() == (guarded == "guarded")
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_data_loader_workers_collate_as_before(how: str, tmp_path: Path) -> None:
    bare = output_of(LOADER, how, "bare", folder=tmp_path)
    assert "True" in bare, "the workers have to put their batches into shared memory"
    assert output_of(LOADER, how, "guarded", folder=tmp_path) == bare


# --- TorchScript


def adds_and_norms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.add(x, y, alpha=2) + torch.norm(x, dim=1, keepdim=True)
    total = torch.nn.functional.gelu(total) + torch.tensordot(x, y, dims=1)
    total = total + torch.nn.functional.normalize(x) + torch.linalg.norm(y)
    return total + torch.special.erf(x) + torch.fft.ifft(torch.fft.fft(x)).real  # type: ignore[no-any-return]


def writes_into_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, y, out=out)
    values, indices = torch.max(x, 1)
    return out + values + indices


def resizes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros([1])
    out.resize_([3, 3])
    out.resize_as_(x)
    out.copy_(y)
    other = torch.zeros([2])
    other.set_(out)  # type: ignore[call-overload]
    return other


SCRIPTED: list[Callable[..., torch.Tensor]] = [adds_and_norms, writes_into_out, resizes]
SQUARE = (torch.arange(9.0).view(3, 3), torch.ones(3, 3))


@pytest.mark.parametrize("function", SCRIPTED, ids=lambda function: function.__name__)
def test_torchscript_compiles_the_same_program(function: Callable[..., torch.Tensor]) -> None:
    bare = torch.jit.script(function)
    expected = bare(*SQUARE)
    with install("resize", "out"):
        # TorchScript caches by function: a copy is compiled anew.
        bare_function: Any = function
        twin = FunctionType(
            bare_function.__code__, bare_function.__globals__, bare_function.__name__
        )
        twin.__annotations__ = function.__annotations__
        guarded = torch.jit.script(twin)
        assert _program(guarded) == _program(bare)
        torch.testing.assert_close(guarded(*SQUARE), expected)
        torch.testing.assert_close(bare(*SQUARE), expected)
    torch.testing.assert_close(guarded(*SQUARE), expected)


def _program(scripted: Any) -> str:
    return "\n".join(line.partition("#")[0] for line in str(scripted.inlined_graph).splitlines())


MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3),
    nn.GELU,
    nn.Softplus,
    nn.LogSigmoid,
    lambda: nn.AvgPool2d(2),
    lambda: nn.Softmax(1),
    lambda: nn.LayerNorm(3),
    nn.CosineSimilarity,
    nn.PairwiseDistance,
    lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
    lambda: nn.MultiheadAttention(4, 2),
]


@pytest.mark.parametrize("index", range(len(MODULES)))
def test_torchscript_compiles_torchs_modules_as_before(index: int) -> None:
    bare = str(torch.jit.script(MODULES[index]()).code)
    with install("resize", "out"):
        guarded = torch.jit.script(MODULES[index]())
        assert str(guarded.code) == bare


@pytest.mark.parametrize("function", SCRIPTED, ids=lambda function: function.__name__)
def test_jit_trace_records_the_same_graph_with_the_same_warnings(
    function: Callable[..., torch.Tensor],
) -> None:
    def trace() -> tuple[list[str], list[str], torch.Tensor]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            traced = torch.jit.trace(function, SQUARE)
        operators = [node.kind() for node in traced.inlined_graph.nodes()]
        texts = [f"{each.category.__name__}: {each.message}" for each in warned]
        return operators, texts, traced(*SQUARE)

    bare = trace()
    with install("resize", "out"):
        guarded = trace()
    assert guarded[0] == bare[0]
    assert guarded[1] == bare[1]
    torch.testing.assert_close(guarded[2], bare[2])


# --- graphs: torch.fx, make_fx, torch.export, torch.func


def graph(module: Any) -> list[tuple[str, Any, str, str]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in module.graph.nodes]


def test_symbolic_trace_has_torchs_own_functions_as_targets() -> None:
    bare = torch.fx.symbolic_trace(adds_and_norms)
    with install("resize", "out"):
        guarded = torch.fx.symbolic_trace(adds_and_norms)
        assert graph(guarded) == graph(bare)
        assert guarded.code == bare.code
        torch.testing.assert_close(guarded(*SQUARE), bare(*SQUARE))
        torch.testing.assert_close(guarded(*SQUARE), adds_and_norms(*SQUARE))
    torch.testing.assert_close(guarded(*SQUARE), bare(*SQUARE))
    assert copy.deepcopy(guarded).code == bare.code


def test_a_pass_over_a_graph_finds_the_original_of_torch_add_while_installed() -> None:
    def found() -> int:
        module = torch.fx.symbolic_trace(lambda x: torch.add(x, 1) + torch.nn.functional.gelu(x))
        wanted = set(map(torchguard.get_original, ("torch.add", "torch.nn.functional.gelu")))
        return sum(node.target in wanted for node in module.graph.nodes)

    assert found() == 2
    with install("resize", "out"):
        assert found() == 2


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("function", SCRIPTED[:2], ids=lambda function: function.__name__)
def test_make_fx_records_the_same_graph_and_guards(
    function: Callable[..., torch.Tensor], mode: str
) -> None:
    def trace() -> tuple[Any, str]:
        module = make_fx(function, tracing_mode=mode)(*SQUARE)  # type: ignore[arg-type]
        environment = getattr(module, "shape_env", None)
        guards = [] if environment is None else [str(each.expr) for each in environment.guards]
        return graph(module), str(sorted(set(guards)))

    try:
        bare = trace()
    except UnsupportedOperatorException as error:  # fft with symbolic sizes, on torch 2.6
        with install("resize", "out"), pytest.raises(type(error), match=re.escape(str(error))):
            trace()
        return
    with install("resize", "out"):
        guarded = trace()
    assert [row[0:2] for row in guarded[0]] == [row[0:2] for row in bare[0]]
    assert guarded == bare


def test_a_failure_under_make_fx_is_the_same_failure() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0])
        torch.add(x, 1, out=out)
        out.resize_(x.shape[0])
        out.resize_(2, x.shape[0])  # some releases can't do this with symbolic sizes
        return torch.add(x, torch.ones(x.shape[0] + 1), out=out.resize_as_(x))  # and none this

    def message() -> str:
        with pytest.raises(Exception) as failure:  # noqa: PT011  torch's own differs by release
            make_fx(failing, tracing_mode="symbolic")(torch.ones(10))
        return f"{type(failure.value).__name__}: {failure.value}".partition("\n")[0]

    bare = message()
    with install("resize", "out"):
        assert message() == bare


class Exported(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return adds_and_norms(x, y)


@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_same_program(strict: bool) -> None:
    def export() -> tuple[Any, str]:
        program = torch.export.export(Exported(), SQUARE, strict=strict)
        return graph(program), program.graph_module.code

    bare = export()
    with install("resize", "out"):
        assert export() == bare


def test_functorch_transforms_go_on_working() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.norm(torch.add(torch.matmul(weight, x), 1)) + torch.sum(torch.exp(weight))  # type: ignore[no-any-return]

    weight, batch = torch.rand(2, 3), torch.rand(4, 3)

    def everything() -> list[torch.Tensor]:
        return [
            torch.vmap(loss, in_dims=(None, 0))(weight, batch),
            torch.func.grad(loss)(weight, batch[0]),
            torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batch),
            torch.func.jvp(lambda w: loss(w, batch[0]), (weight,), (weight,))[1],
            torch.func.functionalize(writes_into_out)(*SQUARE),
        ]

    bare = everything()
    with install("resize", "out"):
        for one, other in zip(everything(), bare, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["out", "resize_", "set_"])
def test_what_is_odd_under_vmap_stays_as_odd(kind: str) -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        if kind == "out":
            return torch.index_select(x, 0, torch.tensor([0, 99]), out=out)
        if kind == "resize_":
            return out.resize_(50, 50)
        return out.set_(torch.from_numpy(np.ones(2, dtype=np.float32)).untyped_storage(), 0, (9,))  # type: ignore[call-overload, no-any-return]

    def message() -> str:
        try:
            return str(torch.vmap(failing)(torch.ones(2, 3)).shape)
        except Exception as error:  # noqa: BLE001  whatever torch raises has to stay the same
            return f"{type(error).__name__}: {error}"

    bare = message()
    with install("resize", "out"):
        assert message() == bare


# --- subclasses and modes


class Dispatching(torch.Tensor):
    """The pattern of torch's notes on extending torch: a table of functions."""

    table: dict[Any, str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.table:
            return cls.table[func]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def dispatch_table() -> dict[Any, str]:
    return {
        torch.add: "add",
        torch.norm: "norm",
        torch.nn.functional.gelu: "gelu",
        torch.Tensor.resize_: "resize_",
        torch.nn.functional.normalize: "normalize",
        torch.resize_as_: "torch.resize_as_",
    }


def table_of_originals() -> dict[Any, str]:
    """What docs/patching.md tells those to write who look functions up by identity."""
    return {
        torchguard.get_original(path): name.removeprefix("Tensor.").removeprefix("nn.functional.")
        for name in (
            "add",
            "norm",
            "nn.functional.gelu",
            "Tensor.resize_",
            "nn.functional.normalize",
        )
        for path in (f"torch.{name}",)
    } | {torchguard.get_original("torch.resize_as_"): "torch.resize_as_"}


def dispatched() -> list[Any]:
    tensor: Any = torch.ones(3).as_subclass(Dispatching)
    return [
        torch.add(tensor, 1),
        torch.add(torch.ones(3), tensor, out=torch.empty(3)),
        torch.norm(tensor),
        torch.nn.functional.gelu(tensor),
        tensor.resize_(2),
        torch.nn.functional.normalize(tensor),
        torch.resize_as_(tensor, torch.ones(3)),
    ]


EXPECTED = ["add", "add", "norm", "gelu", "resize_", "normalize", "torch.resize_as_"]


def test_a_dispatch_table_built_before_goes_on_working() -> None:
    Dispatching.table = dispatch_table()
    assert dispatched() == EXPECTED
    with install("resize", "out"):
        assert dispatched() == EXPECTED


def test_a_dispatch_table_of_originals_works_when_it_is_built_while_installed() -> None:
    with install("resize", "out"):
        Dispatching.table = table_of_originals()
        assert dispatched() == EXPECTED


def test_a_dispatch_table_of_originals_works_after_uninstall() -> None:
    with install("resize", "out"):
        Dispatching.table = table_of_originals()
    assert dispatched() == EXPECTED


class Listening(torch.Tensor):
    calls: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(torch.overrides.resolve_name(func) or getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class ListeningMode(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


def calls_of_everyday_code(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.ones(4))
    tensor.resize_(2)
    tensor.resize_(9)
    tensor.resize_as_(torch.ones(3))
    tensor.set_(torch.ones(5))  # type: ignore[call-overload]
    torch.add(tensor, 1, out=torch.empty(0))
    torch.add(torch.ones(5), 1, out=tensor)
    for failing in (
        lambda: tensor.resize_(-1),
        lambda: torch.index_select(torch.ones(5), 0, torch.tensor([9]), out=tensor),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            failing()  # type: ignore[no-untyped-call]


def test_subclasses_and_modes_see_no_call_more_or_less() -> None:
    torch.overrides.resolve_name(torch.add)

    def listen() -> tuple[list[str], list[str]]:
        Listening.calls = []
        calls_of_everyday_code(lambda tensor: tensor.as_subclass(Listening))
        mode = ListeningMode()
        with mode:
            calls_of_everyday_code(lambda tensor: tensor)
        # What the test itself makes does not count.
        return [name for name in Listening.calls if "as_subclass" not in name], mode.calls

    bare = listen()
    assert "resize_" in str(bare[0])
    with install("resize", "out"):
        assert listen() == bare


def test_a_subclass_with_its_own_resize_is_asked_first() -> None:
    class Counting(torch.Tensor):
        count = 0

        def resize_(self, *size: Any, **options: Any) -> Any:
            type(self).count += 1
            return super().resize_(*size, **options)

    with install("resize"):
        tensor = torch.from_numpy(np.ones(2)).as_subclass(Counting)
        with pytest.raises(RuntimeError):
            tensor.resize_(99)
        assert Counting.count == 1
        assert tuple(tensor.shape) == (2,)


# --- tables of torch that know functions by identity

TABLES = """
import sys, torch, torchguard
from importlib import import_module

def facts():
    # Each of these fills a table of torch that is kept for the rest of the process.
    yield "overridable", sorted(
        (getattr(owner, "__name__", type(owner).__name__), function.__name__)
        for owner, functions in torch.overrides.get_overridable_functions().items()
        for function in functions if hasattr(function, "__name__")
    )
    some = [torchguard.get_original("torch." + n) for n in ("add", "norm", "Tensor.resize_", "cat")]
    yield "names", [torch.overrides.resolve_name(function) for function in some]
    yield "methods", torch.overrides.is_tensor_method_or_property(some[2])
    zeros = torchguard.get_original("torch.zeros")
    yield "ignored", zeros in torch.overrides.get_ignored_functions()
    yield "dummies", [f in torch.overrides.get_testing_overrides() for f in some[:2]]
    with torch.device("meta"):
        makers = torch.zeros, torch.empty, torch.ones, torch.rand, torch.arange
        yield "device", [make(2).device.type for make in makers]
    import_module("torch._dynamo")  # torch 2.8 would import it inside the mode, and fail
    from torch._prims.context import TorchRefsMode
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func)); return func(*args, **(kwargs or {}))
    names = []
    with Seen(), TorchRefsMode():
        torch.logaddexp(torch.ones(2), torch.ones(2))
    yield "references", names

def show(when):
    for name, fact in facts():
        print(when, name, len(fact) if name == "overridable" else fact)

order = sys.argv[1]
if order == "bare":
    show("first"); show("then")
elif order == "installed, then not":
    installation = torchguard.install("resize", "out"); show("first")
    installation.uninstall(); show("then")
elif order == "not, then installed":
    show("first"); torchguard.install("resize", "out"); show("then")
"""


@pytest.mark.parametrize("order", ["installed, then not", "not, then installed"])
def test_torchs_tables_of_functions_are_the_same_whenever_they_are_filled(
    order: str,
) -> None:
    bare = output_of(TABLES, "bare")
    assert "'meta', 'meta', 'meta'" in bare
    assert _facts(output_of(TABLES, order)) == _facts(bare)


def _facts(text: str) -> list[str]:
    """Leave out TorchRefsMode: its table, filled while installed, holds replacements."""
    return [line for line in text.splitlines() if " references " not in line]


# --- warnings


def test_torchs_warning_about_a_resized_output_is_still_given() -> None:
    """It names the line in torchguard that called torch: docs/patching.md says so."""

    def given() -> list[tuple[type[Warning], str]]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.add(torch.ones(2), 1, out=torch.ones(3))
            torch.range(0, 3)
        return [(each.category, str(each.message).partition("(")[0]) for each in warned]

    bare = given()
    assert len(bare) == 2
    with install("out"):
        assert given() == bare
