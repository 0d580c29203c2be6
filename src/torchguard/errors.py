"""The exceptions and warnings of torchguard.

If torch itself raises, torchguard lets its exception through unchanged. Exceptions that programs
catch are at the front door too, as ``torchguard.DamagedFileError``.
"""

from collections.abc import Iterable

from torchguard._public import address, public


@public
class TorchGuardError(Exception):
    """Base class of every exception that torchguard itself raises."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if hasattr(self, "add_note"):  # not on Python 3.10
            self.add_note(f"See {address(type(self).__name__.lower())}")


# Each is also what torch or Python raises in such a case, so that code which catches that goes on
# working: a RuntimeError of an operator, an AssertionError of a check, a UserWarning.


class NonResizableStorageError(TorchGuardError, RuntimeError):
    """Raised before anything is touched, if torch would kill the process.

    A ``RuntimeError``, because that is what torch raises for every other storage that can't grow.
    """


@public
class InconsistentTensorError(TorchGuardError, RuntimeError):
    """Raised when a tensor's shape describes memory its storage does not have."""


class PatchConflictError(TorchGuardError, RuntimeError):
    """Raised when undoing a patch would overwrite that of other code."""


class PeerFailedError(TorchGuardError, RuntimeError):
    """Raised by ``step.run`` with ``group=`` when another rank failed; nothing has changed."""


class MiscompilationError(TorchGuardError, RuntimeError):
    """Raised with ``on_mismatch="raise"`` when a graph that was compiled wrong is called."""


class TorchGuardWarning(UserWarning):
    """Base class of every warning of torchguard; one filter for it takes all of them."""


@public
class MiscompilationWarning(TorchGuardWarning):
    """A compiled graph did not do what eager does; the text says what runs instead."""


class UnverifiedWarning(TorchGuardWarning):
    """A compiled graph could not be checked; said once for each function, with the reason."""


class TrainingSetupWarning(TorchGuardWarning):
    """A training is set up wrong: a parameter is not trained, gradients are not cleared."""


@public
class OverlapWarning(TorchGuardWarning):
    """An operation reads memory that it writes; names the line, and what to type."""


@public
class PaddingLeakError(TorchGuardError, AssertionError):
    """Raised when padding an input to its bucket changes the answer or a gradient."""


class SaveError(TorchGuardError, RuntimeError):
    """Raised when a file can't be replaced in one step; the old file is unchanged."""


@public
class DamagedFileError(TorchGuardError, RuntimeError):
    """Raised when a checkpoint is not whole: cut off, or other bytes than were written."""


class ShardedCheckpointError(TorchGuardError, RuntimeError):
    """Raised on all ranks when a sharded checkpoint is not whole or not that of this state."""


class ReplicasDisagreeError(TorchGuardError, RuntimeError):
    """Raised on all ranks when copies of a tensor differ that have to be the same."""


class ReadOnlyMemoryError(TorchGuardError, RuntimeError):
    """Raised by ``torch.asarray(copy=False)`` when a tensor would share read-only memory."""


class SharedViewError(TorchGuardError, RuntimeError):
    """Raised when memory that a numpy array looks at would be moved to shared memory."""


@public
class UnrecoverableStepError(TorchGuardError, RuntimeError):
    """Raised from the original exception when a training step failed and can't be rolled back."""


# torch raises an IndexError in one place and a RuntimeError in another.


class IndexOutOfRangeError(TorchGuardError, IndexError, RuntimeError):
    """Raised by the guard ``"checks"`` for an index, a label or a count that is out of range."""


class ValueOutOfRangeError(TorchGuardError, ValueError, RuntimeError):
    """Raised by the guard ``"checks"`` for a probability that is out of range."""


class ZeroDivisorError(TorchGuardError, ZeroDivisionError, RuntimeError):
    """Raised by the guard ``"checks"`` if integers are divided by zero."""


# ---- out of memory ----


# In a RuntimeError of PyTorch's CPU allocator, and of cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: torch's, Python's, or that of a library."""
    import torch  # noqa: PLC0415 - `python -m torchguard --version` must not wait for it

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


def with_causes(exception: BaseException | None) -> Iterable[BaseException]:
    """Return an exception and all that caused it."""
    found: dict[int, BaseException] = {}
    waiting = [exception]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    return found.values()


def add_note(exception: BaseException, note: str) -> None:
    """Call ``exception.add_note``, which Python 3.10 does not have."""
    if hasattr(exception, "add_note"):
        exception.add_note(note)
    else:
        exception.__notes__ = [*getattr(exception, "__notes__", ()), note]  # type: ignore[attr-defined]
