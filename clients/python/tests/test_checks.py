"""No value becomes another one on its way: what a field cannot hold is refused by name, before
anything is sent, and what numpy calls an integer is one."""

import dataclasses

import numpy as np
import pytest

import kvd
from kvd import checks, messages
from kvd.blocks import BlockRows
from kvd.calls import AttendForm, StoreItem
from kvd.client import ConnectOptions
from kvd.wire import Field, decode, encode, varint

U32, U64 = 2**32, 2**64
NO_INTEGERS = [1.5, 1.0, "1", b"1", None, True, np.float32(1), np.bool_(True), [1], object()]
TOKENS = 300


def rows(tokens=TOKENS, heads=2, dim=64):
    return np.ones((tokens, heads, dim), "f4")


@pytest.fixture
def model(client):
    return client.model("checks", kvd.Geometry(2, 2, 64), dtype="f32", codec="raw")


@pytest.fixture
def sequence(model):
    with model.open() as opened:
        opened.store_layers([rows()] * 2, [rows()] * 2)
        yield opened


def every_field(schema, where):
    for number, field in schema.items():
        if isinstance(field.kind, str):
            yield where, number, field
        else:
            yield from every_field(field.kind, f"{where}.{field.name}")


REQUESTS = {rpc: request for rpc, (request, _) in messages.UNARY.items()}
REQUESTS |= {
    name: getattr(messages, name)
    for name in ("STORE_BLOCKS", "LOAD_BLOCKS", "WATCH_BLOCKS", "OPEN_REGION", "REGION_CALL")
}
FIELDS = [one for rpc, schema in REQUESTS.items() for one in every_field(schema, rpc)]
WRONG = {
    "u32": [-1, -128, U32, U32 + 5, *NO_INTEGERS],
    "u64": [-1, -192, U64, *NO_INTEGERS],
    "enum": [-1, U32, *NO_INTEGERS],
    "bool": [0, 1, 2, -1, "no", 1.0, np.int64(1), [True]],
    "float": [np.nan, np.inf, 1e39, "1", b"1", True, [1.0, 2.0], 10**400],
    "double": [np.nan, -np.inf, "1", True, object(), 10**400],
    "text": [5, b"x", ["x"], "\ud800"],
    "bytes": [5, "abc", [1, 2], np.zeros(2, "i8"), np.int64(5)],
}
RIGHT = {
    "u32": [0, 127, 128, U32 - 1, np.int64(300), np.uint8(200), np.uint32(U32 - 1)],
    "u64": [0, U64 - 1, np.uint64(U64 - 1)],
    "enum": [0, 1, kvd.DType.BF16, np.int32(2)],
    "bool": [True, False, np.bool_(True)],
    "float": [0, 0.5, np.float64(0.25), np.int64(3), -2],
    "double": [0, 0.1, np.float32(0.5)],
    "text": ["", "naïve"],
    "bytes": [b"", b"ab", bytearray(b"ab"), memoryview(b"ab"), np.frombuffer(b"ab", "u1")],
}


def test_every_field_that_is_sent_refuses_what_it_cannot_hold_by_its_name():
    assert len(FIELDS) > 80
    for where, number, field in FIELDS:
        schema, kind = {number: field}, field.kind.removeprefix("optional ")
        for value in WRONG[kind]:
            if value is None and not field.repeated:
                continue  # left out
            given = [value] if field.repeated else value
            with pytest.raises(kvd.InvalidArgument, match=field.name):
                encode(schema, {field.name: given})
                pytest.fail(f"{where}.{field.name} takes {value!r}")
        for value in RIGHT[kind]:
            given = [value] if field.repeated else value
            (got,) = [getattr(decode(schema, encode(schema, {field.name: given})), field.name)]
            wanted = bytes(value) if kind == "bytes" else value
            assert got == ([wanted] if field.repeated else wanted), f"{where}.{field.name}"


def test_the_place_in_a_list_is_named():
    schema = {7: Field("blocks", repeated=True)}
    with pytest.raises(kvd.InvalidArgument, match=r"blocks\[2\] = -5 is not from 0 to 4294967295"):
        encode(schema, {"blocks": [0, 1, -5]})


def test_a_varint_is_never_of_a_negative_number():
    with pytest.raises(kvd.Internal):
        varint(-1)


def test_what_is_encoded_by_hand_is_checked_as_well():
    side = kvd.arrays.Rows(rows(1), kvd.DType.F32)
    for name in ("layer", "start"):
        for value in (-1, U32 + 5, 1.5, "1"):
            fields = {"model_id": 1, "sequence_id": 1, "layer": 0, "start": 0, name: value}
            with pytest.raises(kvd.InvalidArgument, match=name):
                StoreItem(**fields, k=side, v=side)
    form = {"model_id": 1, "heads": (2, 64), "dtype": kvd.DType.F32}
    for scores in (("1", 0.0), (np.nan, 0.0), (1e39, 0.0), (None, "x"), (None, np.inf)):
        with pytest.raises(kvd.InvalidArgument, match=r"scale|soft_cap"):
            AttendForm.encode(**form, scores=scores, partial=False)


