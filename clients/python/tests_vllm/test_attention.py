"""Attention by kvd, which holds all keys and values: with `raw` every greedy token is that of vLLM
alone."""

import pytest
import torch
from conftest import Engine, save_model

import kvd
from kvd.vllm import attending, plugin
from kvd.vllm.own_rows import attend_own

# 128 blocks of 32 tokens: all six prompts, of 3,253 tokens, at once.
BOOKS = {"enable_prefix_caching": False, "num_gpu_blocks_override": 128}


def clear_selected():
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture
def attends(monkeypatch):
    """As if vLLM had been started with the variable."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setenv(plugin.ATTENTION_VARIABLE, "1")
    plugin.register()
    clear_selected()
    yield
    for one in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN):
        one.clear_override()
    clear_selected()


class Attending(Engine):
    """An engine whose attention is kvd's."""

    def settle(self):
        """Every step ends with its stores."""

    def rest(self):
        """Lets vLLM tell the worker of requests that ended."""
        self.llm.llm_engine.step()


@pytest.fixture
def engine(stock, model_folder, server, attends):
    """Makes engines one after another, once `stock` has been computed without them."""
    made = []

    def make(folder=model_folder, options=None, **engine):
        for one in made:
            one.close()
        made.append(Attending(folder, server, options, **{**BOOKS, **engine}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_tokens_are_those_of_vllm(engine, stock, server):
    one = engine()
    caches = one.llm.llm_engine.model_executor.driver_worker.model_runner.kv_caches
    # vLLM has no room for what it computes: 4 bytes a token and layer instead of 1,024.
    assert sum(cache.nbytes for cache in caches) == 128 * 32 * 4 * 4
    cold, did = one.counted(stock["asked"])
    assert cold == stock["cold"]
    assert did["stored_tokens"] + did["loaded_tokens"] == 3253 + 6 * 23
    assert did["published_pages"] >= 40 and did["attend_failures"] == 0
    again, did = one.counted(stock["asked"])
    assert again == stock["cold"]
    assert did["loaded_tokens"] >= 2500, "prefixes begin with what is cached"
    assert did["stored_tokens"] < 1000
    second, did = one.counted(stock["turn"])
    assert second == stock["second"]
    assert did["loaded_tokens"] >= 2500
    one.rest()
    with server.connect() as client:
        assert not client.sequences(), "requests that ended leave nothing open"


def test_requests_share_a_prefix(engine, stock):
    one = engine()
    first, second = stock["asked"][4:]
    one.counted([first])
    tokens, did = one.counted([second])
    assert tokens == [stock["cold"][5]]
    assert did["loaded_tokens"] == 320


@pytest.mark.parametrize("side", ["own", "older"])
def test_either_side_left_out_is_seen(engine, stock, monkeypatch, side):
    """The control: both sides of the merge decide the answer."""
    merge = attending.merge

    def merge_one(out_a, lse_a, out_b, lse_b):
        none = torch.full_like(lse_a, -torch.inf)
        return (
            merge(out_a, none, out_b, lse_b) if side == "own" else merge(out_a, lse_a, out_b, none)
        )

    monkeypatch.setattr(attending, "merge", merge_one)
    tokens = engine().counted(stock["asked"])[0]
    assert all(one != other for one, other in zip(tokens, stock["cold"], strict=True))


def test_preempted_requests_go_on_with_what_is_cached(engine, stock, model_folder):
    asked = [stock["asked"][3][at : at + 150] for at in range(0, 900, 150)]
    one = engine(num_gpu_blocks_override=24, max_model_len=736)
    scheduler = one.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def noting(request, *rest, **named):
        preempted.append(request.request_id)
        preempt(request, *rest, **named)

    scheduler._preempt_request = noting
    tokens, did = one.counted(asked, tokens=90)
    assert preempted and did["attend_failures"] == 0
    assert did["loaded_tokens"] >= 128 * len(preempted)
    alone = [one.counted([each], tokens=90)[0][0] for each in asked]
    assert tokens == alone
    assert [each[:24] for each in tokens] == [each[:24] for each in alone]


def test_a_prompt_in_many_chunks(engine, stock):
    one = engine(max_num_batched_tokens=64)
    assert one.counted(stock["asked"])[0] == stock["cold"]


def test_calls_in_pieces(engine, stock, monkeypatch):
    monkeypatch.setattr(attending, "_PIECE_BYTES", 100 * 2 * 4 * 64 * 4)
    assert engine().counted(stock["asked"])[0] == stock["cold"]


def test_kivi_4_answers_nearly_the_same(engine, stock):
    one = engine(options={"codec": "kivi-4"})
    tokens, did = one.counted(stock["asked"])
    assert did["attend_failures"] == 0
    assert [len(each) for each in tokens] == [24] * 6
    # 100 tokens lie in the codec's windows in full precision.
    assert tokens[0] == stock["cold"][0]


def killed_in(monkeypatch, server, call, at, restarts):
    """Kills the daemon in a call of the worker, the `at`th."""
    whole, seen = getattr(attending.AttendingSide, call), []

    def killing(*asked, **named):
        seen.append(None)
        if len(seen) == at:
            server.kill()
            if restarts:
                server.restart()
        return whole(*asked, **named)

    monkeypatch.setattr(attending.AttendingSide, call, killing)
    return seen


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("_begin", 3),
        ("_ask", 1),
        ("_ask", 18),
        ("_ask", 70),
        ("_store", 2),
        ("_store", 20),
        ("_publish", 4),
    ],
)
def test_a_daemon_that_is_restarted(engine, server, stock, monkeypatch, call, at):
    one = engine()
    seen = killed_in(monkeypatch, server, call, at, restarts=True)
    tokens, did = one.counted(stock["asked"])
    assert len(seen) >= at and did["attend_failures"] > 0
    assert tokens == stock["cold"]
    assert one.counted(stock["asked"])[0] == stock["cold"]


