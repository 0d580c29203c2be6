"""What the tests of saved plans share."""

from __future__ import annotations

import types

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F

SCALE = 2.0
TABLE = {"act": torch.relu}
class Settings:
    window = 1
    def __init__(self): self.depth = 1
settings = Settings()

def helper(x):
    return SCALE * x

def unused(x):
    return x + 1

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        return self.drop(self.project(x))

class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, width)
        self.inner = Inner()
        self.norm = nn.LayerNorm(4, eps=1e-5)
        self.steps = 3
    def forward(self, ids):
        x = self.embed(ids) * settings.depth
        for _ in range(self.steps):
            x = F.gelu(self.inner(x)) + self.shift(x)
        return TABLE["act"](helper(self.norm(x)))
    def shift(self, x):
        return 0 * x
    def training_step(self, batch):
        return self(batch).sum()

def make():
    return Model()
"""


def program(*changes: tuple[str, str]) -> types.ModuleType:
    """Return PROGRAM as a module of Python, with some of its text changed."""
    source = PROGRAM
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    module = types.ModuleType("users_program")
    exec(compile(source, "users_program.py", "exec"), vars(module))  # noqa: S102
    return module


CHANGES: dict[str, tuple[str, str]] = {
    "a helper": ("SCALE * x\n", "SCALE * x - x.mean()\n"),
    "a global": ("SCALE = 2.0", "SCALE = 3.0"),
    "a table of functions": ("torch.relu}", "torch.sigmoid}"),
    "forward": ("F.gelu(", "F.relu("),
    "a method": ("0 * x", "x.mean()"),
    "an attribute": ("self.steps = 3", "self.steps = 4"),
    "p of a dropout": ("nn.Dropout(0.1)", "nn.Dropout(0.2)"),
    "eps of a norm": ("eps=1e-5", "eps=1e-6"),
    "the class of a part": ("nn.Dropout(0.1)", "nn.AlphaDropout(0.1)"),
    "the forward of a part": ("self.drop(self.project(x))", "self.project(self.drop(x))"),
    "the shape of a weight": (
        "def make():\n    return Model()",
        "def make():\n    return Model(8)",
    ),
    "a part": ("self.norm = ", "self.further = nn.Identity(); self.norm = "),
    "an object's attribute": ("self.depth = 1", "self.depth = 2"),
    "a default": ("def helper(x):\n", "def helper(x, more=None):\n"),
}
