"""A patched function is read, pickled, copied and sent to workers as before."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import pkgutil
import pydoc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of
from torchguard import install
from torchguard.patching.guards import GUARDS, GuardName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


EVERYTHING: tuple[GuardName, ...] = (
    "resize", "out", "verified", "save", "load", "numpy", "optimizer", "overlap", "recompute",
)  # fmt: skip


@pytest.fixture
def everything_installed() -> Iterator[None]:
    with install(*EVERYTHING):
        yield


# Read while nothing is installed: a guard looks for builtins of torch.
PATHS = [
    path
    for guard in GUARDS.values()
    if not guard.patches_dynamo  # what they patch is no function that users call
    for path in guard.replacements()
]


def live(path: str) -> Any:
    # torch.optim deletes the names of its modules, so attributes alone do not lead there.
    return pkgutil.resolve_name(path)


# --- names, signatures, docstrings


def test_what_torch_shows_of_a_function_is_shown_of_what_is_patched() -> None:
    """Name, place, docstring, ``help()``; and a signature, which most do not have without it."""
    assert len(PATHS) > 300
    unreadable = 0
    for path in PATHS:
        try:
            inspect.signature(live(path))
        except ValueError:
            unreadable += 1
    assert unreadable > 300
    with install(*EVERYTHING):
        for path in PATHS:
            function, bare = live(path), torchguard.get_original(path)
            owner, _, name = path.rpartition(".")
            place = name
            if isinstance(live(owner), type):
                owner, _, kind = owner.rpartition(".")
                place = f"{kind}.{name}"
            assert str(inspect.signature(function)).startswith("("), path
            assert (function.__name__, function.__qualname__) == (name, place)
            assert function.__module__ == owner
            assert live(f"{function.__module__}.{function.__qualname__}") is function
            assert function.__doc__ == bare.__doc__
            assert f"function {place} at" in repr(function)
            text = pydoc.render_doc(function, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
            assert f"{name}(" in text.replace("Tensor.", "")
            assert "torchguard" not in text


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


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("torch.max", (1, 2), {}),
    ("torch.max", (1,), {"dim": 0, "keepdim": True}),
    ("torch.argmax", (1, 0), {}),
    ("torch.sum", (1,), {"dim": 0, "out": None}),
    ("torch.median", (1, 0), {}),
    ("torch.prod", (1,), {}),
    ("torch.softmax", (1, 0), {"out": None}),
    ("torch.isin", (1, 2), {"out": None}),
    ("torch.normal", (0.0, 1.0, (2,)), {}),
    ("torch.full", ((2,), 1), {"out": None}),
    ("torch.zeros", (2, 3), {"out": None}),
    ("torch.arange", (2, 3), {"out": None}),
    ("torch.nn.functional.gelu", (1,), {"out": None}),
    ("torch.nn.functional.linear", (1, 2), {"out": None}),
    ("torch.Tensor.resize_", (1, 2, 3), {"memory_format": None}),
    ("torch.Tensor.resize_", (1, (2, 3)), {}),
    ("torch.Tensor.set_", (1,), {}),
    ("torch.Tensor.resize_as_", (1, 2), {"memory_format": None}),
]


@pytest.mark.usefixtures("everything_installed")
def test_a_signature_refuses_no_call_that_torch_takes_and_methods_take_self() -> None:
    for path, arguments, names in CALLS:
        inspect.signature(live(path)).bind(*arguments, **names)
    for name in ("resize_", "resize_as_", "set_"):
        parameters = list(inspect.signature(getattr(torch.Tensor, name)).parameters)
        assert parameters[0] == "self"
        assert len(parameters) > 1
        bound = inspect.signature(getattr(torch.ones(2), name)).parameters
        assert list(bound) == parameters[1:]


# --- pickle, copy, save


@pytest.mark.usefixtures("everything_installed")
def test_a_patched_function_survives_pickle_and_copy() -> None:
    for path in PATHS:
        function = live(path)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(function, protocol)) is function  # noqa: S301
        assert copy.deepcopy(function) is function


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


def test_a_function_is_pickled_by_its_name() -> None:
    """Loaded after uninstall() it is torch's own; what was taken before or kept is refused."""
    bare = {path: live(path) for path in PATHS}
    failing_anyway = {path for path, function in bare.items() if not _pickles(function)}
    with install("resize", "out"):
        pickled = pickle.dumps({path: live(path) for path in PATHS})
        kept = [torch.nn.functional.gelu, torch.add, torch.Tensor.resize_]
        failing = {path for path, function in bare.items() if not _pickles(function)}
    assert failing - failing_anyway == set()
    for path, function in pickle.loads(pickled).items():  # noqa: S301
        assert function is live(path) is torchguard.get_original(path)
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
    loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context=how,
                        worker_init_fn=start)
    for batch in loader:
        shared = batch["square"].is_shared()
        row = batch["pair"][0].sum().item()
        print(batch["square"].tolist(), batch["index"].tolist(), row, shared)
        print("installed", batch["pair"][1].tolist(), file=sys.stderr)
        assert batch["pair"][1].all().item() == (guarded == "guarded")
"""


def test_data_loader_workers_collate_as_before(tmp_path: Path) -> None:
    bare = output_of(LOADER, "fork", "bare", folder=tmp_path)
    assert "True" in bare, "the workers have to put their batches into shared memory"
    for how in ("fork", "spawn"):
        assert output_of(LOADER, how, "guarded", folder=tmp_path) == bare
