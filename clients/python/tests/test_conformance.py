"""Answers of a real daemon against attention in f64."""

import numpy as np
import pytest
from reference import attention, budget, causal

import kvd

KV_HEADS, DIM, TOKENS = 2, 64, 300
DTYPES = ("f32", "f16", "bf16")


def random_rows(rng, shape, dtype):
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == "bf16":
        return kvd.f32_to_bf16(values)
    return values.astype(kvd.DType.of(dtype).numpy)


def to_f32(values, dtype):
    return kvd.bf16_to_f32(values) if dtype == "bf16" else values.astype(np.float32)


def rounding(dtype, values):
    """Half a step of the precision of an answer, at its largest value."""
    digits = {"f32": 24, "f16": 11, "bf16": 8}[dtype]
    return float(np.abs(values).max(initial=0.0)) * 2.0**-digits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["raw", "kivi-4", "fp8"])
@pytest.mark.parametrize("q_heads", [2, 8])
def test_outputs_are_attention_over_the_rows_that_are_held(client, rng, codec, dtype, q_heads):
    model = client.model(
        f"c-{codec}-{dtype}", kvd.Geometry(2, KV_HEADS, DIM), dtype=dtype, codec=codec
    )
    precision = client.info().precision
    with model.open() as sequence:
        for layer in range(2):
            for start in range(0, TOKENS, 100):
                k, v = (random_rows(rng, (100, KV_HEADS, DIM), dtype) for _ in "kv")
                ack = sequence.store(layer, k, v)
                assert ack.length == start + 100
        q = random_rows(rng, (7, q_heads, DIM), dtype)
        attended = model.attend(1, [kvd.Query(sequence, n_q=7)], q, dtype=dtype)
        held = [to_f32(side, dtype) for side in sequence.load(1, dtype=dtype)]
        if codec == "raw":
            assert np.array_equal(held[0][200:], to_f32(k, dtype))
        else:
            assert not np.array_equal(held[0][:100], to_f32(k, dtype)[:100])
        if dtype == "bf16":
            # Rows that a codec decodes are rounded once more by a load in bf16.
            held = [side.astype(np.float32) for side in sequence.load(1, dtype="f32")]
        seen = causal(7, TOKENS)
        out, lse, out_bound, lse_bound = budget(to_f32(q, dtype), *held, DIM**-0.5, seen, precision)
        got = to_f32(attended.out, dtype)
        assert got.shape == (7, q_heads, DIM)
        assert np.abs(got - out).max() <= out_bound + rounding(dtype, out)
        assert np.abs(attended.lse - lse).max() <= lse_bound


def test_a_ragged_batch_with_positions_windows_and_limits(client, rng):
    model = client.model("ragged", kvd.Geometry(1, KV_HEADS, DIM), dtype="f32", codec="raw")
    precision = client.info().precision
    lengths, rows = (10, 130, 64, 300), []
    sequences = []
    for length in lengths:
        k, v = (random_rows(rng, (length, KV_HEADS, DIM), "f32") for _ in "kv")
        sequences.append(model.open())
        sequences[-1].store(0, k, v)
        rows.append((k, v))
    queries = [
        kvd.Query(sequences[0], n_q=3),
        kvd.Query(sequences[1], n_q=1, kv_length=100, position=100),
        kvd.Query(sequences[2]),
        kvd.Query(sequences[3], n_q=5, sliding_window=16),
        kvd.Query(sequences[3], n_q=2, start=50, end=60, position=300),
        kvd.Query(sequences[3], n_q=1, kv_length=0, position=0),
    ]
    seen = [
        causal(3, 10),
        np.arange(130)[None, :] < 100,
        causal(1, 64),
        causal(5, 300, window=16),
        np.broadcast_to((np.arange(300) >= 50) & (np.arange(300) < 60), (2, 300)),
        np.zeros((1, 300), bool),
    ]
    q = random_rows(rng, (13, 4, DIM), "f32")
    attended = model.attend(0, queries, q, scale=0.2, soft_cap=3.0)
    at = 0
    for query, mask, of in zip(queries, seen, (0, 1, 2, 3, 3, 3), strict=True):
        part = slice(at, at + query.n_q)
        at += query.n_q
        out, lse, out_bound, lse_bound = budget(
            q[part], *rows[of], 0.2, mask, precision, soft_cap=3.0
        )
        assert np.abs(attended.out[part] - out).max() <= out_bound
        empty = np.isneginf(lse)
        assert np.array_equal(np.isneginf(attended.lse[part]), empty)
        assert np.abs(attended.lse[part][~empty] - lse[~empty]).max(initial=0.0) <= lse_bound
    assert not attended.out[-1].any()
    for sequence in sequences:
        sequence.close()


