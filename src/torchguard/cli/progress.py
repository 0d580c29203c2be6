"""Shows how far the doctor is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from typing import TYPE_CHECKING, TextIO

from torchguard.cli.table import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchguard.defects.examination import Step

__all__ = ["shown_on"]


_CELLS = 20  # of a bar


@contextlib.contextmanager
def shown_on(stream: TextIO, *, color: bool) -> Iterator[Callable[[Step], None]]:
    """Give a function for ``doctor(progress=...)`` that shows each step on ``stream``."""
    if not stream.isatty():
        yield _lines(stream)
    # rich is the extra `cli`: it is only imported where a bar can be drawn.
    elif importlib.util.find_spec("rich") is not None:
        with _bar(stream, color=color) as show:
            yield show
    else:
        with _plain_bar(stream) as show:
            yield show


def _lines(stream: TextIO) -> Callable[[Step], None]:
    """One line per finished row, so a log shows what the doctor was doing when it stopped."""
    announced = False

    def show(step: Step) -> None:
        nonlocal announced
        if step.remaining is not None and not announced:
            announced = True
            print(
                f"{step.total} defects to probe, {_duration(step.remaining)}",
                file=stream,
                flush=True,
            )
        if step.row is not None:
            width = len(str(step.total))
            print(
                f"[{step.done:>{width}}/{step.total}] {one_line(step.row)}", file=stream, flush=True
            )

    return show


def _described(step: Step) -> str:
    running = ", ".join(step.running) or ("starting" if step.done < step.total else "finishing")
    return running if step.remaining is None else f"{_duration(step.remaining)} left: {running}"


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - from here on people count in minutes
        return f"about {max(5, 5 * round(seconds / 5))} seconds"
    return f"about {round(seconds / 60)} minutes"


@contextlib.contextmanager
def _plain_bar(stream: TextIO) -> Iterator[Callable[[Step], None]]:
    """Redraw one line; it is cut where the terminal ends, and gone afterwards."""

    def show(step: Step) -> None:
        full = _CELLS * step.done // max(step.total, 1)
        bar = "#" * full + "-" * (_CELLS - full)
        line = f"[{bar}] {step.done}/{step.total} {_described(step)}"
        width = shutil.get_terminal_size((80, 24)).columns - 1
        print(f"\r{line[:width]:<{width}}", end="", file=stream, flush=True)

    try:
        yield show
    finally:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        print(f"\r{'':<{width}}\r", end="", file=stream, flush=True)


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
            progress.update(
                bar, completed=step.done, total=step.total, description=_described(step)
            )

        yield show
