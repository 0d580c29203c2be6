"""The ways to verify: a decorator, a backend, install(); lines that Inductor compiles wrong."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of
from support.miscompiling import bare, inputs, one_value, spoiling, stats, workload
from torchguard import (
    MiscompilationWarning,
    install,
    verification_report,
    verified,
    verified_backend,
)
from torchguard._torch import compiled_call, settings_of_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


def test_a_function_stays_a_function_and_has_stats() -> None:
    @verified(backend="aot_eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x * 2

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert stats(double).verified == 1


def test_a_module_stays_what_it_was() -> None:
    original = nn.Linear(3, 2)
    keys = list(original.state_dict())
    module: nn.Module = verified(backend="aot_eager")(original)
    assert module is original
    assert type(original) is nn.Linear
    assert list(module.state_dict()) == keys
    module(torch.ones(1, 3))
    assert stats(module).verified == 1
    again = pickle.loads(pickle.dumps(module))  # noqa: S301
    torch.testing.assert_close(again(torch.ones(1, 3)), module(torch.ones(1, 3)))


def test_two_wrappers_are_counted_apart_and_the_process_counts_both() -> None:
    before = len(verification_report().graphs)
    one, other = verified_backend("eager"), verified_backend("aot_eager")
    torch.compile(lambda x: x + 1, backend=one)(torch.ones(1))
    torch.compile(lambda x: x + 2, backend=other)(torch.ones(1))
    assert len(one.stats().graphs) == len(other.stats().graphs) == 1
    assert len(verification_report().graphs) == before + 2


def test_the_report_is_a_table() -> None:
    backend = verified_backend(spoiling(one_value))
    with pytest.warns(MiscompilationWarning):
        torch.compile(workload, backend=backend)(*inputs())
    shown = str(backend.stats())
    assert "workload (" in shown
    assert "mismatched  aot_eager" in shown
    assert shown.splitlines()[-1].startswith("1 graphs: 0 verified, 1 mismatched, 0 unverified; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls": 0}, "calls is 0, expected a number of 1 or more"),
        ({"on_mismatch": "panic"}, "expected 'fallback' or 'raise' or 'warn'"),
        ({"check_each": "call"}, "expected 'auto' or 'graph' or 'shape'"),
        ({"max_bytes": -1}, "max_bytes is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified_backend(**options)
    with pytest.raises(ValueError, match=message):
        verified(**options)


def test_options_that_inductor_does_not_know_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        verified_backend(options={"no_such_option": 1})
    with install("verified"), pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(lambda x: x, options={"no_such_option": 1})


def test_install_leaves_other_backends_alone() -> None:
    before = len(verification_report().graphs)
    with install("verified"):
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert len(verification_report().graphs) == before
    assert "verified" not in torchguard.installed()


# --- with inductor: the three everyday lines


def shift(x: torch.Tensor) -> None:
    x[1:] = x[:-1].clone()


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def write_and_copy(x: torch.Tensor) -> torch.Tensor:
    x[2] = 5.0
    return x.clone()


EVERYDAY: list[Any] = [shift, swap, write_and_copy]


def outcome_of(function: Callable[..., Any], count: int) -> list[Any]:
    given = [torch.arange(4.0) + 10 * i for i in range(count)]
    result = function(*given)
    if result is not None:
        result.add_(1)  # it must alias nothing
    return [value.tolist() for value in given] + [None if result is None else result.tolist()]


def wrong_everyday_lines(compile_: Callable[..., Any]) -> list[str]:
    wrong = []
    for function in EVERYDAY:
        torch._dynamo.reset()
        count = function.__code__.co_argcount
        if outcome_of(compile_(function), count) != outcome_of(function, count):
            wrong.append(function.__name__)
    return wrong


def by_decorator(function: Any) -> Any:
    return verified()(function)


def around_compiled(function: Any) -> Any:
    return verified()(torch.compile(function))


def by_backend(function: Any) -> Any:
    return torch.compile(function, backend=verified_backend("inductor"))


def by_install(function: Any) -> Any:
    with install("verified"):
        return torch.compile(function)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_the_everyday_lines_are_wrong_bare_and_right_each_way() -> None:
    assert wrong_everyday_lines(bare) != []
    for way in (by_decorator, around_compiled, by_backend, by_install):
        before = len(verification_report().graphs)
        assert wrong_everyday_lines(way) == [], way.__name__
        assert len(verification_report().graphs) == before + len(EVERYDAY), way.__name__


@pytest.mark.slow
def test_the_backend_is_found_by_name_with_no_import(tmp_path: Path) -> None:
    information = tmp_path / "torchguard_runtime-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 0\n")
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    group = project.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    line = group.partition("\n")[0].replace('"', "")
    (information / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    (tmp_path / "everyday.py").write_text(
        "from __future__ import annotations\nimport torch\n"
        + "\n".join(inspect.getsource(each) for each in (*EVERYDAY, outcome_of))
        + "EVERYDAY = shift, swap, write_and_copy\n"
    )
    printed = output_of(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from everyday import EVERYDAY, outcome_of
        options = {{"max_fusion_size": 32}}
        for function in EVERYDAY:
            count = function.__code__.co_argcount
            expected = outcome_of(function, count)
            compiled = torch.compile(function, backend="torchguard", options=options)
            print(outcome_of(compiled, count) == expected)
        import torchguard
        print(len(torchguard.verification_report().graphs))
        """
    )
    assert printed.split() == ["True", "True", "True", "3"]


