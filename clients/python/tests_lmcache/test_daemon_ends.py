"""Daemons that end, hang, forget and spoil: each is a miss, and LMCache goes on."""

import os
import signal

import pytest
import torch
from conftest import CHUNK, FULL, await_true, is_same, stop

import kvd


def test_restart_finds_chunks_on_disk(engine, server, tokens):
    one = engine()
    rows = one.fill(1)
    one.store(tokens, FULL)
    stop(server)
    server.restart()
    # The connection of before is found dead, and made anew, by the call itself.
    back, count = one.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(back, rows[:, :, :count])


def test_kill_leaves_what_was_durable(engine, server, tokens):
    one = engine()
    rows = one.fill(2)
    one.store(tokens, FULL)
    server.kill()
    server.restart()
    back, count = one.retrieve(tokens)
    assert count % CHUNK == 0
    assert is_same(back, rows[:, :, :count])
    # What is missing is stored again.
    one.memory.kv.copy_(rows)
    one.store(tokens, FULL - count // CHUNK)
    assert one.retrieve(tokens)[1] == FULL * CHUNK


def test_daemon_that_forgot_is_a_miss(engine, tokens, tmp_path):
    with kvd.serve(pool="64 MiB", settings={"device.threads": 1}) as server:
        one = engine(region=server.region)
        rows = one.fill(3)
        one.store(tokens, FULL)
        server.kill()
        server.restart()
        assert one.engine.lookup(tokens) == 0
        assert one.retrieve(tokens)[1] == 0
        one.memory.kv.copy_(rows)
        one.store(tokens, FULL)
        back, count = one.retrieve(tokens)
        assert is_same(back, rows[:, :, :count])
        assert count == FULL * CHUNK


def test_damaged_records_are_misses(engine, server, folder, tokens):
    one = engine()
    rows = one.fill(4)
    one.store(tokens, FULL)
    stop(server)
    segments = [path for path in folder.rglob("*") if path.stat().st_size > 100_000]
    assert segments
    for path in segments:
        data = bytearray(path.read_bytes())
        # In the rows of the last chunk that was written, wherever its records are.
        needle = rows[0, 0, 2 * CHUNK + 70 : 2 * CHUNK + 72].contiguous().numpy().tobytes()[:64]
        at = data.find(needle)
        if at >= 0:
            data[at + 8] ^= 0x10
            path.write_bytes(data)
            break
    else:
        pytest.fail("the rows are in no segment")
    server.restart()
    back, count = one.retrieve(tokens)
    assert count == (FULL - 1) * CHUNK
    assert is_same(back, rows[:, :, :count])
    one.memory.kv.copy_(rows)
    one.store(tokens, 1)
    back, count = one.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(back, rows[:, :, :count])


def test_dropped_chunk_is_a_miss(engine, tokens):
    one = engine()
    rows = one.fill(5)
    one.store(tokens, FULL)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    # The daemon holds what it writes to disk.
    await_true(lambda: one.backend.remove(keys[1]))
    assert one.engine.lookup(tokens) == CHUNK
    back, count = one.retrieve(tokens)
    assert count == CHUNK
    assert is_same(back, rows[:, :, :count])


def test_dead_daemon_is_a_miss(engine, server, tokens):
    one = engine()
    rows = one.fill(6)
    one.store(tokens, FULL)
    server.kill()
    assert one.engine.lookup(tokens) == 0
    assert one.retrieve(tokens)[1] == 0
    one.engine.store(tokens + 1)
    server.restart()

    def is_back():
        return one.engine.lookup(tokens) > 0

    # A second after it was missed it is looked for again.
    one.memory.kv.copy_(rows)
    await_true(lambda: one.engine.store(tokens) or is_back())
    await_true(lambda: one.engine.lookup(tokens) == FULL * CHUNK)
    back, count = one.retrieve(tokens)
    assert is_same(back, rows[:, :, :count])


def test_engine_starts_before_the_daemon(engine, tokens, server):
    server.kill()
    one = engine()
    rows = one.fill(7)
    assert one.engine.lookup(tokens) == 0
    one.engine.store(tokens)
    server.restart()
    await_true(one.chunks.is_reached)
    one.store(tokens, FULL)
    back, count = one.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(back, rows[:, :, :count])


def test_daemon_that_hangs_is_a_miss_in_time(engine, server, tokens):
    one = engine(options={"timeout_s": 0.5})
    one.fill(8)
    one.store(tokens, FULL)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert one.retrieve(tokens)[1] == 0
        # It is left alone for a while.
        assert not one.chunks.is_reached()
        assert one.engine.lookup(tokens) == 0
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_full_pool_keeps_what_it_can(engine, tokens):
    # A chunk has 1 MiB: the pool holds a few of the 9.
    settings = {"device.threads": 1}
    with kvd.serve(pool="6 MiB", settings=settings) as server:
        one = engine(region=server.region)
        kept = {}
        for seed in range(3):
            asked = (tokens + 7 * seed) % 499
            kept[seed] = (asked, one.fill(seed))
            one.store_settled(asked)
        total = 0
        for asked, rows in kept.values():
            back, count = one.retrieve(asked)
            assert is_same(back, rows[:, :, :count])
            total += count
        assert 0 < total < 9 * CHUNK


def test_torch_dtypes_are_told_apart(engine, tokens):
    one = engine(dtype=torch.bfloat16)
    one.fill(9)
    one.store(tokens, FULL)
    assert engine(dtype=torch.float16).engine.lookup(tokens) == 0
