"""torchguard: failed operations lose nothing, and compiled code does what it says.

Three ways in, each complete without the others: call a helper
(:func:`safe_resize_`), guard a scope (:func:`guarded`), or switch the guards on
for the whole process (:func:`install`).

A public name imports its module when it is first used (PEP 562). ``import torchguard`` alone
imports nothing else, torch included.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchguard._public import __version__

# The stub beside this file says the same to type checkers; a test compares the two.
_PUBLIC = {
    "assignment.assign": ("sliced_assign", "sliced_assign_"),
    "assignment.at": ("at",),
    "bucketing.buckets": ("Buckets",),
    "bucketing.collator": ("BucketCollator",),
    "bucketing.decorator.api": ("bucketed",),
    "bucketing.decorator.compile": ("no_recompile",),
    "bucketing.decorator.stats": ("BucketedReport", "BucketedStats", "WarmupReport"),
    "bucketing.masks": ("length_mask",),
    "bucketing.packed": ("packed",),
    "bucketing.padding": ("Padded", "PaddedPair", "pad_to_bucket", "unpad"),
    "bucketing.pairs": ("PairBuckets",),
    "bucketing.sampler": ("BucketBatchSampler",),
    "checkpoint.loading": ("load", "load_state_dict"),
    "checkpoint.saving": ("save",),
    "checkpoint.sharded": ("load_sharded",),
    "checkpoint.verify": ("verify_checkpoint",),
    "checkpoint.folder": ("checkpoint_folder",),
    "defects.doctor": ("DoctorReport", "doctor"),
    "errors": (
        "DamagedFileError",
        "InconsistentTensorError",
        "MiscompilationError",
        "MiscompilationWarning",
        "NonResizableStorageError",
        "OptimizerStateError",
        "PaddingLeakError",
        "PatchConflictError",
        "PeerFailedError",
        "ReadOnlyMemoryError",
        "RecompileError",
        "ReplayMismatchError",
        "SaveError",
        "SharedViewError",
        "TorchGuardError",
        "TornSaveError",
        "UnrecoverableStepError",
    ),
    "patching.install": (
        "Installation",
        "get_original",
        "install",
        "installed",
        "uninstall",
    ),
    "replicas": ("replicas_agree",),
    "rollback.block": ("rollback_on_error",),
    "rollback.consistency": ("check_consistent", "is_consistent", "repair_"),
    "rollback.resize": ("safe_resize_", "safe_resize_as_", "safe_set_"),
    "rollback.scope": ("guarded",),
    "transactions.retry": ("halved",),
    "transactions.api": ("transaction",),
    "transactions.step": ("TransactionStats",),
    "verification.backend": ("verified_backend",),
    "verification.decorator": ("verified",),
    "verification.report": ("GraphRecord", "VerificationReport", "verification_report"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_ROOMS = ("assignment", "bucketing", "checkpoint", "defects", "equivalence", "interop", "patching",
          "rollback", "transactions", "verification")  # fmt: skip

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - they are the strings of _PUBLIC


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found  # so that __getattr__ is asked once
        return found
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_ROOMS))
