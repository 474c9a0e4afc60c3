"""What the cache's tiers cost and bring, through the daemon, beside plain peers in the same run.

    KVD_BINARY=… python bench/cache_tiers.py [--folder DIR] [match disk redis attends nothing]

match: 2,048 keys by gRPC and by a region. disk: publish to durable, and back after a kill; the
peers write and read the same bytes with O_DIRECT, and rows in f16. redis: a second daemon reads
what the first published, beside redis-benchmark; and what a dead Redis adds to a match that hits.
attends: one layer of 4,096 tokens, alone and while prefixes come from disk. nothing: stores and
attends of prompts that nobody shares, published and written to disk or not.
"""

import argparse
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import kvd

# 32 layers, 8 KV heads of 128 channels in f16; 32 pages of 64 tokens.
BIG = kvd.Geometry(32, 8, 128)
PAGES, TOKENS, BIG_PAGE_BYTES = 32, 32 * 64, 64 * 32 * 8 * 128 * 2 * 2
QUIET = {"log.filter": "warn,kvd::daemon=info", "cache.remote.min_prefix_tokens": 0}
DRAW = np.random.default_rng(1)


def say(*parts):
    print(f"{' '.join(parts)}  [load {os.getloadavg()[0]:.1f}]", flush=True)


def keys(pages):
    return kvd.Keys(DRAW.bytes(32 * pages), 32, 64)


def timed(act, rounds):
    """Sorted seconds of so many runs, without the first few."""
    times = []
    for _ in range(rounds + rounds // 10):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return sorted(times[rounds // 10 :])


def quantiles(times):
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    return f"p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us"


def metric(server, series):
    page = urllib.request.urlopen(f"http://{server.admin}/metrics").read().decode()
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.M)
    return float(found[1]) if found else 0.0


def wait_until(is_so):
    while not is_so():
        time.sleep(0.002)


def disk_settings(folder):
    return {**QUIET, "cache.disk.path": folder, "cache.disk.bytes": "8 GiB"}


def store_prefix(model, prefix, rows, settle=None):
    """Stores a prefix and publishes it; seconds of the publish until `settle` says it is done."""
    with model.open() as sequence:
        sequence.store_layers([rows] * model.geometry.layers, [rows] * model.geometry.layers)
        began = time.perf_counter()
        done = sequence.publish(0, prefix)
        assert done.length == len(prefix) * 64, done
        if settle is not None:
            wait_until(settle)
        return time.perf_counter() - began


def big_rows():
    return DRAW.standard_normal((TOKENS, 8, 128)).astype(np.float16)


def run_match(_):
    small = kvd.Geometry(1, 1, 32)
    with kvd.serve(pool="2 GiB", settings=QUIET) as server:
        for name, target in (("gRPC, Unix socket", server.unix), ("region", server.region)):
            with kvd.connect(target) as client:
                model, chain = (
                    client.model(name[:4].lower(), small, dtype="f16", codec="raw"),
                    keys(2048),
                )
                rows = np.zeros((32768, 1, 32), np.float16)
                with model.open() as sequence:
                    for at in range(0, 2048 * 64, 32768):
                        sequence.store(0, rows, rows, at)
                    sequence.publish(0, chain)
                for case, chain_of in (
                    ("all 2,048", chain),
                    ("none of 2,048", keys(2048)),
                    ("one", chain.cut(0, 1)),
                ):
                    times = timed(lambda c=chain_of: model.match([c]), 300)
                    say(f"match by {name}, {case}: {quantiles(times)}")


def direct(path, flags):
    return os.open(path, flags | os.O_DIRECT, 0o600)


def plain_write(folder, size, count):
    """Writes files of so many bytes with a sync for each 8 MiB; seconds."""
    buffer = mmap.mmap(-1, size)
    buffer.write(DRAW.bytes(size))
    began, since = time.perf_counter(), 0
    file = direct(f"{folder}/plain", os.O_CREAT | os.O_WRONLY)
    for _ in range(count):
        os.write(file, buffer)
        since += size
        if since >= 8 << 20:
            os.fdatasync(file)
            since = 0
    os.fdatasync(file)
    os.close(file)
    return time.perf_counter() - began


