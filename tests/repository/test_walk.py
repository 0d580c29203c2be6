"""How far a call walks through torchguard's files, and that it does not get longer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support.walk import Walk, walked, walks

counted = functools.lru_cache(walks)

# The most of torch 2.8 to 2.15. Before the rooms: 24 and 203, 8 and 8, 15 and 63. Two files of a
# check look for operands that overlap what is written, in the reference.
AT_MOST = {
    "bucketed, first call": (12, 61),
    "bucketed, warm call": (4, 4),
    "verified, first call": (10, 28),
}
# torch 2.6 has no function in C that says whether saved-tensors hooks are on: each isolated run
# goes to this one and comes back.
FALLBACK = "_torch/tensors.py:_saved_tensors_hooks_cannot_be_disabled"
# Dynamo of torch 2.15 compares the backend of a call with those of its graphs, in a row.
COMPARED = "verification/backend.py:__eq__"


@pytest.mark.parametrize("name", AT_MOST)
def test_the_walk_of_a_call_is_not_longer_than_it_was(name: str) -> None:
    """Files entered and changes of file, as ``python tests/support/walk.py`` prints them."""
    walk = counted()[name]
    files, changes = AT_MOST[name]
    detours = walk.entered.count(FALLBACK)
    assert 0 < len(walk.files) <= files + bool(detours), walk.files
    detours += COMPARED in walk.entered
    assert walk.changes <= changes + 2 * detours, walk.entered


def test_a_walk_counts_functions_files_and_changes(tmp_path: Path) -> None:
    """Two files: a generator counts once, a comprehension not at all."""
    sources = {
        "one.py": "def one():\n    return [each for each in two()]\n",
        "two.py": "def two():\n    yield three()\n    yield three()\ndef three():\n    return 3\n",
    }
    names: dict[str, object] = {}
    for name, source in sources.items():
        exec(compile(source, str(tmp_path / name), "exec"), names)  # noqa: S102
    one = names["one"]
    assert callable(one)
    walk = walked(one, tmp_path)
    assert walk == Walk(["one.py:one", "two.py:two", "two.py:three", "two.py:three"], 3)
    assert walk.files == ["one.py", "two.py"]
    assert walk.changes == 1
