"""torchguard: failed operations lose nothing, and compiled code does what it says.

Three ways in, each complete without the others: call a helper
(:func:`safe_resize_`), guard a scope (:func:`guarded`), or switch the guards on
for the whole process (:func:`install`).
"""

from torchguard.command_line import show_version_alone

# `torchguard --version` has to be told before the lines below import torch, which takes seconds.
show_version_alone()

from torchguard.assign import sliced_assign, sliced_assign_
from torchguard.at import at
from torchguard.bucketed import bucketed, no_recompile
from torchguard.buckets import Buckets
from torchguard.checkpoint.folder import checkpoint_folder
from torchguard.checkpoint.loading import load
from torchguard.checkpoint.saving import save
from torchguard.checkpoint.state_dict import load_state_dict
from torchguard.collating import BucketCollator
from torchguard.consistency import check_consistent, is_consistent, repair_
from torchguard.doctor import doctor
from torchguard.errors import (
    DamagedFileError,
    InconsistentTensorError,
    MiscompilationError,
    MiscompilationWarning,
    NonResizableStorageError,
    PaddingLeakError,
    PatchConflictError,
    ReadOnlyMemoryError,
    RecompileError,
    SaveError,
    SharedViewError,
    TorchGuardError,
    TornSaveError,
)
from torchguard.guarded import guarded
from torchguard.install import (
    Installation,
    install,
    installed,
    is_installed,
    original,
    uninstall,
)
from torchguard.masks import attention_mask, length_mask, position_ids
from torchguard.observed import batch_maxima
from torchguard.padding import Padded, pad_to_bucket, unpad
from torchguard.pairs import PairBuckets
from torchguard.resize import safe_resize_, safe_resize_as_, safe_set_
from torchguard.rollback import rollback_on_error
from torchguard.verified import VerificationReport, verification_report, verified, verified_backend
from torchguard.version import __version__

__all__ = [
    "BucketCollator",
    "Buckets",
    "DamagedFileError",
    "InconsistentTensorError",
    "Installation",
    "MiscompilationError",
    "MiscompilationWarning",
    "NonResizableStorageError",
    "Padded",
    "PaddingLeakError",
    "PairBuckets",
    "PatchConflictError",
    "ReadOnlyMemoryError",
    "RecompileError",
    "SaveError",
    "SharedViewError",
    "TorchGuardError",
    "TornSaveError",
    "VerificationReport",
    "__version__",
    "at",
    "attention_mask",
    "batch_maxima",
    "bucketed",
    "check_consistent",
    "checkpoint_folder",
    "doctor",
    "guarded",
    "install",
    "installed",
    "is_consistent",
    "is_installed",
    "length_mask",
    "load",
    "load_state_dict",
    "no_recompile",
    "original",
    "pad_to_bucket",
    "position_ids",
    "repair_",
    "rollback_on_error",
    "safe_resize_",
    "safe_resize_as_",
    "safe_set_",
    "save",
    "sliced_assign",
    "sliced_assign_",
    "uninstall",
    "unpad",
    "verification_report",
    "verified",
    "verified_backend",
]
