"""An L2 adapter for LMCache's server (MP mode): its objects in a daemon's cache. LMCache's
controllers never wait for the daemon: threads of this adapter do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from ..arrays import DType
from ..chunks import Chunk, ChunkCache, ChunkShape
from ..errors import InvalidArgument, KvdError, Unsupported
from ..options import STORE_OPTIONS, check_options, chunk_home
from . import check_release

logger = logging.getLogger("lmcache.kvd")

_THREADS = 4
_OPTIONS = {**STORE_OPTIONS, "head_dim": (int,), "untested_lmcache": (bool,)}
# Widest head of a model, for which rows of unknown heads are cut with `raw`.
_HEAD_DIM_MAX = 256
_DIMENSIONS = 4


@dataclass(frozen=True)
class _Kind:
    """Objects that are kept as one model at the daemon."""

    model: str
    rank: int
    group: int
    shape: tuple[int, ...]
    dtype: str


class _Results:
    """What tasks have come to, until LMCache asks; its event tells that some has."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._done[task] = result
        self.event.notify()

    def pop(self, task: int) -> Any | None:
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done


class KvdL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of LMCache's server, each under its key; what fails is a miss."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """Raises `InvalidArgument` for options that are none, `Unsupported` for another release."""
        super().__init__()
        self._options = check_options("adapter_params", params, _OPTIONS)
        check_release(self._options)
        if self._options.get("codec", "raw") != "raw" and "head_dim" not in self._options:
            raise InvalidArgument(
                'adapter_params needs "head_dim" with a lossy codec: LMCache does not tell it'
            )
        self._caches: dict[_Kind, ChunkCache | None] = {}
        self._lock = threading.Lock()
        self._tasks = 0
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._threads = ThreadPoolExecutor(_THREADS, "kvd-lmcache-l2")

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(
            self._stores, partial(self._store, keys, objects), L2StoreResult(False, 0)
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Locks nothing: an object that is evicted before it is loaded is a miss then."""
        layouts = dict(group_layout_descs)
        return self._submit(self._lookups, partial(self._look_up, keys, layouts), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(self._loads, partial(self._load, keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Drops objects of every layout that was seen."""
        with self._lock:
            caches = dict(self._caches)
        for kind, cache in caches.items():
            some = [_key_bytes(key) for key in keys if _is_of(key, kind)]
            if cache is not None and some:
                cache.drop(some)

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            caches = [cache for cache in self._caches.values() if cache is not None]
        counters = [cache.counters for cache in caches]
        return {
            "is_healthy": all(cache.is_reached() for cache in caches),
            "type": type(self).__name__,
            "region": self._options["region"],
            "stored": sum(one.stored for one in counters),
            "loaded": sum(one.loaded for one in counters),
            "missed": sum(one.missed for one in counters),
            "failures": sum(one.failures for one in counters),
        }

    def close(self) -> None:
        """Ends what is under way and hangs up; what is cached stays."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for cache in self._caches.values():
            if cache is not None:
                cache.close()
        for results in (self._stores, self._lookups, self._loads):
            results.event.close()

    def _submit(self, results: _Results, job: Callable[[], Any], failed: Any) -> int:
        with self._lock:
            self._tasks += 1
            task = self._tasks

        def run() -> None:
            try:
                result = job()
            except Exception:
                # A defect: LMCache must hear that the task is over.
                logger.exception("kvd: a task of LMCache failed")
                result = failed
            results.put(task, result)

        self._threads.submit(run)
        return task

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        kept = 0
        stored: list[ObjectKey] = []
        for kind, places in self._by_kind(keys, objects).items():
            cache = self._cache(kind)
            if cache is None:
                continue
            chunks = [_chunk(keys[at], objects[at]) for at in places]
            there = cache.put(chunks)
            stored += [keys[at] for at, is_kept in zip(places, there, strict=True) if is_kept]
            kept += sum(there) * cache.shape.size
        if stored:
            self._notify_keys_stored(stored, [kept // len(stored)] * len(stored))
        return L2StoreResult(len(stored) == len(keys), kept)

    def _look_up(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        found = Bitmap(len(keys))
        kinds: dict[_Kind, list[int]] = {}
        for at, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            if layout is not None and len(layout.shapes) == 1:
                kind = _kind(key, layout.shapes[0], layout.dtypes[0])
                kinds.setdefault(kind, []).append(at)
        for kind, places in kinds.items():
            cache = self._cache(kind)
            if cache is not None:
                there = cache.contains([_key_bytes(keys[at]) for at in places])
                found.batched_set([at for at, one in zip(places, there, strict=True) if one])
        return found

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        loaded, some = Bitmap(len(keys)), []
        for kind, places in self._by_kind(keys, objects).items():
            cache = self._cache(kind)
            if cache is not None:
                there = cache.get([_chunk(keys[at], objects[at]) for at in places])
                some += [at for at, one in zip(places, there, strict=True) if one]
        loaded.batched_set(some)
        if some:
            self._notify_keys_accessed([keys[at] for at in some])
        return loaded

    def _by_kind(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> dict[_Kind, list[int]]:
        kinds: dict[_Kind, list[int]] = {}
        for at, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            shapes, dtypes = memory.get_shapes(), memory.get_dtypes()
            if len(shapes) == 1:
                kinds.setdefault(_kind(key, shapes[0], dtypes[0]), []).append(at)
            else:
                logger.debug("kvd: an object of %d shapes is not kept", len(shapes))
        return kinds

    def _cache(self, kind: _Kind) -> ChunkCache | None:
        """Where objects of a kind are kept; None for a kind that is not, which is said once."""
        with self._lock:
            if kind not in self._caches:
                try:
                    self._caches[kind] = self._make_cache(kind)
                except KvdError as error:
                    self._caches[kind] = None
                    logger.error(
                        "kvd: objects %s of %s are not kept: %s", kind.shape, kind.model, error
                    )
            return self._caches[kind]

    def _make_cache(self, kind: _Kind) -> ChunkCache:
        shape = _chunk_shape(kind, self._options.get("head_dim"))
        identity = f"mp/{kind.rank:x}/{kind.group}/{kind.shape}".encode()
        return ChunkCache(chunk_home("lmcache", kind.model, identity, self._options), shape)


def _chunk_shape(kind: _Kind, head_dim: int | None) -> ChunkShape:
    """Raises `Unsupported` for what is no [2, layers, tokens, width] of rows."""
    if len(kind.shape) != _DIMENSIONS or kind.shape[0] != 2:
        raise Unsupported("this version keeps objects [2, layers, tokens, width], and no MLA")
    _, layers, tokens, width = kind.shape
    if head_dim is None:
        # `raw` keeps the bits of any cut.
        fits = (one for one in range(2, _HEAD_DIM_MAX + 1, 2) if width % one == 0)
        head_dim = max(fits, default=width)
    if width % head_dim:
        raise InvalidArgument(f"head_dim = {head_dim}: rows are {width} wide")
    try:
        dtype = DType.of(kind.dtype)
    except KvdError as error:
        raise Unsupported(f"rows of {kind.dtype}: kvd takes f32, f16 and bf16") from error
    return ChunkShape(layers, width // head_dim, head_dim, tokens, dtype)


def _kind(key: ObjectKey, shape: torch.Size, dtype: torch.dtype) -> _Kind:
    return _Kind(key.model_name, key.kv_rank, key.object_group_id, tuple(shape), str(dtype))


def _is_of(key: ObjectKey, kind: _Kind) -> bool:
    of_key = (key.model_name, key.kv_rank, key.object_group_id)
    return of_key == (kind.model, kind.rank, kind.group)


def _key_bytes(key: ObjectKey) -> bytes:
    salt: str = key.cache_salt
    return bytes(key.chunk_hash) + b"\0" + salt.encode()


def _chunk(key: ObjectKey, memory: MemoryObj) -> Chunk:
    return Chunk(_key_bytes(key), np.frombuffer(memory.byte_array, np.uint8))
