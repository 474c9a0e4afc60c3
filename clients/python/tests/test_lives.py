"""What ends: daemons, sessions, deadlines, regions. Nobody hangs or reads another's rows."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import SETTINGS

import kvd

GEOMETRY = kvd.Geometry(1, 2, 64)
ROWS = np.ones((10, 2, 64), "f4")
Q = np.ones((1, 4, 64), "f4")


def stop(server):
    """Stops the daemon's threads, all of them."""
    os.kill(server.pid, signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{server.pid}/task")
    while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
        time.sleep(0.001)


@pytest.fixture
def own():
    with kvd.serve(pool="64 MiB", settings=SETTINGS) as running:
        yield running


@pytest.fixture(params=["region", "grpc"])
def own_client(own, request):
    if request.param == "grpc":
        pytest.importorskip("grpc")
        with kvd.connect(own.unix) as client:
            yield client
    else:
        with own.connect() as client:
            yield client


def test_a_restart_is_told_and_a_new_sequence_works(own, own_client):
    model = own_client.model("m", GEOMETRY, dtype="f32", codec="raw")
    old = model.open()
    old.store(0, ROWS, ROWS)
    boot = own_client.boot_id
    own.kill()
    for _ in range(2):
        with pytest.raises(kvd.Disconnected) as raised:
            model.attend(0, [old], Q)
        assert raised.value.retryable
    own.restart()
    deadline = time.monotonic() + 60
    while True:
        try:
            fresh = model.open()  # registers the model again
            break
        except kvd.Disconnected:  # gRPC waits before it connects again
            assert time.monotonic() < deadline
            time.sleep(0.1)
    fresh.store(0, ROWS, ROWS)
    for call in (lambda: model.attend(0, [old], Q), lambda: old.store(0, ROWS, ROWS), old.describe):
        with pytest.raises(kvd.Restarted) as raised:
            call()
        assert raised.value.old_boot[:8] == boot[:8]
        assert raised.value.new_boot == own_client.boot_id != boot
    old.close()  # gone already
    assert fresh.describe().length == 10
    np.testing.assert_allclose(model.attend(0, [fresh], Q).out, 1.0)


def test_a_model_that_shall_fail_after_a_restart_does(own):
    with own.connect() as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="raw", on_restart="fail")
        old = model.open()
        boot = client.boot_id
        own.kill()
        own.restart()
        with pytest.raises(kvd.Disconnected):
            old.describe()
        for _ in range(2):
            for call in (model.open, lambda: model.id, old.describe):
                with pytest.raises(kvd.Restarted) as raised:
                    call()
                assert raised.value.old_boot[:8] == boot[:8]
        # Another registration is another promise.
        assert client.model("m", GEOMETRY, dtype="f32", codec="raw").open().length == 0
        with pytest.raises(kvd.InvalidArgument, match="on_restart"):
            client.model("m", GEOMETRY, dtype="f32", codec="raw", on_restart="retry")


def test_hints_are_listed(own_client):
    parent = own_client.model("m", GEOMETRY, dtype="f32", codec="raw").open()
    child = parent.fork()

    def said(of):
        found = {one.sequence_id: one for one in own_client.sequences()}[of.id]
        return found.phase, found.parent_sequence_id

    phase = kvd.SequencePhase
    assert (said(parent), said(child)) == ((phase.UNKNOWN, 0), (phase.UNKNOWN, parent.id))
    child.hint(phase.END_OF_TURN)
    parent.hint(phase.DONE, child)
    assert (said(parent), said(child)) == ((phase.DONE, child.id), (phase.END_OF_TURN, 0))
    with pytest.raises(kvd.InvalidArgument):
        child.hint(phase.DONE, child)
    assert phase(99) is phase.UNKNOWN


def test_a_daemon_killed_under_a_call_ends_it(own, own_client):
    model = own_client.model("m", GEOMETRY, dtype="f32", codec="raw")
    sequence = model.open()
    sequence.store(0, ROWS, ROWS)
    stop(own)
    pending = model.begin_attend(0, [sequence], Q)
    killer = threading.Timer(0.3, own.kill)
    killer.start()
    with pytest.raises(kvd.Disconnected):
        pending.result()
    killer.join()


def test_a_deadline_passes_and_the_region_serves_on(own):
    # What is asked later must be answered in as much, however busy the machine is.
    with own.connect(timeout=3) as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="raw")
        sequence = model.open()
        sequence.store(0, ROWS, ROWS)
        stop(own)
        with pytest.raises(kvd.DeadlineExceeded):
            model.attend(0, [sequence], Q)
        os.kill(own.pid, signal.SIGCONT)
        for _ in range(3):
            np.testing.assert_allclose(model.attend(0, [sequence], Q).out, 1.0)


