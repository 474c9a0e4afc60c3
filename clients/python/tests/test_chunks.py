"""Chunks by key: rows lie where the order says, wholes are found and parts are not."""

import os
import signal
import time

import numpy as np
import pytest

import kvd
from kvd.chunks import Chunk, ChunkCache, ChunkHome, ChunkShape, RowOrder

LAYERS, HEADS, DIM, TOKENS = 3, 2, 64, 128


def shape_of(order=RowOrder.LAYERS_FIRST, **other):
    given = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "tokens": TOKENS}
    return ChunkShape(**{**given, "dtype": kvd.DType.F32, "order": order, **other})


@pytest.fixture
def open_cache(server):
    made = []

    def make(name, shape=None, **options):
        home = ChunkHome(server.region, "tests", name, b"weights", **options)
        made.append(ChunkCache(home, shape or shape_of()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def random_rows(seed):
    """[2, layers, tokens, heads, dim]"""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((2, LAYERS, TOKENS, HEADS, DIM)).astype(np.float32)


def as_bytes(rows):
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("order", RowOrder)
def test_rows_lie_where_the_order_says(open_cache, order):
    cache = open_cache("order", shape_of(order))
    rows = random_rows(1)
    given = rows if order is RowOrder.LAYERS_FIRST else rows.swapaxes(1, 2)
    assert cache.put([Chunk(b"one", as_bytes(given))]) == [True]
    with cache._reached().open(cache._chain(b"one")) as sequence:
        assert sequence.length == TOKENS
        for layer in range(LAYERS):
            for loaded, side in zip(sequence.load(layer), rows[:, layer], strict=True):
                np.testing.assert_array_equal(loaded, side)
    back = np.zeros_like(as_bytes(given))
    assert cache.get([Chunk(b"one", back)]) == [True]
    np.testing.assert_array_equal(back, as_bytes(given))


def test_many_go_in_one_call_and_those_that_are_there_are_left(open_cache):
    cache = open_cache("many")
    rows = [as_bytes(random_rows(seed)) for seed in range(5)]
    keys = [b"%d" % seed for seed in range(5)]
    assert cache.put([Chunk(keys[2], rows[2])]) == [True]
    # Other rows under a key that is taken change nothing.
    assert cache.put([Chunk(keys[2], rows[0])]) == [True]
    assert cache.put([Chunk(*one) for one in zip(keys, rows, strict=True)]) == [True] * 5
    assert cache.counters.stored == 5
    asked = [*keys, b"unknown"]
    assert cache.contains(asked) == [True] * 5 + [False]
    into = [np.zeros_like(rows[0]) for _ in asked]
    found = cache.get([Chunk(*one) for one in zip(asked, into, strict=True)])
    assert found == [True] * 5 + [False]
    for got, had in zip(into, rows, strict=False):
        np.testing.assert_array_equal(got, had)
    assert not into[5].any()


def test_a_chunk_without_its_end_is_none_and_is_completed(open_cache):
    cache = open_cache("end")
    rows = as_bytes(random_rows(7))
    model = cache._reached()
    # What is left when the pool took the last page.
    with model.open() as sequence:
        sides = rows.view(np.float32).reshape(2, LAYERS, TOKENS, HEADS, DIM)
        sequence.store_layers(sides[0, :, :64], sides[1, :, :64])
        sequence.publish(0, cache._chain(b"one").cut(0, 1))
    assert cache.contains([b"one"]) == [False]
    back = np.zeros_like(rows)
    assert cache.get([Chunk(b"one", back)]) == [False]
    assert cache.put([Chunk(b"one", rows)]) == [True]
    assert cache.get([Chunk(b"one", back)]) == [True]
    np.testing.assert_array_equal(back, rows)


def test_chunks_of_few_tokens_have_pages_of_their_own(open_cache):
    shape = shape_of(RowOrder.TOKENS_FIRST, tokens=16)
    cache = open_cache("few", shape)
    rows = as_bytes(random_rows(8))[: shape.size]
    assert cache.put([Chunk(b"one", rows)]) == [True]
    back = np.zeros_like(rows)
    assert cache.get([Chunk(b"one", back)]) == [True]
    np.testing.assert_array_equal(back, rows)


def test_what_does_not_fit_is_refused_at_the_start(open_cache):
    with pytest.raises(kvd.InvalidArgument, match="multiple of 64"):
        open_cache("odd", shape_of(tokens=100))
    with pytest.raises(kvd.InvalidArgument, match="region_mib: a chunk of this model needs 2 MiB"):
        open_cache("large", region_bytes=1 << 20)
    with pytest.raises(kvd.InvalidCodec):
        open_cache("codec", codec="kivi-5")


def test_a_daemon_that_hangs_in_a_store_costs_one_timeout_and_keeps_nothing():
    rows = [as_bytes(random_rows(seed)) for seed in range(8)]
    with kvd.serve(pool="64 MiB", settings={"device.threads": 1}) as server:
        home = ChunkHome(server.region, "tests", "hangs", b"weights", timeout=0.5)
        cache = ChunkCache(home, shape_of())
        store_step, stores = cache._store_step, []

        def hang_and_store(*arguments):
            stores.append(arguments)
            os.kill(server.pid, signal.SIGSTOP)
            store_step(*arguments)

        cache._store_step = hang_and_store
        try:
            kept = cache.put([Chunk(b"%d" % at, one) for at, one in enumerate(rows)])
            # One call has waited for an answer, and the next does not ask.
            assert len(stores) == 1
            assert not cache.is_reached()
            assert cache.contains([b"0"]) == [False]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert kept == [False] * 8
        with server.connect() as other:
            deadline = time.monotonic() + 30
            while other.sequences():
                time.sleep(0.05)
                assert time.monotonic() < deadline
        cache.close()


def test_after_close_all_is_a_miss(open_cache):
    cache = open_cache("closed")
    rows = as_bytes(random_rows(9))
    assert cache.put([Chunk(b"one", rows)]) == [True]
    cache.close()
    assert cache.contains([b"one"]) == [False]
    assert cache.put([Chunk(b"two", rows)]) == [False]
    assert cache.get([Chunk(b"one", rows)]) == [False]
    assert not cache.drop([b"one"])
    assert not cache.is_reached()
