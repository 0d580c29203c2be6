"""Writes the texts into ``docs/reference/messages.md``, from the source; its prose stays.

``python docs/make_messages.py`` after a message has changed; a test compares the page with what
this writes. A warning, a line of the log or an error class that has no heading there is an error.
"""  # noqa: INP001

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torchguard
from torchguard import errors

PAGE = Path(__file__).parent / "reference" / "messages.md"
SOURCE = Path(torchguard.__file__).parent
GAP = "…"
"""What stands for a value in a text."""

_SHORT = 20
"""As long as the name of a function, which many messages begin with."""

_SAYS = {
    "message": "",
    "record": "",
    "record_event": "",
    "warn_user": "TorchGuardWarning",
    "warn_at_compiled_call": "TorchGuardWarning",
    "warn_of_setup": "TrainingSetupWarning",
    "_Fault": "TrainingSetupWarning",
    "say_once": "TrainingSetupWarning",
}
"""Functions whose first argument names an entry, with the class of their warning."""

_ERRORS = {name: name for name, each in vars(errors).items() if name.endswith("Error")}
_RAISES = {**_ERRORS, "_disagreement": "ReplicasDisagreeError"}
"""What makes an error, with the class of it."""


class Text(NamedTuple):
    """A text of the source, with a gap for each value in it."""

    entry: str
    text: str
    kind: str
    """The class of the warning or of the error; empty for a line of the log."""

    def __str__(self) -> str:
        is_error = self.kind in _ERRORS
        return (
            (f"{self.kind}: " if self.kind else "")
            + ("" if is_error else "torchguard: ")
            + self.text
        )


def texts() -> list[Text]:
    """Return each text that is warned of, logged or raised, in the order of the files.

    Raises:
        ValueError: a call warns or logs without ``message``.
    """
    return [each for file in sorted(SOURCE.rglob("*.py")) for each in _File(file).texts()]


