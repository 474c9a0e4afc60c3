"""Schemas of the messages of `kvd.v1` that this client sends or reads, by rpc.

A test holds every field against proto/kvd/v1/kvd.proto.
"""

from __future__ import annotations

from typing import Final

from .wire import Field, Schema


def _schema(*fields: tuple[int, str] | tuple[int, str, str | Schema]) -> Schema:
    return {field[0]: Field(field[1], field[2] if len(field) == 3 else "u32") for field in fields}


def _repeated(number: int, name: str, kind: str | Schema = "u32") -> dict[int, Field]:
    return {number: Field(name, kind, repeated=True)}


NOTHING: Final[Schema] = {}

GEOMETRY = _schema(
    (1, "layers"),
    (2, "kv_heads"),
    (3, "head_dim_k"),
    (4, "head_dim_v"),
    (5, "block_tokens"),
    (6, "dtype", "enum"),
    (7, "rope_pairing", "enum"),
)
REGION_SLICE = _schema((1, "offset", "u64"), (2, "bytes", "u64"))
PAYLOAD = _schema((1, "inline", "bytes"), (2, "region", REGION_SLICE))
CALL_ERROR = _schema(
    (1, "code", "text"),
    (2, "message", "text"),
    (3, "retry_after_ms", "optional u32"),
    (4, "id_boot", "text"),
    (5, "boot_id", "text"),
)
SERVER_INFO = {
    **_schema((1, "version", "text"), (2, "boot_id", "text"), (3, "device", "text")),
    **_schema(
        (4, "pool_capacity_bytes", "u64"),
        (5, "message_bytes_max", "u64"),
        (6, "block_tokens_default"),
    ),
    **_schema((7, "precision", "text"), (20, "region_path", "text"), (21, "protocol")),
    **_repeated(22, "features", "text"),
    **_schema((24, "codec_default", "text")),
}
CODEC_INFO = _schema(
    (1, "name", "text"),
    (2, "spec", "text"),
    (3, "summary", "text"),
    (4, "choose_when", "text"),
    (5, "bits_k", "optional double"),
    (6, "bits_v", "optional double"),
    (7, "needs_calibration", "bool"),
    (8, "page_tokens_min"),
    (9, "sink"),
    (10, "recent"),
)
REGISTER_MODEL = _schema(
    (1, "name", "text"),
    (2, "geometry", GEOMETRY),
    (3, "codec", "text"),
    (4, "calibration", "bytes"),
    (40, "identity", _schema((1, "weights", "bytes"))),
)
REGISTERED_MODEL = _schema(
    (1, "model_id", "u64"),
    (2, "codec_spec", "text"),
    (3, "fingerprint", "text"),
    (4, "geometry", GEOMETRY),
)
STORED_BYTES = _schema(
    (1, "packed_values", "u64"),
    (2, "packed_bytes", "u64"),
    (3, "code_bytes", "u64"),
    (4, "scale_bytes", "u64"),
    (5, "offset_bytes", "u64"),
    (6, "header_bytes", "u64"),
    (7, "raw_values", "u64"),
    (8, "raw_bytes", "u64"),
    (9, "packed_key_bytes", "u64"),
    (10, "packed_value_bytes", "u64"),
)
SEQUENCE_STATE = {
    **_schema((1, "model_id", "u64"), (2, "length")),
    **_repeated(3, "layer_lengths"),
    **_schema((4, "packed_blocks", "u64"), (5, "raw_blocks", "u64"), (6, "stored", STORED_BYTES)),
}
SEQUENCE_INFO = _schema(
    (1, "sequence_id", "u64"),
    (2, "model_id", "u64"),
    (3, "session_id", "u64"),
    (4, "length"),
    (5, "age_ms", "u64"),
    (6, "idle_ms", "u64"),
    (7, "stored", STORED_BYTES),
    (8, "phase", "enum"),
    (9, "parent_sequence_id", "u64"),
)
LIST_SEQUENCES = _schema(
    (1, "model_id", "u64"),
    (2, "session_id", "u64"),
    (3, "idle_ms_min", "u64"),
    (4, "after_id", "u64"),
    (5, "limit"),
)
SEQUENCE_PAGE = {**_repeated(1, "sequences", SEQUENCE_INFO), **_schema((2, "next_after_id", "u64"))}
HOLD_SESSION = _schema(
    (1, "name", "text"), (2, "ttl_ms"), (3, "take_over", "bool"), (4, "session_id", "u64")
)
HELD_SESSION = _schema((1, "session_id", "u64"), (2, "ttl_ms"))
STORE_BLOCKS = _schema(
    (1, "sequence_id", "u64"),
    (2, "layer"),
    (3, "start"),
    (4, "tokens"),
    (5, "k", PAYLOAD),
    (6, "v", PAYLOAD),
)
STORED_BLOCKS = _schema(
    (1, "layer"),
    (2, "length"),
    (3, "replayed", "bool"),
    (4, "packed_blocks"),
    (5, "error", CALL_ERROR),
)
QUERY = _schema(
    (1, "sequence_id", "u64"),
    (2, "n_q"),
    (3, "kv_length", "optional u32"),
    (4, "position", "optional u32"),
    (5, "start", "optional u32"),
    (6, "end", "optional u32"),
    (7, "sliding_window"),
)
ATTEND = {
    **_schema((1, "model_id", "u64"), (2, "layer"), (3, "q_heads"), (4, "dtype", "enum")),
    **_schema((5, "scale", "float"), (6, "soft_cap", "float")),
    **_repeated(7, "queries", QUERY),
    **_schema((8, "q", PAYLOAD), (9, "per_query_errors", "bool")),
}
QUERY_ERROR = _schema((1, "query"), (2, "error", CALL_ERROR))
ATTENDED = {
    **_schema((1, "out", PAYLOAD), (2, "lse", PAYLOAD)),
    **_repeated(3, "query_errors", QUERY_ERROR),
    **_schema((4, "error", CALL_ERROR)),
}
LOAD_BLOCKS = _schema(
    (1, "sequence_id", "u64"), (2, "layer"), (3, "start"), (4, "end"), (5, "dtype", "enum")
)
LOADED_BLOCKS = _schema((1, "start"), (2, "tokens"), (3, "k", PAYLOAD), (4, "v", PAYLOAD))
ROWS = {
    **_schema(
        (1, "offset", "u64"),
        (2, "head_stride", "u64"),
        (3, "token_stride", "u64"),
        (4, "layer_stride", "u64"),
    ),
    **_schema((5, "block_tokens"), (6, "block_stride", "u64")),
    **_repeated(7, "blocks"),
    **_schema((8, "first_row")),
}
STEP_PART = _schema(
    (1, "sequence_id", "u64"),
    (2, "start"),
    (3, "tokens"),
    (4, "first_layer"),
    (5, "layers"),
    (6, "k", ROWS),
    (7, "v", ROWS),
)
STORE_STEP = {**_schema((1, "model_id", "u64")), **_repeated(2, "parts", STEP_PART)}
STORED_STEP = _repeated(
    1, "parts", _schema((1, "length"), (2, "replayed", "bool"), (3, "packed_blocks"))
)
LOAD_STEP = {**STORE_STEP, **_schema((3, "dtype", "enum"))}
LOADED_STEP = _repeated(1, "errors", _schema((1, "part"), (2, "error", CALL_ERROR)))
BLOCK_KEYS = _schema((1, "keys", "bytes"), (2, "key_bytes"), (3, "key_tokens"))
OPEN_SEQUENCE = _schema(
    (1, "model_id", "u64"),
    (2, "session_id", "u64"),
    (40, "prefix", BLOCK_KEYS),
    (41, "lease_id", "u64"),
    (42, "ready_layers"),
)
OPENED_SEQUENCE = _schema((1, "sequence_id", "u64"), (40, "length"), (41, "ready_layers"))
MATCH_PREFIX = {
    **_schema((1, "model_id", "u64"), (3, "lease_ms")),
    **_repeated(2, "chains", BLOCK_KEYS),
}
MATCHED_PREFIX = {
    **_repeated(1, "matched_keys"),
    **_repeated(2, "matched_tokens"),
    **_schema((3, "lease_id", "u64")),
}
PUBLISH_BLOCKS = _schema(
    (1, "sequence_id", "u64"), (2, "start"), (3, "keys", BLOCK_KEYS), (4, "settle", "bool")
)
PUBLISHED_BLOCKS = _schema(
    (1, "length"), (2, "published"), (3, "existed"), (4, "stopped_by", "text")
)
DROP_BLOCKS = {**_schema((1, "model_id", "u64")), **_repeated(2, "chains", BLOCK_KEYS)}
DROPPED_BLOCKS = _schema((1, "dropped", "u64"), (2, "held", "u64"))
WATCH_BLOCKS = _schema((1, "boot_id", "text"), (2, "after_number", "u64"))
BLOCK_EVENT = _schema(
    (1, "change", "enum"),
    (2, "model_id", "u64"),
    (3, "model", "text"),
    (4, "tier", "enum"),
    (5, "keys", BLOCK_KEYS),
    (6, "parent_key", "bytes"),
    (7, "position"),
)
WATCHED_BLOCKS = {
    **_schema((1, "boot_id", "text"), (2, "number", "u64"), (3, "reset", "bool")),
    **_repeated(4, "events", BLOCK_EVENT),
}
CALIBRATE = {
    **_schema((1, "model_id", "u64"), (4, "seed", "u64"), (5, "tokens_max")),
    **_repeated(2, "sequence_ids", "u64"),
    **_repeated(3, "codecs", "text"),
}
MADE_CALIBRATION = _schema(
    (1, "calibration", "bytes"), (2, "tokens", "u64"), (3, "queries_per_head", "u64")
)
OPEN_REGION = _schema((1, "namespace", "text"), (2, "bytes", "u64"))
OPENED_REGION = _schema(
    (1, "kind", "enum"), (2, "reason", "text"), (3, "boot_id", "text"), (4, "refused", "text")
)
REGION_ATTEND = _schema(
    (1, "request", ATTEND),
    (2, "out", REGION_SLICE),
    (3, "lse", REGION_SLICE),
    (4, "query_errors", REGION_SLICE),
)
REGION_CALL = _schema(
    (1, "done", "u64"),
    (2, "timeout_us", "u64"),
    (3, "attend", REGION_ATTEND),
    (4, "store", STORE_BLOCKS),
)

