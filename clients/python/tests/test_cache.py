"""Cached prefixes by key, and engine blocks of all layers in one call."""

import re

import numpy as np
import pytest

import kvd
from kvd.blocks import BlockRows

GEOMETRY = kvd.Geometry(layers=2, kv_heads=2, head_dim_k=32, head_dim_v=16)
BLOCK, PAGE = 16, 64


def keys_of(name, blocks):
    return kvd.Keys.of([f"{name}-{at:04}".encode() for at in range(blocks)], BLOCK)


def register(client, name, weights=b"these"):
    return client.model(name, GEOMETRY, dtype="f32", codec="raw", weights=weights)


@pytest.fixture
def model(client, request):
    # A model of the test's own: what others cached is not found.
    return register(client, re.sub(r"[^a-z_]", ".", request.node.name))


def rows(rng, tokens):
    k = rng.standard_normal((GEOMETRY.layers, tokens, 2, 32)).astype(np.float32)
    return k, rng.standard_normal((GEOMETRY.layers, tokens, 2, 16)).astype(np.float32)


def publish(model, keys, sides, tokens):
    with model.open() as sequence:
        sequence.store_layers(*([side[:, :tokens] for side in sides][at] for at in (0, 1)))
        return sequence.publish(0, keys.cut(0, tokens // BLOCK))


def test_a_prefix_is_found_by_other_sequences_and_clients(model, server, rng):
    keys, sides = keys_of("a", 12), rows(rng, 192)
    published = publish(model, keys, sides, 128)
    assert (published.length, published.published, published.existed) == (128, 2, 0)
    assert published.stopped_by == ""
    with server.connect() as other:
        twin = register(other, model.name)
        assert twin.match([keys, keys_of("b", 4), keys.cut(0, 4)]).tokens == (128, 0, 64)
        with twin.open(keys) as found:
            assert found.length == 128
            for layer in range(GEOMETRY.layers):
                k, v = found.load(layer)
                assert np.array_equal(k, sides[0][layer, :128])
                assert np.array_equal(v, sides[1][layer, :128])


def test_other_weights_find_nothing(client, model, rng):
    keys = keys_of("w", 4)
    publish(model, keys, rows(rng, 64), 64)
    with pytest.raises(kvd.InvalidArgument, match="another geometry"):
        register(client, model.name, b"others")
    others = register(client, model.name + "-others", b"others")
    assert model.match(keys).tokens == (64,)
    assert others.match([keys]).tokens == (0,)
    with others.open(keys) as sequence:
        assert sequence.length == 0


def test_leases_end_once(client, model, rng):
    keys = keys_of("l", 4)
    publish(model, keys, rows(rng, 64), 64)
    lease = model.match([keys], lease=30).lease_id
    assert lease
    assert model.drop([keys]) == kvd.Dropped(0, 1)
    client.release_lease(lease)
    with pytest.raises(kvd.UnknownLease):
        client.release_lease(lease)
    with pytest.raises(kvd.UnknownLease):
        model.open(keys, lease_id=lease)
    assert model.drop() == kvd.Dropped(1, 0)
    assert model.match([keys]).tokens == (0,)


def test_keys_that_are_none_are_refused():
    with pytest.raises(kvd.InvalidArgument):
        kvd.Keys(b"abc", 2)
    with pytest.raises(kvd.InvalidArgument):
        kvd.Keys(b"", 65)
    with pytest.raises(kvd.InvalidArgument):
        kvd.Keys.of([b"a", b"bc"])


def test_blocks_of_an_engine_are_stored_and_loaded_whole(region_client, rng):
    model = region_client.model("blocks", GEOMETRY, dtype="f32", codec="raw")
    k, v = rows(rng, 96)
    sent = BlockRows(model, region_client.link(), 6, BLOCK)
    for block in range(6):
        part = slice(block * BLOCK, block * BLOCK + BLOCK)
        sent.cells[:, block, :, : BLOCK * 32] = (
            k[:, part].transpose(0, 2, 1, 3).reshape(2, 2, BLOCK * 32)
        )
        sent.cells[:, block, :, BLOCK * 32 :] = (
            v[:, part].transpose(0, 2, 1, 3).reshape(2, 2, BLOCK * 16)
        )
    expected = sent.cells.copy()
    with model.open() as sequence:
        sequence.store_layers(k[:, :32], v[:, :32])
        sent.store(sequence, 32, first_block=2)
        assert sequence.length == sequence.describe().length == 96
        assert np.array_equal(sequence.load(1)[0], k[1])
        got = BlockRows(model, region_client.link(), 4, BLOCK)
        got.load(sequence, 32)
        assert np.array_equal(got.cells, expected[:, 2:])
        got.free()
        # A layer from its third block on, and one not at all.
        some = BlockRows(model, region_client.link(), 4, BLOCK)
        some.cells[:] = -1
        some.load(sequence, 32, [2, 4])
        assert np.array_equal(some.cells[0, 2:], expected[0, 4:])
        assert (some.cells[0, :2] == -1).all() and (some.cells[1] == -1).all()
        some.load(sequence, 32, [4, 4])
        some.load(sequence, 32, [1, 3])
        assert np.array_equal(some.cells[0, 1:], expected[0, 3:])
        assert np.array_equal(some.cells[1, 3:], expected[1, 5:])
        some.free()
        late = BlockRows(model, region_client.link(), 4, BLOCK)
        with pytest.raises(kvd.RangeNotStored):
            late.load(sequence, 48)


def test_room_for_blocks_is_bounded_and_given_back(server):
    geometry = kvd.Geometry(layers=2, kv_heads=2, head_dim_k=64)
    with server.connect(region_bytes=4 << 20) as client:
        model = client.model("room", geometry, dtype="f32", codec="raw")
        one = BlockRows(model, client.link(), 80, BLOCK)
        with pytest.raises(kvd.QueueFull):
            BlockRows(model, client.link(), 80, BLOCK)
        with pytest.raises(kvd.MessageTooLarge):
            BlockRows(model, client.link(), 160, BLOCK)
        one.free()
        BlockRows(model, client.link(), 80, BLOCK).free()


def test_blocks_need_a_region(server):
    pytest.importorskip("grpc")
    with kvd.connect(server.unix) as client:
        model = client.model("far", GEOMETRY, dtype="f32", codec="raw")
        with pytest.raises(kvd.Unsupported, match="region"):
            BlockRows(model, client.link(), 1, BLOCK)
