"""The hand-written messages against the proto file, and decoding of what is no message."""

import pathlib
import re

import pytest

import kvd
from kvd import calls, messages
from kvd.model import model_label
from kvd.wire import Field, decode, encode, varint

PROTO = pathlib.Path(__file__).parents[3] / "proto/kvd/v1/kvd.proto"
NAMES = {
    "GEOMETRY": "Geometry",
    "REGION_SLICE": "RegionSlice",
    "PAYLOAD": "Payload",
    "CALL_ERROR": "CallError",
    "SERVER_INFO": "GetServerInfoResponse",
    "CODEC_INFO": "CodecInfo",
    "ROWS": "Rows",
    "STEP_PART": "StepPart",
    "BLOCK_KEYS": "BlockKeys",
    "REGISTER_MODEL": "RegisterModelRequest",
    "REGISTERED_MODEL": "RegisterModelResponse",
    "STORED_BYTES": "StoredBytes",
    "SEQUENCE_STATE": "DescribeSequenceResponse",
    "SEQUENCE_INFO": "SequenceInfo",
    "LIST_SEQUENCES": "ListSequencesRequest",
    "SEQUENCE_PAGE": "ListSequencesResponse",
    "HOLD_SESSION": "HoldSessionRequest",
    "HELD_SESSION": "HoldSessionResponse",
    "STORE_BLOCKS": "StoreBlocksRequest",
    "STORED_BLOCKS": "StoreBlocksResponse",
    "QUERY": "Query",
    "ATTEND": "AttendRequest",
    "QUERY_ERROR": "QueryError",
    "ATTENDED": "AttendResponse",
    "LOAD_BLOCKS": "LoadBlocksRequest",
    "LOADED_BLOCKS": "LoadBlocksResponse",
    "CALIBRATE": "CalibrateModelRequest",
    "MADE_CALIBRATION": "CalibrateModelResponse",
    "OPEN_REGION": "OpenRegionRequest",
    "OPENED_REGION": "OpenRegionResponse",
    "REGION_ATTEND": "RegionAttend",
    "REGION_CALL": "RegionCall",
    "STORE_STEP": "StoreStepRequest",
    "STORED_STEP": "StoreStepResponse",
    "LOAD_STEP": "LoadStepRequest",
    "LOADED_STEP": "LoadStepResponse",
    "WATCH_BLOCKS": "WatchBlocksRequest",
    "WATCHED_BLOCKS": "WatchBlocksResponse",
}
KINDS = {
    "text": {"string"},
    "bytes": {"bytes"},
    "float": {"float"},
    "double": {"double"},
    "u32": {"uint32"},
    "u64": {"uint64"},
    "bool": {"bool"},
    "enum": {"DType", "RopePairing", "RegionKind", "SequencePhase", "BlockChange", "BlockTier"},
    "optional u32": {"uint32"},
    "optional double": {"double"},
}


def proto_messages():
    """Fields of each message: number to name, type, label."""
    if not PROTO.exists():
        pytest.skip("not in a checkout")
    text = re.sub(r"//.*", "", PROTO.read_text())
    text = re.sub(r"^message (\w+) \{\}", r"message \1 {\n}", text, flags=re.M)
    found = {}
    for name, body in re.findall(r"^message (\w+) \{(.*?)^\}", text, re.M | re.S):
        fields = re.findall(r"(repeated |optional )?(\w+) (\w+) = (\d+)", body)
        found[name] = {int(n): (field, kind, label.strip()) for label, kind, field, n in fields}
    rpcs = re.findall(r"rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", text)
    return found, {name: (request, answer) for name, request, answer in rpcs}


def check_schema(schema, fields, where):
    for number, field in schema.items():
        assert number in fields, f"{where}.{field.name} = {number} is not in the proto file"
        name, kind, label = fields[number]
        assert name == field.name, f"{where}: {number} is {name}"
        assert field.repeated == (label == "repeated"), f"{where}.{name}"
        if not isinstance(field.kind, str):
            check_schema(field.kind, proto_messages()[0][kind], f"{where}.{name}")
        else:
            assert kind in KINDS[field.kind], f"{where}.{name} is {kind}"
            if field.kind not in ("float", "double"):  # those are only written
                assert (label == "optional") == field.kind.startswith("optional"), f"{where}.{name}"


