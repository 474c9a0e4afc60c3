"""What an attend and a store through a region cost, seen from Python: p50, p99, Python's share.

    python bench/attend.py     # the daemon is $KVD_BINARY, that of kvd-server, or kvd of PATH

Python's share is measured with calls that are answered at once: encoding, copies, objects. What
the client's processor does in a real call is more: it sends, sleeps, wakes up with cold caches.
"""

import argparse
import contextlib
import os
import time
import urllib.request

import numpy as np

import kvd


def percentile(samples, part):
    """A percentile, in microseconds."""
    return float(np.percentile(samples, part)) * 1e6


def device_seconds(server):
    """Device time of attends, and their number, from the daemon's metrics."""
    page = urllib.request.urlopen(f"http://{server.admin}/metrics").read().decode()
    sums = {}
    for line in page.splitlines():
        for name in ("kvd_attend_seconds_sum", "kvd_attend_seconds_count"):
            if line.startswith(name):
                sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums["kvd_attend_seconds_sum"], sums["kvd_attend_seconds_count"]


@contextlib.contextmanager
def answered_at_once(client):
    """A region whose calls are answered before they are waited for, by nobody: what is left is
    Python's share of a call, without a wake-up, another process and its effects on caches."""
    region = client.link().payloads
    words = region._memory.words

    def answer(_message):
        words[0] = 1

    region._send = answer
    try:
        yield
    finally:
        del region._send


def measure(calls, call):
    """Wall and processor seconds of each of so many calls."""
    wall, own = [], []
    for _ in range(calls):
        t, c = time.perf_counter(), time.thread_time()
        call()
        own.append(time.thread_time() - c)
        wall.append(time.perf_counter() - t)
    return wall, own


def mean_share(client, calls, call):
    """Processor time of Python alone in a call, the best of ten rounds, in microseconds."""
    best = float("inf")
    with answered_at_once(client):
        for _ in range(10):
            begin = time.thread_time()
            for _ in range(calls):
                call()
            best = min(best, time.thread_time() - begin)
    return best / calls * 1e6


def measure_steps(client, rng):
    """All layers of 64 tokens in one store, and their rows back, of a model of 8 B parameters."""
    layers, kv_heads, dim = 32, 8, 128
    rows = [rng.standard_normal((64, kv_heads, dim)).astype("f2") for _ in range(layers)]
    megabytes = 2 * layers * rows[0].nbytes / 1e6
    for codec in ("raw", "kivi-4; recent=0"):
        model = client.model(
            f"steps-{codec[:3]}", kvd.Geometry(layers, kv_heads, dim), dtype="f16", codec=codec
        )
        with model.open() as sequence:
            stores, _ = measure(16, lambda: sequence.store_layers(rows, rows))
            loads, _ = measure(4, lambda: [sequence.load(layer) for layer in range(layers)])
        p50 = percentile(stores, 50)
        print(
            f"{codec}: store of 64 tokens x {layers} layers, {megabytes:.1f} MB:"
            f" p50 {p50 / 1e3:.1f} ms, {megabytes / p50 * 1e3:.2f} GB/s; load of {16 * 64} tokens,"
            f" a call a layer: {percentile(loads, 50) / 1e3:.0f} ms,"
            f" {16 * megabytes / percentile(loads, 50) * 1e3:.2f} GB/s"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="kivi-4; recent=0")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, codec {options.codec}, f16")
    rng = np.random.default_rng(1)
    layers, q_heads, kv_heads, dim, context = 1, 4, 2, 128, 1024
    with kvd.serve(pool="1 GiB", settings={"device.threads": 1}) as server:
        client = server.connect()
        model = client.model(
            "bench", kvd.Geometry(layers, kv_heads, dim), dtype="f16", codec=options.codec
        )
        print(f"{client.info().device}; {q_heads} query heads, {kv_heads} KV heads x {dim}")
        rows = rng.standard_normal((64, kv_heads, dim)).astype("f2")
        for count in (1, 64):
            sequences = []
            for _ in range(count):
                sequence = model.open()
                sequences.append(sequence)
                for _ in range(context // 64 if count == 1 else 1):
                    sequence.store(0, rows, rows)
            q = rng.standard_normal((count, q_heads, dim)).astype("f2")
            queries = kvd.Queries(sequences)
            best = None
            for _ in range(options.rounds):
                before = device_seconds(server)
                wall, own = measure(options.calls, lambda: model.attend(0, queries, q))
                after = device_seconds(server)
                device = (after[0] - before[0]) / (after[1] - before[1]) * 1e6
                row = (percentile(wall, 50), percentile(wall, 99), device, percentile(own, 50))
                best = min(best or row, row)
            shares = [
                mean_share(client, options.calls, lambda: model.attend(0, batch(), q))
                for batch in (lambda: queries, lambda: kvd.Queries(sequences))
            ]
            print(
                f"attend of {count:2} x {context if count == 1 else 64} tokens:"
                f" p50 {best[0]:.0f} us, p99 {best[1]:.0f}, device {best[2]:.0f};"
                f" Python's share {shares[0]:.1f}, queries encoded anew {shares[1]:.1f};"
                f" processor of the client in all {best[3]:.0f}"
            )
            for sequence in sequences:
                sequence.close()
        sequence = model.open()
        wall, own = measure(200, lambda: sequence.store(0, rows, rows))
        print(
            f"store of 64 tokens: p50 {percentile(wall, 50):.0f} us,"
            f" p99 {percentile(wall, 99):.0f}, processor of the client {percentile(own, 50):.0f}"
        )
        sequence.close()
        measure_steps(client, rng)
        client.close()


if __name__ == "__main__":
    main()
