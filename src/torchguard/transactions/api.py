"""transaction(): a training step that fails is rolled back."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from torchguard._public import called, public
from torchguard._torch.eager import has_step_hooks, steps_in_backward
from torchguard.state.tensors import refuse_sparse
from torchguard.state.training import TrainingState
from torchguard.training_setup import FirstSteps, StepsOutside, warn_of_parameters
from torchguard.transactions.accumulation import Accumulation, is_accelerator
from torchguard.transactions.block import Guarded, Undo
from torchguard.transactions.nonfinite import NonfiniteGate
from torchguard.transactions.ranks import Ranks
from torchguard.transactions.step import Transaction


@called("model, optimizer")
@public
def transaction(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer],
    scaler: Any = None,
    scheduler: Any = None,
    *,
    also: Any = (),
    undo: Undo = "auto",
    skip_nonfinite: bool = False,
    group: Any = None,
) -> Transaction:
    """Make ``with step:`` blocks that change nothing if they raise before the optimizer steps.

    Equals plain code on success: no bit, no gradient, no random number and no compiled graph
    differs. If a block raises:

    - before the first ``optimizer.step()`` begins, everything is restored bit for bit to the
      beginning of the block: parameters, gradients, buffers, the optimizer's state and options,
      scaler, schedulers, RNG states, ``training`` and ``requires_grad``, attributes and hooks of
      modules;
    - in ``optimizer.step()``, that is rolled back too, from copies that were made when it began
      (``undo=``). State is made before the first parameter is written;
    - after every optimizer has stepped, the step counts (``step.committed``). Gradients are
      dropped, the scaler is updated, and a note on the exception names the schedulers that have
      not stepped. Ctrl-C waits from the first step to the end of the block.

    The exception is raised. ``step.run(loss_of, batch)`` does the whole step in the right order;
    your loop then steps no scheduler. ``step.committed`` says whether the last block's step counts,
    ``step.guarantee`` what holds for these optimizers, ``step.stats()`` what has happened so far.
    A wrong setup gives a :class:`~torchguard.errors.TrainingSetupWarning`, here or in the first two
    steps of an optimizer.

    Gradients that exist when the block begins are copied, so call ``zero_grad()`` at its end.

    Args:
        model: the module, or several in a list. What lies inside belongs to it.
        optimizer: the optimizer, or all of them in a list.
        scaler: a ``torch.amp.GradScaler``.
        scheduler: the learning rate scheduler, or several in a list.
        also: what else the step changes: modules (whose parameters are copied when a block
            begins), tensors, generators, and objects with ``state_dict`` and ``load_state_dict``
            (an average of the weights), an ``accelerate.Accelerator`` that accumulates gradients;
            one, or several in a list.
        undo: when parameters and the optimizer's state are copied. ``"auto"``: when ``step()``
            begins, unless it is a fused step (of several optimizers, the last one). ``"copy"``:
            when the block begins, also for code that writes parameters itself. ``"none"``: never.
        skip_nonfinite: skip each step with a gradient (in ``run`` without ``group``: or a loss)
            that is not finite, for bf16 training without a scaler. The host waits for the device
            once a step.
        group: the process group of DistributedDataParallel, True for the default one; a step is
            taken on all its ranks or on none, with :meth:`Transaction.run`.

    Returns:
        A :class:`Transaction`: use it in a ``with`` statement, for one step at a time.

    Raises:
        TypeError: an argument is of another type, or a step can't be seen or rolled back (LBFGS,
            FSDP, a step inside backward, an optimizer without the hooks of ``torch.optim``), or a
            parameter, a buffer or a tensor of ``also`` is sparse.
        ValueError: ``undo`` is none of the three, a parameter is not initialised yet, an optimizer
            has no parameter of the model, ``skip_nonfinite`` comes with a GradScaler, or ``group``
            with a model that it can't average.
        UnrecoverableStepError: raised by the block if a step can't be rolled back: load a
            checkpoint.

    Upstream: https://github.com/pytorch/pytorch/issues/64636,
    https://github.com/pytorch/pytorch/issues/10615

    Cost:
        Copies of parameters and optimizer state while ``optimizer.step()`` runs, unless it is
        fused, and copies of buffers for each block.

    Example:
        >>> import torch, torchguard
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = torchguard.transaction(model, optimizer)
        >>> try:
        ...     with step:
        ...         model(torch.ones(3, 2)).sum().backward()
        ...         raise RuntimeError("out of memory")
        ... except RuntimeError:
        ...     print(model.weight.grad)
        None
    """
    setup = Setup(
        models=_several("model", model),
        optimizers=list(map(_innermost, _several("optimizer", optimizer))),
        scalers=_several("scaler", scaler),
        schedulers=_several("scheduler", scheduler),
        also=[Accumulation(e) if is_accelerator(e) else e for e in _several("also", also)],
        undo=undo,
        skip_nonfinite=skip_nonfinite,
        group=group,
    )
    warn_of_parameters("transaction", setup.models, setup.optimizers)
    return Transaction(setup.guarded())


@dataclass(frozen=True)
class Setup:
    """What :func:`transaction` was given, checked."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    scalers: list[Any]
    schedulers: list[Any]
    also: list[Any]
    undo: Undo
    skip_nonfinite: bool
    group: Any

    def __post_init__(self) -> None:
        if len(self.scalers) > 1:
            given = len(self.scalers)
            raise TypeError(f"transaction: scaler has {given} GradScalers, expected one")
        if self.undo not in get_args(Undo):
            expected = get_args(Undo)
            raise ValueError(f"transaction: undo is {self.undo!r}, expected one of {expected}")
        for model in self.models:
            _refuse_model(model)
        for each in (*self.models, *self.also):
            refuse_sparse("transaction", _tensors_of(each))
        own = {id(parameter) for each in self.models for parameter in each.parameters()}
        for optimizer in self.optimizers:
            _refuse_optimizer(optimizer, own)
        if self.skip_nonfinite and any(scaler.is_enabled() for scaler in self.scalers):
            raise ValueError(
                "transaction: skip_nonfinite=True with a GradScaler, which skips such steps "
                "itself; leave one of them out"
            )

    def guarded(self) -> Guarded:
        """Return what the blocks of a transaction share."""
        models, also, scaler = self.models, self.also, next(iter(self.scalers), None)
        others = (*self.scalers, *self.schedulers)
        modules = [each for each in also if isinstance(each, nn.Module)]
        return Guarded(
            TrainingState(tuple(models), tuple(self.optimizers), others, tuple(also)),
            undo=self.undo,
            scaler=scaler,
            schedulers=tuple(self.schedulers),
            gate=NonfiniteGate() if self.skip_nonfinite else None,
            ranks=None if self.group is None else Ranks(models, self.group),
            first_steps={each: FirstSteps(models, each, scaler) for each in self.optimizers},
            outside=StepsOutside(),
            accumulation_is_known=any(isinstance(each, Accumulation) for each in also),
            sharded=next(filter(None, map(_sharded, modules)), None),
        )


