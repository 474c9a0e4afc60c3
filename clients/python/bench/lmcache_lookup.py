"""How long LMCache's engine takes to look 131,072 cached tokens up, in its memory on the CPU.

    python bench/lmcache_lookup.py

`kvd bench cache` and `bench/cache_tiers.py match` look up the same tokens as 2,048 keys. LMCache
hashes tokens itself; what its look-ups take beside that is given apart.
"""

import os
import statistics
import time

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

TOKENS, WIDTH = 131_072, 16


class HostMemory(GPUConnectorInterface):
    """KV memory of one narrow layer."""

    def __init__(self):
        self.kv = torch.zeros(2, 1, TOKENS, WIDTH, dtype=torch.float16)

    def from_gpu(self, memory_obj, start, end, **_):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def to_gpu(self, memory_obj, start, end, **_):
        self.kv[:, :, start:end] = memory_obj.tensor

    def batched_from_gpu(self, memory_objs, starts, ends, **_):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*one)

    def batched_to_gpu(self, memory_objs, starts, ends, **_):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*one)

    def get_shape(self, num_tokens):
        return torch.Size([2, 1, num_tokens, WIDTH])


def milliseconds(act):
    times = []
    for _ in range(15):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main():
    tokens = list(range(TOKENS))
    for chunk in (256, 64):
        engine = LMCacheEngineBuilder.get_or_create(
            f"engine-{chunk}",
            LMCacheEngineConfig.from_defaults(
                chunk_size=chunk,
                local_cpu=True,
                max_local_cpu_size=0.5,
                pre_caching_hash_algorithm="sha256_cbor",
            ),
            LMCacheMetadata(
                model_name="narrow",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=torch.float16,
                kv_shape=(1, 2, chunk, 1, WIDTH),
                chunk_size=chunk,
                use_mla=False,
            ),
            HostMemory(),
            lambda tensor, _: tensor,
            lambda thing, _: thing,
        )
        engine.post_init()
        engine.store(torch.tensor(tokens))
        assert engine.lookup(tokens) == TOKENS
        whole = milliseconds(lambda of=engine: of.lookup(tokens))
        keys = [key for _, _, key in engine.token_database.process_tokens(tokens)]
        manager = engine.storage_manager
        alone = milliseconds(lambda of=manager, keys=keys: [of.contains(key) for key in keys])
        print(
            f"chunks of {chunk}: {whole:.2f} ms; {len(keys)} look-ups alone {alone:.2f} ms"
            f"  [load {os.getloadavg()[0]:.1f}]"
        )
        LMCacheEngineBuilder.destroy(f"engine-{chunk}")


if __name__ == "__main__":
    main()
