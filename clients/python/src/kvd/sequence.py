"""A sequence that the daemon holds, and what it says of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .arrays import DType, Rows, check_dtype, check_shape, read_rows
from .calls import LoadItem, StoreAck, StoreItem
from .checks import check_index, check_list, check_uint
from .errors import InvalidArgument, ShapeMismatch, restarted
from .keys import Keys, Published, as_keys
from .wire import Message, varint

if TYPE_CHECKING:
    from .client import Link
    from .model import Model


class SequencePhase(enum.IntEnum):
    """What comes next for a sequence, as its engine says."""

    # Nothing is known, or a turn is under way.
    UNKNOWN = 0
    # A turn has ended; the next one may come after a while.
    END_OF_TURN = 1
    # No more tokens will come.
    DONE = 2

    @classmethod
    def _missing_(cls, value: object) -> SequencePhase:
        """One that a later daemon knows."""
        return cls.UNKNOWN


@dataclass(frozen=True)
class StoredBytes:
    """Bytes held right now, by part; the proto file says what each counts."""

    packed_values: int = 0
    packed_bytes: int = 0
    code_bytes: int = 0
    scale_bytes: int = 0
    offset_bytes: int = 0
    header_bytes: int = 0
    raw_values: int = 0
    raw_bytes: int = 0
    packed_key_bytes: int = 0
    packed_value_bytes: int = 0

    @classmethod
    def of(cls, message: Message | None) -> StoredBytes:
        """Those of a message."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(message, name, 0) for name in names})


@dataclass(frozen=True)
class SequenceState:
    """How much of a sequence is stored, and how."""

    # Tokens stored on every layer.
    length: int
    layer_lengths: tuple[int, ...]
    packed_blocks: int
    raw_blocks: int
    stored: StoredBytes


