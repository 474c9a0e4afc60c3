"""A daemon that is killed, restarted, stopped or has evicted what it said: vLLM computes, and every
token is that of vLLM alone."""

import os
import signal
import threading
import time

from conftest import SHARED

import kvd
from kvd.blocks import BlockRows
from kvd.keys import Matches


def wait_for(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_between_runs_and_back_again(engine, server, stock):
    one = engine()
    one.counted(stock["asked"])
    server.kill()
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert did["loaded_tokens"] == 0 and did["lookup_failures"] > 0
    server.restart()
    transfers = one.worker.worker.transfers
    wait_for(lambda: transfers.client.link_if_open() is not None)
    # Look-ups rest after a failure.
    one.scheduler.scheduler.lookups._paused_until = 0.0
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert did["loaded_tokens"] in (0, SHARED), "a new daemon has nothing"
    assert did["stored_tokens"] >= 2500
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert did["loaded_tokens"] >= 2500 and did["load_failures"] == 0


def test_killed_between_lookup_and_load(engine, server, stock, monkeypatch):
    one = engine()
    one.counted(stock["asked"])
    transfers = one.worker.worker.transfers
    open_sequence, killed = transfers._open, []

    def kill_first(*asked):
        if not killed:
            killed.append(server.kill())
        return open_sequence(*asked)

    monkeypatch.setattr(transfers, "_open", kill_first)
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert killed and did["load_failures"] > 0


def test_killed_and_restarted_in_a_load(engine, server, stock, monkeypatch):
    one = engine()
    one.counted(stock["asked"])
    load, ended = BlockRows.load, []

    def restart_first(rows, *where):
        if not ended:
            server.kill()
            ended.append(server.restart())
        load(rows, *where)

    monkeypatch.setattr(BlockRows, "load", restart_first)
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]
    assert ended and did["load_failures"] > 0
    one.forget()
    tokens, did = one.counted(stock["asked"])
    assert tokens == stock["cold"]


def test_killed_and_restarted_in_a_store(engine, server, stock, monkeypatch):
    """What was lost is stored again while the request goes on."""
    one = engine()
    store, ended = BlockRows.store, []

    def restart_third(rows, *where):
        ended.append(None)
        if len(ended) == 3:
            server.kill()
            server.restart()
        store(rows, *where)

    monkeypatch.setattr(BlockRows, "store", restart_third)
    asked = stock["asked"][3:4]
    whole = one.counted(asked, tokens=200)[0]
    assert whole[0][:24] == stock["cold"][3]
    assert len(ended) > 3
    one.forget()
    again, did = one.counted(asked, tokens=200)
    assert again == whole
    assert did["loaded_tokens"] >= 1472, "the prompt was stored again"


def test_killed_while_requests_run(engine, server, stock):
    """At moments of chance, many times."""
    one = engine()
    for delay in (0.05, 0.2, 0.4, 0.6):

        def restart(delay=delay):
            time.sleep(delay)
            server.kill()
            time.sleep(0.05)
            server.restart()

        chaos = threading.Thread(target=restart)
        chaos.start()
        tokens, _ = one.counted(stock["asked"])
        chaos.join()
        assert tokens == stock["cold"], delay
        one.forget()
        assert one.counted(stock["asked"])[0] == stock["cold"], delay
        one.forget()


def test_a_daemon_that_hangs_delays_and_does_not_block(engine, server, stock):
    one = engine(options={"timeout_s": 1})
    one.counted(stock["asked"])
    one.forget()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        tokens, did = one.counted(stock["asked"])
        assert tokens == stock["cold"]
        assert did["loaded_tokens"] == 0 and did["lookup_failures"] > 0
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_what_was_evicted_meanwhile_is_computed(engine, stock, monkeypatch):
    """A look-up that found more than there is: the part that is there is loaded."""
    one = engine()
    one.counted([stock["asked"][3][:640]])
    model, match = one.scheduler.scheduler.lookups._model, kvd.Model.match

    def match_more(asked, chains, **options):
        found = match(asked, chains, **options)
        assert asked is model and found.tokens == (640,)
        return Matches((1472,), found.lease_id)

    monkeypatch.setattr(kvd.Model, "match", match_more)
    one.forget()
    tokens, did = one.counted(stock["asked"][3:4])
    assert tokens == stock["cold"][3:4]
    assert did["loaded_tokens"] == 640 and did["load_failures"] == 1


def test_a_full_pool_stores_no_more(engine, stock, model_folder):
    """The daemon keeps what it has room for, and vLLM goes on."""
    from conftest import SETTINGS, Engine

    with kvd.serve(pool="3 MiB", settings=SETTINGS) as small:
        one = Engine(model_folder, small)
        try:
            assert one.counted(stock["asked"])[0] == stock["cold"]
            one.forget()
            assert one.counted(stock["asked"])[0] == stock["cold"]
        finally:
            one.close()
