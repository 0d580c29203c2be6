"""replicas_agree(): ranks that hold copies of a tensor compare them, by two numbers."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import operator
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard._events import record
from torchguard._public import public
from torchguard._torch import compiler_of
from torchguard.errors import ReplicasDisagreeError
from torchguard.training_setup import warn_of_parameters

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST = 100  # calls, each of which compares
# Layers of Megatron-LM and DeepSpeed say by it that a parameter is sharded.
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py
_OF_MEGATRON = "tensor_model_parallel"
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


@public
def replicas_agree(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    every: int = 100,
    group: Any = None,
    buffers: bool = False,
    ignore: Iterable[str] = (),
) -> Replicas:
    """Compare the copies of parameters and optimizer state that ranks hold.

    Call ``agree.gradients()`` before ``optimizer.step()`` and ``agree()`` after it, on every rank.
    DDP compares shapes when it is made and nothing after that.

    Left out: parameters that are frozen, that DDP ignores, or that Megatron-LM has marked with
    ``tensor_model_parallel``; tensors that are sparse or quantized; state of an optimizer under
    keys that are no parameters. A DTensor is compared along the dimensions of its mesh that
    replicate it.

    Args:
        model: the module, wrapped or not.
        optimizer: one, or several, whose state and options are compared by ``agree()``.
        every: compare in each of the first 100 calls, and in each ``every``-th after them.
        group: of the ranks that hold the same plain tensors; None or True for the default one.
        buffers: compare buffers too.
        ignore: names of parameters and buffers that each rank has a part of, sharded by code of
            your own; ``*`` matches any text: ``ignore=["blocks.*.column.weight"]``.

    Warns with a :class:`~torchguard.errors.TrainingSetupWarning` if the model has trainable
    parameters that no optimizer has.

    Raises:
        ValueError: ``every`` is below 1, or nothing has a name of ``ignore``.
        TypeError: a module is a ``FullyShardedDataParallel``, whose parameters do not say what is
            sharded; ``fully_shard`` is fine.
        ReplicasDisagreeError: raised by the calls, on all ranks: names the first tensor, the
            groups of ranks that hold the same, and how many tensors differ.

    Upstream: https://github.com/pytorch/pytorch/issues/104336

    Cost:
        The compared tensors are hashed, and two integers are all-reduced for each group of ranks.

    Example:
        >>> import torch, torch.distributed as dist, torchguard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> agree = torchguard.replicas_agree(model, optimizer)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> agree.gradients()  # raises on all ranks if they differ
        >>> optimizer.step()
        >>> agree()
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"replicas_agree: model is of type {type(model).__name__}, expected a module"
        )
    if every < 1:
        raise ValueError(f"replicas_agree: every is {every}, expected 1 or more")
    first_fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(each, first_fsdp) for each in model.modules()):
        raise TypeError(
            "replicas_agree: a module is sharded by FullyShardedDataParallel, whose parameters do "
            "not say which ranks hold copies; shard it with fully_shard"
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    inner = _unwrapped(model)
    names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"replicas_agree: ignore has {pattern!r}, and no parameter or buffer is called so; "
                f"the names are those of model.named_parameters(): {', '.join(names[:3])}, ..."
            )
    warn_of_parameters("replicas_agree", [inner], optimizers)
    return Replicas(model, optimizers, every, None if group is True else group, buffers, patterns)


def _unwrapped(model: Any) -> nn.Module:
    """Return the module inside of DistributedDataParallel and of ``torch.compile``."""
    while True:
        compiled = compiler_of(model)
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif compiled is not None:
            model, _ = compiled
        else:
            return model  # type: ignore[no-any-return]


