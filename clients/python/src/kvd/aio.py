"""asyncio: the blocking calls, each in a thread of the loop's pool.

    client = await kvd.aio.connect("/run/kvd/region.sock")
    model = await client.model("llama", kvd.Geometry(32, 8, 128), dtype="f16")
    sequence = await model.open()
    attended = await model.attend(0, [sequence], q)

A call sleeps in the kernel and keeps no other from running. One that is cancelled goes on until it
is answered; its answer is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from . import client as _client
from .calls import Attended, Queries, Query, StoreAck
from .model import Geometry
from .model import Model as SyncModel
from .sequence import Sequence as SyncSequence
from .sequence import SequenceState


class Sequence:
    """As `kvd.Sequence`, which is `sync`."""

    def __init__(self, sync: SyncSequence) -> None:
        self.sync = sync

    async def store(self, layer: int, k: Any, v: Any, start: int | None = None) -> StoreAck:
        """Appends to a layer."""
        return await asyncio.to_thread(self.sync.store, layer, k, v, start)

    async def store_layers(self, k: list[Any], v: list[Any]) -> list[StoreAck]:
        """Appends to every layer."""
        return await asyncio.to_thread(self.sync.store_layers, k, v)

    async def load(self, layer: int, start: int = 0, end: int | None = None) -> tuple[Any, Any]:
        """Rows as they are held."""
        return await asyncio.to_thread(self.sync.load, layer, start, end)

    async def fork(self, length: int | None = None) -> Sequence:
        """Shares the first tokens."""
        return Sequence(await asyncio.to_thread(self.sync.fork, length))

    async def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        await asyncio.to_thread(self.sync.truncate, length)

    async def describe(self) -> SequenceState:
        """What the daemon holds."""
        return await asyncio.to_thread(self.sync.describe)

    async def close(self) -> None:
        """Gives up what nobody else shares."""
        await asyncio.to_thread(self.sync.close)


class Model:
    """As `kvd.Model`, which is `sync`."""

    def __init__(self, sync: SyncModel) -> None:
        self.sync = sync

    async def open(self) -> Sequence:
        """A new sequence."""
        return Sequence(await asyncio.to_thread(self.sync.open))

    async def attend(
        self,
        layer: int,
        queries: Queries | Iterable[Query | SyncSequence | Sequence],
        q: Any,
        **options: Any,
    ) -> Attended:
        """Attention of a batch; `options` as of `kvd.Model.attend`."""
        if not isinstance(queries, Queries):
            queries = Queries(one.sync if isinstance(one, Sequence) else one for one in queries)
        return await asyncio.to_thread(self.sync.attend, layer, queries, q, **options)


class Client:
    """As `kvd.Client`, which is `sync`."""

    def __init__(self, sync: _client.Client) -> None:
        self.sync = sync

    async def model(self, name: str, geometry: Geometry, **options: Any) -> Model:
        """Registers a model; `options` as of `kvd.Client.model`."""
        return Model(await asyncio.to_thread(self.sync.model, name, geometry, **options))

    async def info(self) -> _client.ServerInfo:
        """What the daemon says of itself."""
        return await asyncio.to_thread(self.sync.info)

    async def close(self) -> None:
        """Ends the session and the connection."""
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def connect(target: str, **options: Any) -> Client:
    """Connects to a daemon; `options` as of `kvd.connect`."""
    return Client(await asyncio.to_thread(_client.connect, target, **options))
