# What torchguard holds, for type checkers: __init__.py imports each name when it is used.
from torchguard import errors as errors
from torchguard._events import Event as Event
from torchguard._events import events
from torchguard._public import __version__
from torchguard.assignment.assign import sliced_assign, sliced_assign_
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.collator import BucketCollator
from torchguard.bucketing.decorator.api import bucketed
from torchguard.bucketing.decorator.bucketed import Bucketed as Bucketed
from torchguard.bucketing.decorator.bucketed import BucketedModule as BucketedModule
from torchguard.bucketing.decorator.stats import BucketedStats as BucketedStats
from torchguard.bucketing.padding import Padded as Padded
from torchguard.bucketing.padding import length_mask, pad_to_bucket, unpad
from torchguard.bucketing.sampler import BucketBatchSampler
from torchguard.checkpoint.folder import checkpoint_folder
from torchguard.checkpoint.loading import load, load_state_dict
from torchguard.checkpoint.saving import save
from torchguard.checkpoint.sharded import load_sharded
from torchguard.checkpoint.whole import CheckpointCheck as CheckpointCheck
from torchguard.checkpoint.whole import verify_checkpoint
from torchguard.defects.diagnosis import DoctorReport as DoctorReport
from torchguard.defects.diagnosis import doctor
from torchguard.errors import (
    DamagedFileError,
    InconsistentTensorError,
    MiscompilationWarning,
    OverlapWarning,
    PaddingLeakError,
    TorchGuardError,
    UnrecoverableStepError,
)
from torchguard.patching.install import Installation as Installation
from torchguard.patching.install import install, installed, uninstall
from torchguard.patching.scope import guarded
from torchguard.replicas import Replicas as Replicas
from torchguard.replicas import replicas_agree
from torchguard.rollback.consistency import check_consistent
from torchguard.rollback.on_error import rollback_on_error
from torchguard.rollback.recompute import safe_checkpoint
from torchguard.rollback.resize import safe_resize_, safe_resize_as_, safe_set_
from torchguard.transactions.api import transaction
from torchguard.transactions.step import Transaction as Transaction
from torchguard.transactions.step import TransactionStats as TransactionStats
from torchguard.verification.decorator import Verified as Verified
from torchguard.verification.decorator import verified
from torchguard.verification.report import GraphRecord as GraphRecord
from torchguard.verification.report import VerificationReport as VerificationReport
from torchguard.verification.report import verification_report

__all__ = [
    "BucketBatchSampler",
    "BucketCollator",
    "Buckets",
    "DamagedFileError",
    "InconsistentTensorError",
    "MiscompilationWarning",
    "OverlapWarning",
    "PaddingLeakError",
    "TorchGuardError",
    "UnrecoverableStepError",
    "__version__",
    "bucketed",
    "check_consistent",
    "checkpoint_folder",
    "doctor",
    "events",
    "guarded",
    "install",
    "installed",
    "length_mask",
    "load",
    "load_sharded",
    "load_state_dict",
    "pad_to_bucket",
    "replicas_agree",
    "rollback_on_error",
    "safe_checkpoint",
    "safe_resize_",
    "safe_resize_as_",
    "safe_set_",
    "save",
    "sliced_assign",
    "sliced_assign_",
    "transaction",
    "uninstall",
    "unpad",
    "verification_report",
    "verified",
    "verify_checkpoint",
]