@pytest.mark.parametrize("value", [-1, -128, -192, U32, U32 + 5, 1.5, "7", True])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("length", lambda m, s, n: s.fork(n)),
        ("length", lambda m, s, n: s.truncate(n)),
        ("start", lambda m, s, n: s.load(0, n)),
        ("end", lambda m, s, n: s.load(0, 0, n)),
        ("start", lambda m, s, n: s.store(0, rows(1), rows(1), start=n)),
        ("layer", lambda m, s, n: s.store(n, rows(1), rows(1))),
        ("layer", lambda m, s, n: s.load(n)),
        ("layer", lambda m, s, n: m.attend(n, [s], rows(1, 4))),
        ("ready_layers", lambda m, s, n: m.open(ready_layers=n)),
        ("start", lambda m, s, n: s.publish(n, kvd.Keys.of([b"k"]))),
        ("key_tokens", lambda m, s, n: kvd.Keys.of([b"k"], n)),
        ("key_bytes|keys of", lambda m, s, n: kvd.Keys(b"", n)),
        ("n_q", lambda m, s, n: m.attend(0, [kvd.Query(s, n)], rows(1, 4))),
        ("kv_length", lambda m, s, n: m.attend(0, [kvd.Query(s, kv_length=n)], rows(1, 4))),
        ("sliding_window", lambda m, s, n: m.attend(0, [kvd.Query(s, 1, sliding_window=n)], rows(1, 4))),
        ("tokens_max", lambda m, s, n: m.calibrate([s], ["kivi-4"], tokens=n)),
    ],
)  # fmt: skip
def test_calls_refuse_numbers_that_they_cannot_send(model, sequence, name, call, value):
    with pytest.raises(kvd.InvalidArgument, match=name):
        call(model, sequence, value)
    assert sequence.describe().layer_lengths == (TOKENS, TOKENS)
    assert sequence.length == TOKENS


def test_other_values_of_calls_are_refused_by_name(client, model, sequence):
    keys, q = kvd.Keys.of([b"k"]), rows(1, 4)
    for name, call in {
        "lease_id": lambda: model.open(keys, lease_id=-1),
        "lease_id = ": lambda: client.release_lease(U64),
        "lease =": lambda: model.match(keys, lease=-1),
        "lease = nan": lambda: model.match(keys, lease=float("nan")),
        "lease = 5000000": lambda: model.match(keys, lease=5_000_000),
        "seed": lambda: model.calibrate([sequence], ["kivi-4"], seed=-1),
        "timeout": lambda: model.calibrate([sequence], ["kivi-4"], timeout=-1),
        "codecs": lambda: model.calibrate([sequence], "kivi-4"),
        "settle": lambda: sequence.publish(0, keys, settle="no"),
        "phase": lambda: sequence.hint("done"),
        "parent": lambda: sequence.hint(kvd.SequencePhase.DONE, 5),
        "scale": lambda: model.attend(0, [sequence], q, scale="1"),
        "scale = nan": lambda: model.attend(0, [sequence], q, scale=float("nan")),
        "soft_cap": lambda: model.attend(0, [sequence], q, soft_cap=[1]),
        "partial": lambda: model.attend(0, [sequence], q, partial="no"),
        r"queries\[0\]": lambda: model.attend(0, [5], q),
        "queries is no list": lambda: model.attend(0, 5, q),
        r"queries\[0\] is": lambda: model.attend(0, [kvd.Query(7)], q),
        r"items\[0\]": lambda: model.store([sequence]),
        "prefix": lambda: model.open(b"k"),
        r"chains\[0\]": lambda: model.match([b"k"]),
        "chains is no list": lambda: model.drop("k"),
        "keys is no Keys|no kvd.Keys": lambda: sequence.publish(0, [b"k"]),
        "k is no list": lambda: sequence.store_layers(5, 5),
        "after": lambda: client.watch_blocks(5),
    }.items():
        with pytest.raises(kvd.InvalidArgument, match=name):
            call()
            pytest.fail(name)
    assert model.attend(0, [sequence], q, scale=np.float32(0.5), soft_cap=3).out.shape == (1, 4, 64)


def test_models_are_checked_before_they_are_registered(client):
    for name in ("layers", "kv_heads", "head_dim_k", "head_dim_v", "block_tokens"):
        for value in (-1, -2, 2**40, 1.5, "1", True):
            with pytest.raises(kvd.InvalidArgument, match=name):
                dataclasses.replace(kvd.Geometry(1, 2, 64), **{name: value})
    spec = {"dtype": "f32", "codec": "raw"}
    for name, value in {
        "weights": "abc", "calibration": 5, "codec": 5, "interleaved_rope": 1,
    }.items():  # fmt: skip
        with pytest.raises(kvd.InvalidArgument, match=name):
            client.model("checked", kvd.Geometry(1, 2, 64), **{**spec, name: value})
    with pytest.raises(kvd.InvalidArgument, match="name"):
        client.model(5, kvd.Geometry(1, 2, 64), **spec)
    with pytest.raises(kvd.InvalidArgument, match="geometry"):
        client.model("checked", (1, 2, 64), **spec)


