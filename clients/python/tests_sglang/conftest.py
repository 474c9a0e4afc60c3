"""A daemon with a disk, and SGLang's own host pool, factory and storage calls, on the CPU."""

import hashlib
import logging
import os
import signal
import types

import pytest
import torch

import kvd
import kvd.sglang

pytest.importorskip("sglang")

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 64, 64, 512
LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
logging.getLogger("sglang").setLevel(logging.ERROR)


def make_pool(layout="page_first", dtype=torch.float32, page=PAGE, dims=(DIM, DIM)):
    """SGLang's host pool for models of full attention."""

    def buffers(dim):
        return tuple(torch.zeros(TOKENS, HEADS, dim, dtype=dtype) for _ in range(LAYERS))

    def pointers(tensors):
        return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)

    k, v = buffers(dims[0]), buffers(dims[1])
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=pointers(k),
            v_data_ptrs=pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page,
        head_num=HEADS,
        head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def make_config(region, options=None, **other):
    every = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny/model",
        "extra_config": kvd.sglang.storage_settings(region, **(options or {})),
    }
    return HiCacheStorageConfig(**{**every, **other})


class Host:
    """A pool with its storage, made by SGLang's factory, and the controller's calls of both."""

    def __init__(self, region, options=None, config=None, **pool):
        self.pool = make_pool(**pool)
        config = make_config(region, options, **(config or {}))
        self.storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        # What the methods of the controller below use of it.
        self.controller = types.SimpleNamespace(
            storage_backend=self.storage,
            storage_host_pool=self.pool,
            page_size=self.pool.page_size,
        )
        self.operation = types.SimpleNamespace(request_id="r", is_terminated=lambda: False)

    def fill(self, seed):
        """Random rows, with values that no rounding would leave alone."""
        rows = torch.randn(self.pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed))
        rows[..., 0], rows[..., 1] = -0.0, 1e-40
        self.pool.kv_buffer.copy_(rows)
        return self.pool.kv_buffer.clone()

    def backup(self, keys, indices, is_zero_copy=True):
        kind = "_page_set_zero_copy" if is_zero_copy else "_generic_page_set"
        return getattr(HiCacheController, kind)(self.controller, keys, indices)

    def prefetch(self, keys, indices, is_zero_copy=True):
        """How many pages came, from the first on."""
        kind = "_page_get_zero_copy" if is_zero_copy else "_generic_page_get"
        call = getattr(HiCacheController, kind)
        return call(self.controller, self.operation, keys, indices)

    def page(self, start):
        """Rows [2, layers, tokens, heads, dim] of a page, whatever the layout."""
        page = self.pool.get_data_page(start, flat=False)
        if self.pool.layout == "page_first":
            return page.transpose(1, 2)
        return page.squeeze(1) if self.pool.layout == "page_first_direct" else page

    def pages(self, indices):
        size = self.pool.page_size
        return torch.stack([self.page(int(start)) for start in indices[::size]])


def hashes(count, prompt=0):
    """Page hashes as SGLang chains them: hex of SHA-256 over the one before and the tokens."""
    found, before = [], b""
    for page in range(count):
        tokens = b"".join(
            (prompt * 1000 + page * PAGE + at).to_bytes(4, "little") for at in range(PAGE)
        )
        before = hashlib.sha256(before + tokens).digest()
        found.append(before.hex())
    return found


def is_same(a, b):
    """Bit by bit: -0.0 is not 0.0."""
    view = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def stop(server):
    os.kill(server.pid, signal.SIGTERM)
    assert server._process.wait(30) == 0


@pytest.fixture
def server(tmp_path):
    settings = {
        "device.threads": 1,
        "namespaces.allowed": '["*"]',
        "cache.disk.path": str(tmp_path / "cache"),
        "cache.disk.bytes": "1 GiB",
    }
    with kvd.serve(pool="256 MiB", settings=settings) as running:
        yield running


@pytest.fixture
def host(server):
    made = []

    def make(region=server.region, **options):
        made.append(Host(region, **options))
        return made[-1]

    yield make
    for one in made:
        one.storage.close()