def _can_be_saved(each: Any) -> bool:
    return (
        isinstance(each, (torch.Tensor, torch.Generator))
        or is_accelerator(each)
        or (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
    )


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (
        lambda m: isinstance(m, nn.Module),
        "a torch Module or a list of them: write transaction(model, optimizer)",
    ),
    "optimizer": (lambda o: isinstance(o, Optimizer), "a torch Optimizer or a list of them"),
    "scaler": (
        lambda s: hasattr(s, "unscale_"),
        "a torch.amp.GradScaler; a scheduler goes by its name: scheduler=",
    ),
    "scheduler": (
        lambda s: callable(getattr(s, "step", None)) and not isinstance(s, type),
        "a scheduler of torch.optim.lr_scheduler",
    ),
    "also": (
        _can_be_saved,
        (
            "a tensor, a module, a torch.Generator or an object with state_dict() and "
            "load_state_dict(), or a list of them"
        ),
    ),
}


_FILLED = (list, tuple, set, frozenset, deque, ValuesView)


def _several(name: str, value: Any) -> list[Any]:
    """Return the values of an argument, one or several in any iterable, as a list; None is none."""
    if value is None:
        return []
    is_one, expected = _EXPECTED[name]
    # A Sequential is an iterable of modules, and a tensor one of its rows: each is one. A loader is
    # not read, and for also=, whose items may be tensors, nothing that may make them as it is read.
    kinds = _FILLED if name == "also" else (Collection, Iterator)
    several = isinstance(value, kinds) and not isinstance(value, (str, Mapping))
    values = []
    for each in value if several and not is_one(value) and not _is_data(value) else [value]:
        if not is_one(each):
            raise TypeError(f"transaction: {name} {_described(name, each, expected)}")
        values.append(each)
    return values


