"""Shows how far the doctor is: a live bar on a terminal with rich, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, TextIO

from torchguard.doctor.table import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchguard.doctor.examination import Step

__all__ = ["shown_on"]


@contextlib.contextmanager
def shown_on(stream: TextIO, *, color: bool) -> Iterator[Callable[[Step], None]]:
    """Give a function for ``doctor(progress=...)`` that shows each step on ``stream``."""
    # rich is the extra `cli`: it is only imported where a bar can be drawn.
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(stream, color=color) as show:
            yield show
    else:
        yield _lines(stream)


def _lines(stream: TextIO) -> Callable[[Step], None]:
    """One line per finished row, so a log shows what the doctor was doing when it stopped."""

    def show(step: Step) -> None:
        if step.row is not None:
            width = len(str(step.total))
            print(
                f"[{step.done:>{width}}/{step.total}] {one_line(step.row)}", file=stream, flush=True
            )

    return show


@contextlib.contextmanager
def _bar(stream: TextIO, *, color: bool) -> Iterator[Callable[[Step], None]]:
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.progress import (  # noqa: PLC0415 - optional
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(file=stream, no_color=not color, highlight=False)
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)

        def show(step: Step) -> None:
            running = ", ".join(step.running) or "finishing"
            progress.update(bar, completed=step.done, total=step.total, description=running)

        yield show
