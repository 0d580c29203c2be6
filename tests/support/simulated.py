"""Releases of PyTorch that do not exist: one private name is gone, or no longer called.

A change is made in a fork, before torchguard is imported there. Torch itself goes on working if
it can: what calls a function by a name calls it by another one from then on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import json
import operator
import os
import pickle
import signal
import sys
import tempfile
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")
numpy: Any = importlib.import_module("numpy")
_SECONDS = 60


def _split(path: str) -> tuple[Any, str]:
    """Return the object that ``torch.a.b`` is an attribute of, and ``b``."""
    owner, _, name = path.rpartition(".")
    module = owner
    while module not in sys.modules:
        module = module.rpartition(".")[0]
    rest = owner[len(module) + 1 :]
    found = sys.modules[module]
    return (operator.attrgetter(rest)(found) if rest else found), name


def _functions(module: types.ModuleType) -> list[types.FunctionType]:
    """Return every function that looks up names in a module, closures included."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is types.FunctionType and each.__globals__ is vars(module)
    ]


def _rewritten(code: types.CodeType, name: str, new: str) -> types.CodeType:
    names = tuple(new if each == name else each for each in code.co_names)
    constants = tuple(
        _rewritten(each, name, new) if isinstance(each, types.CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_names=names, co_consts=constants)


# ---- changes ----


def gone(path: str) -> None:
    """Let there be nothing at the path; what of torch needs it fails too."""
    owner, name = _split(path)

    def missing(_: object) -> Any:
        raise AttributeError(name)

    if isinstance(owner, type) and name not in vars(owner):  # of a class of C
        setattr(owner, name, property(missing))
    else:
        delattr(owner, name)


def uncalled(path: str, *, callers: str = "") -> None:
    """Let the functions of a module (that of the path) call it by another name; it stays."""
    owner, name = _split(path)
    new = f"{name}_of_later"
    setattr(owner, new, vars(owner).get(name, None) or getattr(owner, name))
    module = callers or (owner.__module__ if isinstance(owner, type) else owner.__name__)
    for function in _functions(sys.modules[module]):
        function.__code__ = _rewritten(function.__code__, name, new)


def renamed(path: str, *, callers: str = "") -> None:
    """Let it have another name."""
    uncalled(path, callers=callers)
    gone(path)


def replaced(path: str, make: Callable[[Any], Any]) -> None:
    """Let there be another function."""
    owner, name = _split(path)
    setattr(owner, name, make(getattr(owner, name)))


def _with_one_more_argument(original: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{original.__name__}() missing 1 required positional argument: 'later'")

    return refuse


def signature(path: str) -> None:
    """Let it have one more argument."""
    replaced(path, _with_one_more_argument)


# The names with which torchguard is imported; torch itself needs them afterwards.
_HIDDEN: list[tuple[Any, str, Any]] = []


def hidden(path: str) -> None:
    """Let it not be there while torchguard is imported, which is when torchguard looks."""
    owner, name = _split(path)
    _HIDDEN.append((owner, name, getattr(owner, name)))
    delattr(owner, name)


def _version_counter_stays(original: Any) -> Any:
    class Keeper:
        def __init__(self, tensor: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    return Keeper


def _another_reentrant(checkpoint: Any) -> None:
    """``checkpoint()`` applies another class than ``CheckpointFunction``."""
    now = checkpoint.CheckpointFunction
    both = {name: vars(now)[name] for name in ("forward", "backward")}
    uncalled(f"{_CHECKPOINT}.CheckpointFunction")
    checkpoint.CheckpointFunction_of_later = type(now)("OfLater", now.__bases__, both)


def _local_renamed(name: str) -> None:
    """The functions of ``torch.utils.checkpoint`` call a local variable by another name."""
    for function in _functions(importlib.import_module(_CHECKPOINT)):
        code = function.__code__
        local, cells = (
            tuple(f"{each}_of_later" if each == name else each for each in names)
            for names in (code.co_varnames, code.co_cellvars)
        )
        function.__code__ = code.replace(co_varnames=local, co_cellvars=cells)


def _loads_otherwise() -> None:
    """``Module.load_state_dict`` copies with another operator than ``copy_``."""

    def copy_of_later(self: Any, other: Any) -> Any:
        torch._foreach_copy_([self], [other])
        return self

    torch.Tensor.copy_of_later = copy_of_later
    function = torch.nn.Module._load_from_state_dict
    function.__code__ = _rewritten(function.__code__, "copy_", "copy_of_later")


def _no_global_hooks(optimizer: Any) -> None:
    """``optimizer.step()`` calls the hooks of one optimizer alone."""
    around = optimizer.Optimizer.profile_hook_step
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        around.__code__ = _rewritten(around.__code__, name, f"{name}_of_later")
        setattr(optimizer, f"{name}_of_later", OrderedDict())


def _hooks_around(optimizer: Any, step: Any, this: Any, args: Any, kwargs: Any) -> Any:
    """Make a step, and call the hooks before and after it."""
    for hook in optimizer._global_optimizer_pre_hooks.values():
        hook(this, (this, *args), kwargs)
    result = step(this, *args, **kwargs)
    for hook in optimizer._global_optimizer_post_hooks.values():
        hook(this, (this, *args), kwargs)
    return result


def _hooks_otherwise(optimizer: Any) -> None:
    """Another function, with other names, stands around each step and calls the hooks."""

    def profile_hook_step(step: Any) -> Any:
        return lambda this, *args, **kwargs: _hooks_around(optimizer, step, this, args, kwargs)

    optimizer.Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _hooks_of_an_object(optimizer: Any) -> None:
    """An object, which has no code of its own, stands around each step and calls the hooks."""

    class Around:
        def __init__(self, step: Any) -> None:
            self.step = step

        def __get__(self, this: Any, kind: Any = None) -> Any:
            return self if this is None else functools.partial(self, this)

        def __call__(self, this: Any, *args: Any, **kwargs: Any) -> Any:
            return _hooks_around(optimizer, self.step, this, args, kwargs)

    optimizer.Optimizer.profile_hook_step = staticmethod(Around)


_CHECKPOINT = "torch.utils.checkpoint"
_GENERATOR = f"{_CHECKPOINT}._checkpoint_without_reentrant_generator"


def generator() -> str:
    """Return the path of the generator that ``checkpoint`` runs on this release."""
    module = importlib.import_module(_CHECKPOINT)
    return _GENERATOR + "_impl" * hasattr(module, _GENERATOR.rpartition(".")[2] + "_impl")


def _table(change: Callable[[str], None], *paths: str) -> dict[str, Callable[[], None]]:
    return {f"{change.__name__} {path}": functools.partial(change, path) for path in paths}


EAGER: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    **_table(
        gone,
        "torch.autograd._unsafe_preserve_version_counter",
        "torch.Tensor._version",
        "torch.Tensor._base",
        "torch.UntypedStorage._cdata",
        "torch.Tensor._backward_hooks",
        "torch._C._set_conj",
        "torch._C._set_neg",
        "torch._neg_view",
        "torch._C._jit_get_schemas_for_operator",
        "torch._C._get_operation_overload",
        "torch._C._get_tracing_state",
        "torch._C.PyTorchFileReader",
        "torch._foreach_copy_",
        "torch._foreach_add_",
        "torch.index_select",
        "torch.gather",
        "torch.embedding_renorm_",
        "torch.resize_as_",
        "torch.overrides._get_overridable_functions",
        "torch.utils._device._device_constructors",
        "torch.jit._builtins._get_builtin_table",
        "torch.multiprocessing.reductions.reduce_tensor",
        "torch.nn.Module.to_empty",
        f"{_CHECKPOINT}.CheckpointFunction",
    ),
    **_table(
        signature,
        "torch.autograd._unsafe_preserve_version_counter",
        "torch._C._jit_get_schemas_for_operator",
        "torch._C._get_operation_overload",
        "torch._C._set_conj",
    ),
    **_table(
        hidden,
        "torch._C._DisableTorchDispatch",
        "torch._C._set_grad_enabled",
        "torch._C._InferenceMode",
        "torch._C._EnableTorchFunction",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._is_any_autocast_enabled",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._functorch.get_unwrapped",
        "torch._C._nn",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._dynamo.eval_frame",
    ),
    "the version counter stays": lambda: replaced(
        "torch.autograd._unsafe_preserve_version_counter", _version_counter_stays
    ),
    "no operator has a schema": lambda: replaced(
        "torch._C._jit_get_schemas_for_operator", lambda _: lambda *_: []
    ),
    **{
        f"F.{name} calls another builtin": functools.partial(
            uncalled, path, callers="torch.nn.functional"
        )
        for name, path in {
            "embedding": "torch.embedding",
            "embedding_bag": "torch.embedding_bag",
            "cross_entropy": "torch._C._nn.cross_entropy_loss",
            "nll_loss": "torch._C._nn.nll_loss_nd",
            "binary_cross_entropy": "torch._C._nn.binary_cross_entropy",
        }.items()
    },
    "checkpoint() calls another generator": lambda: uncalled(generator()),
    "the generator of checkpoint() is renamed": lambda: renamed(generator()),
    "the generator of checkpoint() takes one more argument": lambda: signature(generator()),
    "checkpoint() applies another function": lambda: _another_reentrant(
        importlib.import_module(_CHECKPOINT)
    ),
    "load_state_dict copies otherwise": _loads_otherwise,
    "Tensor.share_memory_ calls another method": lambda: uncalled(
        "torch.UntypedStorage.share_memory_", callers="torch.storage"
    ),
}
"""What is tried without Dynamo."""

_DYNAMO = "torch._dynamo"
_HOOK = f"{_DYNAMO}.eval_frame._callback_from_stance"
_COMPILER = f"{_DYNAMO}.output_graph.OutputGraph.call_user_compiler"
_SETITEM = f"{_DYNAMO}.variables.tensor.TensorVariable.method___setitem__"

COMPILED: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    **_table(renamed, _HOOK, _COMPILER, f"{_DYNAMO}.trace_rules.get_torch_obj_rule_map"),
    **_table(uncalled, _HOOK, _COMPILER, _SETITEM),
    **_table(gone, _SETITEM, f"{_DYNAMO}.external_utils.wrap_inline"),
    "the generator of checkpoint() is renamed": lambda: renamed(generator()),
    "checkpoint() calls another generator": lambda: uncalled(generator()),
    "a local of checkpoint() is renamed": lambda: _local_renamed("gen"),
    "a local of the generator of checkpoint() is renamed": lambda: _local_renamed("new_frame"),
    "step() calls no global hooks": lambda: _no_global_hooks(sys.modules["torch.optim.optimizer"]),
    "step() is wrapped otherwise": lambda: _hooks_otherwise(sys.modules["torch.optim.optimizer"]),
    "step() is wrapped by an object": lambda: _hooks_of_an_object(
        sys.modules["torch.optim.optimizer"]
    ),
    "Adam._init_group is renamed": lambda: renamed(
        "torch.optim.Adam._init_group", callers="torch.optim.adam"
    ),
    "the version counter stays": lambda: replaced(
        "torch.autograd._unsafe_preserve_version_counter", _version_counter_stays
    ),
    **_table(signature, "torch.autograd._unsafe_preserve_version_counter"),
    **_table(gone, "torch._foreach_copy_", "torch.Tensor._backward_hooks"),
}
"""What is tried with Dynamo: compiled code, and optimizers, which import it."""


# ---- what is judged ----


class Unprotected(Exception):  # noqa: N818  an answer
    """What a judge has seen."""


def _fixed(size: int = 1) -> Any:
    return torch.from_numpy(numpy.ones(size))  # its memory can't grow


def _keeps_shape(tensor: Any, call: Callable[[], object]) -> None:
    shape = tuple(tensor.shape)
    with contextlib.suppress(RuntimeError):
        call()
        return
    if tuple(tensor.shape) != shape:
        raise Unprotected(f"the shape is {tuple(tensor.shape)}, not {shape}")


def _keeps_version(resize: Callable[[Any], object]) -> None:
    fixed = _fixed()
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    loss = (weight * fixed).sum()
    _keeps_shape(fixed, lambda: resize(fixed))
    try:
        loss.backward()
    except RuntimeError as error:
        raise Unprotected("a backward sees a write") from error


def _resize(torchguard: Any) -> None:
    for resize in (
        lambda t: t.resize_(5),
        lambda t: t.resize_(-1),
        lambda t: t.resize_as_(torch.ones(5)),
        lambda t: t.set_(t.untyped_storage(), 0, (5,), (1,)),
    ):
        _keeps_version(resize)


def _out(torchguard: Any) -> None:
    x = torch.ones(5, 5, dtype=torch.float64)
    for write in (
        lambda out: torch.add(x, 1, out=out),
        lambda out: torch.mm(x, x, out=out),
        lambda out: torch.cat([x, x], out=out),
        lambda out: torch.cumsum(x, 0, out=out),
        lambda out: torch.norm(x, dim=0, out=out),
        lambda out: torch.linalg.vector_norm(x, out=out),
        lambda out: torch.special.expit(x, out=out),
        lambda out: torch.fft.fftfreq(5, out=out),
        lambda out: torch.nn.functional.softplus(x, out=out),
    ):
        out = _fixed(0)
        _keeps_shape(out, functools.partial(write, out))


def _overlap(torchguard: Any) -> None:
    def subtract(x: Any) -> None:
        x -= x[:, :1]

    def shift(x: Any) -> None:
        x[:, 1:] = x[:, :-1]

    def by_method(x: Any) -> None:
        x[:, 1:].copy_(x[:, :-1])

    def multiply(x: Any) -> None:
        torch.mul(x[:, :-1], 2, out=x[:, 1:])

    first = numpy.arange(12.0).reshape(3, 4)
    shifted = first[:, [0, 0, 1, 2]]
    doubled = numpy.hstack([first[:, :1], 2 * first[:, :-1]])
    pairs = (subtract, first - first[:, :1]), (shift, shifted), (by_method, shifted)
    for write, expected in (*pairs, (multiply, doubled)):
        x = torch.tensor(first)
        with contextlib.suppress(RuntimeError):
            write(x)
            if x.tolist() != expected.tolist():
                raise Unprotected(write.__name__)

    def each_row(x: Any) -> Any:
        subtract(x)
        return x

    rows = torch.arange(24.0).reshape(2, 3, 4)
    if not torch.equal(torch.func.vmap(each_row)(rows.clone()), rows - rows[:, :, :1]):
        raise Unprotected("inside vmap")


def _checks(torchguard: Any) -> None:
    errors, functional, two = torchguard.errors, torch.nn.functional, torch.ones(2, 2)
    far = torch.tensor([5])
    calls: tuple[Callable[[], object], ...] = (
        lambda: functional.embedding(far, two),
        lambda: functional.embedding_bag(far[None], two),
        lambda: functional.one_hot(far, 2),
        lambda: functional.cross_entropy(two[:1], far),
        lambda: functional.nll_loss(two[:1], far),
        lambda: functional.binary_cross_entropy(two * 2, two),
        lambda: two[far],
        lambda: two.__setitem__(far, 1.0),
        lambda: two.index_select(0, far),
        lambda: two.gather(0, far[None]),
        lambda: two.scatter_add(0, far[None], two),
        lambda: two.index_add(0, far, two[:1]),
        lambda: two.take(far),
        lambda: torch.bincount(-far),
        lambda: torch.multinomial(-two, 1),
        lambda: far // 0,
    )
    for call in calls:
        try:
            call()
        except (errors.IndexOutOfRangeError, errors.ValueOutOfRangeError, errors.ZeroDivisorError):
            continue
        except (IndexError, RuntimeError, ValueError) as error:
            raise Unprotected(f"PyTorch's own {error}") from error
        raise Unprotected("nothing is raised")


def _save(torchguard: Any) -> None:
    refused = (AttributeError, pickle.PicklingError, TypeError, ImportError)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.pt")
        path.write_bytes(b"old")
        with contextlib.suppress(*refused):
            torch.save(lambda: 0, path)
        if path.read_bytes() != b"old":
            raise Unprotected("the old file is gone")


def _load(_: Any, *, load: Any = None) -> None:
    module, load = torch.nn.LayerNorm(1), load or torch.nn.Module.load_state_dict
    with contextlib.suppress(RuntimeError):
        load(module, {"weight": torch.full((1,), 77.0), "bias": torch.ones(9)})
    if module.weight.item() != 1.0:
        raise Unprotected("a part of the state is loaded")


def _numpy(torchguard: Any) -> None:
    for convert in (torch.from_numpy, torch.as_tensor, torch.asarray):
        array = numpy.zeros(1)
        array.flags.writeable = False
        convert(array).fill_(1)
        if array[0]:
            raise Unprotected(convert.__name__)
    tensor = torch.zeros(1)
    view = tensor.numpy()
    with contextlib.suppress(RuntimeError):
        tensor.share_memory_()
        del view
        raise Unprotected("share_memory_ moves what numpy sees")


def _recompute(_: Any, *, function: Any = None) -> None:
    import torch.utils.checkpoint as module  # noqa: PLC0415

    with_dynamo = _DYNAMO in sys.modules
    # What is around `checkpoint`, and its mode without reentrant autograd, import Dynamo.
    checkpoint = function or (
        module.checkpoint if with_dynamo else inspect.unwrap(module.checkpoint)
    )
    for reentrant in (True, False) if with_dynamo else (True,):
        block, rrelu = torch.nn.BatchNorm1d(1), torch.nn.RReLU()
        x = torch.ones(2, 1, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        if block.num_batches_tracked.item() != 1:
            raise Unprotected(f"use_reentrant={reentrant}: a batch counts twice")
        gradients = []
        for call in (rrelu, functools.partial(checkpoint, rrelu, use_reentrant=reentrant)):
            x = torch.linspace(-2, 2, 9, requires_grad=True)
            torch.manual_seed(0)
            call(x).sum().backward()
            gradients.append(x.grad.tolist())
        if gradients[0] != gradients[1]:
            raise Unprotected(f"use_reentrant={reentrant}: rrelu has other gradients")


GUARDS = {
    "resize": _resize, "out": _out, "overlap": _overlap, "checks": _checks, "save": _save,
    "load": _load, "numpy": _numpy, "recompute": _recompute,
}  # fmt: skip


def _compiled_checks(torchguard: Any) -> None:
    def look_up(index: Any, weight: Any) -> Any:
        return torch.nn.functional.embedding(index, weight)

    look_up_compiled = torch.compile(look_up, backend="aot_eager")
    try:
        look_up_compiled(torch.tensor([5]), torch.ones(2, 2))
    except torchguard.errors.IndexOutOfRangeError:
        return
    except Exception as error:
        raise Unprotected(f"PyTorch's own {error}") from error
    raise Unprotected("nothing is raised")


def _compiled_setitem(torchguard: Any) -> None:
    def assign(value: Any) -> Any:
        x = torch.zeros(2, 2)
        x[0][0] = value
        return x.requires_grad, x

    if not torch.compile(assign, backend="eager")(torch.ones((), requires_grad=True))[0]:
        raise Unprotected("requires_grad is False")


def _wrong(graph: Any, _: Any) -> Callable[..., Any]:
    return lambda *inputs: [each + 1 for each in graph.forward(*inputs)]


def _verified(torchguard: Any) -> None:
    double = torchguard.verified(lambda x: x * 2, backend=_wrong)
    if double(torch.ones(2)).tolist() != [2.0, 2.0]:
        raise Unprotected("a wrong graph is used")


def _transaction(torchguard: Any) -> None:
    weights = torch.nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizer = torch.optim.Adam(weights, foreach=False)
    step = torchguard.transaction(weights, optimizer)

    def train() -> None:
        with step:
            optimizer.zero_grad()
            (weights[0].sum() + weights[1].sum()).backward()
            optimizer.step()

    train()
    if not step.committed:
        raise Unprotected("a step does not count")
    before = weights[0].tolist()
    optimizer.state[weights[1]]["exp_avg"] = torch.ones(5)
    with contextlib.suppress(RuntimeError):
        train()
    if weights[0].tolist() != before:
        raise Unprotected("half a step stays")


def _safe_checkpoint(torchguard: Any) -> None:
    _recompute(torchguard, function=torchguard.safe_checkpoint)


IN_COMPILED_CODE = {
    "checks": _compiled_checks, "setitem": _compiled_setitem, "recompute": _recompute,
    "verified()": _verified, "transaction()": _transaction,
    "safe_checkpoint()": _safe_checkpoint,
}  # fmt: skip


def _safe_resize(torchguard: Any) -> None:
    _keeps_version(lambda t: torchguard.safe_resize_(t, 5))
    _keeps_version(lambda t: torchguard.safe_set_(t, t.untyped_storage(), 0, (5,), (1,)))


def _rollback(torchguard: Any) -> None:
    def write(t: Any) -> None:
        with torchguard.rollback_on_error(t, data=True):
            t.add_(1)
            raise RuntimeError

    t = torch.ones(1, dtype=torch.complex64).conj()
    with contextlib.suppress(RuntimeError):
        write(t)
    if t.tolist() != [1.0]:
        raise Unprotected("the elements are not restored")
    _keeps_version(write)


def _sliced_assign(torchguard: Any) -> None:
    value = torch.ones(2, requires_grad=True)
    torchguard.sliced_assign(torch.zeros(2, 2), 0, value).sum().backward()
    if value.grad is None or value.grad.tolist() != [1.0, 1.0]:
        raise Unprotected("the gradient is lost")


def _guarded(torchguard: Any) -> None:
    with torchguard.guarded():
        _out(torchguard)
        _keeps_version(lambda t: t.resize_(5))


def _load_state_dict(torchguard: Any) -> None:
    _load(torchguard, load=torchguard.load_state_dict)


FUNCTIONS = {
    "safe_resize_()": _safe_resize, "rollback_on_error()": _rollback,
    "sliced_assign()": _sliced_assign, "guarded()": _guarded,
    "load_state_dict()": _load_state_dict,
}  # fmt: skip
"""What is no guard of ``install()``."""


def judged(change: Callable[[], None], *, compiled: bool) -> dict[str, str]:
    """Make a change and say of each guard and function: protects, says so, or silent."""
    try:
        change()
    except AttributeError as error:
        return {"absent": str(error)}  # from this release
    answers: dict[str, str] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torchguard  # noqa: PLC0415

            for owner, name, value in _HIDDEN:
                setattr(owner, name, value)
        except Exception as error:  # noqa: BLE001
            return {"import": f"raises {type(error).__name__}: {error}"}
        if not compiled:
            _judge(answers, said, FUNCTIONS, torchguard)
        names = COMPILED_GUARDS if compiled else GUARDS
        try:
            installation = torchguard.install(*names, only_if_needed=False)
        except Exception as error:  # noqa: BLE001
            return {**answers, "install": f"raises {type(error).__name__}: {error}"}
        if compiled:
            with contextlib.suppress(Exception):
                torch.compile(lambda x: x, backend="eager")(torch.ones(1))
            _judge(answers, said, IN_COMPILED_CODE, torchguard, installation)
        else:
            _judge(answers, said, GUARDS, torchguard, installation)
    return answers


COMPILED_GUARDS = ("checks", "setitem", "recompute")


def _judge(
    answers: dict[str, str], said: Any, judges: Any, torchguard: Any, installation: Any = None
) -> None:
    for name, judge in judges.items():
        before = len(said)
        if installation is not None and name in installation.skipped:
            answers[name] = f"says so: {installation.skipped[name]}"
            continue
        try:
            judge(torchguard)
        except Unprotected as seen:
            # What can't be restored is said once per process, with the functions that restore.
            texts = [str(each.message) for each in said]
            ours = [text for text in texts[before:] if "torchguard" in text]
            ours += [text for text in texts if name.removesuffix("()") in text]
            answers[name] = f"says so: {ours[0]}" if ours else f"SILENT: {seen}"
        except Exception as error:  # noqa: BLE001
            answers[name] = f"raises {type(error).__name__}: {error}"
        else:
            answers[name] = "protects"


def run(names: list[str], *, compiled: bool) -> None:
    """Print the answers to each change, which is made in a fork; two at a time."""
    table = COMPILED if compiled else EAGER
    waiting = list(names)
    running: dict[int, tuple[str, int]] = {}
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop(0)
            ends = os.pipe()
            child = os.fork()
            if child == 0:
                signal.alarm(_SECONDS)
                try:
                    text = json.dumps(judged(table[name], compiled=compiled))
                except BaseException as error:  # noqa: BLE001
                    text = json.dumps({"change": f"raises {type(error).__name__}: {error}"})
                os.write(ends[1], text.encode())
                os._exit(0)
            os.close(ends[1])
            running[child] = name, ends[0]
        child, status = os.wait()
        name, end = running.pop(child)
        with os.fdopen(end, "rb") as pipe:
            text = pipe.read().decode() or json.dumps({"process": f"dies: {status}"})
        sys.stdout.write(json.dumps([name, json.loads(text)]) + "\n")
        sys.stdout.flush()