class Sequence:
    """Tokens of one request or conversation, layer by layer.

    It belongs to one boot of the daemon: after a restart every use raises `Restarted`.
    """

    __slots__ = ("boot_id", "id", "layer_lengths", "model", "wire_id", "wire_query")

    def __init__(self, model: Model, identifier: int, boot_id: str, lengths: list[int]) -> None:
        self.model, self.id, self.boot_id = model, identifier, boot_id
        # As this client has stored them.
        self.layer_lengths = lengths
        self.wire_id = b"\x08" + varint(identifier)
        # A whole query of one token that sees all.
        body = self.wire_id + b"\x10\x01"
        self.wire_query = b"\x3a" + varint(len(body)) + body

    def __repr__(self) -> str:
        return f"<kvd.Sequence {self.id:#x} of {self.model.name}, {self.length} tokens>"

    @property
    def length(self) -> int:
        """Tokens that this client has stored on every layer."""
        return min(self.layer_lengths)

    def check_boot(self) -> Link:
        """The connection to the boot of the daemon that gave this sequence.

        Raises `Restarted` where there is another by now.
        """
        link = self.model.client.link()
        if link.boot_id != self.boot_id:
            raise restarted(self.boot_id, link.boot_id)
        return link

    def item(self, layer: int, k: Any, v: Any, start: int | None = None) -> StoreItem:
        """K and V of one range of a layer, for `Model.store`; `start` None continues the layer."""
        model = self.model
        layer = check_index("layer", layer, model.geometry.layers)
        rows = []
        for name, array, dim in (
            ("k", k, model.geometry.head_dim_k),
            ("v", v, model.geometry.head_dim_v),
        ):
            side = read_rows(array, model.dtype)
            check_dtype(name, side, model.dtype)
            check_shape(name, side, (None, model.geometry.kv_heads, dim))
            rows.append(side)
        if rows[0].values.shape[0] != rows[1].values.shape[0]:
            raise ShapeMismatch(f"{len(rows[0].values)} rows of k and {len(rows[1].values)} of v")
        at = self.layer_lengths[layer] if start is None else start
        return StoreItem(model.id, self.id, layer, at, rows[0], rows[1])

    def store(self, layer: int, k: Any, v: Any, start: int | None = None) -> StoreAck:
        """Appends K [tokens, kv_heads, head_dim_k] (after RoPE) and V to a layer.

        Sending an acknowledged range again, with its `start`, changes nothing.
        """
        return self.model.store([(self, self.item(layer, k, v, start))])[0]

    def store_layers(self, k: SequenceOf[Any], v: SequenceOf[Any]) -> list[StoreAck]:
        """Appends the same tokens to every layer: a list of K and one of V, by layer."""
        layers = self.model.geometry.layers
        k, v = check_list("k", k), check_list("v", v)
        if len(k) != layers or len(v) != layers:
            raise ShapeMismatch(f"k of {len(k)} and v of {len(v)} layers, not {layers}")
        return self.model.store(
            [(self, self.item(layer, *sides)) for layer, sides in enumerate(zip(k, v, strict=True))]
        )

    def load(
        self, layer: int, start: int = 0, end: int | None = None, dtype: DType | str | None = None
    ) -> tuple[Any, Any]:
        """K and V as they are held, decoded, as numpy arrays (bf16 as bits in uint16)."""
        geometry = self.model.geometry
        layer, start = check_index("layer", layer, geometry.layers), check_uint("start", start)
        end = self.layer_lengths[layer] if end is None else check_uint("end", end)
        if start > end:
            raise InvalidArgument(f"rows from {start} to {end}")
        shapes = (
            (geometry.kv_heads, geometry.head_dim_k),
            (geometry.kv_heads, geometry.head_dim_v),
        )
        kind = self.model.dtype if dtype is None else DType.of(dtype)
        item = LoadItem(self.model.id, self.id, layer, start, end, kind, shapes)
        link = self.check_boot()
        with link.watched():
            return link.payloads.load(item)

    def fork(self, length: int | None = None) -> Sequence:
        """A new sequence that shares the first `length` tokens (all that every layer holds)."""
        link = self.check_boot()
        with link.watched():
            answer = link.call(
                "ForkSequence", sequence_id=self.id, length=length, session_id=link.session_id
            )
        lengths = [answer.length] * len(self.layer_lengths)
        return Sequence(self.model, answer.sequence_id, self.boot_id, lengths)

    def publish(self, start: int, keys: Keys, *, settle: bool = False) -> Published:
        """Puts whole pages from token `start` on into the cache under their keys. With `settle`
        this sequence too reads them encoded from now on."""
        chain, link = as_keys("keys", keys), self.check_boot()
        with link.watched():
            answer = link.call(
                "PublishBlocks",
                sequence_id=self.id,
                start=start,
                keys=chain.as_fields(),
                settle=settle,
            )
        return Published(answer.length, answer.published, answer.existed, answer.stopped_by)

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on, on every layer."""
        length, link = check_uint("length", length), self.check_boot()
        with link.watched():
            link.call("TruncateSequence", sequence_id=self.id, length=length)
        self.layer_lengths = [length] * len(self.layer_lengths)

    def hint(self, phase: SequencePhase, parent: Sequence | None = None) -> None:
        """Says what comes next, and for which sequence this one works, such as a sub-agent's: lists
        show it. It replaces what was said before; a fork begins with what it was forked from."""
        if parent is not None and not isinstance(parent, Sequence):
            raise InvalidArgument(f"parent is no kvd.Sequence but {type(parent).__name__}")
        link = self.check_boot()
        with link.watched():
            link.call(
                "HintSequence",
                sequence_id=self.id,
                phase=phase,
                parent_sequence_id=0 if parent is None else parent.id,
            )

    def describe(self) -> SequenceState:
        """What the daemon holds of it; also corrects the lengths that this client believes in."""
        link = self.check_boot()
        with link.watched():
            answer = link.call("DescribeSequence", sequence_id=self.id)
        # An empty layer may be left out at the end.
        self.layer_lengths = list(answer.layer_lengths)
        return SequenceState(
            answer.length,
            tuple(answer.layer_lengths),
            answer.packed_blocks,
            answer.raw_blocks,
            StoredBytes.of(answer.stored),
        )

    def close(self) -> None:
        """Gives up what nobody else shares. One of an earlier boot is gone already."""
        link = self.model.client.link_if_open()
        if link is None or link.boot_id != self.boot_id:
            return
        with link.watched():
            link.call("CloseSequence", sequence_id=self.id)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def q_rows(q: Any, bits_are: DType | None, shape: tuple[int, int]) -> Rows:
    """Queries [rows, q_heads, head_dim_k]; `shape` is rows and head_dim_k."""
    rows = read_rows(q, bits_are)
    given = rows.values.shape
    if len(given) != 3 or given[0] != shape[0] or given[2] != shape[1]:
        check_shape("q", rows, (shape[0], None, shape[1]))
    return rows
