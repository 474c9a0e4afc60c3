"""gRPC, for daemons of other machines (needs grpcio): blocking calls of bytes.

This package encodes them itself: no protobuf runtime, no generated code."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from . import messages
from .arrays import Array, Rows
from .calls import (
    Attended,
    AttendForm,
    LoadItem,
    PendingAttend,
    Queries,
    QueryError,
    StoreAck,
    StoreItem,
)
from .credentials import Credentials
from .errors import (
    Cancelled,
    DeadlineExceeded,
    Disconnected,
    Internal,
    InvalidArgument,
    KvdError,
    MessageTooLarge,
    Unsupported,
    error_of,
    restarted,
)
from .wire import Message, decode, encode, field_bytes

_SERVICE = "/kvd.v1.Kvd/"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
# Of statuses without kvd's details; UNIMPLEMENTED: the daemon is older than this client.
_BY_STATUS: dict[str, type[KvdError]] = {
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Disconnected,
    "UNIMPLEMENTED": Unsupported,
}
_SIZES_OF_MESSAGES = ("message length too large", "larger than max", "exceeded while decompressing")


class _AnsweredAttend(PendingAttend):
    """An attend that is sent when its result is asked for: gRPC from Python is slowest in
    threads of its own."""

    def __init__(
        self, remote: Remote, request: bytes, q: Rows, shape: tuple[int, int, int]
    ) -> None:
        self._remote, self._request, self._q, self._shape = remote, request, q, shape

    def result(self) -> Attended:
        answer = self._remote.attend(self._request)
        out = np.frombuffer(bytearray(answer.out.inline), self._q.values.dtype).reshape(self._shape)
        lse = np.frombuffer(bytearray(answer.lse.inline), np.float32).reshape(self._shape[:2])
        errors = tuple(
            QueryError(one.query, _error_of_call(one.error)) for one in answer.query_errors
        )
        if self._q.is_torch:
            import torch  # noqa: PLC0415 (the caller has imported it)

            return Attended(self._q.like(out), torch.from_numpy(lse), errors)
        return Attended(out, lse, errors)


class Remote:
    """A gRPC channel to a daemon."""

    def __init__(
        self,
        target: str,
        *,
        namespace: str | None,
        timeout: float,
        is_tls: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        try:
            import grpc  # noqa: PLC0415 (an extra of this package)
        except ImportError as error:
            raise Unsupported(
                f"{target} is reached by gRPC: pip install grpcio, or connect to the path of"
                " a region (server.listen_region) on this machine"
            ) from error
        self._grpc, self.target, self.timeout = grpc, target, timeout
        options: list[tuple[str, int | str]] = list(_OPTIONS)
        if target.startswith("unix:"):
            # Without it the socket's path would be the authority, which HTTP/2 refuses.
            options.append(("grpc.default_authority", "localhost"))
        shown = credentials or Credentials()
        if is_tls:
            secure = _channel_credentials(grpc, shown)
            self._channel = grpc.secure_channel(target, secure, options=options)
        elif shown.ca or shown.cert or shown.key:
            raise InvalidArgument(f"ca, cert and key are of https://, which {target} is not")
        else:
            self._channel = grpc.insecure_channel(target, options=options)
        self._metadata = []
        if namespace:
            self._metadata.append(("kvd-namespace", _check_header("namespace", namespace)))
        if shown.token is not None:
            token = _check_header("token", shown.token)
            self._metadata.append(("authorization", f"Bearer {token}"))
        self._methods: dict[str, Any] = {}
        self._held: Any = None

    def _method(self, rpc: str, kind: str = "unary_unary") -> Any:
        method = self._methods.get(rpc)
        if method is None:
            method = self._methods[rpc] = getattr(self._channel, kind)(_SERVICE + rpc)
        return method

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._grpc.RpcError as error:
            raise self._error_of(error) from None

    def call(self, rpc: str, **fields: Any) -> Message:
        """A unary rpc."""
        request, answer = messages.UNARY[rpc]
        with self._errors():
            data = self._method(rpc)(
                encode(request, fields), metadata=self._metadata, timeout=self.timeout
            )
        return decode(answer, data)

    def hold_session(self, **fields: Any) -> Message:
        """Holds a session as long as its stream is open."""
        method = self._method("HoldSession", "unary_stream")
        with self._errors():
            stream = method(encode(messages.HOLD_SESSION, fields), metadata=self._metadata)
            held = next(stream, None)
        if held is None:
            raise Internal("HoldSession ended without an answer")
        self._held = stream
        return decode(messages.HELD_SESSION, held)

    def watch_blocks(self, boot_id: str, after_number: int) -> Any:
        """The stream of a watch; `cancel` ends it."""
        request = encode(messages.WATCH_BLOCKS, {"boot_id": boot_id, "after_number": after_number})
        return self._method("WatchBlocks", "unary_stream")(request, metadata=self._metadata)

    def next_watched(self, stream: Any) -> Message | None:
        """The next answer of a watch; waits for one. None after the last."""
        with self._errors():
            data = next(stream, None)
        return None if data is None else decode(messages.WATCHED_BLOCKS, data)

    def attend(self, request: bytes) -> Message:
        """An attend with everything in the message."""
        with self._errors():
            data = self._method("Attend")(request, metadata=self._metadata, timeout=self.timeout)
        return decode(messages.ATTENDED, data)

    def begin_attend(
        self, form: AttendForm, layer: int, queries: Queries, q: Rows
    ) -> PendingAttend:
        """Encodes an attend; it is sent when its result is asked for."""
        payload = field_bytes(1, q.values.tobytes())
        request = form.encode_request(layer, queries, payload)
        return _AnsweredAttend(self, request, q, (queries.rows, form.q_heads, form.head_dim_v))

    def store(self, items: SequenceOf[StoreItem]) -> list[StoreAck]:
        """Stores ranges, in order, by one stream. After an error those before it stay stored."""
        requests = (
            item.encode_request(
                field_bytes(1, item.k.values.tobytes()), field_bytes(1, item.v.values.tobytes())
            )
            for item in items
        )
        acks = []
        with self._errors():
            stream = self._method("StoreBlocks", "stream_stream")(
                requests, metadata=self._metadata, timeout=self.timeout
            )
            for data in stream:
                ack = decode(messages.STORED_BLOCKS, data)
                acks.append(StoreAck(ack.layer, ack.length, bool(ack.replayed), ack.packed_blocks))
        if len(acks) != len(items):
            raise Internal(f"{len(acks)} of {len(items)} stores were answered")
        return acks

    def load(self, item: LoadItem) -> tuple[Array, Array]:
        """Reads rows back, in pieces."""
        tokens = item.end - item.start
        sides = tuple(np.empty((tokens, *shape), item.dtype.numpy) for shape in item.shapes)
        fields = {
            "sequence_id": item.sequence_id,
            "layer": item.layer,
            "start": item.start,
            "end": item.end,
            "dtype": int(item.dtype),
        }
        got = 0
        with self._errors():
            stream = self._method("LoadBlocks", "unary_stream")(
                encode(messages.LOAD_BLOCKS, fields), metadata=self._metadata, timeout=self.timeout
            )
            for data in stream:
                piece = decode(messages.LOADED_BLOCKS, data)
                begin = piece.start - item.start
                for side, payload in zip(sides, (piece.k, piece.v), strict=True):
                    rows = np.frombuffer(payload.inline, side.dtype)
                    side[begin : begin + piece.tokens] = rows.reshape(-1, *side.shape[1:])
                got += piece.tokens
        if got != tokens:
            raise Internal(f"{got} of {tokens} rows were loaded")
        return sides[0], sides[1]

    def close(self) -> None:
        """Lets go of the session and closes the channel."""
        if self._held is not None:
            self._held.cancel()
        self._channel.close()

    def _error_of(self, error: Any) -> KvdError:
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                known = _error_of_details(value)
                if known is not None:
                    return known
        code, message = error.code().name, f"{self.target}: {error.details()}"
        if any(text in message for text in _SIZES_OF_MESSAGES):
            return MessageTooLarge(message)
        kind = _BY_STATUS.get(code)
        return kind(message) if kind else Internal(f"{code}: {message}")


def _channel_credentials(grpc: Any, shown: Credentials) -> Any:
    """Credentials of a channel, out of files."""
    if (shown.cert is None) != (shown.key is None):
        raise InvalidArgument("cert and key belong together: give both, or neither")
    files = (shown.ca, shown.key, shown.cert)
    try:
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in files)
    except (OSError, TypeError, ValueError) as error:
        raise InvalidArgument(f"ca, cert and key are paths of files: {error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _check_header(name: str, value: str) -> str:
    """A text as a header may have it; the error does not tell it, as it may be a secret."""
    text = value.strip() if isinstance(value, str) else ""
    if not text or not text.isascii() or not text.isprintable():
        raise InvalidArgument(f"{name} is empty or no text, or holds what no header may")
    return text


def _error_of_details(data: bytes) -> KvdError | None:
    """The error of a google.rpc.Status with kvd's ErrorInfo."""
    status = decode(messages.STATUS, data)
    reason, retry_after, metadata = "", None, {}
    for detail in status.details:
        if detail.type_url.endswith("google.rpc.ErrorInfo"):
            info = decode(messages.ERROR_INFO, detail.value)
            reason = info.reason if info.domain == "kvd" else ""
            metadata = {entry.key: entry.value for entry in info.metadata}
        elif detail.type_url.endswith("google.rpc.RetryInfo"):
            delay = decode(messages.RETRY_INFO, detail.value).retry_delay
            retry_after = delay.seconds + delay.nanos / 1e9 if delay else None
    if not reason:
        return None
    if "id_boot" in metadata:
        return restarted(metadata["id_boot"], metadata.get("boot_id", ""))
    return error_of(reason, status.message, retry_after)


def _error_of_call(error: Message) -> KvdError:
    if error.id_boot:
        return restarted(error.id_boot, error.boot_id)
    retry = error.retry_after_ms
    return error_of(error.code, error.message, None if retry is None else retry / 1000)
