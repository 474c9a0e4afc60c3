"""What is refused, by name, before a wrong answer can be given; and what vLLM promises us."""

import dataclasses
import inspect
import json
import types

import pytest
import torch
from conftest import save_model
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

import kvd
import kvd.vllm
from kvd.vllm import attention
from kvd.vllm import plan as plans
from kvd.vllm.cells import PagedCells
from kvd.vllm.messages import NULL_BLOCK
from kvd.vllm.stats import KvdPromMetrics, KvdStats

REGION = "/run/kvd/region.sock"
SPEC = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def groups(*specs):
    made = [KVCacheGroupSpec([f"layers.{10 - at}.attn"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=made)


@pytest.fixture(scope="module")
def settings(model_folder):
    transfer = kvd.vllm.transfer_config(REGION)
    return EngineArgs(
        model=model_folder,
        kv_transfer_config=transfer,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
    ).create_engine_config()


def plan_of(settings, cache=None, **changed):
    view = types.SimpleNamespace(**{**vars(settings), **changed})
    return plans.make_plan(view, cache or groups(FullAttentionSpec(**SPEC)))


def with_options(**changed):
    made = kvd.vllm.transfer_settings(REGION)
    made["kv_connector_extra_config"] |= changed.pop("options", {})
    return {"kv_transfer_config": KVTransferConfig(**{**made, **changed})}


def test_a_plan_says_what_goes_where(settings):
    two = KVCacheGroupSpec(["layers.10.attn", "layers.2.attn"], FullAttentionSpec(**SPEC))
    cache = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[two])
    plan = plan_of(settings, cache)
    assert plan.layer_names == ("layers.2.attn", "layers.10.attn")
    assert plan.geometry == kvd.Geometry(2, 2, 64, 64, 64)
    assert (plan.block_tokens, plan.page_tokens, plan.page_blocks) == (32, 64, 2)
    assert plan.layer_groups == (0, 0) and not plan.is_windowed
    assert plan.codec == "raw" and plan.loads and plan.stores
    assert plan == plan_of(settings, cache)
    wide = groups(FullAttentionSpec(**{**SPEC, "block_size": 128}))
    assert plan_of(settings, wide).page_tokens == 128


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"socket": REGION}, "socket"),
        ({"region": "region.sock"}, "absolute path"),
        ({"codec": 4}, "codec = 4"),
        ({"region_mib": True}, "region_mib"),
        ({"timeout_s": 0}, "timeout_s = 0"),
    ],
)
def test_wrong_options_are_refused(settings, options, words):
    with pytest.raises(kvd.InvalidArgument, match=words):
        plan_of(settings, **with_options(options=options))


def test_requests_must_not_end_empty(settings):
    changed = with_options(kv_load_failure_policy="fail")
    with pytest.raises(kvd.InvalidArgument, match="recompute"):
        plan_of(settings, **changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel_config": types.SimpleNamespace(tensor_parallel_size=2)}, "tensor_parallel"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative"),
        ({"weight_transfer_config": object()}, "weights"),
        ({"device_config": types.SimpleNamespace(device_type="cuda")}, "cuda"),
    ],
)
def test_what_is_not_known_to_be_right_is_refused(settings, change, words):
    with pytest.raises(kvd.Unsupported, match=words):
        plan_of(settings, **change)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([FullAttentionSpec(**SPEC), FullAttentionSpec(**SPEC)], "2 groups"),
        ([SlidingWindowSpec(**SPEC, sliding_window=63)], "63 tokens.*disable-hybrid"),
        (
            [
                FullAttentionSpec(**SPEC),
                SlidingWindowSpec(**{**SPEC, "block_size": 64}, sliding_window=96),
            ],
            "differ",
        ),
        ([ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=96)], "ChunkedLocal"),
        ([MLAAttentionSpec(**{**SPEC, "num_kv_heads": 1})], "MLAAttentionSpec"),
        ([FullAttentionSpec(**{**SPEC, "dtype": torch.uint8})], "uint8"),
    ],
)
def test_other_caches_are_refused(settings, specs, words):
    with pytest.raises(kvd.Unsupported, match=words):
        plan_of(settings, groups(*specs))


def test_an_untested_release_is_refused_unless_asked_for(settings, monkeypatch):
    monkeypatch.setattr(plans.vllm, "__version__", "0.99.1")
    with pytest.raises(kvd.Unsupported, match="untested_vllm"):
        plan_of(settings)
    assert plan_of(settings, **with_options(options={"untested_vllm": True}))


def test_names_tell_weights_and_codecs_apart(settings, tmp_path):
    folder = save_model(tmp_path / "saved", seed=3)

    def config_of():
        return (
            EngineArgs(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512)
            .create_engine_config()
            .model_config
        )

    before = plan_of(settings, model_config=config_of())
    assert before.weights == plan_of(settings, model_config=config_of()).weights
    save_model(folder, seed=4)
    after = plan_of(settings, model_config=config_of())
    assert before.weights != after.weights and before.name != after.name
    lossy = plan_of(settings, **with_options(options={"codec": "kivi-4"}))
    assert lossy.name != plan_of(settings).name
    named = plan_of(settings, **with_options(options={"weights": "run 7"}))
    assert named.weights != plan_of(settings).weights


def test_weights_of_a_hub_need_a_commit(settings):
    hub = types.SimpleNamespace(
        model="org/name", revision=None, hf_config=settings.model_config.hf_config
    )
    with pytest.raises(kvd.InvalidArgument, match="revision"):
        plans._find_weights(hub)
    hub.revision = "0123456789" * 4
    assert plans._find_weights(hub) == ["org/name", hub.revision]


