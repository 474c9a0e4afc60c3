"""With `raw` every greedy token is that of vLLM without the connector."""

import numpy as np
from conftest import SHARED, answer_without, prompts, save_model


def test_prefixes_come_back(engine, stock):
    one = engine()
    cold, did = one.counted(stock["asked"])
    assert cold == stock["cold"]
    assert did["stored_tokens"] >= 2500 and did["loaded_tokens"] in (0, SHARED)
    again, did = one.counted(stock["asked"])
    assert again == stock["cold"]
    assert did["loaded_tokens"] == 0, "vLLM had them itself"
    one.forget()
    reloaded, did = one.counted(stock["asked"])
    assert reloaded == stock["cold"]
    assert did["loaded_tokens"] >= 2500 and did["load_failures"] == 0
    assert did["stored_tokens"] == 0, "all of it was there"
    one.forget()
    second, did = one.counted(stock["turn"])
    assert second == stock["second"]
    assert did["loaded_tokens"] >= 2500 and did["stored_tokens"] > 0


def test_requests_share_a_prefix_through_kvd(engine, stock):
    one = engine()
    first, second = stock["asked"][4:]
    one.counted([first])
    one.forget()
    tokens, did = one.counted([second])
    assert tokens == [stock["cold"][5]]
    assert did["loaded_tokens"] == 320


def test_a_wrong_load_is_seen(engine, stock, monkeypatch):
    """The control: what is loaded decides the answer."""
    one = engine()
    one.counted(stock["asked"][2:3])
    one.forget()
    cells = one.worker.worker._cells
    write = cells.write
    monkeypatch.setattr(cells, "write", lambda blocks, rows: write(blocks, -rows))
    tokens, did = one.counted(stock["asked"][2:3])
    assert did["loaded_tokens"] >= 512
    assert tokens != stock["cold"][2:3]


def forget_what_is_preempted(one, monkeypatch):
    """vLLM's own copy of a preempted request is gone by the time that it goes on."""
    scheduler = one.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def forgetting(request, *rest, **named):
        preempted.append(request.request_id)
        preempt(request, *rest, **named)
        scheduler.kv_cache_manager.evict_blocks(set(range(1, 24)))

    monkeypatch.setattr(scheduler, "_preempt_request", forgetting)
    return preempted


def test_a_pool_of_24_blocks_preempts_and_answers_the_same(
    engine, stock, model_folder, monkeypatch
):
    asked = [stock["asked"][3][at : at + 150] for at in range(0, 900, 150)]
    expected = answer_without(model_folder, asked, tokens=90)
    one = engine(num_gpu_blocks_override=24, max_model_len=736)
    preempted = forget_what_is_preempted(one, monkeypatch)
    tokens, did = one.counted(asked, tokens=90)
    assert tokens == expected
    assert preempted
    assert did["loaded_tokens"] > 0, "a preempted request loads what it had"
    one.forget()
    again, did = one.counted(asked, tokens=90)
    assert again == expected
    assert did["loaded_tokens"] >= 6 * 128 and did["load_failures"] == 0


def test_a_lossy_codec_loads_too(engine, stock):
    one = engine(options={"codec": "kivi-4"}, block_size=64)
    cold, _ = one.counted(stock["asked"])
    assert cold == stock["cold"], "the first run reads vLLM's own rows"
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert did["loaded_tokens"] >= 2500 and did["load_failures"] == 0
    assert [len(one) for one in tokens] == [len(one) for one in cold]
    one.forget()
    assert one.counted(stock["asked"])[0] == tokens, "every reload reads the same bits"


def test_namespaces_are_apart(engine, stock):
    engine().counted(stock["asked"])
    other = engine(options={"namespace": "other"})
    tokens, did = other.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert did["matched_tokens"] in (0, SHARED) and did["lookups"] >= 6


def test_weights_are_apart(engine, stock, tmp_path):
    folder = save_model(tmp_path / "other", seed=1)
    expected = answer_without(folder, stock["asked"])
    assert expected != stock["cold"]
    engine().counted(stock["asked"])
    tokens, did = engine(folder).counted(stock["asked"])
    assert tokens == expected
    assert did["matched_tokens"] in (0, SHARED) and did["lookups"] >= 6


def test_windowed_layers_beside_others_are_kept_whole(engine, tmp_path):
    folder = save_model(tmp_path / "gemma", kind="gemma3")
    expected = answer_without(folder, prompts())
    one = engine(folder)
    assert one.counted(prompts())[0] == expected
    one.forget()
    tokens, did = one.counted(prompts())
    assert tokens == expected
    assert did["loaded_tokens"] >= 2500


def test_a_reset_of_the_connector_drops_what_kvd_has(engine, stock):
    """After weights were changed in place, say."""
    one = engine()
    one.counted(stock["asked"])
    assert not one.llm.reset_prefix_cache(reset_connector=True), "the last requests hold some"
    # vLLM tells the worker of ended requests in the next step, which `generate` does not wait for.
    one.llm.llm_engine.step()
    one.settle()
    assert one.llm.reset_prefix_cache(reset_connector=True)
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert did["matched_tokens"] in (0, SHARED) and did["stored_tokens"] >= 2500


def test_rows_in_bf16_come_back_bit_by_bit(engine, stock, monkeypatch):
    """Also where keys lie in pairs for matrix units."""
    one = engine(dtype="bfloat16")
    cells = one.worker.worker._cells
    read, write, stored, loaded = cells.read, cells.write, [], []

    def note_stored(blocks, rows):
        read(blocks, rows)
        stored.append(rows.copy())

    def note_loaded(blocks, rows):
        write(blocks, rows)
        back = np.empty_like(rows)
        read(blocks, back)
        loaded.append(back)

    monkeypatch.setattr(cells, "read", note_stored)
    monkeypatch.setattr(cells, "write", note_loaded)
    one.counted(stock["asked"][3:4])
    one.forget()
    _, did = one.counted(stock["asked"][3:4])
    assert did["loaded_tokens"] == 1472
    whole, back = (np.concatenate(each, axis=1) for each in (stored, loaded))
    assert whole.shape[1] >= back.shape[1] == 1472 // 32
    assert back.any() and np.array_equal(whole[:, : back.shape[1]], back)
