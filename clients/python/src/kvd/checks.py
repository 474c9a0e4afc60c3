"""What callers give, checked by type and range, with an error that names the field: what goes onto
the wire passes here, so that no value becomes another one on its way."""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

from .errors import InvalidArgument

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
_SECONDS_MAX = 1e9
_MILLISECONDS = 1e3


def check_uint(name: str, value: Any, most: int = U32_MAX) -> int:
    """An integer from 0 to `most`: of Python, numpy or whatever else is one, but no bool."""
    if type(value) is not int:
        if isinstance(value, bool):
            raise InvalidArgument(f"{name} = {value}: give an integer")
        try:
            value = operator.index(value)
        except TypeError:
            raise InvalidArgument(f"{name} = {_shown(value)}: give an integer") from None
    if not 0 <= value <= most:
        raise InvalidArgument(f"{name} = {value} is not from 0 to {most}")
    return int(value)


def check_index(name: str, value: Any, count: int) -> int:
    """Which of so many."""
    index = check_uint(name, value, U64_MAX)
    if index >= count:
        raise InvalidArgument(f"{name} {index} of {count}")
    return index


def check_bool(name: str, value: Any) -> bool:
    """True or False, of Python or numpy."""
    if value is True or value is False:
        return bool(value)
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise InvalidArgument(f"{name} = {_shown(value)}: give True or False")


def check_float(name: str, value: Any) -> float:
    """A finite number."""
    if type(value) is not float:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise InvalidArgument(f"{name} = {_shown(value)}: give a number")
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise InvalidArgument(f"{name} = {_shown(value)}: give a number") from None
    if not math.isfinite(value):
        raise InvalidArgument(f"{name} = {value} is not finite")
    return float(value)


def pack_f32(name: str, value: Any) -> bytes:
    """A number as the wire has it in single precision."""
    number = check_float(name, value)
    try:
        return struct.pack("<f", number)
    except OverflowError:
        raise InvalidArgument(f"{name} = {number} is beyond single precision") from None


def check_text(name: str, value: Any) -> str:
    """A text that has an encoding."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} = {_shown(value)}: give a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is no UTF-8: {error}") from None
    return value


def check_bytes(name: str, value: Any) -> bytes:
    """Bytes, or an array of them."""
    if type(value) is bytes:
        return value
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        raise InvalidArgument(f"{name} = {_shown(value)}: give bytes") from None
    if view.itemsize != 1 or view.ndim != 1:
        raise InvalidArgument(f"{name} is an array of {view.itemsize} bytes a value: give bytes")
    return view.tobytes()


def check_list(name: str, values: Any) -> list[Any]:
    """What can be iterated; a text is no list of texts."""
    if not isinstance(values, (str, bytes, bytearray)):
        try:
            items = iter(values)
        except TypeError:
            pass
        else:
            return list(items)
    raise InvalidArgument(f"{name} is no list but {type(values).__name__}")


def check_seconds(name: str, value: Any, *, is_positive: bool = False) -> float:
    """A span of time; 0 only where that means none."""
    seconds = check_float(name, value)
    if seconds < 0 or seconds > _SECONDS_MAX or (is_positive and not seconds):
        least = "more than 0" if is_positive else "0"
        raise InvalidArgument(f"{name} = {seconds} s is not from {least} to {_SECONDS_MAX:.0f}")
    return seconds


def read_milliseconds(name: str, seconds: Any) -> int:
    """A span in whole milliseconds of a field of 32 bits; what is not 0 stays at least one."""
    whole = math.ceil(check_seconds(name, seconds) * _MILLISECONDS)
    if whole > U32_MAX:
        raise InvalidArgument(f"{name} = {seconds} s is over {U32_MAX // 1000} s")
    return whole


def _shown(value: Any) -> str:
    """As a message has it."""
    try:
        text = repr(value)
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
