"""The fingerprint of a function changes with everything that its outputs depend on."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.plans import CHANGES, program
from torchguard.bucketing.decorator.fingerprint import UnknownValue, fingerprint
from torchguard.bucketing.decorator.proof_cache import key_text


def parts(module: types.ModuleType, change: Callable[[Any], Any] = lambda model: None) -> Any:
    model = module.make()
    change(model)
    return fingerprint({"the function": type(model).forward, "self": model}, {})


class TestFingerprint:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_it_changes_with(self, change: tuple[str, str]) -> None:
        before = parts(program())
        assert parts(program()) == before
        assert parts(program(change)) != before

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("return x + 1", "return x + 2"),
            ("def unused", "\n\n\ndef unused"),
            ("class Settings:", "# a comment\nclass Settings:"),
            ("    window = 1", "    window = 2"),
        ],
    )
    def test_it_stays_where_nothing_is_called_that_changes(self, before: str, after: str) -> None:
        assert parts(program((before, after))) == parts(program())

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.inner.register_forward_hook(lambda *_: None),
            lambda m: m.inner.drop.eval(),
            lambda m: m.norm.half(),
            lambda m: nn.utils.parametrizations.weight_norm(m.inner.project),
            lambda m: setattr(m, "shift", lambda x: x),
            lambda m: m.inner.project.bias.data.zero_(),
            lambda m: m.inner.project.requires_grad_(requires_grad=False),
        ],
        ids=["hook", "eval", "dtype", "parametrization", "method", "a bias of zeros", "frozen"],
    )
    def test_it_changes_with_the_object(self, change: Callable[[Any], Any]) -> None:
        assert parts(program(), change) != parts(program())

    def test_values_of_weights_do_not_count(self) -> None:
        assert parts(program(), lambda m: m.inner.project.weight.data.mul_(2)) == parts(program())

    def test_a_function_of_torch_that_was_patched_counts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = parts(program())
        original = nn.functional.gelu

        @functools.wraps(nn.functional.softplus)
        def other(x: torch.Tensor) -> torch.Tensor:
            return original(x)

        monkeypatch.setattr(nn.functional, "gelu", other)
        assert parts(program()) != before

    def test_a_function_that_torch_itself_calls_was_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """nn.GELU calls functional.gelu, and a package its own apply_rotary_pos_emb."""
        gelu = nn.GELU()
        before = fingerprint({"f": nn.GELU.forward, "self": gelu}, {})
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "gelu", lambda x, approximate="none": x)
            assert fingerprint({"f": nn.GELU.forward, "self": gelu}, {}) != before
        alone = fingerprint({"self": gelu}, {})
        with monkeypatch.context() as patch:
            patch.setattr(nn.GELU, "forward", lambda self, x: x)
            assert fingerprint({"self": gelu}, {}) != alone
        assert fingerprint({"f": nn.GELU.forward, "self": gelu}, {}) == before

    def test_a_function_in_an_installed_package_was_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed: Any = importlib.import_module("sympy.core.add")  # any that is not looked into

        before = fingerprint({"f": installed.Add.flatten}, {})
        monkeypatch.setattr(installed, "_addsort", lambda args: None)
        assert fingerprint({"f": installed.Add.flatten}, {}) != before

    def test_a_forward_set_on_the_object_counts(self) -> None:
        def given(model: Any) -> None:
            model.inner.forward = model.inner.project.forward

        assert parts(program(), given) != parts(program())

    def test_a_bound_method_of_c_brings_its_table(self) -> None:
        first, second = ({"a": 1}.get, {"a": 2}.get)
        assert fingerprint({"f": first}, {}) != fingerprint({"f": second}, {})

    def test_the_environment_that_is_read_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def reads(x: torch.Tensor) -> torch.Tensor:
            return x if os.environ.get("OF_A_TEST") else 2 * x

        before = fingerprint({"f": reads}, {})
        monkeypatch.setenv("OF_A_TEST", "1")
        assert fingerprint({"f": reads}, {}) != before

    def test_a_subclass_of_a_module_of_torch_is_read_by_torch(self) -> None:
        class Own(nn.Dropout):
            pass

        first, second = (fingerprint({"m": Own(p)}, {}) for p in (0.1, 0.2))
        assert first != second

    def test_two_functions_of_one_name_are_told_apart(self) -> None:
        """max_pool2d and adaptive_max_pool2d are both ``boolean_dispatch.<locals>.fn``."""
        first = fingerprint({"f": nn.functional.max_pool2d}, {})
        assert first != fingerprint({"f": nn.functional.adaptive_max_pool2d}, {})

    @pytest.mark.parametrize(
        "held",
        [{"a": 1}, [1, 2], (1,), {3, 4}, "text", 5, 0.5, torch.ones(3), torch.float32, slice(2)],
        ids=str,
    )
    def test_a_value_in_a_closure_counts(self, held: Any) -> None:
        def make(value: Any) -> Any:
            return lambda x: (value, x)

        same = fingerprint({"f": make(held)}, {})
        assert same == fingerprint({"f": make(held)}, {})
        assert same != fingerprint({"f": make("other")}, {})

    def test_what_reaches_itself_ends(self) -> None:
        def even(n: int) -> bool:
            return n == 0 or odd(n - 1)

        def odd(n: int) -> bool:
            return n != 0 and even(n - 1)

        loop: list[Any] = [even]
        namespace = types.SimpleNamespace(loop=loop)
        namespace.own = namespace
        assert fingerprint({"f": even}, {"x": namespace})

    def test_an_object_of_c_is_not_told(self) -> None:
        counter = itertools.count()
        with pytest.raises(UnknownValue, match=r"itertools\.count"):
            fingerprint({"f": lambda x: x + next(counter)}, {})

    def test_an_operator_of_another_package_has_none(self) -> None:
        with torch.library._scoped_library("of_a_test", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")
            with pytest.raises(UnknownValue, match="operator of another package"):
                fingerprint({"f": lambda x: torch.ops.of_a_test.twice(x) + 1}, {})

    def test_a_key_is_equal_in_every_process(self) -> None:
        key = (1, 1.0, True, None, "1", torch.float32, dict, (torch.device("cpu"),))
        assert key_text(key) == key_text(key)
        assert len({key_text((each,)) for each in (1, 1.0, True, "1")}) == 4
        with pytest.raises(UnknownValue):
            key_text((object(),))