@dataclass(eq=False, repr=False)
class Replicas:
    """What :func:`replicas_agree` returns.

    Example:
        >>> import torch, torch.distributed as dist, torchguard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> agree = torchguard.replicas_agree(torch.nn.Linear(2, 1), every=10)
        >>> agree()  # raises a ReplicasDisagreeError on all ranks if they differ
        >>> dist.destroy_process_group()
    """

    _model: nn.Module
    _optimizers: list[Optimizer]
    _every: int
    _group: Any
    _buffers: bool
    _ignore: tuple[str, ...]
    _calls: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> None:
        """Compare parameters, the optimizers' state and options, and buffers if asked."""
        if self._due("parameters"):
            self._compare(self._state())

    def gradients(self) -> None:
        """Compare gradients: call it when they are averaged and clipped, before the step."""
        if self._due("gradients"):
            self._compare((f"{name}.grad", p.grad, p) for name, p in self._parameters())

    def batch(self, ids: Iterable[int] | Tensor, *, same: Any = None) -> None:
        """Compare the samples of this step: each is on one rank only, or on all those of ``same``.

        A rank that has one sample twice raises too: loader workers that share a seed, or a sampler
        that is not told its rank. Do not call it if you sample with replacement.

        Args:
            ids: a number for each sample of this rank's batch, or the batch itself, (B, ...), whose
                samples are hashed.
            same: the group of ranks that share a batch (tensor parallel); None if none do.

        Raises:
            ReplicasDisagreeError: ranks of ``same`` have other samples, ranks apart share one, or
                a rank has one twice.

        Example::

            for batch in loader:
                agree.batch(batch["tokens"])
        """
        if isinstance(ids, Tensor) and (ids.dim() > 1 or ids.is_floating_point()):
            ids = [int(_hash(sample)) for sample in ids]
        own = sorted(ids.tolist() if isinstance(ids, Tensor) else list(ids))
        leader = min(dist.get_process_group_ranks(same)) if same is not None else dist.get_rank()
        gathered = self._gathered((leader, own))
        batches = {first: found for rank, (first, found) in gathered.items() if rank == first}
        for rank, (first, found) in gathered.items():
            if found != batches.get(first, found):
                raise _disagreement(
                    f"ranks {first} and {rank} share a batch and have other samples"
                )
        owner: dict[int, int] = {}
        for first, found in sorted(batches.items()):
            twice = [one for one, other in itertools.pairwise(found) if one == other]
            if twice:
                raise _disagreement(
                    f"rank {first} has sample {twice[0]} twice in one batch: its "
                    "loader's workers share a seed, or it samples with replacement"
                )
            for sample in found:
                if owner.setdefault(sample, first) != first:
                    raise _disagreement(
                        f"ranks {owner[sample]} and {first} both have sample "
                        f"{sample}; give each its part, with a DistributedSampler"
                    )

    def _gathered(self, own: Any) -> dict[int, Any]:
        """Return what every rank gives, by rank."""
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, (dist.get_rank(), own), group=self._group)
        return dict(gathered)

    def _due(self, kind: str) -> bool:
        # Most faults are there from the beginning, some of them in every other step alone.
        due = self._calls[kind] < _FIRST or self._calls[kind] % self._every == 0
        self._calls[kind] += 1
        return due

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        wrapped = [m for m in self._model.modules() if isinstance(m, DistributedDataParallel)]
        ignored = {
            id(parameter)
            for each in wrapped
            for name, parameter in each.module.named_parameters()
            if name in each.parameters_to_ignore
        }
        for name, parameter in _unwrapped(self._model).named_parameters():
            left_out = id(parameter) in ignored or getattr(parameter, _OF_MEGATRON, False)
            if parameter.requires_grad and not left_out and self._compares(name):
                yield name, parameter

    def _compares(self, name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _state(self) -> Iterator[_Named]:
        # Of ZeroRedundancyOptimizer each rank has a part of the state.
        whole = {
            f"optimizer {number}": each
            for number, each in enumerate(self._optimizers)
            if not hasattr(each, "consolidate_state_dict")
        }
        for owner, optimizer in whole.items():  # first: what follows from them differs as well
            for place, options in enumerate(optimizer.param_groups):
                others = {key: each for key, each in options.items() if key != "params"}
                yield from _values(f"{owner} param_groups[{place}]", others)
        named: dict[str, Tensor] = dict(self._parameters())
        if self._buffers:
            buffers = _unwrapped(self._model).named_buffers()
            named |= {name: each for name, each in buffers if self._compares(name)}
        yield from ((name, each, each) for name, each in named.items())
        for owner, optimizer in whole.items():
            for name, parameter in named.items():
                yield from _values(f"{owner} {name}", optimizer.state.get(parameter, {}))

    @torch.no_grad()
    def _compare(self, named: Iterable[_Named]) -> None:
        # The groups are those of the parameters: a rank that lacks a gradient takes part as well.
        groups: dict[Any, dict[str, Tensor]] = {self._group: {}}
        for parameter in self._model.parameters():
            groups |= {group: {} for group, _ in _replicated(parameter, self._group)}
        for name, value, held_as in named:
            for group, local in _replicated(held_as if value is None else value, self._group):
                groups.setdefault(group, {})[name] = _hash(None if value is None else local)
        own = groups.pop(self._group)
        apart = [not _alike_in(group, hashes) for group, hashes in groups.items()]
        # A group whose ranks differ must not leave those of the others waiting.
        if not _alike_in(self._group, own, apart=any(apart)):
            self._raise({**groups, self._group: own})

    def _raise(self, groups: dict[Any, dict[str, Tensor]]) -> None:
        """Say on all ranks what differs: every rank sees the hashes of all."""
        own = [
            (tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), name, int(each))
            for group, hashes in groups.items()
            for name, each in hashes.items()
        ]
        held: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
        for rank, entries in self._gathered(own).items():
            for ranks, name, each in entries:
                held.setdefault((name, ranks), {})[rank] = each
        differing = [
            (name, found)
            for (name, ranks), found in held.items()
            if len(set(found.values())) > 1 or len(found) < len(ranks)
        ]
        first, found = differing[0] if differing else ("the order of the tensors", {})
        alike: dict[int, list[int]] = {}
        for rank, each in found.items():
            alike.setdefault(each, []).append(rank)
        sets = " | ".join(", ".join(map(str, ranks)) for ranks in alike.values())
        count, names = len({name for name, _ in differing}), len({name for name, _ in held})
        raise _disagreement(
            f"{first} is not the same on all ranks: ranks {sets} hold other bits. "
            f"{count} of {names} tensors differ. Load the last checkpoint, or broadcast the "
            "parameters from one rank, and look for what only some ranks do"
        )


