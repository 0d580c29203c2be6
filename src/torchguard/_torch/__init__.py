"""Every private torch API that torchguard uses, with a fallback where a release lacks one.

No public API reads or sets a tensor's version counter, hides a call from
``__torch_function__``, or tells what ``torch.compile`` keeps of a
function. ``tests/patching/test_import.py`` checks each name here on the torch at hand,
and that nothing private is used anywhere else.
"""

# ruff: noqa: F403  what a module offers has no underscore
from torchguard._torch.compile import *
from torchguard._torch.dynamo import *
from torchguard._torch.eager import *
from torchguard._torch.replacement import *
from torchguard._torch.schemas import *
from torchguard._torch.symbolic_shapes import *
