"""Chunks of KV rows under keys of their own, in a daemon's cache: rows of all layers in, the same
rows out, with codec `raw` bit by bit. For engines whose cache hands out whole chunks by key.

A chunk is a sequence of its own, published under keys made of its key, so one call of the daemon
stores or loads many. Whatever goes wrong is a miss: nothing here raises once it is set up.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .arrays import Array, DType
from .client import Client, connect
from .errors import (
    DeadlineExceeded,
    Disconnected,
    InvalidArgument,
    KvdError,
    QueueFull,
    Restarted,
    ShuttingDown,
)
from .keys import Keys
from .model import Geometry, Model, model_label
from .region import Region
from .region_steps import error_of_part
from .sequence import Sequence

if TYPE_CHECKING:
    from .ring import Place

logger = logging.getLogger("kvd.chunks")
T = TypeVar("T")

# Of a page; chunks are whole pages.
PAGE_TOKENS = 64
_NAME_CHARACTERS_MAX = 100
# Most chunks of one call, and the share of the region that they take.
_CHUNKS_MAX = 256
_CALL_SHARE = 4
_ANSWER_BYTES = 16 << 10
# When a lost daemon is looked for again, and one that did not answer in time.
_RETRY_SECONDS = 1.0
_LONG_RETRY_SECONDS = 10.0
# How long room in the region is waited for, and how often one looks.
_ROOM_SECONDS = 0.5
_ROOM_INTERVAL = 0.001


class RowOrder(Enum):
    """How the rows of a chunk follow one another, K before V."""

    # [2, layers, tokens, kv_heads, head_dim]
    LAYERS_FIRST = "layers first"
    # [2, tokens, layers, kv_heads, head_dim]
    TOKENS_FIRST = "tokens first"


@dataclass(frozen=True)
class ChunkShape:
    """Tokens of a chunk on all layers, in an order."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    dtype: DType
    order: RowOrder = RowOrder.LAYERS_FIRST

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of kvd.

        Raises `InvalidArgument` where chunks are not whole pages.
        """
        if self.tokens > PAGE_TOKENS and self.tokens % PAGE_TOKENS:
            raise InvalidArgument(
                f"chunks of {self.tokens} tokens: take a multiple of {PAGE_TOKENS}, or fewer"
            )
        return min(self.tokens, PAGE_TOKENS)

    @property
    def side_bytes(self) -> int:
        """Bytes of K, and of V."""
        rows = self.layers * self.tokens * self.kv_heads
        return rows * self.head_dim * self.dtype.numpy.itemsize

    @property
    def size(self) -> int:
        """Bytes of a chunk."""
        return 2 * self.side_bytes

    def strides(self) -> dict[str, int]:
        """As Rows of a step has them."""
        row = self.kv_heads * self.head_dim * self.dtype.numpy.itemsize
        if self.order is RowOrder.LAYERS_FIRST:
            return {"token_stride": row, "layer_stride": self.tokens * row}
        return {"token_stride": self.layers * row, "layer_stride": row}


@dataclass(frozen=True)
class ChunkHome:
    """Where chunks are kept, and as what. `engine` and `weights` tell those of different engines
    and models apart; a lossy `codec` gives other rows back than it was given."""

    region: str
    engine: str
    model: str
    weights: bytes
    codec: str = "raw"
    calibration: bytes = b""
    namespace: str | None = None
    region_bytes: int = 256 << 20
    timeout: float = 5.0

    def connect(self) -> Client:
        """A connection of its own."""
        return connect(
            self.region,
            namespace=self.namespace,
            timeout=self.timeout,
            region_bytes=self.region_bytes,
        )

    def register(self, client: Client, shape: ChunkShape) -> Model:
        """The model at the daemon. Its name stands for one registration."""
        digest = hashlib.sha256(self.engine.encode() + b"\0" + self.weights).digest()
        geometry = Geometry(
            shape.layers, shape.kv_heads, shape.head_dim, block_tokens=shape.page_tokens
        )
        said = (geometry, int(shape.dtype), self.codec, hashlib.sha256(self.calibration).digest())
        tag = hashlib.sha256(digest + repr(said).encode()).hexdigest()[:12]
        return client.model(
            f"{self.engine}/{model_label(self.model, _NAME_CHARACTERS_MAX)}-{tag}",
            geometry,
            dtype=shape.dtype,
            codec=self.codec,
            calibration=self.calibration,
            weights=digest,
        )


@dataclass(frozen=True)
class Chunk:
    """A key and its rows, read by `put` and written by `get`: an array of as many bytes as a chunk
    has, of any shape and dtype, which need not be dense."""

    key: bytes
    rows: Array


@dataclass
class ChunkCounters:
    """What has happened to chunks."""

    stored: int = 0
    loaded: int = 0
    missed: int = 0
    failures: int = 0


@dataclass
class _Reach:
    """The connection, or when to look for one again."""

    client: Client | None = None
    model: Model | None = None
    look_after: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Resting(Disconnected):
    """The daemon was away just now."""


class ChunkCache:
    """Chunks at a daemon. Threads may share one."""

    def __init__(self, home: ChunkHome, shape: ChunkShape) -> None:
        """Raises what the daemon says of a registration that it refuses; one that is not there is
        looked for later. `InvalidArgument` where a chunk does not fit the region."""
        self.home, self.shape = home, shape
        self.counters = ChunkCounters()
        self._page_tokens = shape.page_tokens
        self._chunks_max = min(_CHUNKS_MAX, home.region_bytes // _CALL_SHARE // shape.size)
        if not self._chunks_max:
            need = -(-_CALL_SHARE * shape.size >> 20)
            raise InvalidArgument(f"region_mib: a chunk of this model needs {need} MiB")
        self._reach = _Reach()
        try:
            self._reached()
        except (Disconnected, DeadlineExceeded) as error:
            self._note(error)

    def contains(self, keys: SequenceOf[bytes]) -> list[bool]:
        """Whether each is there, whole."""
        try:
            tokens = self._try(lambda model: model.match(self._chains(keys))).tokens
        except KvdError as error:
            self._note(error)
            return [False] * len(keys)
        return [matched == self.shape.tokens for matched in tokens]

    def put(self, chunks: SequenceOf[Chunk]) -> list[bool]:
        """Keeps chunks; which of them are there now. One that is there already is not read."""
        kept: list[bool] = []
        for at in range(0, len(chunks), self._chunks_max):
            piece = chunks[at : at + self._chunks_max]
            try:
                kept += self._try(partial(self._put_piece, piece))
            except KvdError as error:
                self._note(error)
                if len(piece) > 1 and not _is_away(error):
                    # A step is all or nothing: rows that are refused shall cost one chunk.
                    for chunk in piece:
                        kept += self.put([chunk])
                else:
                    kept += [False] * len(piece)
        return kept

    def get(self, chunks: SequenceOf[Chunk]) -> list[bool]:
        """Fills the rows of chunks; which of them were there. Those of the others mean nothing."""
        found: list[bool] = []
        for at in range(0, len(chunks), self._chunks_max):
            piece = chunks[at : at + self._chunks_max]
            try:
                found += self._try(partial(self._get_piece, piece))
            except KvdError as error:
                self._note(error)
                found += [False] * len(piece)
        self.counters.loaded += sum(found)
        self.counters.missed += len(found) - sum(found)
        return found

    def drop(self, keys: SequenceOf[bytes]) -> bool:
        """Forgets chunks; whether the daemon did so."""
        try:
            return not self._try(lambda model: model.drop(self._chains(keys))).held
        except KvdError as error:
            self._note(error)
            return False

    def drop_all(self) -> bool:
        """Forgets all chunks of this home; whether the daemon did so."""
        try:
            return not self._try(lambda model: model.drop()).held
        except KvdError as error:
            self._note(error)
            return False

    def is_reached(self) -> bool:
        """Whether the daemon answers now."""
        try:
            self._try(lambda model: model.client.info())
        except KvdError as error:
            self._note(error)
            return False
        return True

    def close(self) -> None:
        """Hangs up; what is cached stays."""
        with self._reach.lock:
            client, self._reach.client, self._reach.model = self._reach.client, None, None
            self._reach.look_after = float("inf")
        if client is not None:
            client.close()

    def _try(self, job: Callable[[Model], T]) -> T:
        """Does a job; once more where the connection was one of an earlier life of the daemon."""
        try:
            return job(self._reached())
        except _Resting:
            raise
        except (Disconnected, Restarted, ShuttingDown) as error:
            client = self._reach.client
            link = client.link_if_open() if client is not None else None
            if link is not None and isinstance(error, ShuttingDown):
                link.is_lost = True
        return job(self._reached())

    def _reached(self) -> Model:
        """The model at a daemon that is there, found again where it was lost.

        Raises `Disconnected` at once while it is too early to look.
        """
        reach = self._reach
        model = reach.model
        if model is not None and model.client.link_if_open() is not None:
            return model
        with reach.lock:
            if time.monotonic() < reach.look_after:
                raise _Resting(f"{self.home.region}: not looked for again yet")
            try:
                if reach.client is None:
                    reach.client = self.home.connect()
                if reach.model is None:
                    reach.model = self.home.register(reach.client, self.shape)
                reach.model.id_at(reach.client.link())
            except KvdError as error:
                if _is_away(error):
                    self._rest(error)
                raise
            return reach.model

    def _rest(self, error: KvdError) -> None:
        """Looks for a daemon that is away no sooner than it makes sense. Callers hold the lock."""
        reach, is_slow = self._reach, isinstance(error, DeadlineExceeded)
        after = time.monotonic() + (_LONG_RETRY_SECONDS if is_slow else _RETRY_SECONDS)
        reach.look_after = max(reach.look_after, after)
        if is_slow and reach.client is not None:
            # One that does not answer is as good as none, until it lets us in again. What was
            # opened there ends with the connection.
            link = reach.client.link_if_open()
            if link is not None:
                link.is_lost = True
            reach.client.close()
            reach.client = reach.model = None

    def _note(self, error: KvdError) -> None:
        """Says what went wrong: of a daemon that is away, once."""
        if isinstance(error, _Resting):
            return
        self.counters.failures += 1
        logger.warning("kvd: %s", error)
        if isinstance(error, DeadlineExceeded):
            with self._reach.lock:
                self._rest(error)

    def _chains(self, keys: SequenceOf[bytes]) -> list[Keys]:
        return [self._chain(key) for key in keys]

    def _chain(self, key: bytes) -> Keys:
        """Keys of the pages of a chunk."""
        each = []
        for page in range(self.shape.tokens // self._page_tokens):
            each.append(hashlib.sha256(page.to_bytes(4, "little") + key).digest())
        return Keys.of(each)

    def _put_piece(self, chunks: SequenceOf[Chunk], model: Model) -> list[bool]:
        shape, chains = self.shape, self._chains([chunk.key for chunk in chunks])
        with _opened(model, chains) as sequences:
            lacking = [at for at, one in enumerate(sequences) if one.length < shape.tokens]
            if lacking:
                self._store_step(model, [(sequences[at], chunks[at]) for at in lacking])
            kept = [True] * len(chunks)
            for at in lacking:
                kept[at] = self._publish(sequences[at], chains[at])
        self.counters.stored += sum(kept[at] for at in lacking)
        return kept

    def _publish(self, sequence: Sequence, chain: Keys) -> bool:
        """Makes what a sequence was opened without findable; whether all of the chunk is now."""
        lacking = chain.cut(sequence.length // self._page_tokens, len(chain))
        published = sequence.publish(sequence.length, lacking)
        if published.stopped_by:
            logger.info("kvd: a chunk is not kept: %s", published.stopped_by)
        return published.length == self.shape.tokens

    def _store_step(self, model: Model, parts: SequenceOf[tuple[Sequence, Chunk]]) -> None:
        link = parts[0][0].check_boot()
        region, place = self._reserve(link.payloads, len(parts))
        try:
            for index, (_, chunk) in enumerate(parts):
                np.copyto(self._slot(region, place, index, chunk.rows), chunk.rows)
        except BaseException:
            place.is_free = True
            raise
        fields = self._step_fields(model, region, place, [one for one, _ in parts])
        with link.watched():
            region.call_in(place, "StoreStep", fields, _ANSWER_BYTES)
        place.is_free = True

    def _get_piece(self, chunks: SequenceOf[Chunk], model: Model) -> list[bool]:
        shape, chains = self.shape, self._chains([chunk.key for chunk in chunks])
        with _opened(model, chains) as sequences:
            there = [at for at, one in enumerate(sequences) if one.length == shape.tokens]
            spoilt: list[int] = []
            if there:
                asked = [(sequences[at], chunks[at]) for at in there]
                spoilt = [there[part] for part in self._load_step(model, asked)]
        if spoilt:
            # So that the next one who computes it can store it.
            self.drop([chunks[at].key for at in spoilt])
        found = [False] * len(chunks)
        for at in there:
            found[at] = at not in spoilt
        return found

    def _load_step(self, model: Model, parts: SequenceOf[tuple[Sequence, Chunk]]) -> list[int]:
        """Fills the chunks; the parts that could not be read."""
        link = parts[0][0].check_boot()
        region, place = self._reserve(link.payloads, len(parts))
        fields = self._step_fields(model, region, place, [one for one, _ in parts], is_load=True)
        with link.watched():
            answer = region.call_in(place, "LoadStep", fields, _ANSWER_BYTES)
        try:
            failed = []
            for one in answer.errors:
                self.counters.failures += 1
                failed.append(one.part)
                logger.warning("kvd: a chunk cannot be read: %s", error_of_part(one.error))
            for index, (_, chunk) in enumerate(parts):
                if index not in failed:
                    np.copyto(chunk.rows, self._slot(region, place, index, chunk.rows))
            return failed
        finally:
            place.is_free = True

    def _reserve(self, payloads: Any, count: int) -> tuple[Region, Place]:
        """Room for chunks in the region.

        Raises `QueueFull` where there is none in time.
        """
        assert isinstance(payloads, Region)
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                return payloads, payloads.reserve(count * self.shape.size, _ANSWER_BYTES)
            except QueueFull:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ROOM_INTERVAL)

    def _slot(self, region: Region, place: Place, index: int, rows: Array) -> Array:
        """The bytes of a chunk of a place, as rows of it have them."""
        if rows.nbytes != self.shape.size:
            raise InvalidArgument(f"{rows.nbytes} bytes are no chunk of {self.shape.size}")
        at = region.payload_offset(place) + index * self.shape.size
        slot: Array = np.ndarray(rows.shape, rows.dtype, region.memory, at)
        return slot

    def _step_fields(
        self,
        model: Model,
        region: Region,
        place: Place,
        sequences: SequenceOf[Sequence],
        *,
        is_load: bool = False,
    ) -> dict[str, Any]:
        """A step of whole chunks, or of what the sequences lack of them."""
        shape, parts = self.shape, []
        strides, begin = shape.strides(), region.payload_offset(place)
        for index, sequence in enumerate(sequences):
            start = 0 if is_load else sequence.length
            at = begin + index * shape.size + start * strides["token_stride"]
            part: dict[str, Any] = {
                "sequence_id": sequence.id,
                "start": start,
                "tokens": shape.tokens - start,
                "layers": shape.layers,
                "k": {"offset": at, **strides},
                "v": {"offset": at + shape.side_bytes, **strides},
            }
            parts.append(part)
        return {"model_id": model.id_at(sequences[0].check_boot()), "parts": parts}


@contextmanager
def _opened(model: Model, chains: SequenceOf[Keys]) -> Iterator[list[Sequence]]:
    """Sequences on what is cached of chains, closed in the end."""
    sequences: list[Sequence] = []
    try:
        for chain in chains:
            sequences.append(model.open(chain))
        yield sequences
    except DeadlineExceeded:
        # Nobody answers: the end of the connection closes them.
        sequences.clear()
        raise
    finally:
        for sequence in sequences:
            try:
                sequence.close()
            except KvdError as error:
                logger.debug("kvd: a sequence was not closed: %s", error)
                if isinstance(error, DeadlineExceeded):
                    break


def _is_away(error: KvdError) -> bool:
    return isinstance(error, DeadlineExceeded | Disconnected | Restarted | ShuttingDown)
