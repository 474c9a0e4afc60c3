"""A connection to a daemon, made again when it was lost, and the session that owns what is opened.

A `Link` is one connection to one boot of the daemon; a `Client` has the link of the moment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .arrays import DType
from .checks import U64_MAX, check_seconds, check_text, check_uint, read_milliseconds
from .credentials import Credentials, PathLike
from .errors import (
    Disconnected,
    InvalidArgument,
    KvdError,
    Restarted,
    UnknownSession,
    Unsupported,
)
from .model import Geometry, Model
from .region import Region
from .sequence import SequencePhase, StoredBytes
from .watch import BlockWatch, WatchPosition

if TYPE_CHECKING:
    from .remote import Remote

REGION_BYTES_DEFAULT = 64 << 20
_own_pid = os.getpid


@dataclass(frozen=True)
class ServerInfo:
    """What a daemon says of itself."""

    version: str
    # New for every start of the daemon.
    boot_id: str
    device: str
    pool_capacity_bytes: int
    message_bytes_max: int
    block_tokens_default: int
    # How far attention may round: "single", "fast" or "int8".
    precision: str
    # Where regions are opened; empty where there are none.
    region_path: str
    # What this daemon can beyond the first version of the protocol (contract 70).
    features: tuple[str, ...]
    # Of models that name no codec.
    codec_default: str


@dataclass(frozen=True)
class CodecInfo:
    """A preset."""

    name: str
    # In full.
    spec: str
    choose_when: str
    # Bits of a value of full pages; None where they depend on the data.
    bits_k: float | None
    bits_v: float | None
    needs_calibration: bool
    # Tokens kept in the stored precision, first and last.
    sink: int
    recent: int


@dataclass(frozen=True)
class SequenceInfo:
    """A sequence of the namespace, whoever opened it."""

    sequence_id: int
    model_id: int
    # 0: no session owns it.
    session_id: int
    length: int
    age_ms: int
    idle_ms: int
    stored: StoredBytes
    # As `Sequence.hint` said them; 0: no parent.
    phase: SequencePhase
    parent_sequence_id: int


@dataclass(frozen=True)
class ConnectOptions:
    """How a client reaches its daemon."""

    target: str
    namespace: str | None = None
    timeout: float = 60.0
    region_bytes: int = REGION_BYTES_DEFAULT
    session: str | None = None
    session_ttl: float = 0.0
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        check_text("target", self.target)
        for name in ("namespace", "session"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        size = check_uint("region_bytes", self.region_bytes, U64_MAX)
        if not size:
            raise InvalidArgument("region_bytes = 0: a region has at least one byte")
        read_milliseconds("session_ttl", self.session_ttl)
        checked = {
            "timeout": check_seconds("timeout", self.timeout, is_positive=True),
            "session_ttl": check_seconds("session_ttl", self.session_ttl),
            "region_bytes": size,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


class Link:
    """One connection to one boot of a daemon."""

    def __init__(self, options: ConnectOptions, session: tuple[str, int]) -> None:
        """`session` is the boot id and the id of the session to hold on with, or ("", 0)."""
        self.is_lost = False
        self._options = options
        path = region_path(options.target)
        shown = options.credentials
        if path and (shown.token is not None or shown.ca or shown.cert or shown.key):
            raise InvalidArgument(
                "a region is known by its user: give token, ca, cert and key with HOST:PORT,"
                " https://HOST:PORT or unix:PATH"
            )
        # The way for calls, queries and rows.
        self.payloads: Region | Remote
        if path:
            self.payloads = Region(
                path,
                namespace=options.namespace,
                size=options.region_bytes,
                timeout=options.timeout,
            )
        else:
            from .remote import Remote  # noqa: PLC0415 (only where there is a gRPC address)

            self.payloads = Remote(
                grpc_address(options.target),
                namespace=options.namespace,
                timeout=options.timeout,
                is_tls=options.target.startswith("https://"),
                credentials=shown,
            )
        self.call = self.payloads.call
        try:
            info = self.info()
            self.boot_id = info.boot_id
            # Most bytes of K and V in one store.
            self.store_bytes_max = info.message_bytes_max // 2
            if path:
                self.store_bytes_max = min(self.store_bytes_max, options.region_bytes // 4)
            self.session_id = self._hold_session(*session)
        except BaseException:
            self.close()
            raise

    def info(self) -> ServerInfo:
        """What the daemon says of itself."""
        answer = self.call("GetServerInfo")
        fields = {name: getattr(answer, name) for name in ServerInfo.__annotations__}
        return ServerInfo(**{**fields, "features": tuple(answer.features)})

    def _hold_session(self, boot_id: str, session_id: int) -> int:
        name = self._options.session or f"python-{os.getpid()}-{os.urandom(4).hex()}"
        fields = {"ttl_ms": read_milliseconds("session_ttl", self._options.session_ttl)}
        hold = self.payloads.hold_session
        if session_id and boot_id == self.boot_id:
            try:
                return int(hold(**fields, session_id=session_id).session_id)
            except UnknownSession:
                pass  # it has ended, and its sequences with it: the next call says so
        is_named = self._options.session is not None
        return int(hold(**fields, name=name, take_over=is_named).session_id)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Marks the link as lost where a call shows that it is."""
        try:
            yield
        except (Disconnected, Restarted):
            self.is_lost = True
            raise

    def close(self) -> None:
        """Hangs up; the session ends after its time to live."""
        self.is_lost = True
        self.payloads.close()


