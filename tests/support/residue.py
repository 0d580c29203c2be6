"""What torchguard may not leave behind in torch: compared by identity with a snapshot."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from torchguard._torch import replacement

MODULES = ("torch", "torch.linalg", "torch.special", "torch.fft", "torch.nn.functional")
EVAL_FRAME = "torch._dynamo.eval_frame"
DYNAMO_CLASSES = {
    "torch._dynamo.variables.tensor": "TensorVariable",
    "torch._dynamo.output_graph": "OutputGraph",
}
BUILTINS = "TorchScript builtins"

Snapshot = dict[str, dict[Any, Any]]


def _owners() -> dict[str, Any]:
    """Return what has the attributes, by name; of Dynamo once it is imported."""
    found: dict[str, Any] = {"torch.Tensor": torch.Tensor}
    names = (*MODULES, EVAL_FRAME)
    found |= {name: sys.modules[name] for name in names if name in sys.modules}
    for module, name in DYNAMO_CLASSES.items():
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            found[f"{module}.{name}"] = owner
    return found


def _namespaces() -> Snapshot:
    found: Snapshot = {name: dict(vars(owner)) for name, owner in _owners().items()}
    if EVAL_FRAME in found:
        # Its other attributes are state that compiling changes.
        found[EVAL_FRAME] = {
            name: value
            for name, value in found[EVAL_FRAME].items()
            if isinstance(value, (FunctionType, BuiltinFunctionType, type))
        }
    table = getattr(torch.jit._builtins, "_get_builtin_table", dict)
    ours = set(map(id, replacement._made))  # they stay, and TorchScript knows them
    # Other namespaces are libraries, inductor's for one, that register when they are imported.
    found[BUILTINS] = {
        id_: name
        for id_, name in table().items()
        if name.startswith("aten::") and id_ not in ours and not _is_packet(id_, name)
    }
    return found


def _identities() -> list[Any]:
    """Tell whether any of the namespaces has changed at all, without looking at their names."""
    table = getattr(torch.jit._builtins, "_get_builtin_table", dict)
    return [*(list(map(id, vars(owner).values())) for owner in _owners().values()), dict(table())]


def _is_packet(id_: int, name: str) -> bool:
    """Torch enters the operator behind ``torch.ops.aten.add`` when it is first looked up."""
    namespace, _, operator = name.partition("::")
    packet = vars(getattr(torch.ops, namespace)).get(operator)
    return id(getattr(packet, "_op", None)) == id_


_ENABLING: list[Any] = []


class Residue:
    """Taken before torchguard does anything; :meth:`now` says what has changed since."""

    def __init__(self) -> None:
        self._before = _namespaces()
        self._clean: list[Any] = []

    def now(self) -> list[str]:
        identities = _identities()
        if identities == self._clean:  # after nearly every test, and far faster
            return _modes_left()
        found = self._differences()
        self._clean = [] if found else identities
        return found + _modes_left()

    def _differences(self) -> list[str]:
        found: list[str] = []
        now = _namespaces()
        if EVAL_FRAME in now and EVAL_FRAME not in self._before:
            self._accept_what_importing_dynamo_changed(now)
        for owner, names in now.items():
            before = self._before.setdefault(owner, _without_ours(names))
            found += [f"{owner}.{name} is gone" for name in before if name not in names]
            for name, value in names.items():
                if name not in before:
                    # torch imports modules and fills some names lazily.
                    lazy = name == "__slotnames__"  # copyreg keeps it for pickle
                    strict = owner in {"torch.Tensor", BUILTINS} or _is_class(owner)
                    if (strict and not lazy) or _ours(value):
                        found.append(f"{owner}.{name} is new: {value!r}")
                elif value is not before[name] and owner != BUILTINS:
                    found.append(f"{owner}.{name} was replaced by {value!r}")
        return found

    def accept(self) -> None:
        """Compare with what is there now, so that one test's residue is not every later test's."""
        self._before = _namespaces()
        for _ in range(torch._C._len_torch_function_stack()):
            torch._C._pop_torch_function_stack()
        if not torch._C._is_torch_function_enabled():
            _ENABLING.append(torch._C._EnableTorchFunction())  # dropped, it disables them again

    def _accept_what_importing_dynamo_changed(self, now: Snapshot) -> None:
        """It wraps ``torch.manual_seed``, for one, and tells TorchScript so."""
        self._before[EVAL_FRAME] = {}
        for owner, names in now.items():
            accepted = {name: value for name, value in names.items() if not _ours(value)}
            if owner == BUILTINS:
                accepted = {k: v for k, v in accepted.items() if v == "aten::manual_seed"}
            self._before.setdefault(owner, {}).update(accepted)


def _modes_left() -> list[str]:
    found = []
    if modes := torch._C._len_torch_function_stack():
        found.append(f"{modes} modes are left on the torch function stack")
    if not torch._C._is_torch_function_enabled():
        found.append("subclasses and modes see no call any more: torch functions are disabled")
    if modes := torch._C._len_torch_dispatch_stack():
        found.append(f"{modes} modes are left on the torch dispatch stack")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        found.append("grad mode or inference mode was changed")
    return found


def _is_class(owner: str) -> bool:
    return any(owner == f"{module}.{name}" for module, name in DYNAMO_CLASSES.items())


def _without_ours(names: dict[Any, Any]) -> dict[Any, Any]:
    """What a class of Dynamo had when it was imported, as far as it can be seen afterwards."""
    return {name: value for name, value in names.items() if not _ours(value)}


def _ours(value: object) -> bool:
    if isinstance(value, ModuleType):
        return False
    if isinstance(value, replacement.Replacement):
        return True
    if isinstance(value, property):
        value = value.fget
    return "torchguard" in str(getattr(getattr(value, "__code__", None), "co_filename", ""))
