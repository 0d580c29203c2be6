"""What a command shows a person at a terminal: width, colors, a progress bar."""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
from typing import TextIO

_WIDEST = 100  # longer lines are hard to read
_BAR = 24

RED, GREEN, DIM, BOLD = "31", "32", "2", "1"


def width() -> int:
    """Return how many columns a line may have."""
    return max(40, min(_WIDEST, shutil.get_terminal_size().columns))


def shortened(text: str, columns: int) -> str:
    """Return a text that fits; a dot at its end says that something is left out."""
    return text if len(text) <= columns else text[: columns - 1] + "\N{HORIZONTAL ELLIPSIS}"


def folded(text: str, stream: TextIO, hang: int = 0) -> str:
    """Return lines that fit a terminal, below their own beginning; elsewhere each as it is.

    ``hang`` is how far the second line of a text is indented.
    """
    if not stream.isatty():
        return text
    fold = textwrap.TextWrapper(
        width(), subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(fold.fill(line) for line in text.splitlines())


class Paint:
    """Colors a text, on a terminal that has colors and where nobody has switched them off."""

    def __init__(self, stream: TextIO) -> None:
        # https://no-color.org
        off = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.on = stream.isatty() and not off

    def __call__(self, text: str, style: str) -> str:
        """Return the text in a style; unchanged where there are no colors."""
        return f"\x1b[{style}m{text}\x1b[0m" if self.on and text else text


class Bar:
    """A progress bar in one line of a terminal; elsewhere a line for each step."""

    def __init__(self, stream: TextIO, total: int, unit: str) -> None:
        self._stream, self._total, self._done = stream, total, 0
        self._moves = stream.isatty()
        self._write(f"{total} {unit}" if not self._moves else self._line(unit))

    def step(self, name: str, line: str) -> None:
        """Show that something has ended: its name in the bar, its line where there is none."""
        self._done += 1
        count = f"[{self._done:>{len(str(self._total))}}/{self._total}]"
        self._write(self._line(name) if self._moves else f"{count} {line}")
        if self._moves and self._done == self._total:
            self.clear()

    def clear(self) -> None:
        """Remove the bar, so that a result or an error begins in an empty line."""
        if self._moves:
            self._write("")

    def _line(self, name: str) -> str:
        filled = _BAR * self._done // max(1, self._total)
        bar = "#" * filled + "-" * (_BAR - filled)
        return shortened(f"[{bar}] {self._done} of {self._total}  {name}", width() - 1)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the result is what counts
            self._stream.write(f"\r\x1b[K{line}" if self._moves else f"{line}\n")
            self._stream.flush()