def test_none_is_no_window_and_no_cap(model, sequence):
    q = rows(1, 4)
    plain = model.attend(0, [kvd.Query(sequence, 1)], q)
    none = model.attend(0, [kvd.Query(sequence, 1, sliding_window=None)], q, soft_cap=None)
    assert np.array_equal(plain.out, none.out)


def test_an_error_of_a_generator_is_its_own():
    with pytest.raises(ZeroDivisionError):
        checks.check_list("queries", (1 // n for n in (1, 0)))


def test_integers_of_numpy_are_integers(client):
    one, two, dim = np.int64(1), np.uint8(2), np.int32(64)
    model = client.model("of-numpy", kvd.Geometry(two, one, dim), dtype="f32", codec="raw")
    assert model.geometry == kvd.Geometry(2, 1, 64, 64)
    with model.open() as sequence:
        sequence.store_layers([rows(TOKENS, 1)] * 2, [rows(TOKENS, 1)] * 2)
        assert sequence.store(one, rows(5, 1), rows(5, 1), start=np.int16(TOKENS)).length == 305
        with sequence.fork(np.uint8(200)) as child:
            child.truncate(np.int8(100))
            assert child.describe().layer_lengths == (100, 100) and child.length == 100
        # Their sum is over what 8 bits hold.
        queries = [kvd.Query(sequence, n_q=np.uint8(200)), kvd.Query(sequence, n_q=np.uint8(100))]
        assert model.attend(np.uint8(0), queries, rows(300, 2)).out.shape == (300, 2, 64)
        assert sequence.load(np.int8(1), np.uint8(250), np.int64(305))[0].shape == (55, 1, 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("timeout", value) for value in (0, -1, np.nan, np.inf, "5", None, True, 1e300)],
        *[("session_ttl", value) for value in (-1, np.nan, "5", None, 5_000_000)],
        *[("region_bytes", value) for value in (0, -1, 1.5, "64", U64, True)],
        ("session", 5), ("namespace", 5), ("target", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["region", "grpc"])
def test_options_of_a_connection_mean_the_same_by_both_ways(server, way, name, value):
    """0 was no deadline by a region, and one that had passed by gRPC."""
    options = {"target": server.region if way == "region" else server.unix, name: value}
    with pytest.raises(kvd.InvalidArgument, match=name):
        kvd.connect(**options)


def test_spans_never_become_none():
    assert checks.read_milliseconds("lease", 1e-9) == 1
    assert checks.read_milliseconds("lease", 0) == 0
    assert checks.read_milliseconds("lease", np.float32(1.5)) == 1500
    assert ConnectOptions("/r", region_bytes=np.int32(1 << 20)).region_bytes == 1 << 20


def test_a_region_that_cannot_be_made_is_refused_by_name(server):
    with pytest.raises(kvd.InvalidArgument, match="region_bytes"):
        server.connect(region_bytes=2**62)


def test_room_for_blocks_is_checked(region_client):
    model = region_client.model("checks", kvd.Geometry(2, 2, 64), dtype="f32", codec="raw")
    for blocks, tokens in ((-1, 64), (0, 64), (1, -64), (1, 0), (1.5, 64), ("1", 64)):
        with pytest.raises(kvd.InvalidArgument, match="block"):
            BlockRows(model, region_client.link(), blocks, tokens)


def test_keys_are_bytes_of_one_length_and_say_what_is_wrong():
    for given in (["k"], [5], "abc", b"abc", 5, [np.zeros(2)]):
        with pytest.raises(kvd.InvalidArgument, match="keys"):
            kvd.Keys.of(given)
    with pytest.raises(kvd.InvalidArgument, match="keys of 0 bytes: a key has 1 to 64"):
        kvd.Keys.of([b""])
    with pytest.raises(kvd.InvalidArgument, match="packed has 3 bytes, no multiple of 2"):
        kvd.Keys(b"abc", 2)
    assert kvd.Keys(bytearray(b"abcd"), np.int64(2)) == kvd.Keys.of([b"ab", memoryview(b"cd")])
    with pytest.raises(kvd.InvalidArgument, match="first"):
        kvd.Keys.of([b"a", b"b"]).cut(-1, 2)


def test_results_of_other_shapes_do_not_merge():
    out, lse = np.zeros((3, 2, 8)), np.zeros((3, 2))
    for sides in (
        (out, lse, out[:2], lse[:2]), (out, lse[:, :1], out, lse), (out, lse, out, lse[0]), (5, lse, out, lse),
    ):  # fmt: skip
        with pytest.raises(kvd.ShapeMismatch, match="shapes"):
            kvd.merge(*sides)
