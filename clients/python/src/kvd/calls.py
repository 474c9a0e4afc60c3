"""What travels in calls with payloads: queries, stores, loads and their answers.

A decode step asks many attends and stores, so these are encoded by hand."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .arrays import Array, DType, Rows
from .checks import check_bool, check_list, check_uint, pack_f32
from .errors import InvalidArgument, KvdError
from .wire import field_bytes, uint_field, varint

if TYPE_CHECKING:
    from .sequence import Sequence


@dataclass(slots=True)
class Query:
    """What some query tokens of a batch may see of a sequence (contract 26).

    `kv_length` None means all that the layer holds; `position` None means that the last token sees
    all of it. `position=kv_length` means no mask: every query token sees every stored one.
    """

    sequence: Sequence
    n_q: int = 1
    kv_length: int | None = None
    position: int | None = None
    start: int | None = None
    end: int | None = None
    sliding_window: int | None = 0

    def encode(self) -> bytes:
        """As AttendRequest.queries has it, without its tag."""
        out = self.sequence.wire_id + uint_field(2, "n_q", self.n_q)
        if self.kv_length is not None:
            out += uint_field(3, "kv_length", self.kv_length)
        if self.position is not None:
            out += uint_field(4, "position", self.position)
        if self.start is not None:
            out += uint_field(5, "start", self.start)
        if self.end is not None:
            out += uint_field(6, "end", self.end)
        if self.sliding_window not in (0, None):
            out += uint_field(7, "sliding_window", self.sliding_window)
        return out


class Queries:
    """A batch, encoded once. The same one serves every layer of a step."""

    __slots__ = ("boot_id", "count", "encoded", "prepared", "rows")

    def __init__(self, queries: Iterable[Query | Sequence]) -> None:
        self.count, self.rows, self.boot_id = 0, 0, ""
        parts = []
        for query in check_list("queries", queries):
            try:
                if isinstance(query, Query):
                    sequence = query.sequence
                    body = query.encode()
                    n_q = int(query.n_q)  # checked by now
                    parts.append(b"\x3a" + varint(len(body)) + body)
                else:
                    sequence, n_q = query, 1
                    parts.append(query.wire_query)
            except AttributeError:
                raise InvalidArgument(
                    f"queries[{self.count}] is of no kvd.Sequence: {type(query).__name__}"
                ) from None
            if not self.count:
                self.boot_id = sequence.boot_id
            elif sequence.boot_id != self.boot_id:
                sequence.check_boot()
            self.count += 1
            self.rows += n_q
        self.encoded = b"".join(parts)
        # What a region has prepared for it, by form and precision.
        self.prepared: dict[Any, Any] = {}

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False)
class AttendForm:
    """What is the same in every attend of a model with the same heads, precision and scores."""

    head: bytes
    q_heads: int
    head_dim_v: int
    partial: bool

    @classmethod
    def encode(
        cls,
        *,
        model_id: int,
        heads: tuple[int, int],
        dtype: DType,
        scores: tuple[float | None, float],
        partial: bool,
    ) -> AttendForm:
        """`heads` are query heads and head_dim_v, `scores` are scale and soft cap."""
        head = b"\x08" + varint(model_id) + b"\x18" + varint(heads[0]) + b"\x20" + varint(dtype)
        scale, soft_cap = scores
        if scale is not None:
            head += b"\x2d" + pack_f32("scale", scale)
        if soft_cap != 0:
            head += b"\x35" + pack_f32("soft_cap", soft_cap)
        if check_bool("partial", partial):
            head += b"\x48\x01"
        return cls(head, heads[0], heads[1], partial)

    def encode_request(self, layer: int, queries: Queries, q: bytes) -> bytes:
        """An AttendRequest whose Payload `q` is encoded already; its layer stands last."""
        return b"".join(
            (self.head, queries.encoded, b"\x42", varint(len(q)), q, b"\x10", varint(layer))
        )


@dataclass(frozen=True)
class QueryError:
    """A query of a batch that was not answered: its `out` is 0 and its `lse` -inf."""

    query: int
    error: KvdError


@dataclass(slots=True)
class Attended:
    """Outputs [rows, q_heads, head_dim_v] and log-sum-exps [rows, q_heads], natural, in f32."""

    out: Any
    lse: Any
    errors: tuple[QueryError, ...] = ()


class PendingAttend(Protocol):
    """An attend under way."""

    def result(self) -> Attended:
        """Waits for the answer; once."""
        ...


@dataclass(frozen=True)
class StoreItem:
    """K and V of one range of one layer."""

    model_id: int
    sequence_id: int
    layer: int
    start: int
    k: Rows
    v: Rows

    def __post_init__(self) -> None:
        # Of every way that it may go, and before any of its rows went.
        object.__setattr__(self, "layer", check_uint("layer", self.layer))
        object.__setattr__(self, "start", check_uint("start", self.start))

    def encode_request(self, k: bytes, v: bytes) -> bytes:
        """A StoreBlocksRequest whose Payloads are encoded already."""
        head = b"\x08" + varint(self.sequence_id) + b"\x10" + varint(self.layer)
        head += b"\x18" + varint(self.start) + b"\x20" + varint(self.k.values.shape[0])
        return head + field_bytes(5, k) + field_bytes(6, v)

    def split(self, bytes_max: int) -> list[StoreItem]:
        """The same rows as ranges of at most so many bytes, in order."""
        tokens = self.k.values.shape[0]
        step = max(1, bytes_max * tokens // max(1, self.k.values.nbytes + self.v.values.nbytes))
        if step >= tokens:
            return [self]
        pieces = []
        for at in range(0, tokens, step):
            k, v = (Rows(side.values[at : at + step], side.dtype) for side in (self.k, self.v))
            pieces.append(
                StoreItem(self.model_id, self.sequence_id, self.layer, self.start + at, k, v)
            )
        return pieces


@dataclass(frozen=True)
class StoreAck:
    """What a store has done."""

    layer: int
    # Tokens of the layer that can now be read.
    length: int
    replayed: bool
    packed_blocks: int

    @classmethod
    def join(cls, acks: SequenceOf[StoreAck]) -> StoreAck:
        """Of a range that was stored in pieces."""
        replayed = all(ack.replayed for ack in acks)
        return cls(
            acks[-1].layer, acks[-1].length, replayed, sum(ack.packed_blocks for ack in acks)
        )


@dataclass(frozen=True)
class LoadItem:
    """Rows to read back, decoded."""

    model_id: int
    sequence_id: int
    layer: int
    start: int
    end: int
    dtype: DType
    # Of K and of V, without the number of tokens.
    shapes: tuple[tuple[int, int], tuple[int, int]]


class Payloads(Protocol):
    """A way for payloads to and from a daemon: a region, or gRPC messages."""

    def begin_attend(
        self, form: AttendForm, layer: int, queries: Queries, q: Rows
    ) -> PendingAttend:
        """Sends an attend."""
        ...

    def store(self, items: SequenceOf[StoreItem]) -> list[StoreAck]:
        """Stores ranges, of which those of one layer of a sequence follow one another."""
        ...

    def load(self, item: LoadItem) -> tuple[Array, Array]:
        """Reads rows back."""
        ...

    def close(self) -> None:
        """Hangs up."""
        ...
