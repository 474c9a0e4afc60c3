"""Watches of the cache: which blocks are where, and every change. They go by gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .credentials import Credentials
from .errors import Disconnected, Internal

if TYPE_CHECKING:
    from .remote import Remote
    from .wire import Message


class Tier(Enum):
    """Where a block is: in the daemon's pool, on its disk, or in a store that daemons share."""

    POOL = 1
    DISK = 2
    REMOTE = 3


class Change(Enum):
    """What has happened to blocks: they came to a tier, they left it, or nothing of their model is
    found any more."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True)
class WatchPosition:
    """Where a watch can go on that ended."""

    boot_id: str
    number: int


@dataclass(frozen=True)
class BlockEvent:
    """A change of blocks: pages of tokens, each under the key of its last engine block."""

    change: Change
    model_id: int
    # Empty of a model that is unregistered.
    model: str
    # None of CLEARED.
    tier: Tier | None
    # Of STORED each follows the one before.
    keys: tuple[bytes, ...]
    # Tokens of a page; 0 where the model is unregistered.
    block_tokens: int
    # Key of the block before the first; empty where there is none or it is not known.
    parent_key: bytes
    # Blocks before the first.
    position: int

    @classmethod
    def of(cls, event: Message) -> BlockEvent:
        """As the wire has it."""
        keys, block_tokens = (), 0
        if event.keys is not None:
            packed, size = event.keys.keys, max(1, event.keys.key_bytes)
            keys = tuple(packed[at : at + size] for at in range(0, len(packed), size))
            block_tokens = event.keys.key_tokens
        return cls(
            Change(event.change),
            event.model_id,
            event.model,
            Tier(event.tier) if event.tier else None,
            keys,
            block_tokens,
            event.parent_key,
            event.position,
        )


@dataclass(frozen=True)
class BlockUpdate:
    """What a watch tells at a time."""

    boot_id: str
    # Number of the last event; 0 while all blocks are being told: the picture is not whole.
    number: int
    # Forget whatever was told before.
    reset: bool
    events: tuple[BlockEvent, ...]


class BlockWatch:
    """An open watch: iterate it. It ends with an error; `position` says where another goes on."""

    def __init__(self, remote: Remote, after: WatchPosition | None = None) -> None:
        start = after or WatchPosition("", 0)
        self._remote, self._owned = remote, False
        self._stream = remote.watch_blocks(start.boot_id, start.number)
        # None while the picture is not whole.
        self.position: WatchPosition | None = after

    @classmethod
    def connect(
        cls,
        target: str,
        *,
        namespace: str | None = None,
        after: WatchPosition | None = None,
        credentials: Credentials | None = None,
    ) -> BlockWatch:
        """A watch on a connection of its own, without a session: all that a router needs."""
        from .client import grpc_address  # noqa: PLC0415 (a client has watches)
        from .remote import Remote  # noqa: PLC0415 (an extra of this package)

        remote = Remote(
            grpc_address(target),
            namespace=namespace,
            timeout=60.0,
            is_tls=target.startswith("https://"),
            credentials=credentials,
        )
        watch = cls(remote, after)
        watch._owned = True
        return watch

    def __iter__(self) -> BlockWatch:
        return self

    def __next__(self) -> BlockUpdate:
        answer = self._remote.next_watched(self._stream)
        if answer is None:
            raise Disconnected("the stream of the watch ended")
        try:
            events = tuple(BlockEvent.of(event) for event in answer.events)
        except ValueError as error:
            raise Internal(f"an event that this client does not know: {error}") from error
        number = answer.number
        self.position = WatchPosition(answer.boot_id, number) if number else None
        return BlockUpdate(answer.boot_id, number, bool(answer.reset), events)

    def close(self) -> None:
        """Ends it, also from another thread."""
        self._stream.cancel()
        if self._owned:
            self._remote.close()

    def __enter__(self) -> BlockWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
