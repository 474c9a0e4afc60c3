"""Models with windowed layers under vLLM's hybrid manager, which frees the blocks behind a window:
with `raw` every greedy token is that of vLLM without the connector."""

import pytest
from conftest import SHARED, answer_without, generate, make_llm, prompts, save_model
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvd.blocks import BlockRows
from kvd.keys import Matches
from kvd.model import Model
from kvd.vllm.messages import NULL_BLOCK
from kvd.vllm.scheduler import SchedulerSide

# Groups of layers that vLLM makes of a model: gemma3 has full attention in one of two.
KINDS = {"gemma3": 2, "mistral": 1}
# Of the longest prompt: its window ends far from that of the whole.
SHORT = 640


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(kind), kind=kind)


@pytest.fixture(scope="module")
def expected(folder):
    """Tokens without the connector: cold, and of a second turn."""
    asked = prompts()
    llm = make_llm(folder)
    cold = generate(llm, asked)
    turn = [a + b + [7, 8, 9] for a, b in zip(asked, cold, strict=True)]
    second = generate(llm, turn)
    short = [asked[3][:SHORT]]
    early = generate(llm, short)
    llm.llm_engine.engine_core.shutdown()
    return {
        "asked": asked,
        "cold": cold,
        "turn": turn,
        "second": second,
        "short": short,
        "early": early,
    }


def note_orders(one, monkeypatch):
    """Orders of all steps from now on."""
    noted, take = [], one.scheduler.scheduler.take_orders

    def noting(scheduled):
        noted.append(take(scheduled))
        return noted[-1]

    monkeypatch.setattr(one.scheduler.scheduler, "take_orders", noting)
    return noted


def test_prefixes_of_windowed_layers_come_back(engine, folder, kind, expected, monkeypatch):
    one = engine(folder)
    assert one.scheduler.plan.is_windowed
    specs = [group.kv_cache_spec for group in one.scheduler._kv_cache_config.kv_cache_groups]
    windowed = [type(spec) is SlidingWindowSpec for spec in specs]
    assert len(windowed) == KINDS[kind] and windowed.count(True) == 1
    cold, did = one.counted(expected["asked"])
    assert cold == expected["cold"]
    assert did["stored_tokens"] >= 2500 and did["store_failures"] == 0
    assert one.counted(expected["asked"])[0] == expected["cold"], "vLLM has them itself"
    one.forget()
    noted = note_orders(one, monkeypatch)
    reloaded, did = one.counted(expected["asked"])
    assert reloaded == expected["cold"]
    assert did["loaded_tokens"] >= 2500 and did["load_failures"] == 0
    assert did["stored_tokens"] == 0, "all of it was there"
    loads = [load for orders in noted for load in orders.loads]
    assert len(loads) >= 5
    for load in loads:
        for group, is_windowed in zip(load.blocks, windowed, strict=True):
            gone = group.count(NULL_BLOCK)
            # A window of 96 tokens lies in at most 4 blocks of 32.
            assert len(group) - gone <= 4 if is_windowed else not gone
    one.forget()
    second, did = one.counted(expected["turn"])
    assert second == expected["second"]
    assert did["loaded_tokens"] >= 2500 and did["stored_tokens"] > 0


def test_a_wrong_load_of_windows_is_seen(engine, folder, expected, monkeypatch):
    """The control: what is loaded decides the answer."""
    one = engine(folder)
    one.counted(expected["asked"][2:3])
    one.forget()
    cells = one.worker.worker._cells
    write = cells.write
    monkeypatch.setattr(cells, "write", lambda blocks, rows: write(blocks, -rows))
    tokens, did = one.counted(expected["asked"][2:3])
    assert did["loaded_tokens"] >= 512
    assert tokens != expected["cold"][2:3]


def lose_what_kvd_has(one):
    """While vLLM keeps the prefixes, of windowed layers their ends."""
    one.llm.llm_engine.step()
    one.settle()
    dropped = one.worker.worker._model.drop()
    assert dropped.pages and not dropped.held


def test_rows_behind_a_window_are_not_stored(engine, folder, expected, monkeypatch):
    one = engine(folder)
    one.counted(expected["asked"][3:4])
    lose_what_kvd_has(one)
    noted = note_orders(one, monkeypatch)
    tokens, did = one.counted(expected["turn"][3:4])
    assert tokens == expected["second"][3:4]
    stores = [store for orders in noted for store in orders.stores]
    assert max(store.readable_from for store in stores) >= 1500 // 64 - 2
    assert did["stored_tokens"] == 0, "kvd has not what comes before"
    one.forget()
    tokens, did = one.counted(expected["turn"][3:4])
    assert tokens == expected["second"][3:4]
    assert did["loaded_tokens"] == 0 and did["stored_tokens"] >= 1472, "computed and stored"
    one.forget()
    tokens, did = one.counted(expected["short"])
    assert tokens == expected["early"] and did["loaded_tokens"] >= SHORT - 64


