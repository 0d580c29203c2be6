"""torchguard: verifies compiled graphs against eager, and rolls back training steps that fail.

Compile
    :func:`verified` checks each compiled graph against eager and falls back if they differ
    (:func:`verification_report`).

Training step
    :func:`transaction` rolls back a step that failed. :func:`save`, :func:`load`,
    :func:`load_state_dict` and :func:`checkpoint_folder` keep files whole.
    :func:`safe_checkpoint` recomputes activations as the first run computed them.
    Several ranks: :func:`load_sharded`, :func:`verify_checkpoint`, :func:`replicas_agree`.

Sizes
    :func:`bucketed` pads to the sizes of :class:`Buckets`; :class:`BucketBatchSampler` and
    :class:`BucketCollator` make batches of them (:func:`pad_to_bucket`, :func:`unpad`,
    :func:`length_mask`).

Operations that fail
    :func:`rollback_on_error` restores tensors if a block raises. :func:`safe_resize_`,
    :func:`safe_resize_as_` and :func:`safe_set_` are single calls. :func:`check_consistent` finds
    tensors that are broken already. :func:`sliced_assign` and :func:`sliced_assign_` assign by
    index and keep the gradient.

The whole process
    :func:`install` switches guards on for code that does not import torchguard, and
    :func:`uninstall` removes them (:func:`installed`). :func:`guarded` does so for a block.
    :func:`events` counts what the guards did. :func:`doctor` shows which defects this torch has.

Errors are in :mod:`torchguard.errors`. ``python -m torchguard`` lists the commands.

A public name imports its module when it is first used (PEP 562). ``import torchguard`` alone
imports nothing else, not even torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchguard._public import __version__

# The stub beside this file says the same to type checkers; a test compares the two.
_PUBLIC = {
    "_events": ("events",),
    "assignment.assign": ("sliced_assign", "sliced_assign_"),
    "bucketing.buckets": ("Buckets",),
    "bucketing.collator": ("BucketCollator",),
    "bucketing.decorator.api": ("bucketed",),
    "bucketing.padding": ("length_mask", "pad_to_bucket", "unpad"),
    "bucketing.sampler": ("BucketBatchSampler",),
    "checkpoint.loading": ("load", "load_state_dict"),
    "checkpoint.saving": ("save",),
    "checkpoint.sharded": ("load_sharded",),
    "checkpoint.whole": ("verify_checkpoint",),
    "checkpoint.folder": ("checkpoint_folder",),
    "defects.diagnosis": ("doctor",),
    "errors": (
        "DamagedFileError",
        "InconsistentTensorError",
        "MiscompilationWarning",
        "OverlapWarning",
        "PaddingLeakError",
        "TorchGuardError",
        "UnrecoverableStepError",
    ),
    "patching.install": ("install", "installed", "uninstall"),
    "patching.scope": ("guarded",),
    "replicas": ("replicas_agree",),
    "rollback.on_error": ("rollback_on_error",),
    "rollback.consistency": ("check_consistent",),
    "rollback.recompute": ("safe_checkpoint",),
    "rollback.resize": ("safe_resize_", "safe_resize_as_", "safe_set_"),
    "transactions.api": ("transaction",),
    "verification.decorator": ("verified",),
    "verification.report": ("verification_report",),
}
# What the functions above return, for annotations: nobody makes one, so dir() leaves them out.
_RETURNED = {
    "_events": ("Event",),
    "bucketing.decorator.bucketed": ("Bucketed", "BucketedModule"),
    "bucketing.decorator.stats": ("BucketedStats",),
    "bucketing.padding": ("Padded",),
    "checkpoint.whole": ("CheckpointCheck",),
    "defects.diagnosis": ("DoctorReport",),
    "patching.install": ("Installation",),
    "replicas": ("Replicas",),
    "transactions.step": ("Transaction", "TransactionStats"),
    "verification.decorator": ("Verified",),
    "verification.report": ("GraphRecord", "VerificationReport"),
}
_HOME = {
    name: module
    for table in (_PUBLIC, _RETURNED)
    for module, names in table.items()
    for name in names
}
_FOLDERS = ("assignment", "bucketing", "checkpoint", "checks", "defects", "equivalence", "interop",
            "patching", "rollback", "transactions", "verification")  # fmt: skip

__all__ = ["__version__", *(name for names in _PUBLIC.values() for name in names)]  # noqa: PLE0604 - strings


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found  # so that __getattr__ is asked once
        return found
    if name == "errors" or name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    text = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        from difflib import get_close_matches  # noqa: PLC0415 - rarely needed

        close = get_close_matches(name, _HOME, n=1)
        is_error = name.endswith(("Error", "Warning"))
        if is_error and hasattr(importlib.import_module(f"{__name__}.errors"), name):
            text += f"; it is torchguard.errors.{name}"
        elif close:
            text += f"; did you mean torchguard.{close[0]}?"
    raise AttributeError(text)


def __dir__() -> list[str]:
    return sorted((*__all__, "errors"))