def _is_data(value: Any) -> bool:
    """Whether it is a loader, a dataset, a sampler, or an iterator over a loader."""
    return any(each.__module__.startswith("torch.utils.data") for each in type(value).__mro__)


def _described(name: str, value: Any, expected: str) -> str:
    kind = type(value).__name__
    if name != "also":
        return f"is of type {kind}, expected {expected}"
    if _is_data(value):
        return (
            f"has a {kind}, whose position can't be saved: pass a loader or sampler with "
            "state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader, or leave "
            "it out"
        )
    return f"has {value!r:.200}, expected {expected}"


def _innermost(optimizer: Any) -> Optimizer:
    """Return what a wrapper without hooks steps, such as Accelerate's."""
    inner = vars(optimizer).get("optimizer")
    if has_step_hooks(optimizer) or not isinstance(inner, Optimizer):
        return optimizer  # type: ignore[no-any-return]
    if vars(optimizer).get("state", inner.state) is not inner.state:
        outer = type(optimizer).__name__
        raise TypeError(
            f"transaction: {outer} keeps state besides that of the {type(inner).__name__} in it, "
            f"whose step alone would be undone: give the optimizer in it, and also= the {outer}"
        )
    return _innermost(inner)


def _refuse_optimizer(optimizer: Optimizer, own: set[int]) -> None:
    """Raise if its steps can't be seen or rolled back; ``own`` are the ids of the parameters."""
    if not has_step_hooks(optimizer):
        raise TypeError(_why_not_seen(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "transaction: LBFGS runs forward and backward many times inside step(). Put the "
            "step into `with torchguard.rollback_on_error(model, data=True):`, and make a new "
            "LBFGS after a failure"
        )
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"transaction: {type(optimizer).__name__} has no parameter of the model, whose step it "
            "would be: make it from model.parameters(), after the model was replaced or moved"
        )


def _why_not_seen(optimizer: Optimizer) -> str:
    """Return the error for an optimizer whose ``step()`` calls no hooks."""
    name = type(optimizer).__name__
    said = f"transaction: {name}.step() calls no hooks of torch.optim, so its steps can't be seen"
    for attribute, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer):
            return (
                f"{said}, but those of the {type(inner).__name__} in it can: pass "
                f"optimizer.{attribute}, and go on to call optimizer.step()"
            )
    return (
        f"{said}: call super().__init__(params, defaults) in {name}.__init__, and do not replace "
        "step on the class"
    )


def _tensors_of(each: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model or an item of ``also`` consists of, by name."""
    if isinstance(each, nn.Module):
        yield from each.named_parameters()
        yield from each.named_buffers()
    elif isinstance(each, torch.Tensor):
        yield "a tensor of also=", each


def _sharded(model: nn.Module) -> str | None:
    """Return why the steps of a model that FSDP has sharded can't be rolled back."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(fsdp, each, ()) for each in ("FullyShardedDataParallel", "FSDPModule"))
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            return (
                f"transaction: {name or 'model'} is sharded by FSDP. When a rank fails, its peers "
                "wait inside a collective that Python can't revoke, so no rank can be rolled back. "
                "Save with checkpoint_folder(group=) every so many steps, compare copies with "
                "replicas_agree, and load_sharded after a restart"
            )
    return None


def _refuse_model(model: nn.Module) -> None:
    if reason := _sharded(model):
        raise TypeError(reason)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"transaction: {name} has no shape yet; run the model once before transaction()"
            )
        if steps_in_backward(parameter):
            raise TypeError(
                f"transaction: an optimizer steps over {name} inside backward, before it is "
                "known whether the step succeeds"
            )
