"""Bad input is a typed error that says what to do, and leaves the connection usable."""

import numpy as np
import pytest

import kvd

GEOMETRY = kvd.Geometry(2, 2, 64)


@pytest.fixture
def model(client):
    return client.model("errors", GEOMETRY, dtype="f32", codec="raw")


@pytest.fixture
def sequence(model):
    with model.open() as opened:
        opened.store_layers(*[[np.ones((10, 2, 64), "f4")] * 2] * 2)
        yield opened


def rows(tokens=10, heads=2, dim=64, dtype="f4"):
    return np.ones((tokens, heads, dim), dtype)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, s: s.store(0, rows(dim=32), rows()), kvd.ShapeMismatch, r"k has shape \[10, 2, 32\]"),
        (lambda m, s: s.store(0, rows(), rows(tokens=9)), kvd.ShapeMismatch, "10 rows of k and 9 of v"),
        (lambda m, s: s.store(0, rows(dtype="f2"), rows()), kvd.ShapeMismatch, "k is f16"),
        (lambda m, s: s.store(0, rows(dtype="f8"), rows()), kvd.InvalidArgument, "float64"),
        (lambda m, s: s.store(7, rows(), rows()), kvd.InvalidArgument, "layer 7 of 2"),
        (lambda m, s: s.store(0, rows() * np.nan, rows()), kvd.NonFinite, "finite"),
        (lambda m, s: s.store(0, rows(), rows(), start=11), kvd.RangeGap, "10"),
        (lambda m, s: s.store(0, rows(5), rows(5), start=2), kvd.RangeOverlap, "10"),
        (lambda m, s: s.store(0, object(), rows()), kvd.InvalidArgument, "object"),
        (lambda m, s: m.attend(0, [s], rows(1, 3)), kvd.InvalidArgument, "3 query heads for 2 KV"),
        (lambda m, s: m.attend(0, [s], rows(2, 4)), kvd.ShapeMismatch, "q has shape"),
        (lambda m, s: m.attend(5, [s], rows(1, 4)), kvd.InvalidArgument, "layer 5 of 2"),
        (lambda m, s: m.attend(0, [s], rows(1, 4) * np.inf), kvd.NonFinite, "finite"),
        (lambda m, s: m.attend(0, [kvd.Query(s, kv_length=11)], rows(1, 4)), kvd.RangeNotStored, "11"),
        (lambda m, s: m.attend(0, [kvd.Query(s, n_q=11)], rows(11, 4)), kvd.InvalidArgument, "n_q"),
        (lambda m, s: m.attend(0, [kvd.Query(s, n_q=-1)], rows(1, 4)), kvd.InvalidArgument, "n_q"),
        (lambda m, s: s.load(0, 0, 11), kvd.RangeNotStored, "11"),
        (lambda m, s: s.load(0, 5, 4), kvd.InvalidArgument, "5 to 4"),
        (lambda m, s: s.fork(11), kvd.RangeNotStored, "11"),
        (lambda m, s: s.truncate(11), kvd.RangeNotStored, "11"),
        (lambda m, s: s.truncate(-1), kvd.InvalidArgument, "-1"),
        (lambda m, s: m.unregister(), kvd.ModelInUse, "sequence"),
    ],
)  # fmt: skip
def test_bad_calls_are_typed(model, sequence, call, error, text):
    with pytest.raises(error, match=text) as raised:
        call(model, sequence)
    assert raised.value.code in str(raised.value)
    assert not raised.value.retryable
    # The connection serves on, and nothing was stored.
    assert sequence.describe().layer_lengths == (10, 10)
    assert model.attend(0, [sequence], rows(1, 4)).out.shape == (1, 4, 64)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"codec": "kivi4"}, kvd.InvalidCodec),
        ({"codec": "kvd-2"}, kvd.InvalidCalibration),
        ({"codec": "raw", "calibration": b"nonsense"}, kvd.InvalidCalibration),
        ({"name": "not a name!"}, kvd.InvalidArgument),
        ({"dtype": "f64"}, kvd.InvalidArgument),
        ({"geometry": kvd.Geometry(0, 2, 64)}, kvd.InvalidArgument),
    ],
)
def test_bad_models_are_typed(client, change, error):
    spec = {"name": "bad", "geometry": GEOMETRY, "dtype": "f32", "codec": "raw", **change}
    with pytest.raises(error):
        client.model(spec.pop("name"), spec.pop("geometry"), **spec)