def test_sixty_four_sequences_in_one_batch(region_client, rng):
    model = region_client.model("many", kvd.Geometry(1, KV_HEADS, DIM), dtype="f16", codec="raw")
    sequences, held = [], []
    for index in range(64):
        k, v = (random_rows(rng, (index + 1, KV_HEADS, DIM), "f16") for _ in "kv")
        sequences.append(model.open())
        sequences[-1].store(0, k, v)
        held.append((k, v))
    q = random_rows(rng, (64, 4, DIM), "f16")
    batch = kvd.Queries(sequences)
    for _ in range(3):
        attended = model.attend(0, batch, q)
    for index, (k, v) in enumerate(held):
        out, _, bound, _ = budget(
            q[index : index + 1].astype("f4"),
            k.astype("f4"),
            v.astype("f4"),
            DIM**-0.5,
            causal(1, index + 1),
            region_client.info().precision,
        )
        assert np.abs(attended.out[index] - out).max() <= bound + rounding("f16", out)


def test_layers_beyond_one_byte(region_client):
    model = region_client.model("deep", kvd.Geometry(300, 1, 64), dtype="f32", codec="raw")
    q = np.ones((1, 1, 64), "f4")
    with model.open() as sequence:
        rows = [np.full((3, 1, 64), layer, "f4") for layer in range(300)]
        sequence.store_layers(rows, rows)
        batch = kvd.Queries([sequence])
        for layer in (0, 127, 128, 299, 1):
            np.testing.assert_allclose(model.attend(layer, batch, q).out, layer, rtol=1e-3)


def test_two_ranges_merge_to_the_whole(client, rng):
    model = client.model("merge", kvd.Geometry(1, KV_HEADS, DIM), dtype="f32", codec="raw")
    k, v = (random_rows(rng, (200, KV_HEADS, DIM), "f32") for _ in "kv")
    q = random_rows(rng, (1, 4, DIM), "f32")
    with model.open() as sequence:
        sequence.store(0, k, v)
        whole = model.attend(0, [sequence], q)
        parts = [
            model.attend(0, [kvd.Query(sequence, start=start, end=end)], q)
            for start, end in ((0, 70), (70, 200), (5, 5))
        ]
    out, lse = kvd.merge(parts[0].out, parts[0].lse, parts[1].out, parts[1].lse)
    out, lse = kvd.merge(out, lse, parts[2].out, parts[2].lse)
    _, _, out_bound, lse_bound = budget(q, k, v, DIM**-0.5, causal(1, 200), client.info().precision)
    assert np.abs(out - whole.out).max() <= 2 * out_bound
    assert np.abs(lse - whole.lse).max() <= 2 * lse_bound


def test_merge_against_f64_and_of_nothing(rng):
    q, k, v = (rng.standard_normal((n, 2, 8)) for n in (3, 40, 40))
    split = np.arange(40)[None, :] < 17
    everything = np.ones((3, 40), bool)
    a = attention(q, k, v, 0.3, np.broadcast_to(split, (3, 40)))
    b = attention(q, k, v, 0.3, np.broadcast_to(~split, (3, 40)))
    out, lse = kvd.merge(*a, *b)
    wanted = attention(q, k, v, 0.3, everything)
    np.testing.assert_allclose(out, wanted[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, wanted[1], rtol=0, atol=1e-12)
    nothing = np.zeros((3, 2, 8)), np.full((3, 2), -np.inf)
    out, lse = kvd.merge(*nothing, *nothing)
    assert not out.any() and np.isneginf(lse).all()
    out, _ = kvd.merge(*a, *nothing)
    np.testing.assert_array_equal(out, a[0])


def test_forks_part_and_truncation_forgets(client, rng):
    model = client.model("fork", kvd.Geometry(2, KV_HEADS, DIM), dtype="f32", codec="raw")
    k, v = (random_rows(rng, (150, KV_HEADS, DIM), "f32") for _ in "kv")
    more = random_rows(rng, (20, KV_HEADS, DIM), "f32")
    parent = model.open()
    parent.store_layers([k, k], [v, v])
    child = parent.fork(100)
    assert (child.length, parent.length) == (100, 150)
    child.store_layers([more, more], [more, more])
    assert np.array_equal(child.load(1)[0], np.concatenate([k[:100], more]))
    assert np.array_equal(parent.load(1)[0], k)
    parent.truncate(30)
    assert parent.describe().layer_lengths == (30, 30)
    assert child.describe().length == 120
    parent.store(0, more, more)
    assert np.array_equal(parent.load(0)[1], np.concatenate([v[:30], more]))
    parent.close()
    child.close()


def test_a_range_sent_again_is_a_replay(client, rng):
    model = client.model("replay", kvd.Geometry(1, KV_HEADS, DIM), dtype="f16", codec="raw")
    k = random_rows(rng, (10, KV_HEADS, DIM), "f16")
    with model.open() as sequence:
        assert not sequence.store(0, k, k, start=0).replayed
        assert sequence.store(0, k, k, start=0).replayed
        with pytest.raises(kvd.RangeConflict):
            sequence.store(0, k, -k, start=0)
