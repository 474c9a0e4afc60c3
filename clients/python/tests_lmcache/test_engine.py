"""What LMCache stores comes back bit by bit, through its own engine."""

import pytest
import torch
from conftest import CHUNK, FULL, is_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_come_back_bit_by_bit(engine, tokens, dtype):
    writer = engine(dtype=dtype)
    rows = writer.fill(1)
    assert writer.engine.lookup(tokens) == 0
    writer.store(tokens, FULL)
    assert writer.engine.lookup(tokens) == FULL * CHUNK
    back, count = writer.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(back, rows[:, :, :count])


def test_another_engine_finds_them(engine, tokens):
    writer = engine()
    rows = writer.fill(2)
    writer.store(tokens, FULL)
    writer.close()
    reader = engine()
    back, count = reader.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(back, rows[:, :, :count])
    # Of a prompt that goes on otherwise, the part that is equal.
    other = torch.cat([tokens[: CHUNK + 40], tokens[:600] + 1])
    back, count = reader.retrieve(other)
    assert count == CHUNK
    assert is_same(back, rows[:, :, :count])
    assert reader.engine.lookup(tokens + 1) == 0


def test_storing_again_changes_nothing(engine, tokens):
    one = engine()
    rows = one.fill(3)
    one.store(tokens, FULL)
    one.fill(4)
    one.engine.store(tokens)
    back, count = one.retrieve(tokens)
    assert is_same(back, rows[:, :, :count])


def test_memory_of_lmcache_is_given_back(engine, tokens):
    # Room for 60 chunks, and 40 rounds that take 6 each.
    one = engine(max_local_cpu_size=0.06)
    rows = one.fill(5)
    one.store(tokens, FULL)
    for _ in range(40):
        back, count = one.retrieve(tokens)
        assert count == FULL * CHUNK
        one.engine.store(tokens)
    assert is_same(back, rows[:, :, :count])


@pytest.mark.parametrize("chunk", [64, 512])
def test_other_chunk_sizes(engine, tokens, chunk):
    one = engine(chunk_size=chunk)
    rows = one.fill(6)
    one.store(tokens, 1000 // chunk)
    back, count = one.retrieve(tokens)
    assert count == 1000 // chunk * chunk
    assert is_same(back, rows[:, :, :count])


def test_lossy_codec_is_near_and_steady(engine, tokens):
    one = engine(options={"codec": "kivi-4"})
    rows = one.fill(7)
    one.store(tokens, FULL)
    first, count = one.retrieve(tokens)
    second, _ = one.retrieve(tokens)
    assert count == FULL * CHUNK
    assert is_same(first, second)
    error = (first - rows[:, :, :count]).pow(2).mean().sqrt() / rows.pow(2).mean().sqrt()
    assert 0 < error < 0.2


def test_what_is_of_others_is_not_found(engine, tokens):
    one = engine()
    one.fill(8)
    one.store(tokens, FULL)
    for others in (
        {"options": {"namespace": "other"}},
        {"options": {"weights": "another checkpoint"}},
        {"options": {"codec": "kivi-4"}},
        {"worker": 1},
        {"dtype": torch.float16},
    ):
        assert engine(**others).engine.lookup(tokens) == 0


def test_rows_that_are_not_finite_cost_one_chunk(engine, tokens):
    one = engine()
    rows = one.fill(9)
    one.memory.kv[0, 1, CHUNK + 5, 3] = float("inf")
    one.store(tokens, FULL - 1)
    back, count = one.retrieve(tokens)
    assert count == CHUNK
    assert is_same(back, rows[:, :, :count])
