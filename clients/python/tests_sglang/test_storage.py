"""Pages go to kvd and come back, through SGLang's factory, host pool and controller calls."""

import inspect
import os
import signal
import time

import pytest
import torch
from conftest import (
    LAYOUTS,
    PAGE,
    StorageBackendFactory,
    hashes,
    is_same,
    make_config,
    make_pool,
    stop,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

import kvd
import kvd.sglang

COUNT = 5


def spans(*pages):
    """Host indices of pages, in the order of the prompt."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


OUT, IN = spans(1, 2, 5, 0, 7), spans(3, 0, 6, 7, 2)


@pytest.mark.parametrize("is_zero_copy", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_bit_by_bit(host, layout, dtype, is_zero_copy):
    one, keys = host(layout=layout, dtype=dtype), hashes(COUNT)
    one.fill(1)
    before = one.pages(OUT).clone()
    assert one.storage.batch_exists(keys) == 0
    assert one.backup(keys, OUT, is_zero_copy)
    assert one.storage.batch_exists(keys) == COUNT
    one.pool.kv_buffer[:] = 7
    assert one.prefetch(keys, IN, is_zero_copy) == COUNT
    assert is_same(one.pages(IN), before)
    # No page but these was written.
    assert torch.all(one.pages(spans(1, 4, 5, 8)) == 7)


def test_layouts_share_pages(host):
    keys = hashes(COUNT)
    first = host(layout="layer_first")
    first.fill(2)
    assert first.backup(keys, OUT)
    for layout in LAYOUTS:
        other = host(layout=layout)
        assert other.prefetch(keys, IN) == COUNT
        assert is_same(other.pages(IN), first.pages(OUT))


def test_pages_of_16_tokens(host):
    one, keys = host(page=16), hashes(3)
    one.fill(3)
    out = torch.arange(16, 64)
    before = one.pages(out).clone()
    assert one.backup(keys, out)
    assert one.prefetch(keys, torch.arange(128, 176)) == 3
    assert is_same(one.pages(torch.arange(128, 176)), before)


def test_missing_page_ends_the_prefix(host):
    one, keys = host(), hashes(COUNT)
    one.fill(4)
    fourth = one.pool.get_data_page(int(OUT[3 * PAGE]))
    assert one.backup(keys[:2] + keys[3:], torch.cat([OUT[: 2 * PAGE], OUT[3 * PAGE :]]))
    assert one.storage.batch_exists(keys) == 2
    assert one.storage.exists(keys[3])
    assert one.prefetch(keys, IN) == 2
    assert one.storage.get(keys[2]) is None
    assert is_same(one.storage.get(keys[3]), fourth)


def test_clear_forgets(host):
    one, keys = host(), hashes(COUNT)
    one.fill(5)
    assert one.backup(keys, OUT)
    deadline = time.monotonic() + 30
    while one.storage.batch_exists(keys):
        # The daemon holds what it writes to disk.
        one.storage.clear()
        assert time.monotonic() < deadline
    assert one.backup(keys, OUT)
    assert one.storage.batch_exists(keys) == COUNT


def test_what_is_of_others_is_not_found(host):
    one, keys = host(), hashes(COUNT)
    one.fill(6)
    assert one.backup(keys, OUT)
    for others in (
        {"options": {"namespace": "other"}},
        {"options": {"weights": "another checkpoint"}},
        {"options": {"codec": "kivi-4"}},
        {"config": {"tp_rank": 1, "tp_size": 2}},
        {"config": {"model_name": "other/model"}},
        {"dtype": torch.float16},
    ):
        assert host(**others).storage.batch_exists(keys) == 0
    assert one.storage.batch_exists(hashes(COUNT, prompt=1)) == 0


def test_lossy_codec_is_near_and_steady(host):
    one, keys = host(options={"codec": "kivi-4"}), hashes(COUNT)
    one.fill(7)
    before = one.pages(OUT).clone()
    assert one.backup(keys, OUT)
    assert one.prefetch(keys, IN) == COUNT
    first = one.pages(IN).clone()
    assert one.prefetch(keys, OUT) == COUNT
    assert is_same(one.pages(OUT), first)
    error = (first - before).pow(2).mean().sqrt() / before.pow(2).mean().sqrt()
    assert 0 < error < 0.2


def test_restart_finds_pages_on_disk(host, server):
    one, keys = host(), hashes(COUNT)
    one.fill(8)
    before = one.pages(OUT).clone()
    assert one.backup(keys, OUT)
    stop(server)
    server.restart()
    assert one.storage.batch_exists(keys) == COUNT
    assert one.prefetch(keys, IN) == COUNT
    assert is_same(one.pages(IN), before)


def test_dead_daemon_is_a_miss(host, server):
    one, keys = host(), hashes(COUNT)
    one.fill(9)
    assert one.backup(keys, OUT)
    server.kill()
    assert one.storage.batch_exists(keys) == 0
    assert one.prefetch(keys, IN) == 0
    assert not one.backup(keys, OUT)
    server.restart()
    deadline = time.monotonic() + 30
    while not one.backup(keys, OUT):
        time.sleep(0.05)
        assert time.monotonic() < deadline
    assert one.prefetch(keys, IN) == COUNT


def test_daemon_that_hangs_is_a_miss_in_time(host, server):
    one, keys = host(options={"timeout_s": 0.5}), hashes(COUNT)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert one.storage.batch_exists(keys) == 0
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("options", "pool", "config", "said"),
    [
        ({"codek": "raw"}, {}, {}, "codek"),
        ({"region_mib": "1"}, {}, {}, "region_mib"),
        ({"codec": "kivi-5"}, {}, {}, "kivi-5"),
        ({}, {"page": 1}, {}, "--page-size 64"),
        ({}, {"page": 96}, {}, "multiple of 64"),
        ({}, {"layout": "page_head"}, {}, "page_head"),
        ({}, {"dtype": torch.float8_e4m3fn}, {}, "float8"),
        ({}, {}, {"is_mla_model": True}, "MLA"),
    ],
)
def test_refused_by_name(host, options, pool, config, said):
    with pytest.raises(kvd.KvdError, match=said):
        host(options=options, config=config, **pool)


def test_other_pools_are_refused(host):
    one = host()
    with pytest.raises(kvd.Unsupported, match="mamba"):
        one.storage.register_mem_host_pool_v2(make_pool(), "mamba")
    with pytest.raises(kvd.Unsupported, match="host pool"):
        config = make_config("/run/kvd/region.sock")
        StorageBackendFactory.create_backend("dynamic", config, None).exists("key")


def test_overridden_methods_are_those_of_this_release():
    ours = kvd.sglang.KvdStorage
    for name, method in vars(ours).items():
        if name.startswith("_") or not callable(method) or name == "close":
            continue
        theirs = getattr(HiCacheStorage, name, None)
        assert theirs is not None, f"SGLang calls no {name}"
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(theirs).parameters
        ), name
    left = set(HiCacheStorage.__abstractmethods__) - set(vars(ours))
    assert not left
