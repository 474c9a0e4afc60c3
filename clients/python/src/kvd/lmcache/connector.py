"""LMCache's remote connector over a daemon's cache. LMCache's loop never waits for the daemon:
threads of this connector do."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from lmcache.utils import CacheEngineKey
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from ..arrays import Array, DType
from ..chunks import Chunk, ChunkCache, ChunkShape
from ..errors import KvdError, Unsupported
from ..options import STORE_OPTIONS, check_options, chunk_home
from . import PLUGIN, check_release

logger = logging.getLogger("lmcache.kvd")
T = TypeVar("T")

_THREADS = 4
_OPTIONS = {**STORE_OPTIONS, "untested_lmcache": (bool,)}
_OF_LMCACHE = ("module_path", "class_name")


class KvdAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for plug-ins named `kvd` or `kvd.…`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises `IrrecoverableException` for what this package does not serve, so that LMCache
        does not go on without a store that was asked for."""
        try:
            return KvdConnector(context)
        except KvdError as error:
            raise IrrecoverableException(str(error)) from error


class KvdConnector(RemoteConnector):  # type: ignore[misc]
    """Whole chunks of LMCache, each under its key."""

    def __init__(self, context: ConnectorContext) -> None:
        """Raises `Unsupported` for what is not known to be right, `InvalidArgument` for options
        that are none."""
        super().__init__(context.config, context.metadata)
        options = _read_options(context)
        check_release(options)
        shape = _read_shape(context)
        metadata = context.metadata
        self._memory = context.local_cpu_backend
        ranks = f"{metadata.world_size}/{metadata.worker_id}/{metadata.kv_shape}"
        home = chunk_home("lmcache", metadata.model_name, ranks.encode(), options)
        self._chunks = ChunkCache(home, shape)
        self._threads = ThreadPoolExecutor(_THREADS, "kvd-lmcache")

    def __repr__(self) -> str:
        return f"<KvdConnector {self._chunks.home.region}>"

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self._run(lambda: self.exists_sync(key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self._chunks.contains([_key_bytes(key)])[0]

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: builtins.list[CacheEngineKey]) -> int:
        return _prefix(self._chunks.contains([_key_bytes(key) for key in keys]))

    async def batched_async_contains(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey], pin: bool = False
    ) -> int:
        return await self._run(lambda: self.batched_contains(keys))

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(
        self, keys: builtins.list[CacheEngineKey], memory_objs: builtins.list[MemoryObj]
    ) -> None:
        chunks = [
            Chunk(_key_bytes(key), _rows_of(memory))
            for key, memory in zip(keys, memory_objs, strict=True)
            if self._is_whole(memory)
        ]
        await self._run(lambda: self._chunks.put(chunks))

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(
        self, keys: builtins.list[CacheEngineKey]
    ) -> builtins.list[MemoryObj | None]:
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._get, keys)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # LMCache waits no longer: what comes belongs to nobody.
            job.add_done_callback(_release)
            raise

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: builtins.list[CacheEngineKey]
    ) -> builtins.list[MemoryObj]:
        found = await self.batched_get(keys)
        there = [memory for memory in found if memory is not None]
        usable = _prefix([memory is not None for memory in found])
        for memory in there[usable:]:
            memory.ref_count_down()
        return there[:usable]

    async def list(self) -> builtins.list[str]:
        """Nothing: the daemon holds digests of keys and not the keys."""
        return []

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._chunks.drop([_key_bytes(key)])

    async def close(self) -> None:
        await self._run(self._chunks.close)
        self._threads.shutdown(wait=False)

    async def _run(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def _is_whole(self, memory: MemoryObj) -> bool:
        size = self._chunks.shape.size
        if memory.get_memory_format() == MemoryFormat.KV_2LTD and memory.get_size() == size:
            return True
        logger.debug("kvd: %d bytes are no whole chunk of %d", memory.get_size(), size)
        return False

    def _get(self, keys: builtins.list[CacheEngineKey]) -> builtins.list[MemoryObj | None]:
        memories: list[MemoryObj] = []
        for _ in keys:
            memory = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if memory is None:
                # LMCache has no room: the chunks from here on are misses.
                break
            memories.append(memory)
        chunks = [
            Chunk(_key_bytes(key), _rows_of(memory))
            for key, memory in zip(keys, memories, strict=False)
        ]
        there: list[MemoryObj | None] = []
        for memory, is_found in zip(memories, self._chunks.get(chunks), strict=True):
            if not is_found:
                memory.ref_count_down()
            there.append(memory if is_found else None)
        return there + [None] * (len(keys) - len(there))


def _read_options(context: ConnectorContext) -> dict[str, Any]:
    place = f"remote_storage_plugin.{context.plugin_name or PLUGIN}"
    given = {
        name.removeprefix(f"{place}."): value
        for name, value in (context.config.extra_config or {}).items()
        if name.startswith(f"{place}.")
    }
    for name in _OF_LMCACHE:
        given.pop(name, None)
    return check_options(f"extra_config, {place}", given, _OPTIONS)


def _read_shape(context: ConnectorContext) -> ChunkShape:
    config, metadata = context.config, context.metadata
    if metadata is None:
        raise Unsupported("an engine that does not tell its shapes")
    if metadata.use_mla or metadata.get_num_groups() != 1:
        raise Unsupported("MLA, and models with several kinds of layers")
    if config.use_layerwise:
        raise Unsupported("use_layerwise: chunks of single layers")
    if config.remote_serde not in (None, "naive"):
        raise Unsupported(f"remote_serde = {config.remote_serde}: leave it out, kvd compresses")
    (dtype,) = metadata.get_dtypes()
    shape = tuple(metadata.get_shapes()[0])
    sides, layers, tokens, width = shape
    heads, head_dim = metadata.kv_shape[3:]
    if sides != 2 or width != heads * head_dim:
        raise Unsupported(f"chunks of shape {shape} with {heads} heads of {head_dim}")
    try:
        kind = DType.of(str(dtype))
    except KvdError as error:
        raise Unsupported(f"a KV cache of {dtype}: kvd takes f32, f16 and bf16") from error
    return ChunkShape(layers, heads, head_dim, tokens, kind)


def _key_bytes(key: CacheEngineKey) -> bytes:
    return str(key.to_string()).encode()


def _rows_of(memory: MemoryObj) -> Array:
    return np.frombuffer(memory.byte_array, np.uint8)


def _prefix(found: builtins.list[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _release(job: asyncio.Future[builtins.list[MemoryObj | None]]) -> None:
    if not job.cancelled() and job.exception() is None:
        for memory in job.result():
            if memory is not None:
                memory.ref_count_down()