@pytest.mark.slow
def test_settings_of_what_was_compiled_already_are_kept() -> None:
    compiled = torch.compile(
        lambda x: torch.rand(3) + x, options={"fallback_random": True}, fullgraph=True
    )
    checked = verified()(compiled)
    torch.manual_seed(0)
    found = checked(torch.zeros(3))
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))
    (record,) = stats(checked).graphs
    assert record.status == "verified", record


def test_what_was_compiled_already_keeps_its_settings_or_is_refused() -> None:
    with pytest.raises(TypeError, match="keeps its own backend, mode and options"):
        verified(mode="max-autotune")(torch.compile(lambda x: x))


def test_what_another_backend_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="pass what was compiled"):
        verified()(torch.compile(lambda x: x, backend="eager"))
    module = torch.nn.Linear(2, 2)
    module.compile(backend="eager")
    with pytest.raises(TypeError, match="Linear was compiled already"):
        verified()(module)


def test_what_is_verified_already_is_returned_as_it_is() -> None:
    checked = verified(backend="aot_eager")(lambda x: x * 2)
    assert verified()(checked) is checked
    module = verified(backend="aot_eager")(torch.nn.Linear(2, 2))
    module(torch.ones(1, 2))
    assert verified()(module) is module
    module(torch.ones(1, 2))
    assert len(stats(module).graphs) == 1
    with torchguard.install("verified"):
        compiled = torch.compile(lambda x: x * 2)
    assert verified()(compiled) is compiled
    assert stats(compiled).graphs == ()


@pytest.mark.parametrize("options", [{"calls": 2}, {"backend": "eager"}], ids=str)
def test_other_options_for_what_is_verified_already_are_refused(options: dict[str, Any]) -> None:
    checked = verified(backend="aot_eager")(lambda x: x * 2)
    with pytest.raises(TypeError, match="verified already, with other options"):
        verified(**options)(checked)


def test_a_module_that_was_compiled_in_place_keeps_its_mode() -> None:
    module = torch.nn.Linear(2, 2)
    module.compile(mode="max-autotune-no-cudagraphs", dynamic=True)
    verified()(module)
    found = settings_of_compiled(compiled_call(module))
    assert found is not None
    assert found["dynamic"] is True
    assert found["compiler"]._inner.config["max_autotune"] is True


def _pickled(module: torch.nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))  # noqa: S301 - its own bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_module_is_not_compiled_and_has_no_graphs(copied: Any) -> None:
    """As torch has it; ``verified()``, with inductor, can be pickled too."""
    module = verified()(torch.nn.Linear(2, 2))
    other = copied(module)
    assert stats(other).graphs == ()
    assert other(torch.ones(1, 2)).shape == (1, 2)
    assert stats(other).graphs == ()


async def _asynchronous(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "expected a function or a module, got int"),
        ("aot_eager", r"for a backend write verified\(backend='aot_eager'\)"),
        (_asynchronous, "_asynchronous is async"),
    ],
    ids=["number", "name", "async"],
)
def test_what_can_not_be_compiled_is_refused(function: Any, message: str) -> None:
    for decorate in (verified, verified()):
        with pytest.raises(TypeError, match=message):
            decorate(function)
