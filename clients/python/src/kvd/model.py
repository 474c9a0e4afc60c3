"""A model's geometry and codec, registered with the daemon, and attention over its sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arrays import DType
from .calibration import Calibrated, calibrate
from .calls import Attended, AttendForm, PendingAttend, Queries, Query, StoreAck, StoreItem
from .checks import (
    check_bool,
    check_bytes,
    check_float,
    check_index,
    check_list,
    check_text,
    check_uint,
    read_milliseconds,
)
from .errors import Disconnected, InvalidArgument, Restarted, restarted
from .keys import Dropped, Keys, Matches, as_keys
from .sequence import Sequence, q_rows

if TYPE_CHECKING:
    from .client import Client, Link


def model_label(text: str, most: int) -> str:
    """A text, such as a path, as part of a model's name: its last characters, at most so many, with
    what the daemon takes between slashes."""
    plain = re.sub(r"[^A-Za-z0-9._/-]", "-", text).strip("/")[-most:]
    return "/".join(of for of in plain.split("/") if of not in ("", ".", "..")) or "model"


@dataclass(frozen=True)
class Geometry:
    """Layers and heads of K and V. `head_dim_v` 0 means as `head_dim_k`, `block_tokens` 0 the
    daemon's default; that is the size of kvd's own pages, not of an engine's blocks."""

    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int = 0
    block_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, check_uint(name, value))


def _store_pieces(link: Link, items: list[StoreItem]) -> list[StoreAck]:
    """Stores ranges; one that is too large for a message or a region goes in pieces."""
    pieces = [item.split(link.store_bytes_max) for item in items]
    acks = link.payloads.store([piece for of_item in pieces for piece in of_item])
    if len(acks) == len(items):
        return acks
    joined, at = [], 0
    for of_item in pieces:
        joined.append(StoreAck.join(acks[at : at + len(of_item)]))
        at += len(of_item)
    return joined


def _is_pair(pair: Any) -> bool:
    """Whether this is a sequence with an item of it."""
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and isinstance(pair[0], Sequence) and isinstance(pair[1], StoreItem)


def _as_chains(chains: Keys | SequenceOf[Keys]) -> SequenceOf[Keys]:
    """A single chain as a list of one."""
    if isinstance(chains, Keys):
        return [chains]
    each = check_list("chains", chains)
    return [as_keys(f"chains[{index}]", chain) for index, chain in enumerate(each)]


@dataclass(frozen=True)
class _Registration:
    """What the daemon of a boot has answered."""

    boot_id: str
    model_id: int
    codec_spec: str
    fingerprint: str


