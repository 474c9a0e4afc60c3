"""A daemon with a disk, and LMCache's engine in this process over KV memory on the CPU."""

import os

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING")

import itertools
import signal
import threading
import time

import pytest
import torch

import kvd
import kvd.lmcache

pytest.importorskip("lmcache")

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, DIM, CHUNK, ROOM = 4, 2, 64, 256, 2048
# Whole chunks of the 1000 tokens that tests store; LMCache keeps no rest by default.
FULL = 3
PATIENCE = 30.0
_numbers = itertools.count()


class HostMemory(GPUConnectorInterface):
    """KV memory of an engine: tokens are rows [2, layers, tokens, width] of one tensor."""

    def __init__(self, dtype):
        self.kv = torch.zeros(2, LAYERS, ROOM, HEADS * DIM, dtype=dtype)

    def from_gpu(self, memory_obj, start, end, **kwargs):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def to_gpu(self, memory_obj, start, end, **kwargs):
        self.kv[:, :, start:end] = memory_obj.tensor

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*one)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*one)

    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, HEADS * DIM])


class Engine:
    """LMCache's engine with the plug-in, and the memory that it serves."""

    def __init__(self, region, options=None, dtype=torch.float32, worker=0, **config):
        settings = kvd.lmcache.storage_settings(region, **(options or {}))
        every = {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0.1,
            # Independent of the process, unlike the default.
            "pre_caching_hash_algorithm": "sha256_cbor",
            **settings,
            **config,
        }
        self.metadata = LMCacheMetadata(
            model_name="tiny",
            world_size=2,
            local_world_size=2,
            worker_id=worker,
            local_worker_id=worker,
            kv_dtype=dtype,
            kv_shape=(LAYERS, 2, every["chunk_size"], HEADS, DIM),
            chunk_size=every["chunk_size"],
            use_mla=every.pop("use_mla", False),
        )
        self.name = f"engine-{next(_numbers)}"
        self.memory = HostMemory(dtype)
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.name,
            LMCacheEngineConfig.from_defaults(**every),
            self.metadata,
            self.memory,
            lambda tensor, source: tensor,
            lambda thing, source: thing,
        )
        self.engine.post_init()

    @property
    def backends(self):
        return list(self.engine.storage_manager.storage_backends.values())

    @property
    def backend(self):
        (backend,) = [one for one in self.backends if type(one).__name__ == "RemoteBackend"]
        return backend

    @property
    def chunks(self):
        return self.backend.connection.getWrappedConnector()._chunks

    def fill(self, seed):
        """Random rows, with values that no rounding would leave alone."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.memory.kv.shape, generator=generator)
        rows[..., 0], rows[..., 1] = -0.0, 1e-40
        self.memory.kv.copy_(rows)
        return self.memory.kv.clone()

    def store(self, tokens, chunks):
        """Stores, and waits until so many chunks more are kept."""
        before = self.chunks.counters.stored
        self.engine.store(tokens)
        await_true(lambda: self.chunks.counters.stored == before + chunks)

    def store_settled(self, tokens):
        """Stores, and waits until each chunk is kept or refused: LMCache counts no batched put."""
        is_settled, put = threading.Event(), self.chunks.put

        def put_and_note(chunks):
            self.chunks.put = put
            assert len(chunks) == FULL
            try:
                return put(chunks)
            finally:
                is_settled.set()

        self.chunks.put = put_and_note
        self.engine.store(tokens)
        assert is_settled.wait(PATIENCE)

    def retrieve(self, tokens):
        """Rows as they come back into memory that held none, and how many."""
        self.memory.kv.zero_()
        count = int(self.engine.retrieve(tokens).sum())
        assert not self.memory.kv[:, :, count:].any()
        return self.memory.kv[:, :, :count].clone(), count

    def close(self):
        LMCacheEngineBuilder.destroy(self.name)


def await_true(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_same(a, b):
    """Bit by bit: -0.0 is not 0.0."""
    view = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.shape == b.shape and torch.equal(a.view(view), b.view(view))


def stop(server):
    """Ends the daemon as an operator does; `server.restart` starts it again."""
    os.kill(server.pid, signal.SIGTERM)
    assert server._process.wait(PATIENCE) == 0


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def server(folder):
    settings = {
        "device.threads": 1,
        "namespaces.allowed": '["*"]',
        "cache.disk.path": str(folder),
        "cache.disk.bytes": "1 GiB",
    }
    with kvd.serve(pool="256 MiB", settings=settings) as running:
        yield running


@pytest.fixture
def engine(server):
    """Makes engines of LMCache, closed in the end."""
    made = []

    def make(region=server.region, **options):
        made.append(Engine(region, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def tokens():
    return torch.arange(1000) % 499
