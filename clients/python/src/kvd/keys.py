"""Keys of engine blocks, by which the daemon finds cached pages, and what it answers of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .checks import check_bytes, check_list, check_uint
from .errors import InvalidArgument

_KEY_BYTES_MAX = 64


@dataclass(frozen=True)
class Keys:
    """Keys of consecutive engine blocks, packed side by side.

    Each stands for ALL tokens from the start of the sequence to the end of its block, as a chained
    hash does. `key_tokens` are those of a block, a divisor of the model's page; 0: the page.
    """

    packed: bytes
    key_bytes: int
    key_tokens: int = 0

    def __post_init__(self) -> None:
        packed, size = check_bytes("packed", self.packed), check_uint("key_bytes", self.key_bytes)
        if not 1 <= size <= _KEY_BYTES_MAX:
            raise InvalidArgument(f"keys of {size} bytes: a key has 1 to {_KEY_BYTES_MAX}")
        if len(packed) % size:
            raise InvalidArgument(f"packed has {len(packed)} bytes, no multiple of {size}")
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "key_bytes", size)
        object.__setattr__(self, "key_tokens", check_uint("key_tokens", self.key_tokens))

    @classmethod
    def of(cls, keys: Iterable[bytes], key_tokens: int = 0) -> Keys:
        """Keys of equal length; an empty chain has keys of one byte."""
        each = [
            key if type(key) is bytes else check_bytes(f"keys[{index}]", key)
            for index, key in enumerate(check_list("keys", keys))
        ]
        size = len(each[0]) if each else 1
        if any(len(key) != size for key in each):
            raise InvalidArgument("keys of different lengths in one chain")
        return cls(b"".join(each), size, key_tokens)

    def __len__(self) -> int:
        return len(self.packed) // self.key_bytes

    def cut(self, first: int, end: int) -> Keys:
        """Those of the blocks from `first` to before `end`."""
        first, end = check_uint("first", first), check_uint("end", end)
        packed = self.packed[first * self.key_bytes : end * self.key_bytes]
        return Keys(packed, self.key_bytes, self.key_tokens)

    def joined(self, others: Keys) -> Keys:
        """These keys and the ones that follow them."""
        if not self.packed:
            return others
        if (others.key_bytes, others.key_tokens) != (self.key_bytes, self.key_tokens):
            raise InvalidArgument("keys of different lengths in one chain")
        return Keys(self.packed + others.packed, self.key_bytes, self.key_tokens)

    def as_fields(self) -> dict[str, Any]:
        """As BlockKeys has them."""
        return {"keys": self.packed, "key_bytes": self.key_bytes, "key_tokens": self.key_tokens}


def as_keys(name: str, value: Any) -> Keys:
    """Keys of a caller."""
    if not isinstance(value, Keys):
        raise InvalidArgument(f"{name} is no kvd.Keys but {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Matches:
    """What is cached of each chain, in tokens, and the lease that keeps it; 0 where there is
    none."""

    tokens: tuple[int, ...]
    lease_id: int = 0


@dataclass(frozen=True)
class Dropped:
    """Pages that are no longer found, and those that something holds."""

    pages: int
    held: int


@dataclass(frozen=True)
class Published:
    """What a publish has done."""

    # Tokens of the sequence, from its start, that are found under its keys now.
    length: int
    # Pages that were not found before, and pages that were.
    published: int
    existed: int
    # Why it ended before the last key; empty where it did not.
    stopped_by: str