def test_rows_behind_a_window_that_were_stored_would_be_seen(engine, folder, expected, monkeypatch):
    """The control: vLLM has other rows where a window's were."""
    one = engine(folder)
    one.counted(expected["asked"][3:4])
    lose_what_kvd_has(one)
    take = SchedulerSide._find_readable

    def claim_all(side, first_page, blocks):
        for group in blocks:
            group[:] = [one or 1 for one in group]
        return take(side, first_page, blocks)

    monkeypatch.setattr(SchedulerSide, "_find_readable", claim_all)
    _, did = one.counted(expected["turn"][3:4])
    assert did["stored_tokens"] >= 1472
    one.forget()
    tokens, did = one.counted(expected["short"])
    assert did["loaded_tokens"] >= SHORT - 64
    assert tokens != expected["early"]


def test_windowed_requests_share_a_prefix_through_kvd(engine, folder, expected):
    one = engine(folder)
    one.counted(expected["asked"][4:5])
    one.forget()
    tokens, did = one.counted(expected["asked"][5:])
    assert tokens == expected["cold"][5:]
    assert did["loaded_tokens"] == SHARED


def test_a_small_pool_preempts_windowed_requests(engine, folder, monkeypatch):
    asked = [one[:140] for one in prompts()]
    expected = answer_without(folder, asked, tokens=90)
    one = engine(folder, num_gpu_blocks_override=24, max_model_len=256)
    scheduler = one.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def forgetting(request, *rest, **named):
        preempted.append(request.request_id)
        preempt(request, *rest, **named)
        scheduler.kv_cache_manager.evict_blocks(set(range(1, 24)))

    monkeypatch.setattr(scheduler, "_preempt_request", forgetting)
    tokens, did = one.counted(asked, tokens=90)
    assert tokens == expected
    assert preempted and did["loaded_tokens"] > 0
    one.forget()
    again, did = one.counted(asked, tokens=90)
    assert again == expected
    assert did["loaded_tokens"] >= 6 * 128 and did["load_failures"] == 0


def test_what_was_evicted_meanwhile_is_computed_whole(engine, folder, expected, monkeypatch):
    """A part of the load says nothing of windows at its end."""
    one = engine(folder)
    one.counted([expected["asked"][3][:640]])
    match = Model.match

    def match_more(asked, chains, **options):
        found = match(asked, chains, **options)
        assert found.tokens == (640,)
        return Matches((1472,), found.lease_id)

    monkeypatch.setattr(Model, "match", match_more)
    one.forget()
    tokens, did = one.counted(expected["asked"][3:4])
    assert tokens == expected["cold"][3:4]
    assert did["load_failures"] == 1


def test_a_daemon_that_restarts_in_a_store_stores_the_request_no_further(
    engine, server, folder, expected, monkeypatch
):
    """And no rows of other tokens under its keys."""
    one = engine(folder)
    store, stores = BlockRows.store, []

    def restart_third(rows, *where):
        stores.append(None)
        if len(stores) == 3:
            server.kill()
            server.restart()
        store(rows, *where)

    monkeypatch.setattr(BlockRows, "store", restart_third)
    tokens, _ = one.counted(expected["asked"][3:4])
    assert tokens == expected["cold"][3:4]
    assert len(stores) == 3
    for _ in range(2):
        one.forget()
        tokens, did = one.counted(expected["asked"][3:4])
        assert tokens == expected["cold"][3:4]
    assert did["loaded_tokens"] >= 1472, "the next request stores all of it again"


def test_an_engine_of_full_tables_reads_what_a_hybrid_one_stored(engine, folder, kind, expected):
    """Pages hold all tokens of all layers either way."""
    if kind == "mistral":
        pytest.skip("without full attention vLLM has windowed tables in any case")
    engine(folder).counted(expected["asked"])
    other = engine(folder, disable_hybrid_kv_cache_manager=True)
    assert not other.scheduler.plan.is_windowed
    tokens, did = other.counted(expected["asked"])
    assert tokens == expected["cold"]
    assert did["loaded_tokens"] >= 2500