@pytest.mark.parametrize(
    ("dtype", "isa"), [("float32", "vec"), ("bfloat16", "vec"), ("bfloat16", "amx")]
)
def test_cells_hold_rows_as_the_backend_wrote_them(dtype, isa):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("no AMX here")
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    layer = types.SimpleNamespace(
        impl=impl, isa=isa, head_size=64, _k_scale_float=1.0, _v_scale_float=1.0
    )
    cache = torch.zeros(5, 2, 32, 128, dtype=getattr(torch, dtype))
    key, value = (torch.randn(32, 2, 64).to(cache.dtype) for _ in range(2))
    impl.do_kv_cache_update(layer, key, value, cache, torch.arange(96, 128))
    cells = PagedCells([layer], [cache], [0])
    kind = kvd.DType.of(dtype).numpy
    rows = torch.empty(1, 1, 2, 32 * 128, dtype=cache.dtype)
    numbers = rows.view(torch.int16 if dtype == "bfloat16" else torch.int32).numpy().view(kind)
    cells.read(([3],), numbers)
    assert torch.equal(rows[0, 0, :, : 32 * 64].view(2, 32, 64), key.transpose(0, 1))
    assert torch.equal(rows[0, 0, :, 32 * 64 :].view(2, 32, 64), value.transpose(0, 1))
    before = cache.clone()
    cache.zero_()
    cells.write(([3],), numbers)
    assert torch.equal(cache, before)


def test_a_backend_that_changes_values_is_refused():
    class Rounding:
        def do_kv_cache_update(self, layer, key, value, cache, slots):
            cache[1] = torch.cat([key, value], -1).transpose(0, 1) / 2

    layer = types.SimpleNamespace(impl=Rounding(), head_size=64)
    with pytest.raises(kvd.Unsupported, match="as they came"):
        PagedCells([layer], [torch.zeros(5, 2, 32, 128)], [0])


# What vLLM's base class has: an addition may be something that a connector must do.
KNOWN_METHODS = """bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
    build_connector_worker_meta build_kv_connector_stats build_prom_metrics
    clear_connector_metadata finish_forward get_block_ids_with_load_errors
    get_external_cache_hit_sources get_finished get_finished_count get_handshake_metadata
    get_kv_connector_kv_cache_events get_kv_connector_stats get_loaded_kv_cache_group_ids
    get_mem_pool_context get_num_new_matched_tokens get_required_kvcache_layout
    get_transfer_results handle_preemptions has_connector_metadata has_pending_block_frees
    has_pending_push_work on_new_request register_finished_partial_tail register_kv_caches
    request_finished requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
    reset_capture_state role save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata
    set_xfer_handshake_metadata_pp_aware shutdown start_load_kv
    supports_divergent_local_hybrid_hits take_events update_connector_output
    update_state_after_alloc wait_for_layer_load wait_for_save"""


def test_the_base_class_is_the_one_that_we_know():
    public = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    assert public == set(KNOWN_METHODS.split())
    assert not kvd.vllm.KvdConnector.__abstractmethods__


def test_what_the_hybrid_manager_demands_is_what_we_know():
    public = {name for name in vars(SupportsHMA) if not name.startswith("_")}
    assert public == {"request_finished_all_groups"}
    assert supports_hma(kvd.vllm.KvdConnector)
    fields = {field.name for field in dataclasses.fields(KVConnectorTransferResults)}
    assert fields == {"finished_sending", "finished_recving", "failed_recving"}
    assert BlockPool(4, True, 32).null_block.block_id == NULL_BLOCK


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (lambda: kvd.vllm.KvdConnector, KVConnectorBase_V1),
        (lambda: KvdStats, KVConnectorStats),
        (lambda: KvdPromMetrics, KVConnectorPromMetrics),
        (lambda: attention.KvdAttention, CPUAttentionBackend),
        (lambda: attention.KvdAttentionImpl, CPUAttentionBackendImpl),
        (lambda: attention.BatchBuilder, AttentionMetadataBuilder),
    ],
)
def test_overridden_methods_take_what_vllm_passes(ours, base):
    overridden = 0
    for name in vars(ours()):
        theirs = getattr(base, name, None)
        is_named = name == "__init__" or not name.startswith("__")
        if not is_named or not inspect.isroutine(theirs):
            continue
        mine = inspect.signature(getattr(ours(), name)).parameters
        wanted = inspect.signature(theirs).parameters
        assert list(mine) == list(wanted), name
        assert [p.kind for p in mine.values()] == [p.kind for p in wanted.values()], name
        overridden += 1
    assert overridden >= 2


def test_vllm_has_the_fields_that_we_read():
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    } <= fields
    assert {"req_id", "num_computed_tokens"} <= {f.name for f in dataclasses.fields(NewRequestData)}
    assert {"req_ids", "num_computed_tokens"} <= {
        f.name for f in dataclasses.fields(CachedRequestData)
    }
    source = inspect.getsource(Request)
    for name in ("block_hashes", "num_preemptions", "num_tokens", "skip_reading_prefix_cache"):
        assert name in source


def test_settings_are_json_for_the_command_line():
    text = json.dumps(kvd.vllm.transfer_settings(REGION, codec="kivi-4"))
    config = KVTransferConfig(**json.loads(text))
    assert config.kv_load_failure_policy == "recompute"
    assert config.get_from_extra_config("codec", "") == "kivi-4"