def test_schemas_are_those_of_the_proto_file():
    found, rpcs = proto_messages()
    for name, message in NAMES.items():
        check_schema(getattr(messages, name), found[message], message)
    for rpc, schemas in messages.UNARY.items():
        for schema, message in zip(schemas, rpcs[rpc], strict=True):
            check_schema(schema, found[message], message)


def test_tags_of_region_calls_are_those_of_the_proto_file():
    found, _ = proto_messages()
    numbers = {name: number for number, (name, _, _) in found["RegionCall"].items()}
    tags = {
        "attend": messages.ATTEND_TAG,
        "store": messages.STORE_TAG,
        "control": messages.CONTROL_TAG,
    }
    for name, tag in tags.items():
        assert tag == varint(numbers[name] << 3 | 2)


class FakeSequence:
    wire_id, boot_id = b"\x08" + varint(2**63 + 5), "b"
    wire_query = b"\x3a\x0d" + wire_id + b"\x10\x01"


def test_attends_written_by_hand_are_the_schema():
    query = calls.Query(FakeSequence(), 3, 10, 0, 2, 9, 4)
    form = calls.AttendForm.encode(
        model_id=2**40, heads=(8, 64), dtype=kvd.DType.BF16, scores=(0.5, 30.0), partial=True
    )
    request = form.encode_request(300, calls.Queries([query, FakeSequence()]), b"\x0a\x01x")
    message = decode(messages.ATTEND, request)
    assert (message.model_id, message.layer, message.q_heads, message.dtype) == (2**40, 300, 8, 3)
    assert (message.scale, message.soft_cap, message.per_query_errors) == (0.5, 30.0, 1)
    assert message.q.inline == b"x"
    first, second = message.queries
    assert (first.sequence_id, first.n_q, first.kv_length, first.position) == (2**63 + 5, 3, 10, 0)
    assert (first.start, first.end, first.sliding_window) == (2, 9, 4)
    assert (second.n_q, second.kv_length, second.position) == (1, None, None)


def test_what_is_encoded_is_decoded():
    schema = {
        1: Field("number", "u64"),
        2: Field("numbers", repeated=True),
        3: Field("text", "text"),
        400: Field("inner", {1: Field("part", "double")}),
    }
    values = {"number": 2**64 - 1, "numbers": [0, 300], "text": "naïve", "inner": {"part": 0.1}}
    message = decode(schema, encode(schema, values))
    assert (message.number, message.numbers, message.text) == (2**64 - 1, [0, 300], "naïve")
    assert message.inner.part == 0.1
    packed = decode(schema, b"\x12\x03\x00\xac\x02" + b"\x58\x01")  # and an unknown field
    assert packed.numbers == [0, 300] and packed.inner is None


@pytest.mark.parametrize(
    "data", [b"\x08", b"\x1a\x05ab", b"\x0b", b"\x18\x01", b"\xff" * 12, b"\x19\x00"]
)
def test_what_is_no_message_is_an_error(data):
    with pytest.raises(kvd.Internal, match="malformed"):
        decode({1: Field("number"), 3: Field("text", "text")}, data)


def test_every_code_has_its_exception():
    source = PROTO.parents[3] / "crates/kvd-core/src/error_code.rs"
    if not source.exists():
        source = PROTO.parents[3] / "crates/kvd-core/src/error.rs"
    if not source.exists():
        pytest.skip("not in a checkout")
    codes = set(re.findall(r'Self::\w+ => "([A-Z_]+)"', source.read_text()))
    assert len(codes) > 20
    for code in codes:
        error = kvd.errors.error_of(code, "why")
        assert error.code == code and str(error) == f"{code}: why"
    assert isinstance(kvd.errors.error_of("NEW_CODE", "why"), kvd.Internal)


@pytest.mark.parametrize(
    "text, label",
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("../models//a b/./x/", "models/a-b/x"),
        ("/", "model"),
        ("x" * 8 + "/" + "y" * 19, "y" * 19),
    ],
)
def test_a_path_becomes_a_name_that_the_daemon_takes(text, label):
    assert model_label(text, 20) == label
