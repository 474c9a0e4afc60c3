"""kvd: KV caches kept compressed by a daemon, which answers attention over them.

with kvd.connect("/run/kvd/region.sock") as client:
    model = client.model("llama", kvd.Geometry(32, 8, 128), dtype="f16", codec="kivi-4")
    sequence = model.open()
    sequence.store(0, k, v)                       # [tokens, kv_heads, head_dim], after RoPE
    attended = model.attend(0, [sequence], q)     # q [1, q_heads, head_dim]
    out, lse = kvd.merge(attended.out, attended.lse, own_out, own_lse)
"""

from typing import TYPE_CHECKING, Any

from .arrays import DType, bf16_to_f32, f32_to_bf16
from .calibration import Calibrated
from .calls import Attended, Queries, Query, QueryError, StoreAck
from .client import Client, CodecInfo, SequenceInfo, ServerInfo, connect
from .errors import (
    Cancelled,
    CorruptPage,
    DeadlineExceeded,
    DeviceFailed,
    Disconnected,
    Internal,
    InvalidArgument,
    InvalidCalibration,
    InvalidCodec,
    KvdError,
    LimitExceeded,
    MessageTooLarge,
    ModelInUse,
    NamespaceDenied,
    NonFinite,
    PermissionDenied,
    PoolFull,
    QueueFull,
    QuotaExceeded,
    RangeConflict,
    RangeGap,
    RangeNotStored,
    RangeOverlap,
    Restarted,
    SequenceBusy,
    ShapeMismatch,
    ShuttingDown,
    Unauthenticated,
    UnknownLease,
    UnknownModel,
    UnknownSequence,
    UnknownSession,
    Unsupported,
)
from .keys import Dropped, Keys, Matches, Published
from .merge import merge
from .model import Geometry, Model
from .sequence import Sequence, SequencePhase, SequenceState, StoredBytes
from .watch import BlockEvent, BlockUpdate, BlockWatch, Change, Tier, WatchPosition

if TYPE_CHECKING:
    from .server import Server, serve

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads what starts daemons when it is asked for: engines do not need it."""
    if name in ("Server", "serve"):
        from . import server  # noqa: PLC0415 (see above)

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Attended",
    "BlockEvent",
    "BlockUpdate",
    "BlockWatch",
    "Calibrated",
    "Cancelled",
    "Change",
    "Client",
    "CodecInfo",
    "CorruptPage",
    "DType",
    "DeadlineExceeded",
    "DeviceFailed",
    "Disconnected",
    "Dropped",
    "Geometry",
    "Internal",
    "InvalidArgument",
    "InvalidCalibration",
    "InvalidCodec",
    "Keys",
    "KvdError",
    "LimitExceeded",
    "Matches",
    "MessageTooLarge",
    "Model",
    "ModelInUse",
    "NamespaceDenied",
    "NonFinite",
    "PermissionDenied",
    "PoolFull",
    "Published",
    "Queries",
    "Query",
    "QueryError",
    "QueueFull",
    "QuotaExceeded",
    "RangeConflict",
    "RangeGap",
    "RangeNotStored",
    "RangeOverlap",
    "Restarted",
    "Sequence",
    "SequenceBusy",
    "SequenceInfo",
    "SequencePhase",
    "SequenceState",
    "Server",
    "ServerInfo",
    "ShapeMismatch",
    "ShuttingDown",
    "StoreAck",
    "StoredBytes",
    "Tier",
    "Unauthenticated",
    "UnknownLease",
    "UnknownModel",
    "UnknownSequence",
    "UnknownSession",
    "Unsupported",
    "WatchPosition",
    "bf16_to_f32",
    "connect",
    "f32_to_bf16",
    "merge",
    "serve",
]