def test_a_daemon_that_stays_away_ends_the_engine(engine, server, stock, monkeypatch):
    one = engine(options={"timeout_s": 1})
    killed_in(monkeypatch, server, "_ask", 30, restarts=False)
    with pytest.raises(kvd.Disconnected):
        one.counted(stock["asked"])


def test_requests_fail_alone_where_vllm_is_told_to(engine, server, stock, monkeypatch):
    transfer = kvd.vllm.transfer_config

    def failing(*asked, **options):
        made = transfer(*asked, **options)
        made.kv_load_failure_policy = "fail"
        return made

    monkeypatch.setattr(kvd.vllm, "transfer_config", failing)
    one = engine(options={"timeout_s": 1})
    with monkeypatch.context() as during:
        killed_in(during, server, "_ask", 30, restarts=False)
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": each} for each in stock["asked"]]
        answers = one.llm.generate(inputs, sampling, use_tqdm=False)
    for answer, whole in zip(answers, stock["cold"], strict=True):
        given = answer.outputs[0]
        assert given.finish_reason == "error"
        assert list(given.token_ids) == whole[: len(given.token_ids)], "no token is wrong"
    server.restart()
    assert one.counted(stock["asked"])[0] == stock["cold"]


def test_own_rows_against_f64():
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(70, 4, 32, generator=draw)
    k, v = (torch.randn(70, 2, 32, generator=draw) for _ in range(2))
    spans = [(0, 1), (1, 40), (40, 41), (41, 70)]
    out, lse = attend_own(q, k, v, 0.25, spans)
    for first, end in spans:
        for at in range(first, end):
            for head in range(4):
                keys, values = (side[first : at + 1, head // 2].double() for side in (k, v))
                scores = keys @ q[at, head].double() * 0.25
                torch.testing.assert_close(
                    lse[at, head].double(), scores.logsumexp(0), rtol=1e-5, atol=1e-5
                )
                expected = torch.softmax(scores, 0) @ values
                torch.testing.assert_close(out[at, head].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching=False"),
        ({"num_gpu_blocks_override": None}, "num_gpu_blocks_override"),
    ],
)
def test_an_engine_that_cannot_be_right_is_refused(engine, change, says):
    with pytest.raises(Exception, match=says):
        engine(**change)


def test_steps_that_begin_before_the_last_has_ended_are_refused():
    """vLLM's platform for CPUs has none."""
    from types import SimpleNamespace as Some

    from kvd.vllm.plan import _check_attending

    cache = Some(enable_prefix_caching=False, num_gpu_blocks_override=8)
    engine = Some(cache_config=cache, scheduler_config=Some(async_scheduling=True))
    with pytest.raises(kvd.InvalidArgument, match="async_scheduling=False"):
        _check_attending(engine)


def test_windows_are_refused(engine, tmp_path):
    with pytest.raises(Exception, match="sliding window"):
        engine(save_model(tmp_path / "mistral", kind="mistral"))


def test_the_variable_without_the_connector_is_refused(attends, model_folder):
    from conftest import make_llm

    with pytest.raises(Exception, match="needs its connector"):
        make_llm(model_folder)


def test_the_variable_without_the_plugin_is_refused(stock, monkeypatch, model_folder, server):
    monkeypatch.setenv(plugin.ATTENTION_VARIABLE, "1")
    with pytest.raises(Exception, match="VLLM_PLUGINS"):
        Attending(model_folder, server, **BOOKS)


def test_features_of_layers_are_refused_by_name(attends):
    from kvd.vllm.attention import KvdAttentionImpl

    plain = {
        "num_heads": 4,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    for change, says in [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 128}, "sliding window of 128"),
        ({"logits_soft_cap": 50.0}, "soft cap of 50"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_sharing_target_layer_name": "a"}, "share keys and values"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
    ]:
        with pytest.raises(kvd.Unsupported, match=says):
            KvdAttentionImpl(**{**plain, **change})
