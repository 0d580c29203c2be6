"""``pytest --torchguard``: run a test suite with the guards on, and find broken tensors.

pytest loads every plug-in that is installed into every session. This one is a package of
its own, beside ``torchguard``, so that a session that does not ask for it imports no torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_OPTION = "--torchguard"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--torchguard``."""
    group = parser.getgroup("torchguard")
    group.addoption(
        _OPTION,
        nargs="?",
        const="resize",
        metavar="GUARDS",
        help="install torchguard's guards for the session (default: resize; several with commas, "
        "as --torchguard=resize,out), and fail a test that leaves a tensor behind whose shape "
        "needs more memory than its storage has",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Install what was asked for."""
    asked = config.getoption(_OPTION)
    if asked is None:
        return
    import torchguard  # noqa: PLC0415  only a session that asks for it pays for torch

    names = [name for name in (part.strip() for part in asked.split(",")) if name]
    try:
        installation = torchguard.install(*names)
    except ValueError as error:
        hint = ""
        if Path(asked.partition("::")[0]).exists():  # `pytest --torchguard tests`
            hint = f"; it took {asked!r} for the guards, so write {_OPTION}=resize {asked}"
        raise pytest.UsageError(f"{_OPTION}: {error}{hint}") from None
    config.pluginmanager.register(_Session(installation), "torchguard-session")


class _Session:
    """What lasts from the first test to the last."""

    def __init__(self, installation: Any) -> None:
        self._installation = installation
        # Held, so that the id of one that is gone never stands for another.
        self._known: dict[int, Tensor] = {}

    def pytest_report_header(self) -> str:
        names = ", ".join(self._installation.names) or "nothing"
        skipped = "".join(
            f"; {name} not needed: {reason}" for name, reason in self._installation.skipped.items()
        )
        return f"torchguard: installed {names}{skipped}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail the test after which there is a broken tensor that was not there before."""
        del item
        broken: list[Tensor] = []
        try:
            yield
        finally:  # a tensor of a test that raises is not one of the next test
            broken += [tensor for tensor in _broken() if id(tensor) not in self._known]
            self._known.update((id(tensor), tensor) for tensor in broken)
        if broken:
            pytest.fail("torchguard: " + _described(broken), pytrace=False)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what the guards did, if they did something."""
        from torchguard._events import summary  # noqa: PLC0415

        if text := summary():
            terminalreporter.section("torchguard")
            terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        self._installation.uninstall()


def _broken() -> list[Tensor]:
    """Find the inconsistent tensors of the process."""
    import torch  # noqa: PLC0415

    from torchguard.rollback.consistency import is_consistent  # noqa: PLC0415

    return [
        each
        for each in gc.get_objects()
        # type(), because isinstance asks objects of every kind for their __class__.
        if issubclass(type(each), torch.Tensor) and not is_consistent(each)
    ]


def _described(broken: list[Tensor]) -> str:
    from torchguard import InconsistentTensorError, check_consistent  # noqa: PLC0415

    try:
        check_consistent(broken[0])
    except InconsistentTensorError as error:
        more = f"\n(and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return f"the test leaves an inconsistent tensor behind: {error}{more}"
    return "the test left an inconsistent tensor behind"
