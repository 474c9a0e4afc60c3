"""What can go wrong, as exceptions: one class for each error code of the daemon, and a few of the
client's own. `error_of` makes them from codes; nothing here talks to anybody."""

from __future__ import annotations

# Seconds to wait before the next attempt where the daemon names none.
RETRY_AFTER_DEFAULT = 0.05


class KvdError(Exception):
    """Why a call failed.

    `code` is the daemon's error code, `retryable` says whether the same call may succeed later, and
    `retry_after` is the time to wait before that, in seconds.
    """

    code = "INTERNAL"
    retryable = False

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{self.code}: {message}")
        self.message = message
        if retry_after is None and self.retryable:
            retry_after = RETRY_AFTER_DEFAULT
        self.retry_after = retry_after


class InvalidArgument(KvdError, ValueError):
    """A field is missing, malformed or out of range."""

    code = "INVALID_ARGUMENT"


class ShapeMismatch(KvdError, ValueError):
    """An array does not fit the model's geometry."""

    code = "SHAPE_MISMATCH"


class NonFinite(KvdError, ValueError):
    """K, V or a query holds NaN or infinity."""

    code = "NON_FINITE"


class InvalidCodec(KvdError, ValueError):
    """The codec's text does not parse, or it cannot serve this geometry."""

    code = "INVALID_CODEC"


class InvalidCalibration(KvdError, ValueError):
    """The codec needs a calibration that is absent or does not fit."""

    code = "INVALID_CALIBRATION"


class UnknownModel(KvdError, LookupError):
    """No such model in this namespace."""

    code = "UNKNOWN_MODEL"


class UnknownSequence(KvdError, LookupError):
    """No such sequence in this namespace: it was closed, or its session has ended."""

    code = "UNKNOWN_SEQUENCE"


class UnknownLease(KvdError, LookupError):
    """No such lease of cached blocks: it has ended, or never was."""

    code = "UNKNOWN_LEASE"


class UnknownSession(KvdError, LookupError):
    """No such session in this namespace: it has ended."""

    code = "UNKNOWN_SESSION"


class NamespaceDenied(KvdError, PermissionError):
    """A namespace that the daemon does not let in."""

    code = "NAMESPACE_DENIED"


class Unauthenticated(KvdError, PermissionError):
    """The daemon does not know whose call this is."""

    code = "UNAUTHENTICATED"


class PermissionDenied(KvdError, PermissionError):
    """The caller lacks the role that the call needs."""

    code = "PERMISSION_DENIED"


class RangeGap(KvdError):
    """A stored range begins after the end of its layer."""

    code = "RANGE_GAP"


class RangeOverlap(KvdError):
    """A stored range covers tokens that are there already."""

    code = "RANGE_OVERLAP"


class RangeConflict(KvdError):
    """An earlier store put other content in the same range."""

    code = "RANGE_CONFLICT"


class RangeNotStored(KvdError, IndexError):
    """A read, a fork or a truncation reaches past what is stored."""

    code = "RANGE_NOT_STORED"


class SequenceBusy(KvdError):
    """Another request appends to the same layer of the sequence."""

    code = "SEQUENCE_BUSY"
    retryable = True


class ModelInUse(KvdError):
    """The model has open sequences."""

    code = "MODEL_IN_USE"


class PoolFull(KvdError, MemoryError):
    """The daemon's page memory is used up."""

    code = "POOL_FULL"
    retryable = True


class QueueFull(KvdError):
    """The device is behind."""

    code = "QUEUE_FULL"
    retryable = True


class LimitExceeded(KvdError):
    """A limit of the daemon was reached; the message names it."""

    code = "LIMIT_EXCEEDED"


class QuotaExceeded(KvdError, MemoryError):
    """The namespace has as much as it may; retryable where something may be given back."""

    code = "QUOTA_EXCEEDED"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after)
        self.retryable = retry_after is not None


class MessageTooLarge(KvdError):
    """A message, or the payload of a call, is larger than the daemon or the region allows."""

    code = "MESSAGE_TOO_LARGE"


class DeadlineExceeded(KvdError, TimeoutError):
    """The deadline passed before the answer was there. A store may have happened nevertheless."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(KvdError):
    """The call was given up."""

    code = "CANCELLED"


class ShuttingDown(KvdError):
    """The daemon drains and takes no new work."""

    code = "SHUTTING_DOWN"
    retryable = True


class CorruptPage(KvdError):
    """Stored bytes failed a test: close the sequence and store it again."""

    code = "CORRUPT_PAGE"


class DeviceFailed(KvdError):
    """The device failed; the daemon is about to exit."""

    code = "DEVICE_FAILED"


class Internal(KvdError):
    """A defect of kvd, or an answer that breaks the protocol."""


class Disconnected(KvdError, ConnectionError):
    """The daemon cannot be reached, or hung up. The next call connects again."""

    code = "DISCONNECTED"
    retryable = True


class Restarted(KvdError):
    """The daemon is another than the one that gave an id: nothing of what that one held is left.

    Open sequences and store again; models register themselves again. `old_boot` and `new_boot` are
    boot ids, the old one only its first eight digits where the client never saw it whole.
    """

    code = "RESTARTED"

    def __init__(self, message: str, old_boot: str = "", new_boot: str = "") -> None:
        super().__init__(message)
        self.old_boot = old_boot
        self.new_boot = new_boot


class Unsupported(KvdError, NotImplementedError):
    """This package, or the daemon, does not do that, and the message says what to do instead."""

    code = "UNSUPPORTED"


_BY_CODE: dict[str, type[KvdError]] = {
    error.code: error
    for error in KvdError.__subclasses__()
    if error not in (Restarted, Unsupported, Disconnected)
}


def error_of(code: str, message: str, retry_after: float | None = None) -> KvdError:
    """The exception of an error code; `Internal`, with the code in its message, where none is."""
    known = _BY_CODE.get(code)
    if known is None:
        return Internal(f"{code}: {message}")
    return known(message, retry_after)


def error_of_text(text: str, retry_after: float | None = None) -> KvdError:
    """The exception of "CODE: message", as completion records and notices have it."""
    code, colon, message = text.partition(": ")
    return error_of(code, message, retry_after) if colon else Internal(text)


def restarted(old_boot: str, new_boot: str) -> Restarted:
    """The exception of ids that another boot has given."""
    return Restarted(
        f"the daemon was restarted (boot {old_boot} before, {new_boot} now), and nothing is left of"
        " what it held: open sequences and store again",
        old_boot,
        new_boot,
    )


def is_of_boot(identifier: int, boot_id: str) -> bool:
    """Whether an id can be one of that boot: its upper half is the boot id's first digits."""
    return not boot_id or identifier >> 32 == int(boot_id[:8], 16)