def test_a_client_that_dies_leaves_nothing(own):
    program = """
import os, sys, numpy as np, kvd
client = kvd.connect(sys.argv[1])
model = client.model("m", kvd.Geometry(1, 2, 64), dtype="f32", codec="raw")
model.open().store(0, np.ones((10, 2, 64), "f4"), np.ones((10, 2, 64), "f4"))
print(len(client.sequences()), flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program, own.region]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.stdout == "1\n", child.stderr
    with own.connect() as client:
        deadline = time.monotonic() + 60
        while client.sequences():
            assert time.monotonic() < deadline, "the dead client's sequence is still there"
            time.sleep(0.05)


def test_a_closed_client_leaves_nothing_and_says_so(own):
    client = own.connect()
    model = client.model("m", GEOMETRY, dtype="f32", codec="raw")
    model.open().store(0, ROWS, ROWS)
    client.close()
    with pytest.raises(kvd.InvalidArgument, match="closed"):
        model.open()
    with own.connect() as other:
        assert other.sequences() == []


def test_a_named_session_takes_over(own):
    first = own.connect(session="engine-0")
    first.model("m", GEOMETRY, dtype="f32", codec="raw").open().store(0, ROWS, ROWS)
    with own.connect(session="engine-0") as second:
        assert second.sequences() == []
        with pytest.raises(kvd.UnknownSession):
            first.model("m", GEOMETRY, dtype="f32", codec="raw").open()
    first.close()


def test_places_in_a_region_come_round(own):
    with own.connect(region_bytes=1 << 20) as client:
        model = client.model("m", kvd.Geometry(4, 2, 64), dtype="f32", codec="raw")
        sequence = model.open()
        rows = np.arange(250 * 128, dtype="f4").reshape(250, 2, 64)
        for _ in range(5):
            # 4 x 256 KB do not fit at once.
            sequence.store_layers([rows] * 4, [-rows] * 4)
        assert sequence.describe().layer_lengths == (1250,) * 4
        np.testing.assert_array_equal(sequence.load(3, 1000)[1], -rows)
        q = np.ones((100, 4, 64), "f4")
        pending = []
        with pytest.raises(kvd.QueueFull):
            while True:
                pending.append(model.begin_attend(0, [kvd.Query(sequence, n_q=100)], q))
        assert len(pending) > 1
        answers = [one.result() for one in reversed(pending)]
        for answer in answers:
            np.testing.assert_array_equal(answer.out, answers[0].out)
        for _ in range(20):
            model.attend(0, [kvd.Query(sequence, n_q=100)], q)
        long = np.arange(3000 * 128, dtype="f4").reshape(3000, 2, 64)
        sequence.truncate(0)
        acks = sequence.store_layers([long] * 4, [-long] * 4)  # 3 MB a layer
        assert [ack.length for ack in acks] == [3000] * 4
        for layer in range(4):
            k, v = sequence.load(layer)
            np.testing.assert_array_equal(k, long)
            np.testing.assert_array_equal(v, -long)
        with pytest.raises(kvd.MessageTooLarge, match="region_bytes"):
            model.attend(0, [kvd.Query(sequence, n_q=1000)], np.ones((1000, 4, 64), "f4"))


def test_threads_share_a_client(own):
    with own.connect() as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="raw")
        failures = []

        def work(number):
            try:
                sequence = model.open()
                rows = np.full((16, 2, 64), number, "f4")
                for _ in range(20):
                    sequence.store(0, rows, rows)
                    out = model.attend(0, [sequence], Q).out
                    np.testing.assert_allclose(out, number, rtol=1e-3)
                sequence.close()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_a_region_leaves_no_descriptor_or_mapping(own):
    def held():
        gc.collect()
        maps = pathlib.Path("/proc/self/maps").read_text().count("kvd-region")
        return len(os.listdir("/proc/self/fd")), maps

    with own.connect() as client:
        client.info()
    before = held()
    for _ in range(3):
        with own.connect() as client:
            client.model("m", GEOMETRY, dtype="f32", codec="raw").open().store(0, ROWS, ROWS)
            del client
    assert held() == before


@pytest.mark.parametrize("way", ["region", "grpc"])
def test_the_first_call_to_a_daemon_that_hangs_waits_as_long_as_it_was_told(way):
    """A region waited for 5 s, however little was asked."""
    if way == "grpc":
        pytest.importorskip("grpc")
    with kvd.serve(pool="16 MiB", settings=SETTINGS) as own:
        stop(own)
        begun = time.monotonic()
        with pytest.raises(kvd.DeadlineExceeded):
            kvd.connect(own.region if way == "region" else own.unix, timeout=0.5)
        took = time.monotonic() - begun
        os.kill(own.pid, signal.SIGCONT)
    assert 0.4 <= took < 4
