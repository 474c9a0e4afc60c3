"""Chunks by key: time to put, find and get them, and what a small one costs.

python bench/chunks.py [CODEC]   # KVD_BINARY, or kvd of PATH, is the daemon
"""

import statistics
import sys
import time

import numpy as np

import kvd
from kvd.chunks import Chunk, ChunkCache, ChunkHome, ChunkShape

ROUNDS = 5


def measure(region, name, shape, count, codec):
    home = ChunkHome(region, "bench", name, b"weights", codec=codec)
    cache = ChunkCache(home, shape)
    draw = np.random.default_rng(0)
    values = draw.standard_normal(shape.size // 2).astype(np.float16)
    rows = values.view(np.uint8)
    into = np.empty_like(rows)
    seconds = {"put": [], "find": [], "get": [], "put again": []}
    for turn in range(ROUNDS):
        chunks = [Chunk(b"%d %d" % (turn, at), rows) for at in range(count)]
        wanted = [Chunk(chunk.key, into) for chunk in chunks]
        for what, call in (
            ("put", lambda chunks=chunks: cache.put(chunks)),
            ("find", lambda chunks=chunks: cache.contains([chunk.key for chunk in chunks])),
            ("get", lambda wanted=wanted: cache.get(wanted)),
            ("put again", lambda chunks=chunks: cache.put(chunks)),
        ):
            began = time.perf_counter()
            assert call() == [True] * count, what
            seconds[what].append(time.perf_counter() - began)
        if codec == "raw":
            assert np.array_equal(rows, into)
        cache.drop([chunk.key for chunk in chunks])
    for what, each in seconds.items():
        middle = statistics.median(each)
        rate = f", {shape.size * count / middle / 1e9:.2f} GB/s" if what in ("put", "get") else ""
        print(f"{name} {what}: {middle / count * 1e3:.2f} ms a chunk{rate}")
    cache.close()


def main():
    codec = sys.argv[1] if len(sys.argv) > 1 else "raw"
    f16 = kvd.DType.F16
    with kvd.serve(pool="2 GiB", settings={"device.threads": 1}) as server:
        # LMCache's chunk of a model of 8 billion parameters, and SGLang's page.
        measure(server.region, "256 tokens", ChunkShape(32, 8, 128, 256, f16), 8, codec)
        measure(server.region, "64 tokens", ChunkShape(32, 8, 128, 64, f16), 32, codec)
        # Rows hardly count here.
        measure(server.region, "32 small tokens", ChunkShape(2, 1, 64, 32, f16), 128, codec)


if __name__ == "__main__":
    main()
