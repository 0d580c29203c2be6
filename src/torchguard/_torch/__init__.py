"""Every private torch API that torchguard uses, each with what it falls back to.

Nothing public reads or writes a tensor's version counter, steps around
``__torch_function__`` without a call, or tells what ``torch.compile`` kept of a
function. ``tests/patching/test_import.py`` checks each name here on the torch at hand,
and that nothing private is used anywhere else.
"""

# ruff: noqa: F403  what a module offers has no underscore
from torchguard._torch.compile import *
from torchguard._torch.dynamo import *
from torchguard._torch.modes import *
from torchguard._torch.overlap import *
from torchguard._torch.schemas import *
from torchguard._torch.symbolic_shapes import *
from torchguard._torch.tensors import *