def test_a_closed_sequence_is_unknown(model):
    sequence = model.open()
    sequence.store(0, rows(), rows())
    sequence.close()
    for call in (
        lambda: model.attend(0, [sequence], rows(1, 4)),
        lambda: sequence.store(0, rows(), rows()),
        sequence.describe,
        lambda: sequence.load(0, 0, 1),
    ):
        with pytest.raises(kvd.UnknownSequence):
            call()


def test_a_bad_query_fails_alone_where_that_is_asked_for(model, sequence):
    closed = model.open()
    closed.close()
    q = rows(3, 4)
    queries = [sequence, closed, kvd.Query(sequence, kv_length=99)]
    with pytest.raises(kvd.UnknownSequence, match=r"queries\[1\]"):
        model.attend(0, queries, q)
    attended = model.attend(0, queries, q, partial=True)
    assert [one.query for one in attended.errors] == [1, 2]
    assert isinstance(attended.errors[0].error, kvd.UnknownSequence)
    assert isinstance(attended.errors[1].error, kvd.RangeNotStored)
    assert not attended.out[1:].any() and np.isneginf(attended.lse[1:]).all()
    np.testing.assert_array_equal(attended.out[0], model.attend(0, [sequence], q[:1]).out[0])


def test_a_full_pool_says_when_to_try_again(server):
    with kvd.serve(pool="2 MiB", settings={"device.threads": 1}) as small:
        with small.connect() as client:
            model = client.model("full", kvd.Geometry(1, 8, 128), dtype="f32", codec="raw")
            sequence = model.open()
            with pytest.raises(kvd.PoolFull) as raised:
                for _ in range(64):
                    sequence.store(0, rows(64, 8, 128), rows(64, 8, 128))
            assert raised.value.retryable and raised.value.retry_after > 0
            sequence.truncate(0)
            sequence.store(0, rows(64, 8, 128), rows(64, 8, 128))


def test_a_step_that_finds_no_room_leaves_all_layers_even():
    with kvd.serve(pool="5 MiB", settings={"device.threads": 1}) as small:
        with small.connect() as client:
            model = client.model("step", kvd.Geometry(4, 8, 128), dtype="f32", codec="raw")
            sequence, tokens = model.open(), rows(64, 8, 128)
            acks = sequence.store_layers([tokens[:50]] * 4, [tokens[:50]] * 4)
            assert [(ack.layer, ack.length) for ack in acks] == [(n, 50) for n in range(4)]
            for bad in (kvd.PoolFull, kvd.PoolFull):
                with pytest.raises(bad):
                    for _ in range(8):
                        sequence.store_layers([tokens] * 4, [tokens] * 4)
                lengths = sequence.describe().layer_lengths
                assert len(set(lengths)) == 1 and lengths[0] >= 50
            spoilt = [tokens, tokens, tokens * np.nan, tokens]
            sequence.truncate(10)
            with pytest.raises(kvd.NonFinite):
                sequence.store_layers(spoilt, [tokens] * 4)
            assert sequence.describe().layer_lengths == (10,) * 4


def test_names_of_namespaces_are_checked(server):
    with pytest.raises(kvd.NamespaceDenied):
        server.connect(namespace="strangers")


@pytest.mark.parametrize("target", ["nonsense", "localhost", "localhost:", ":1", ""])
def test_targets_that_are_none(target):
    with pytest.raises(kvd.InvalidArgument, match="is no daemon"):
        kvd.connect(target)


@pytest.mark.parametrize(
    "target", ["/nowhere/region.sock", "unix:/nowhere/kvd.sock", "127.0.0.1:1"]
)
def test_a_daemon_that_is_not_there(target):
    if not target.startswith("/"):
        pytest.importorskip("grpc")
    with pytest.raises(kvd.Disconnected) as raised:
        kvd.connect(target, timeout=5)
    assert raised.value.retryable


def test_a_program_that_is_no_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_BINARY", str(tmp_path / "kvd"))
    with pytest.raises(kvd.Unsupported, match="KVD_BINARY"):
        kvd.serve()
    with pytest.raises(kvd.Disconnected, match="exit code"):
        kvd.serve(binary="/bin/false")


def test_a_wrong_setting_of_a_served_daemon_is_said(monkeypatch):
    with pytest.raises(kvd.Disconnected, match=r"exit code 64.*device\.treads"):
        kvd.serve(settings={"device.treads": 1})