class Model:
    """A registered model. After a restart of the daemon it registers itself again, or fails as it
    was told."""

    def __init__(
        self,
        client: Client,
        name: str,
        geometry: Geometry,
        *,
        dtype: DType,
        codec: str,
        calibration: bytes,
        interleaved_rope: bool,
        weights: bytes,
        on_restart: str,
    ) -> None:
        if on_restart not in ("recompute", "fail"):
            raise InvalidArgument(f"on_restart={on_restart!r} is recompute or fail")
        if not isinstance(geometry, Geometry):
            raise InvalidArgument(f"geometry is no kvd.Geometry but {type(geometry).__name__}")
        self.client, self.name, self.dtype = client, check_text("name", name), dtype
        self.codec = check_text("codec", codec)
        v = geometry.head_dim_v or geometry.head_dim_k
        self.geometry = Geometry(
            geometry.layers, geometry.kv_heads, geometry.head_dim_k, v, geometry.block_tokens
        )
        self._calibration = check_bytes("calibration", calibration)
        self._interleaved = check_bool("interleaved_rope", interleaved_rope)
        self._weights, self._on_restart = check_bytes("weights", weights), on_restart
        self._registration: _Registration | None = None
        self._forms: dict[object, AttendForm] = {}
        self._register(client.link())

    def __repr__(self) -> str:
        return f"<kvd.Model {self.name}, {self.codec}>"

    def _register(self, link: Link) -> _Registration:
        known = self._registration
        if known is not None and known.boot_id == link.boot_id:
            return known
        if known is not None and self._on_restart == "fail":
            raise restarted(known.boot_id, link.boot_id)
        geometry = {
            **vars(self.geometry),
            "dtype": int(self.dtype),
            "rope_pairing": 2 if self._interleaved else 1,
        }
        with link.watched():
            answer = link.call(
                "RegisterModel",
                name=self.name,
                geometry=geometry,
                codec=self.codec,
                calibration=self._calibration or None,
                identity={"weights": self._weights} if self._weights else None,
            )
        self._forms.clear()
        given = answer.geometry
        if given is not None and not self.geometry.block_tokens:
            self.block_tokens = given.block_tokens
        else:
            self.block_tokens = self.geometry.block_tokens
        self._registration = _Registration(
            link.boot_id, answer.model_id, answer.codec_spec, answer.fingerprint
        )
        return self._registration

    @property
    def id(self) -> int:
        """Its id at the daemon that serves now."""
        return self._register(self.client.link()).model_id

    def id_at(self, link: Link) -> int:
        """Its id at the daemon of this connection."""
        return self._register(link).model_id

    @property
    def codec_spec(self) -> str:
        """The codec in full, as the daemon understood it."""
        return self._register(self.client.link()).codec_spec

    @property
    def fingerprint(self) -> str:
        """Hash of geometry, codec and calibration."""
        return self._register(self.client.link()).fingerprint

    def open(
        self, prefix: Keys | None = None, *, lease_id: int = 0, ready_layers: int = 0
    ) -> Sequence:
        """A new sequence, which ends with this client's session. It begins with the longest cached
        prefix of these keys: look at its `length`. A lease of `match` ends with that. With
        `ready_layers` it may be there once so many first layers have come from disk: calls that
        need others wait for these, and fail where they do not come."""
        chain = None if prefix is None else as_keys("prefix", prefix)
        link = self.client.link()
        model_id = self._register(link).model_id
        with link.watched():
            answer = link.call(
                "OpenSequence",
                model_id=model_id,
                session_id=link.session_id,
                prefix=chain.as_fields() if chain else None,
                lease_id=lease_id,
                ready_layers=ready_layers,
            )
        lengths = [answer.length] * self.geometry.layers
        return Sequence(self, answer.sequence_id, link.boot_id, lengths)

    def match(self, chains: Keys | SequenceOf[Keys], *, lease: float = 0.0) -> Matches:
        """How many tokens of each chain are cached, from its start, in one call. With `lease`, in
        seconds, what was matched stays so long."""
        chains, lease_ms = _as_chains(chains), read_milliseconds("lease", lease)
        link = self.client.link()
        model_id = self._register(link).model_id
        with link.watched():
            answer = link.call(
                "MatchPrefix",
                model_id=model_id,
                chains=[chain.as_fields() for chain in chains],
                lease_ms=lease_ms,
            )
        tokens = list(answer.matched_tokens)
        tokens += [0] * (len(chains) - len(tokens))
        return Matches(tuple(tokens), answer.lease_id)

    def drop(self, chains: Keys | SequenceOf[Keys] = ()) -> Dropped:
        """Drops what is cached of these chains and nothing holds, or of the whole model."""
        chains = _as_chains(chains)
        link = self.client.link()
        model_id = self._register(link).model_id
        with link.watched():
            answer = link.call(
                "DropBlocks", model_id=model_id, chains=[chain.as_fields() for chain in chains]
            )
        return Dropped(answer.dropped, answer.held)

    def store(self, items: Iterable[tuple[Sequence, StoreItem]]) -> list[StoreAck]:
        """Stores ranges of sequences, made by `Sequence.item`; layers do not wait for one another.

        After an error some of the ranges may be stored: `Sequence.describe` says which.
        """
        pairs = check_list("items", items)
        link = self.client.link()
        for index, pair in enumerate(pairs):
            if not _is_pair(pair):
                raise InvalidArgument(f"items[{index}] is no sequence with an item of it")
            sequence = pair[0]
            if sequence.boot_id != link.boot_id:
                raise restarted(sequence.boot_id, link.boot_id)
        with link.watched():
            acks = _store_pieces(link, [item for _, item in pairs])
        for (sequence, item), ack in zip(pairs, acks, strict=True):
            sequence.layer_lengths[item.layer] = ack.length
        return acks

    def attend(
        self,
        layer: int,
        queries: Queries | Iterable[Query | Sequence],
        q: Any,
        *,
        scale: float | None = None,
        soft_cap: float | None = 0.0,
        partial: bool = False,
        dtype: DType | str | None = None,
    ) -> Attended:
        """Attention of a batch over what its sequences hold on a layer.

        `q` [rows, q_heads, head_dim_k], queries in order; `out` has its precision. `scale` None is
        1/sqrt(head_dim_k). With `partial` a bad query fails alone: look at `errors`. `dtype="bf16"`
        says that uint16 values are bits.
        """
        pending = self.begin_attend(
            layer, queries, q, scale=scale, soft_cap=soft_cap, partial=partial, dtype=dtype
        )
        link = self.client.link()
        try:
            return pending.result()
        except (Disconnected, Restarted):
            link.is_lost = True
            raise

    def begin_attend(
        self,
        layer: int,
        queries: Queries | Iterable[Query | Sequence],
        q: Any,
        *,
        scale: float | None = None,
        soft_cap: float | None = 0.0,
        partial: bool = False,
        dtype: DType | str | None = None,
    ) -> PendingAttend:
        """Sends an attend; `result()` of what it returns waits, once. `q` is copied."""
        link = self.client.link()
        batch = queries if isinstance(queries, Queries) else Queries(queries)
        layer = check_index("layer", layer, self.geometry.layers)
        if scale is not None and type(scale) is not float:
            scale = check_float("scale", scale)
        if type(soft_cap) is not float:
            # Configurations of models without a cap say None.
            soft_cap = 0.0 if soft_cap is None else check_float("soft_cap", soft_cap)
        partial = check_bool("partial", partial)
        if batch.boot_id and batch.boot_id != link.boot_id:
            raise restarted(batch.boot_id, link.boot_id)
        bits_are = None if dtype is None else DType.of(dtype)
        rows = q_rows(q, bits_are, (batch.rows, self.geometry.head_dim_k))
        heads = rows.values.shape[1]
        if not heads or heads % self.geometry.kv_heads:
            raise InvalidArgument(f"{heads} query heads for {self.geometry.kv_heads} KV heads")
        key = (link.boot_id, heads, rows.dtype.value, scale, soft_cap, partial)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = AttendForm.encode(
                model_id=self._register(link).model_id,
                heads=(heads, self.geometry.head_dim_v),
                dtype=rows.dtype,
                scores=(scale, soft_cap),
                partial=partial,
            )
        try:
            return link.payloads.begin_attend(form, layer, batch, rows)
        except (Disconnected, Restarted):
            link.is_lost = True
            raise

    def calibrate(
        self,
        sequences: Iterable[Sequence],
        codecs: Iterable[str],
        *,
        seed: int = 0,
        tokens: int = 0,
        timeout: float = 600.0,
    ) -> Calibrated:
        """Has the daemon fit codecs to what sequences of this model hold, which must be registered
        with codec `raw`; those that look at queries need the sequences attended, too.

        `tokens` are those of each sequence, from its front; 0: all. The same rows, codecs and seed
        give the same bytes. `QueueFull` while another calibration is being made.
        """
        each, names = check_list("sequences", sequences), check_list("codecs", codecs)
        return calibrate(self, each, names, seed=seed, tokens=tokens, timeout=timeout)

    def unregister(self) -> None:
        """Forgets the model at the daemon; `ModelInUse` while it has sequences."""
        registration, link = self._registration, self.client.link()
        self._registration = None
        self._forms.clear()
        if registration is not None and registration.boot_id == link.boot_id:
            with link.watched():
                link.call("UnregisterModel", model_id=registration.model_id)