class Client:
    """A daemon, as long as this lives. Threads may share one."""

    def __init__(self, options: ConnectOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._is_closed = False
        self._session = ("", 0)
        self._link: Link | None = None
        self._pid = os.getpid()
        self.link()

    def link(self) -> Link:
        """The connection; a new one where the last was lost.

        Raises `Disconnected` while the daemon cannot be reached.
        """
        link = self._link
        if link is not None and not link.is_lost and self._pid == _own_pid():
            return link
        with self._lock:
            link = self._link
            if self._is_closed:
                raise InvalidArgument("this client is closed")
            if self._pid != os.getpid():
                raise InvalidArgument("a client does not survive a fork: connect in each process")
            if link is None or link.is_lost:
                if link is not None:
                    link.close()
                link = self._link = Link(self.options, self._session)
                self._session = (link.boot_id, link.session_id)
            return link

    def link_if_open(self) -> Link | None:
        """The connection, if there is one: what only gives up needs no new one."""
        link = self._link
        return None if link is None or link.is_lost else link

    @property
    def boot_id(self) -> str:
        """Boot id of the daemon that was last reached."""
        return self.link().boot_id

    def info(self) -> ServerInfo:
        """What the daemon says of itself, now."""
        link = self.link()
        with link.watched():
            return link.info()

    def codecs(self) -> list[CodecInfo]:
        """The presets that a model may name."""
        link, found = self.link(), []
        with link.watched():
            answer = link.call("ListCodecs")
        for one in answer.codecs:
            fields = {name: getattr(one, name) for name in CodecInfo.__annotations__}
            needs = bool(one.needs_calibration)
            found.append(CodecInfo(**{**fields, "needs_calibration": needs}))
        return found

    def model(
        self,
        name: str,
        geometry: Geometry,
        *,
        dtype: DType | str,
        codec: str = "",
        calibration: bytes = b"",
        interleaved_rope: bool = False,
        weights: bytes = b"",
        on_restart: str = "recompute",
    ) -> Model:
        """Registers a model: what is equal to one that is registered is that one.

        `codec` is a preset or a spec, "" the daemon's default, `kivi-4`. `weights`, up to 256
        bytes, say whose weights these are: models that differ in them share no cached page.
        After a restart of the daemon its sequences raise `Restarted`; with `on_restart`
        "recompute" new ones can be opened, to compute and store the rows again, and with "fail"
        every call of the model raises it.
        """
        return Model(
            self,
            name,
            geometry,
            dtype=DType.of(dtype),
            codec=codec,
            calibration=calibration,
            interleaved_rope=interleaved_rope,
            weights=weights,
            on_restart=on_restart,
        )

    def release_lease(self, lease_id: int) -> None:
        """Ends a lease of `Model.match` before its time; one that has ended is `UnknownLease`."""
        link = self.link()
        with link.watched():
            link.call("ReleaseLease", lease_id=lease_id)

    def sequences(self, model: Model | None = None) -> list[SequenceInfo]:
        """The open sequences of the namespace, of all clients."""
        link, after, found = self.link(), 0, []
        model_id = 0 if model is None else model.id
        while True:
            with link.watched():
                page = link.call("ListSequences", model_id=model_id, after_id=after)
            for one in page.sequences:
                stored = StoredBytes.of(one.stored)
                phase = SequencePhase(one.phase)
                found.append(SequenceInfo(**{**vars(one), "stored": stored, "phase": phase}))
            after = page.next_after_id
            if not after:
                return found

    def watch_blocks(self, after: WatchPosition | None = None) -> BlockWatch:
        """Tells which blocks of the namespace are cached where: all of them, then each change; from
        where an earlier watch ended, if the daemon still can. Needs gRPC."""
        from .remote import Remote  # noqa: PLC0415 (only where there is a gRPC address)

        link = self.link()
        if after is not None and not isinstance(after, WatchPosition):
            raise InvalidArgument(f"after is no kvd.WatchPosition but {type(after).__name__}")
        if not isinstance(link.payloads, Remote):
            raise Unsupported("a region carries no watch: connect to HOST:PORT or unix:PATH")
        return BlockWatch(link.payloads, after)

    def close(self) -> None:
        """Closes the session, so that its sequences are gone, and the connection."""
        with self._lock:
            self._is_closed = True
            link, self._link = self._link, None
        if link is None:
            return
        try:
            if not link.is_lost and self._pid == os.getpid():
                link.call("CloseSession", session_id=link.session_id)
        except KvdError:
            pass  # the daemon is gone or drains; either way nothing is left to close
        finally:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def region_path(target: str) -> str | None:
    """The path of a target that is a region."""
    if target.startswith("region:"):
        return target.removeprefix("region:")
    return target if target.startswith(("/", "./", "../")) else None


def grpc_address(target: str) -> str:
    """A target as gRPC writes it.

    Raises `InvalidArgument` for what is none.
    """
    address = target.removeprefix("http://").removeprefix("https://")
    if address.startswith("unix:"):
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise InvalidArgument(
            f"{target!r} is no daemon: give the path of its region, unix:PATH, HOST:PORT or"
            " https://HOST:PORT"
        )
    return address


def connect(
    target: str,
    *,
    namespace: str | None = None,
    timeout: float = 60.0,
    region_bytes: int = REGION_BYTES_DEFAULT,
    session: str | None = None,
    session_ttl: float = 0.0,
    token: str | None = None,
    ca: PathLike | None = None,
    cert: PathLike | None = None,
    key: PathLike | None = None,
) -> Client:
    """Connects to a daemon.

    `target` is the path of its region (`server.listen_region`; fastest, needs nothing but this
    package), `unix:PATH`, `HOST:PORT` or `https://HOST:PORT` (these need grpcio). `timeout` is
    of each call, in seconds, more than 0. `region_bytes` is the memory of a region, of which there
    is none by gRPC. All that is opened belongs to a session, which ends `session_ttl`
    seconds after the connection; one with a name, `session`, takes over what an earlier one of that
    name left.

    `token` says whose calls these are, by gRPC alone. Of `https://`, `ca` is a PEM file of the
    authorities to trust (the system's when absent), `cert` and `key` those of a certificate of
    one's own.
    """
    credentials = Credentials(token, ca, cert, key)
    options = ConnectOptions(
        target, namespace, timeout, region_bytes, session, session_ttl, credentials
    )
    return Client(options)