# Tags of the calls of a RegionCall, as bytes: fields 3, 4 and 20.
ATTEND_TAG, STORE_TAG, CONTROL_TAG = b"\x1a", b"\x22", b"\xa2\x01"

# google.rpc.Status and what kvd puts into its details.
ANY = _schema((1, "type_url", "text"), (2, "value", "bytes"))
STATUS = {**_schema((1, "code"), (2, "message", "text")), **_repeated(3, "details", ANY)}
METADATA_ENTRY = _schema((1, "key", "text"), (2, "value", "text"))
ERROR_INFO = {
    **_schema((1, "reason", "text"), (2, "domain", "text")),
    **_repeated(3, "metadata", METADATA_ENTRY),
}
DURATION = _schema((1, "seconds", "u64"), (2, "nanos"))
RETRY_INFO = _schema((1, "retry_delay", DURATION))

# Request and answer of each rpc; of HoldSession's answers the first.
UNARY: Final[dict[str, tuple[Schema, Schema]]] = {
    "GetServerInfo": (NOTHING, SERVER_INFO),
    "RegisterModel": (REGISTER_MODEL, REGISTERED_MODEL),
    "UnregisterModel": (_schema((1, "model_id", "u64")), NOTHING),
    "OpenSequence": (OPEN_SEQUENCE, OPENED_SEQUENCE),
    "MatchPrefix": (MATCH_PREFIX, MATCHED_PREFIX),
    "ReleaseLease": (_schema((1, "lease_id", "u64")), NOTHING),
    "PublishBlocks": (PUBLISH_BLOCKS, PUBLISHED_BLOCKS),
    "DropBlocks": (DROP_BLOCKS, DROPPED_BLOCKS),
    "ForkSequence": (
        _schema((1, "sequence_id", "u64"), (2, "length", "optional u32"), (3, "session_id", "u64")),
        _schema((1, "sequence_id", "u64"), (2, "length")),
    ),
    "TruncateSequence": (_schema((1, "sequence_id", "u64"), (2, "length")), NOTHING),
    "HintSequence": (
        _schema((1, "sequence_id", "u64"), (2, "phase", "enum"), (3, "parent_sequence_id", "u64")),
        NOTHING,
    ),
    "CloseSequence": (_schema((1, "sequence_id", "u64"), (2, "idle_ms_min", "u64")), NOTHING),
    "DescribeSequence": (_schema((1, "sequence_id", "u64")), SEQUENCE_STATE),
    "ListSequences": (LIST_SEQUENCES, SEQUENCE_PAGE),
    "HoldSession": (HOLD_SESSION, HELD_SESSION),
    "CloseSession": (_schema((1, "session_id", "u64")), _schema((1, "sequences_closed", "u64"))),
    "Attend": (ATTEND, ATTENDED),
    "CalibrateModel": (CALIBRATE, MADE_CALIBRATION),
    "ListCodecs": (NOTHING, _repeated(1, "codecs", CODEC_INFO)),
    "StoreStep": (STORE_STEP, STORED_STEP),
    "LoadStep": (LOAD_STEP, LOADED_STEP),
}
