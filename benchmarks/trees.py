"""What the hot paths cost in two source trees, by turns, as a ratio of the two times.

    git worktree add /tmp/before COMMIT
    python benchmarks/trees.py /tmp/before/src [--rounds 30] [--only WORD]

Each tree has a process of its own that stays; a block of calls is timed in one, then in the other,
and which comes first changes from round to round. What is printed is the ratio of the two times,
its median and quartiles over the rounds, and the least time of each. The row ``torch alone`` runs
nothing of torchguard: it says what this machine's noise is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent.parent / "src"
_BLOCK_SECONDS = 0.02
_WARM = 50

Step = Callable[[], Any]


def steps() -> dict[str, Step]:
    """Make the steps with the torchguard on the path."""
    import torch  # noqa: PLC0415 - only the children need it

    import torchguard  # noqa: PLC0415 - likewise

    x, y, grown = torch.ones(3), torch.ones(3), torch.ones(3)
    batch = {"ids": torch.ones(2, 3), "more": [torch.ones(2, 3), 1]}
    flat = torchguard.bucketed(lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=[4, 8])
    nested = torchguard.bucketed(
        lambda batch: {"out": batch["ids"] + batch["more"][0]},
        dims={"batch": {"ids": {1: "t"}, "more": [{1: "t"}, None]}},
        buckets=[4, 8],
    )
    verified = torchguard.verified(lambda x: 2 * x, backend="eager")

    def first() -> None:
        torchguard.bucketed(lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=[4, 8])(x)

    def grow() -> None:
        torchguard.safe_resize_(grown, 3)
        torchguard.safe_resize_(grown, 300)

    def in_scope(step: Step) -> Step:
        def block() -> None:
            with torchguard.guarded():
                for _ in range(100):
                    step()

        return block

    return {
        "torch alone: add_": lambda: x.add_(1),
        "bucketed, warm": lambda: flat(x),
        "bucketed, warm, nested": lambda: nested(batch),
        "bucketed, first call": first,
        "verified, warm": lambda: verified(x),
        "guarded: 100 add_": in_scope(lambda: x.add_(1)),
        "guarded: 100 copy_": in_scope(lambda: x.copy_(y)),
        "guarded: 100 resize_": in_scope(lambda: x.resize_(3)),
        "safe_resize_, same size": lambda: torchguard.safe_resize_(x, 3),
        "safe_resize_, other size": grow,
    }


def serve() -> None:
    """Time what the parent asks for: a step's name and how many calls, or 0 to find that out."""
    made = steps()
    for step in made.values():
        for _ in range(_WARM):
            step()
    print("\t".join(made), flush=True)
    for line in sys.stdin:
        name, calls = line.rstrip("\n").split("\t")
        step, count = made[name], int(calls) or 3
        for _ in range(2):  # the interpreter adapts again to what the last step has left
            step()
        start = time.perf_counter()
        for _ in range(count):
            step()
        print((time.perf_counter() - start) / count, flush=True)


class _Tree:
    """The process of one tree."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this file itself
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
            text=True,
        )
        self.names = self._read().split("\t")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a tree's process has ended; its error is above")
        return line.rstrip("\n")

    def seconds(self, name: str, calls: int) -> float:
        """Return the seconds of one call, the mean of a block."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\t{calls}\n")
        self._process.stdin.flush()
        return float(self._read())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(before: str, now: str, rounds: int, only: str) -> None:
    """Print a row for each step."""
    trees = [_Tree(before), _Tree(now)]
    print(f"{'':26}{'now / before':>13}  quartiles     before us    now us")
    for name in trees[0].names:
        if only not in name:
            continue
        once = trees[0].seconds(name, 0)
        calls = max(1, round(_BLOCK_SECONDS / once))
        found: list[list[float]] = [[], []]
        for turn in range(rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                found[index].append(trees[index].seconds(name, calls))
        ratios = [new / old for old, new in zip(*found, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        old, new = (1e6 * min(each) for each in found)
        print(f"{name:26}{middle:13.3f}  {low:.3f}-{high:.3f}  {old:9.2f} {new:9.2f}", flush=True)
    for tree in trees:
        tree.end()


def main() -> None:
    """Compare two trees, or serve one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", help="the folder that holds the other torchguard")
    parser.add_argument("--now", default=str(_HERE), help="by default this checkout's src")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="steps with this in their name")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.before is None:
        parser.error("which tree to compare with?")
    else:
        compare(options.before, options.now, options.rounds, options.only)


if __name__ == "__main__":
    main()
