"""LMCache's server (MP mode) keeps its objects in kvd: its storage manager, factory and controllers
around the L2 adapter, bit by bit."""

import json

import pytest
import torch
from conftest import await_true, is_same, stop
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

import kvd
import kvd.lmcache
from kvd.lmcache import l2

SHAPE = (2, 4, 256, 128)
COUNT = 5


class Manager:
    """LMCache's storage manager over memory of this process and kvd."""

    def __init__(self, region, **options):
        # As the command line has it.
        given = json.loads(json.dumps(kvd.lmcache.l2_settings(region, **options)))
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        config = StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig([PluginL2AdapterConfig.from_dict(given)]),
        )
        self.manager = StorageManager(config)
        ((_, self.adapter),) = self.manager.l2_adapters()

    def write(self, keys, rows, stored=None):
        """Writes objects and waits until kvd has so many more."""
        before = self.adapter.report_status()["stored"]
        layout = MemoryLayoutDesc([torch.Size(rows.shape[1:])], [rows.dtype])
        reserved = self.manager.reserve_write(keys, layout)
        assert len(reserved) == len(keys)
        for key, one in zip(keys, rows, strict=True):
            reserved[key].tensor.copy_(one)
        self.manager.finish_write(keys)
        wanted = before + (len(keys) if stored is None else stored)
        await_true(lambda: self.adapter.report_status()["stored"] == wanted)

    def forget(self, keys):
        """Drops LMCache's own copies, once their stores let go of them."""

        def is_dropped():
            self.manager.delete_l1_keys(keys)
            return not self.hits(
                keys, layout=MemoryLayoutDesc([torch.Size(SHAPE)], [torch.float32]), skip_l2=True
            )

        await_true(is_dropped)

    def prefetch(self, keys, layout, **options):
        group = GroupedObjectKeys(keys, 0, layout)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([group]), **options)
        assert self.manager.wait_prefetch_status(handle, 30)
        return self.manager.query_prefetch_status(handle)

    def hits(self, keys, layout, **options):
        result = self.prefetch(keys, layout, **options)
        found = result.hit_cells[0].get_indices_list()
        if found:
            self.manager.finish_read_prefetched([keys[at] for at in found])
        return len(found)

    def read(self, keys, dtype):
        """Rows of the prefix that was found in kvd."""
        layout = MemoryLayoutDesc([torch.Size(SHAPE)], [dtype])
        result = self.prefetch(keys, layout)
        found = [keys[at] for at in result.l2_hit_cells[0].get_indices_list()]
        if not found:
            return None
        with self.manager.read_prefetched_results(found) as objects:
            rows = torch.stack([one.tensor.clone() for one in objects])
        self.manager.finish_read_prefetched(found)
        return rows

    def close(self):
        self.manager.close()


@pytest.fixture
def manager(server):
    made = []

    def make(region=server.region, **options):
        made.append(Manager(region, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def keys_of(seed, **fields):
    return [
        ObjectKey(
            **{
                "chunk_hash": bytes([seed, at]) * 16,
                "model_name": "tiny",
                "kv_rank": 0x1000100,
                **fields,
            }
        )
        for at in range(COUNT)
    ]


def rows_of(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(COUNT, *SHAPE, generator=generator)
    rows[..., 0], rows[..., 1] = -0.0, 1e-40
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_objects_come_back_bit_by_bit(manager, dtype):
    keys, rows = keys_of(1), rows_of(1, dtype)
    writer = manager()
    writer.write(keys, rows)
    reader = manager()
    assert is_same(reader.read(keys, dtype), rows)


def test_a_manager_finds_what_it_dropped(manager):
    keys, rows = keys_of(2), rows_of(2)
    one = manager()
    one.write(keys, rows)
    one.forget(keys)
    assert is_same(one.read(keys, torch.float32), rows)
    status = one.adapter.report_status()
    assert status["is_healthy"] and status["loaded"] == COUNT and status["failures"] == 0


def test_a_prefix_of_what_is_asked(manager):
    keys, rows = keys_of(3), rows_of(3)
    manager().write(keys[:2], rows[:2])
    assert is_same(manager().read(keys, torch.float32), rows[:2])


@pytest.mark.parametrize(
    "other", [{"cache_salt": "b"}, {"kv_rank": 0x2000200}, {"model_name": "small"}]
)
def test_keys_that_differ_in_anything_are_apart(manager, other):
    manager().write(keys_of(4), rows_of(4))
    assert manager().read(keys_of(4, **other), torch.float32) is None


def test_weights_and_dtypes_are_apart(manager):
    manager(weights="a").write(keys_of(5), rows_of(5))
    assert manager(weights="b").read(keys_of(5), torch.float32) is None
    assert manager(weights="a").read(keys_of(5), torch.bfloat16) is None


def test_deleted_objects_are_gone(manager):
    keys = keys_of(6)
    writer = manager()
    writer.write(keys, rows_of(6))
    (cache,) = writer.adapter._caches.values()

    def is_gone():
        # The store that was just seen may hold them for a moment.
        writer.adapter.delete(keys)
        return not any(cache.contains([l2._key_bytes(key) for key in keys]))

    await_true(is_gone)
    assert manager().read(keys, torch.float32) is None


def test_a_restarted_daemon_has_them_on_its_disk(manager, server):
    keys, rows = keys_of(7), rows_of(7)
    one = manager()
    one.write(keys, rows)
    stop(server)
    server.restart()
    assert is_same(manager().read(keys, torch.float32), rows)


def test_a_daemon_that_is_away_is_a_miss(manager, server):
    keys, rows = keys_of(8), rows_of(8)
    one = manager()
    one.write(keys, rows)
    server.kill()
    one.forget(keys)
    assert one.read(keys, torch.float32) is None
    assert not one.adapter.report_status()["is_healthy"]
    one.write(keys_of(9), rows_of(9), stored=0)


def test_a_lossy_codec_needs_the_head_width(manager):
    keys, rows = keys_of(10), rows_of(10)
    manager(codec="kivi-4", head_dim=64).write(keys, rows)
    back = manager(codec="kivi-4", head_dim=64).read(keys, torch.float32)
    assert 0 < (back - rows).abs().mean() < 0.1
    with pytest.raises(kvd.InvalidArgument, match="head_dim"):
        manager(codec="kivi-4")


def test_objects_of_other_shapes_are_not_kept(server):
    """MLA's rows, say: they have no values."""
    given = PluginL2AdapterConfig.from_dict(kvd.lmcache.l2_settings(server.region))
    adapter = create_l2_adapter(given)
    try:
        layout = MemoryLayoutDesc([torch.Size((4, 256, 576))], [torch.float32])
        task = adapter.submit_lookup_and_lock_task(keys_of(11), {0: layout})
        found = []
        await_true(lambda: found.append(adapter.query_lookup_and_lock_result(task)) or found[-1])
        assert found[-1].popcount() == 0 and len(found[-1]) == COUNT
    finally:
        adapter.close()


def test_events_are_distinct_and_options_are_checked(server):
    adapter = create_l2_adapter(
        PluginL2AdapterConfig.from_dict(kvd.lmcache.l2_settings(server.region))
    )
    events = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(events) == 3
    adapter.close()
    for wrong, says in [({"codek": "raw"}, "codek"), ({"region_mib": 0}, "region_mib")]:
        settings = kvd.lmcache.l2_settings(server.region, **wrong)
        with pytest.raises(kvd.InvalidArgument, match=says):
            create_l2_adapter(PluginL2AdapterConfig.from_dict(settings))
