"""install("setitem") and Dynamo, imported in every order."""

from __future__ import annotations

import pytest

from support.child_process import output_of

pytestmark = pytest.mark.slow

# --- installing it, whenever Dynamo is imported

REPORT = """
import sys, torch, torchguard
def ask(v):
    m = torch.zeros(2, 2)
    m[0][0] = v
    return m, m.requires_grad
def is_right():
    torch.compiler.reset()
    m, known = torch.compile(ask, backend="eager")(torch.ones((), requires_grad=True))
    return known == m.requires_grad
"""

ORDERS = {
    "before Dynamo is imported": """
installation = torchguard.install("setitem")
assert "torch._dynamo" not in sys.modules
print(torchguard.installed())
""",
    "in a hook on its import": """
import wrapt
torchguard.install("resize").uninstall()  # its own hook comes first
made = []
hook = lambda _: made.append(torchguard.install("setitem"))
wrapt.register_post_import_hook(hook, "torch._dynamo")
import torch._dynamo
[installation] = made
print(torchguard.installed())
""",
    "uninstalled while it waits": """
torchguard.install("setitem").uninstall()
import torch._dynamo
assert not is_right()
installation = torchguard.install("setitem")
print(torchguard.installed())
""",
}
REST = """
print(is_right(), torchguard.installed())
installation.uninstall()
print(is_right(), torchguard.installed())
"""


@pytest.mark.parametrize("order", ORDERS)
def test_installing_works_in_every_order(order: str) -> None:
    lines = output_of(REPORT + ORDERS[order] + REST).splitlines()
    assert lines == ["('setitem',)", "True ('setitem',)", "False ()"]


LATE = """
import torch, torchguard
from dataclasses import replace
from torchguard.patching.guards import GUARDS
GUARDS["setitem"] = replace(
    GUARDS["setitem"], not_needed=lambda: "why" if "torch._dynamo" in sys.modules else None
)
import sys
wanted = torchguard.install("setitem")
print(wanted.names, wanted.skipped)
import torch._dynamo
print(wanted.names, wanted.skipped, torchguard.installed())
wanted.uninstall()
with torchguard.install("setitem", only_if_needed=False) as anyway:
    print(anyway.names, torchguard.installed())
print("requires_grad" in vars(torch._dynamo.variables.tensor.TensorVariable))
"""


def test_a_guard_that_turns_out_to_be_unneeded_says_so_when_dynamo_is_imported() -> None:
    assert output_of(LATE).splitlines() == [
        "('setitem',) {}",
        "() {'setitem': 'why'} ()",
        "('setitem',) ('setitem',)",
        "False",
    ]