def _disagreement(text: str) -> ReplicasDisagreeError:
    """Count the event, and make the error to raise."""
    record("replicas_differ", "replicas_agree", text, is_said=True)
    return ReplicasDisagreeError(f"replicas_agree: {text}")


_Named = tuple[str, Any, Any]
"""A name, its value, and where that is None the parameter that other ranks may have one of."""


def _values(owner: str, held: Any) -> Iterator[_Named]:
    leaves, treedef = _pytree.flatten(held)
    names = ["".join(f"[{key!r}]" for key in path) for path in _pytree.key_paths(treedef)]
    for name, value in sorted(zip(names, leaves, strict=True), key=operator.itemgetter(0)):
        if isinstance(value, (int, float, Tensor)):
            yield owner + name, value, value


def _replicated(value: Any, group: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each group that holds copies of a tensor, with what this rank has of it."""
    if not hasattr(value, "placements"):
        yield group, value
        return
    if any(each.is_partial() for each in value.placements):
        return  # not summed yet: each rank has an addend
    if value.device_mesh.get_coordinate() is not None:
        for dim, placement in enumerate(value.placements):
            if placement.is_replicate():
                yield value.device_mesh.get_group(dim), value.to_local()


def _device_of(group: Any) -> torch.device:
    """Return where a group can communicate: NCCL and XCCL have no collectives on the CPU."""
    entries = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in entries else entries[0])


def _alike_in(group: Any, hashes: dict[str, Tensor], *, apart: bool = False) -> bool:
    """Whether all ranks of a group have the same names and hashes, by one all-reduce.

    ``apart`` says that this rank knows of a difference in another group; then they have not.
    """
    device = _device_of(group)
    names = torch.tensor([zlib.crc32(name.encode()) for name in hashes], dtype=torch.int64)
    values = [each.to(device) for each in hashes.values()]
    listed = torch.cat([names.to(device), torch.stack(values) if values else names.to(device)])
    all_bits = _hash(listed)
    # max(h) is ~max(~h), the smallest h, only where all have the same.
    both = torch.stack([all_bits, ~all_bits])
    if apart:
        both.fill_(torch.iinfo(torch.int64).max)  # no number is its own complement
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest_inverted = both.tolist()
    return bool(largest == ~smallest_inverted)


def _hash(value: Any) -> Tensor:
    """Hash all bits of a tensor with their places; the same on every machine of one byte order."""
    if not isinstance(value, Tensor):
        return torch.tensor(zlib.crc32(repr(value).encode()), dtype=torch.int64)
    if value.layout is not torch.strided or value.is_quantized:
        return torch.zeros((), dtype=torch.int64)  # not compared
    text = f"{tuple(value.shape)} {value.dtype}".encode()
    total = torch.full((), zlib.crc32(text), dtype=torch.int64, device=value.device)
    # A gradient may be a conjugate or negative view, whose bits are not those of its memory.
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    width = flat.element_size()
    flat = flat.view(_AS_INTEGERS[width])
    per_word = 8 // width
    if flat.storage_offset() * width % 8:
        flat = flat.clone()  # words of 64 bits, wherever in its memory a rank holds the tensor
    whole = flat.numel() - flat.numel() % per_word
    words = (flat[:whole].view(torch.int64), flat[whole:].to(torch.int64))
    size = 1 << 15 if value.is_cpu else 1 << 22
    for part in filter(Tensor.numel, words):
        weights = _weights(min(size, 1 << max(part.numel() - 1, 1).bit_length()), value.device)
        for chunk in part.split(size):
            weight = weights[: chunk.numel()]
            # The first product spreads an element upwards, the shift brings its top bits down, the
            # second binds it to its place: two changes do not cancel, an exchange is seen.
            mixed = chunk * weight
            mixed ^= mixed >> 32
            mixed *= weight
            total = (total ^ (total >> 29)) * _MULTIPLIER + mixed.sum()
    return total


@functools.lru_cache(maxsize=32)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd numbers, one for each place of a chunk."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = place * _MULTIPLIER
    mixed ^= mixed >> 31
    return (mixed * _MULTIPLIER) | 1