def plain_read(folder, size, count):
    """Reads them by four threads; seconds."""

    def read(first):
        file, buffer = direct(f"{folder}/plain", os.O_RDONLY), mmap.mmap(-1, size)
        for at in range(first, count, 4):
            os.preadv(file, [buffer], at * size)
        os.close(file)

    with ThreadPoolExecutor(4) as pool:
        began = time.perf_counter()
        list(pool.map(read, range(4)))
        return time.perf_counter() - began


def run_disk(folder):
    for codec in ("kivi-4", "kivi-2"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            with kvd.serve(pool="4 GiB", settings=disk_settings(place)) as server:
                written = 'kvd_tier_write_bytes_total{tier="disk"}'
                waiting = 'kvd_tier_queue_bytes{tier="disk"}'
                chains, durable, back = [keys(PAGES) for _ in range(5)], [], []

                def model_of(client, codec=codec):
                    return client.model("big", BIG, dtype="f16", codec=codec, weights=b"bench")

                with server.connect(region_bytes=256 << 20) as client:
                    model, rows = model_of(client), big_rows()
                    for chain in chains:
                        before = metric(server, written)
                        durable.append(
                            store_prefix(
                                model,
                                chain,
                                rows,
                                lambda b=before: (
                                    metric(server, written) > b and metric(server, waiting) == 0
                                ),
                            )
                        )
                    size = int(metric(server, written) / len(chains) / PAGES) // 4096 * 4096
                server.kill()
                server.restart()
                with server.connect() as client:
                    model = model_of(client)
                    for chain in chains:
                        began = time.perf_counter()
                        with model.open(chain) as sequence:
                            back.append(time.perf_counter() - began)
                            assert sequence.length == TOKENS
            writes = [plain_write(place, size, PAGES) for _ in chains]
            reads = [plain_read(place, size, PAGES) for _ in chains]
            raws = [
                plain_write(place, BIG_PAGE_BYTES, PAGES)
                and plain_read(place, BIG_PAGE_BYTES, PAGES)
                for _ in chains
            ]
            medians = [statistics.median(times) for times in (durable, writes, back, reads, raws)]
            speeds = [size * PAGES / median / 1e6 for median in medians]
            tokens = [TOKENS / medians[at] for at in (2, 4)]
            say(
                f"disk, {codec}, records of {size}: publish to durable {speeds[0]:.0f} MB/s,",
                f"plain {speeds[1]:.0f}; back {speeds[2]:.0f} MB/s, plain {speeds[3]:.0f};",
                f"tokens/s {tokens[0]:.0f}, f16 files {tokens[1]:.0f}",
            )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_redis(_):
    port = free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    settings = {
        **QUIET,
        "cache.remote.url": f"redis://127.0.0.1:{port}",
        "cache.remote.find_ms_max": 1000,
    }
    try:
        written = 'kvd_remote_requests_total{op="write",result="ok"}'
        times, chains = [], [keys(PAGES) for _ in range(5)]
        with kvd.serve(pool="4 GiB", settings=settings) as first:
            with first.connect(region_bytes=256 << 20) as client:
                model, rows = (
                    client.model("big", BIG, dtype="f16", codec="kivi-4", weights=b"bench"),
                    big_rows(),
                )
                for chain in chains:
                    before = metric(first, written)
                    store_prefix(
                        model, chain, rows, lambda b=before: metric(first, written) == b + PAGES
                    )
                size = int(
                    metric(first, 'kvd_tier_write_bytes_total{tier="remote"}') / len(chains) / PAGES
                )
            with kvd.serve(pool="4 GiB", settings=settings) as second, second.connect() as client:
                model = client.model("big", BIG, dtype="f16", codec="kivi-4", weights=b"bench")
                for chain in chains:
                    began = time.perf_counter()
                    with model.open(chain) as sequence:
                        times.append(time.perf_counter() - began)
                        assert sequence.length == TOKENS
                told = subprocess.run(
                    [
                        "redis-benchmark",
                        "-p",
                        str(port),
                        "-t",
                        "set,get",
                        "-d",
                        str(size),
                        "-c",
                        "4",
                        "-n",
                        "200",
                        "--csv",
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                peer = float(re.search(r'"GET","([0-9.]+)"', told)[1]) * size
                ours = size * PAGES / statistics.median(times)
                say(
                    f"Redis, records of {size}: verified in the pool {ours / 1e6:.0f} MB/s,",
                    f"redis-benchmark GET {peer / 1e6:.0f} MB/s",
                )
                alive = timed(lambda: model.match([chains[0]]), 300)
                redis.send_signal(signal.SIGKILL)
                redis.wait()
                for _ in range(8):
                    model.match([keys(PAGES)])  # until the breaker is open
                dead = timed(lambda: model.match([chains[0]]), 300)
                half = timed(lambda: model.match([chains[0].joined(keys(1))]), 300)
                say(
                    f"match that hits, Redis alive: {quantiles(alive)}; dead: {quantiles(dead)};",
                    f"dead and one key more: {quantiles(half)}",
                )
    finally:
        redis.kill()


def run_attends(folder):
    with tempfile.TemporaryDirectory(dir=folder) as place:
        settings = {**disk_settings(place), "cache.pool_percent": 50}
        with kvd.serve(pool="640 MiB", settings=settings) as server:
            with server.connect(region_bytes=256 << 20) as client, server.connect() as other:
                of = [
                    each.model("big", BIG, dtype="f16", codec="kivi-4", weights=b"bench")
                    for each in (client, other)
                ]
                chains, rows = [keys(PAGES) for _ in range(8)], big_rows()
                waiting = 'kvd_tier_queue_bytes{tier="disk"}'
                for chain in chains:
                    store_prefix(of[0], chain, rows, lambda: metric(server, waiting) == 0)
                small = kvd.Geometry(1, 8, 128)
                model = client.model("one", small, dtype="f16", codec="kivi-4")
                sequence, q = model.open(), DRAW.standard_normal((1, 32, 128)).astype(np.float16)
                for at in (0, TOKENS):
                    sequence.store(0, rows, rows, at)
                attend = lambda: model.attend(0, [sequence], q)  # noqa: E731
                alone = timed(attend, 2000)
                stop, moved = threading.Event(), [0]

                def promote():
                    while not stop.is_set():
                        for chain in chains:
                            with of[1].open(chain) as found:
                                moved[0] += found.length

                thread = threading.Thread(target=promote)
                before = metric(server, 'kvd_tier_read_bytes_total{tier="disk"}')
                began = time.perf_counter()
                thread.start()
                beside = timed(attend, 4000)
                seconds = time.perf_counter() - began
                read = metric(server, 'kvd_tier_read_bytes_total{tier="disk"}') - before
                stop.set()
                thread.join()
                say(
                    f"attends alone: {quantiles(alone)};",
                    f"while {read / seconds / 1e6:.0f} MB/s come from disk: {quantiles(beside)}",
                )


def run_nothing(folder):
    """Rounds by turns with a daemon that publishes and writes, and one that does not."""
    geometry, tokens = kvd.Geometry(4, 8, 128), 512
    rows = DRAW.standard_normal((tokens, 8, 128)).astype(np.float16)
    q = DRAW.standard_normal((1, 32, 128)).astype(np.float16)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        with (
            kvd.serve(pool="1 GiB", settings=disk_settings(place)) as on,
            kvd.serve(pool="1 GiB", settings=QUIET) as off,
        ):
            with on.connect() as first, off.connect() as second:
                stores, attends = {True: [], False: []}, {True: [], False: []}
                models = {
                    is_on: client.model(
                        "m", geometry, dtype="f16", codec="kivi-4", weights=b"bench"
                    )
                    for is_on, client in ((True, first), (False, second))
                }
                for turn in range(400):
                    is_on, model, chain = turn % 2 == 0, models[turn % 2 == 0], keys(tokens // 64)
                    if is_on:
                        assert model.match([chain]).tokens == (0,)
                    with model.open() as sequence:
                        began = time.perf_counter()
                        sequence.store_layers([rows] * 4, [rows] * 4)
                        stores[is_on].append(time.perf_counter() - began)
                        if is_on:
                            sequence.publish(0, chain)
                        for _ in range(10):
                            began = time.perf_counter()
                            model.attend(0, [sequence], q)
                            attends[is_on].append(time.perf_counter() - began)
                for name, times in (("stores", stores), ("attends", attends)):
                    say(
                        f"{name} with nothing shared, cached and written:",
                        f"{quantiles(sorted(times[True]))}; not: {quantiles(sorted(times[False]))}",
                    )


RUNS = {
    "match": run_match,
    "disk": run_disk,
    "redis": run_redis,
    "attends": run_attends,
    "nothing": run_nothing,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], default=list(RUNS))
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is measured")
    given = parser.parse_args()
    for name in given.runs:
        RUNS[name](given.folder)


if __name__ == "__main__":
    main()