class _File:
    """One file of the source."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tree = ast.parse(file.read_text(encoding="utf-8"))

    def texts(self) -> Iterator[Text]:
        """Yield what its calls say."""
        for node, scope in self._calls(self.tree, self.tree):
            yield from self._said_by(node, scope)
            if _is_direct(node) and not self._has_address(node, scope):
                line = f"{self.file.relative_to(SOURCE)}:{node.lineno}"
                raise ValueError(f"{line}: {ast.unparse(node)} does not go through message()")

    def _said_by(self, node: ast.Call, scope: ast.AST) -> Iterator[Text]:
        name, args = _name(node.func), node.args
        if name.startswith("record") and len(args) > 2:  # noqa: PLR2004 - kind, guard, text
            if all(each.arg != "entry" for each in node.keywords):
                by = _constant(args[1])
                for text in self._rendered(args[2], scope):
                    yield Text(ast.literal_eval(args[0]).replace("_", "-"), f"{by}: {text}", "")
        elif name in _SAYS and args and isinstance(args[0], ast.Constant):
            named = [_name(each) for each in args if _name(each).endswith("Warning")]
            kind = (named or [_SAYS[name]])[0]
            by = "transaction: " if kind == "TrainingSetupWarning" else ""
            if by and len(args) > 2:  # noqa: PLR2004 - the function that was called
                by = f"{_constant(args[2])}: "
            for text in self._rendered(args[1], scope):
                yield Text(str(args[0].value), by + text, kind)
        elif name in _RAISES and args:
            for text in self._rendered(args[0], scope):
                yield Text(_RAISES[name].lower(), text, _RAISES[name])

    def _calls(self, node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
        """Yield each call, with the function that it is in."""
        if isinstance(node, ast.Call):
            yield node, scope
        scope = node if isinstance(node, ast.FunctionDef) else scope
        for child in ast.iter_child_nodes(node):
            yield from self._calls(child, scope)

    def _has_address(self, node: ast.Call, scope: ast.AST) -> bool:
        """Whether a call of ``warnings`` or of the logger passes what ``message`` returned."""
        passed = [each for arg in node.args for each in (arg, *self._assigned(arg, scope))]
        passed += [each for arg in passed for each in self._assigned(arg, self.tree)]
        return any(
            _name(each.func) in {"message", "message_of"}
            for each in passed
            if isinstance(each, ast.Call)
        )

    def _assigned(self, node: ast.expr, scope: ast.AST) -> list[ast.expr]:
        """Return what a variable is assigned in its function, or an attribute in its file."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return []
        return [
            each.value
            for each in ast.walk(scope if isinstance(node, ast.Name) else self.tree)
            if isinstance(each, ast.Assign)
            and any(ast.unparse(target) == ast.unparse(node) for target in each.targets)
        ]

    def _rendered(self, node: ast.expr, scope: ast.AST) -> list[str]:
        """Return the texts that an expression may be, or a gap."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.IfExp):
            return [*self._rendered(node.body, scope), *self._rendered(node.orelse, scope)]
        if isinstance(node, ast.FormattedValue):
            chosen = [
                each for each in self._assigned(node.value, scope) if isinstance(each, ast.IfExp)
            ]
            return self._rendered(chosen[0], scope) if chosen else [GAP]
        if isinstance(node, ast.Name | ast.Attribute):
            values = [
                each for each in self._assigned(node, scope) if not isinstance(each, ast.Name)
            ]
            found = [text for each in values for text in self._rendered(each, scope)]
            return [each for each in found if is_known(each)] or [GAP]
        parts: list[ast.expr] = []
        if isinstance(node, ast.JoinedStr):
            parts = node.values
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        rendered = [self._rendered(part, scope) for part in parts] or [[GAP]]
        return ["".join(each) for each in itertools.product(*rendered)]


def is_known(text: str) -> bool:
    """Whether a text is more than gaps and the name of a guard."""
    return len(re.sub(r"^\w+: |\W", "", text)) > 4  # noqa: PLR2004 - " at "


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _constant(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else GAP


def _is_direct(node: ast.Call) -> bool:
    """Whether a call warns or logs by itself."""
    owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    levels = {"debug", "info", "warning", "error", "exception", "critical", "log"}
    called = _name(node.func)
    return (owner == "warnings" and called.startswith("warn")) or (
        owner == "logger" and called in levels
    )


# ---- the page ----


def page() -> str:
    """Return the whole page, with the texts of today.

    Raises:
        ValueError: a text of the source has no heading, or a heading no text.
    """
    known = texts()
    written = PAGE.read_text(encoding="utf-8")
    entries = [slug_of(title) for title in re.findall(r"^### (.+)$", written, re.MULTILINE)]
    wanted = {each.entry for each in known} | set(map(str.lower, _ERRORS))
    if set(entries) != wanted or len(entries) != len(wanted):
        raise ValueError(
            f"{PAGE}: headings without a text {sorted(set(entries) - wanted)}, texts without a "
            f"heading {sorted(wanted - set(entries))}"
        )

    def filled(match: re.Match[str]) -> str:
        said = [each for each in known if each.entry == slug_of(match[1]) and is_known(each.text)]
        return "\n".join([f"### {match[1]}", "", *_block(said)]) + "\n"

    made = r"^### (.+)\n\n(?:```text\n(?:.+\n)*?```\n\n)?(?:Silence it: .+\n\n)?"
    return re.sub(made, filled, written, flags=re.MULTILINE)


def slug_of(title: str) -> str:
    """Return the address of a heading on its page."""
    return title.lower().replace(" ", "-")


def _block(said: list[Text]) -> Iterator[str]:
    if not said:
        return
    yield from ("```text", *dict.fromkeys(map(str, said)), "```", "")
    warned = dict.fromkeys(filter_of(each.text) for each in said if each.kind.endswith("Warning"))
    if warned:
        calls = (f'`warnings.filterwarnings("ignore", "{each}")`' for each in warned)
        yield from (f"Silence it: {', '.join(calls)}", "")


def filter_of(text: str) -> str:
    """Return a regular expression for ``warnings`` that fits this text alone."""
    first, *others = re.split(r"[^\w ,:;='-]", text)
    if len(first) > _SHORT:
        return "torchguard: " + textwrap.shorten(first, 50, placeholder="")
    return "torchguard: .*" + textwrap.shorten(max(others, key=len), 50, placeholder="")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
