"""The little of protobuf that kvd's messages need: no runtime, no descriptor, no generated code.

A schema is a table from field numbers to `Field`s. Encoding leaves out what is None; decoding gives
every field of the schema, and skips what the schema does not name. Pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, Union

from .checks import (
    U32_MAX,
    U64_MAX,
    check_bool,
    check_bytes,
    check_float,
    check_text,
    check_uint,
    pack_f32,
)
from .errors import Internal

Schema: TypeAlias = Mapping[int, "Field"]
# "u32", "u64", "bool", "enum", "float", "double", "text", "bytes", a message, or "optional u32" and
# "optional double", which are None where they are absent.
Kind: TypeAlias = Union[str, "Schema"]
# Largest value of what travels as a varint; of an enum those that a later daemon may know, too.
_VARINT_MAX = {
    "u32": U32_MAX,
    "optional u32": U32_MAX,
    "enum": 2**31 - 1,
    "u64": U64_MAX,
    "bool": 1,
}


@dataclass(frozen=True)
class Field:
    """A field of a message."""

    name: str
    kind: Kind = "u32"
    repeated: bool = False


class Message(SimpleNamespace):
    """A decoded message: a field by its name."""

    def __getattr__(self, name: str) -> Any:  # only for the type checker: fields are attributes
        raise AttributeError(name)


_SMALL = [bytes((n,)) for n in range(128)]


def varint(value: int) -> bytes:
    """The shortest varint of a number that is not negative, which the caller has checked."""
    if value < 128:
        if value < 0:
            raise Internal(f"{value} has no varint")
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_bytes(number: int, payload: bytes) -> bytes:
    """A field of bytes, or of a message that is encoded already."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def encode(schema: Schema, values: Mapping[str, Any]) -> bytes:
    """The message with these fields; None leaves a field out."""
    unknown = values.keys() - {field.name for field in schema.values()}
    if unknown:
        raise Internal(f"no such fields: {sorted(unknown)}")
    out = []
    for number, field in schema.items():
        value = values.get(field.name)
        if value is None:
            continue
        if field.repeated:
            for index, one in enumerate(value):
                out.append(_encode_one(number, field, one, index))
        else:
            out.append(_encode_one(number, field, value))
    return b"".join(out)


def uint_field(number: int, name: str, value: Any) -> bytes:
    """A field of 32 bits with a number below 16, checked."""
    if type(value) is not int or not 0 <= value <= U32_MAX:
        value = check_uint(name, value)
    return _SMALL[number << 3] + varint(value)


def _encode_one(number: int, field: Field, value: Any, index: int | None = None) -> bytes:
    """A value of a field, refused where the field cannot hold it. `index` is that of a list."""
    kind = field.kind
    if not isinstance(kind, str):
        return field_bytes(number, encode(kind, value))
    most = _VARINT_MAX.get(kind)
    if most is not None and type(value) is int and 0 <= value <= most and kind != "bool":
        return varint(number << 3) + varint(value)
    name = field.name if index is None else f"{field.name}[{index}]"
    if most is not None:
        checked = check_bool(name, value) if kind == "bool" else check_uint(name, value, most)
        return varint(number << 3) + varint(checked)
    if kind in ("float", "double"):
        is_single = kind == "float"
        packed = pack_f32(name, value) if is_single else struct.pack("<d", check_float(name, value))
        return varint(number << 3 | (5 if is_single else 1)) + packed
    payload = check_text(name, value).encode() if kind == "text" else check_bytes(name, value)
    return field_bytes(number, payload)


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("u32", "u64", "enum", "bool"), 0),
    **{"float": 0.0, "double": 0.0, "text": "", "bytes": b""},
}


def decode(schema: Schema, data: bytes | memoryview) -> Message:
    """The message of these bytes.

    Raises `Internal` where they are no such message.
    """
    message = Message()
    for field in schema.values():
        default: Any = [] if field.repeated else None
        if not field.repeated and isinstance(field.kind, str):
            default = _DEFAULTS.get(field.kind)
        setattr(message, field.name, default)
    try:
        for number, wire_type, value in _fields_of(memoryview(data)):
            known = schema.get(number)
            if known is not None:
                _put_field(message, known, wire_type, value)
    except (IndexError, ValueError, struct.error) as error:
        raise Internal(f"malformed answer: {error}") from error
    return message


def _fields_of(data: memoryview) -> Iterable[tuple[int, int, Any]]:
    at, end = 0, len(data)
    while at < end:
        tag, at = read_varint(data, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = read_varint(data, at)
            yield tag >> 3, wire_type, value
            continue
        if wire_type == 2:
            size, at = read_varint(data, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + size > end:
            raise ValueError("cut off")
        yield tag >> 3, wire_type, data[at : at + size]
        at += size


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A varint and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _put_field(message: Message, field: Field, wire_type: int, raw: Any) -> None:
    kind = field.kind
    value: Any = raw
    if isinstance(kind, str) and kind in _VARINT_MAX:
        if wire_type == 2:  # packed
            at, values = 0, []
            while at < len(raw):
                number, at = read_varint(raw, at)
                values.append(number)
            getattr(message, field.name).extend(values)
            return
    elif wire_type == 0:
        raise ValueError(f"{field.name} is a number")
    elif kind == "float":
        value = struct.unpack("<f", raw)[0]
    elif kind in ("double", "optional double"):
        value = struct.unpack("<d", raw)[0]
    elif kind == "text":
        value = bytes(raw).decode("utf-8", "replace")
    elif kind == "bytes":
        value = bytes(raw)
    else:
        assert not isinstance(kind, str)
        value = decode(kind, raw)
    if field.repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)
