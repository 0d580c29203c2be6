"""What Dynamo makes of a function."""

from __future__ import annotations

import contextlib
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import wrapt

from torchguard._events import frame_of_user
from torchguard._public import message
from torchguard._torch.schemas import private

DYNAMO = "torch._dynamo"

FIRST_COMPILE = "torch._dynamo.repro.after_dynamo"
"""The module that the first ``torch.compile`` of a process imports; importing Dynamo does not."""

# What is patched there. Each path is that of torch 2.6 to 2.15; where one is missing, the guard
# that needs it is left out.
# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
CALLBACK_OF_CALL = "torch._dynamo.eval_frame._callback_from_stance"
"""Every compiled function asks it on the way in what is to be done with its frames."""

# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/tensor.py
TENSOR_VARIABLE = "torch._dynamo.variables.tensor.TensorVariable"
"""What stands for a tensor while Dynamo traces."""

# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/output_graph.py
CALL_USER_COMPILER = "torch._dynamo.output_graph.OutputGraph.call_user_compiler"
"""The method that hands Dynamo's graph to the backend."""


_asked: set[tuple[str, Callable[[ModuleType], None]]] = set()


def on_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` once: now if the module is imported, else when it is.

    An import that another thread has begun is waited for. Not to be called under ``patch.lock``,
    which the other thread wants at its end.
    """
    if (name, action) not in _asked:
        _asked.add((name, action))
        # wrapt calls at once where the name is in sys.modules, and hands over half a module then.
        wrapt.register_post_import_hook(lambda _: action(importlib.import_module(name)), name)


def keep_whole_in_graph(*functions: Callable[..., Any]) -> None:
    """Let Dynamo put a call of each into its graph as one node, which the backend traces."""
    _kept_whole.extend(functions)

    def allow(_: Any) -> None:  # allow_in_graph itself would import Dynamo
        for function in functions:
            torch.compiler.allow_in_graph(function)

    on_import("torch._dynamo", allow)


_kept_whole: list[Callable[..., Any]] = []


def is_kept_whole(function: object) -> bool:
    """Whether it is a function of torchguard that a graph holds as one node."""
    return any(function is each for each in _kept_whole)


def mark_untraced(function: Callable[..., Any], why: str | None = None) -> None:
    """Let Dynamo break its graph at a call of this function, by the mark of ``disable``.

    Its error says ``why``, if it must not break the graph.
    """
    # The wrapper of torch.compiler.disable would cost each call some microseconds.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why or (  # type: ignore[attr-defined]
        "torchguard.bucketed pads outside of what is compiled, and compiles each bucket itself: "
        "pass compile={...} to bucketed in place of torch.compile around it"
    )


def skip_frames(code: CodeType) -> None:
    """Tell Dynamo to run this code, and what is defined inside it, as it is.

    Otherwise what is called after a graph break would be compiled and counted as graphs.
    """
    hooks: Any = private("_C._dynamo.eval_frame", None)
    if hasattr(hooks, "skip_code"):  # torch 2.6
        hooks.skip_code(code)
    elif hasattr(hooks, "set_code_exec_strategy"):
        action = hooks._FrameAction
        hooks.set_code_exec_strategy(code, hooks._FrameExecStrategy(action.SKIP, action.DEFAULT))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            skip_frames(constant)


frame_callback: Callable[[], Any] = private(
    "_C._dynamo.eval_frame.get_eval_frame_callback", lambda: None
)
"""Returns what Dynamo does with the frames of this thread: None or False outside of compiled code,
something else where a compiled function has called us."""


def fake_of(variable: Any) -> torch.Tensor | None:
    """Return the fake tensor behind what Dynamo calls a TensorVariable; None if it has none."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    fake = getattr(node, "meta", {}).get("example_value")
    return fake if isinstance(fake, torch.Tensor) else None


# ---- the graph that Dynamo is compiling ----


@dataclass(unsafe_hash=True)
class _Key:
    """A backend, and what it is used for: Dynamo keeps what it compiles with it, by equality."""

    backend: weakref.ref[Any] = field(hash=False)  # two are equal as what they refer to is
    purpose: str


# Up to 2.8 Dynamo compares with keys it holds no reference to, so each small key stays.
_keys: list[_Key] = []
_compiling: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def compiling_as(callback: Any, purpose: str) -> Any:
    """Return the same callback of Dynamo, whose graphs are kept apart from all others."""
    # The backend is part of a variant's cache key; it is found by an attribute of the callback.
    # https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/extra_state.cpp
    if isinstance(getattr(callback, _ORIGINAL[0], None), _Key):
        return callback
    if callback not in _compiling:
        backend = callback
        for name in _ORIGINAL:
            while hasattr(backend, name):
                backend = getattr(backend, name)
        reference: Callable[[], Any] = weakref.ref(callback)  # it keeps what is kept for it alive

        def convert(*args: Any, **kwargs: Any) -> Any:
            return reference()(*args, **kwargs)

        _keys.append(_Key(weakref.ref(backend), purpose))
        vars(convert).update(dict.fromkeys(_ORIGINAL, _keys[-1]))
        _compiling[callback] = convert
    return _compiling[callback]


def compiles_apart(purpose: str) -> bool:
    """Whether something was compiled apart from all others for this purpose."""
    return any(key.purpose == purpose for key in _keys)


_ORIGINAL = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # since 2.8, and 2.6


def symbols_in(values: Iterable[object]) -> set[Any]:
    """Return the symbols in the sizes, strides and offsets of tensors, and in integers."""
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    found: set[Any] = set()
    for value in values:
        parts = (value,)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            parts = (*value.size(), *value.stride(), value.storage_offset())
        for part in parts:
            if isinstance(part, torch.SymInt):
                found |= shapes.free_symbols(part)
    return found


@contextlib.contextmanager
def compiling_outside_dynamo() -> Iterator[None]:
    """Compile a graph outside of Dynamo."""
    frames = importlib.import_module("torch._dynamo.convert_frame")
    # While one thread traces with torch.fx, 2.13 takes compiled code that another thread calls for
    # traced too, unless this says that torch.compile traces. 2.15 looks at the thread alone.
    session = private("compiler._compile_session_context", contextlib.nullcontext)
    lock = getattr(frames, "compile_lock", contextlib.nullcontext())
    with lock, session(), torch._guards.tracing(None):
        yield


# The frames of every call into compiled code have one of this file among them. Where torch renames
# it, the warning is at the innermost line of the user's, which is in the compiled function.
_EVAL_FRAME = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")


def warn_at_compiled_call(entry: str, text: str, category: type[Warning]) -> None:
    """Warn at the line that has called into compiled code; the inner lines are the code's own."""
    innermost = frame = frame_of_user()
    while frame is not None and frame.f_code.co_filename != _EVAL_FRAME:
        frame = frame.f_back
    frame = (None if frame is None else frame_of_user(frame)) or innermost
    text = message(entry, text)
    if frame is None:
        warnings.warn(text, category, stacklevel=2)
        return
    # No registry: one line may call two wrong graphs, and each has its own warning.
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno)


def is_compiling_here() -> bool:
    """Whether Dynamo compiles something in this thread: what it has read must still be there.

    https://github.com/pytorch/pytorch/blob/main/torch/_guards.py
    """
    context: Any = private("_guards.CompileContext", None)
    return context is not None and context.try_get() is not None


def is_static_address(tensor: torch.Tensor) -> bool:
    """Whether Dynamo takes this for a tensor that stays: a parameter, a buffer, or a marked one.

    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/decorators.py
    """
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def source_name(placeholder: Any) -> str:
    """Return how Dynamo reads an input of a graph, such as ``L['x']``; empty if it isn't noted."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)
