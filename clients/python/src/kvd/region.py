"""A region: memory shared with a daemon of the same machine. Queries, K and V are written there,
answers are found there, and small messages on a Unix socket say where.

Threads may call at once: one lock guards places and the socket, and nobody waits under it.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar

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
from .errors import (
    DeadlineExceeded,
    Disconnected,
    KvdError,
    MessageTooLarge,
    QueueFull,
    error_of,
    error_of_text,
    restarted,
)
from .region_steps import fits_step, load_rows, store_step
from .ring import Place, Ring, aligned
from .shared import SharedMemory
from .wire import Message, decode, encode, field_bytes, varint

T = TypeVar("T")

# Messages that a batch remembers, one for each place in the region.
_PREFIXES_MAX = 64

# A completion record is 256 bytes, of which 24 are numbers.
_RECORD_BYTES = 256
_RECORD_TEXT = 24
_QUERY_ERROR_BYTES = 128
_ANSWERED, _REFUSED = 1, 2
# Layers up to this one are one byte on the wire.
_LAYER_OF_ONE_BYTE = 127
_OPEN_TIMEOUT = 5.0
_F32 = np.dtype(np.float32)
_EMPTY_RECORD = memoryview(bytes(24)).cast("I")
# A RegionCall has at most 1 MiB.
_INLINE_BYTES_MAX = 512 << 10
# Room for an answer that is expected: more than a page of a thousand sequences takes.
_ANSWER_BYTES = 256 << 10


class _AttendPlan:
    """Where the parts of an attend are, from the begin of its place on, and its messages: equal
    batches of different layers differ in one byte."""

    def __init__(self, form: AttendForm, queries: Queries, q: Array) -> None:
        self.form, self.queries, self.dtype = form, queries, q.dtype
        self.shape = (queries.rows, form.q_heads, form.head_dim_v)
        self.q_bytes = q.nbytes
        self.out_bytes = queries.rows * form.q_heads * form.head_dim_v * q.dtype.itemsize
        self.lse_bytes = queries.rows * form.q_heads * 4
        self.error_bytes = len(queries) * _QUERY_ERROR_BYTES if form.partial else 0
        self.out_at = _RECORD_BYTES + aligned(self.q_bytes)
        self.lse_at = self.out_at + aligned(self.out_bytes)
        self.errors_at = self.lse_at + aligned(self.lse_bytes)
        self.size = self.errors_at + aligned(self.error_bytes)
        # By the begin of the place.
        self.prefixes: dict[int, bytes] = {}

    def encode(self, start: int, timeout_field: bytes, layer: int) -> bytes:
        """The framed RegionCall of an attend at that place; the layer stands last."""
        call = field_bytes(2, _slice(start + self.out_at, self.out_bytes))
        call += field_bytes(3, _slice(start + self.lse_at, self.lse_bytes))
        if self.error_bytes:
            call += field_bytes(4, _slice(start + self.errors_at, self.error_bytes))
        q = _in_region(start + _RECORD_BYTES, self.q_bytes)
        call += field_bytes(1, self.form.encode_request(layer, self.queries, q))
        return _frame(start, timeout_field, messages.ATTEND_TAG, call)


class _RegionAttend(PendingAttend):
    """An attend of a region."""

    __slots__ = ("deadline", "place", "plan", "q", "region")

    def __init__(self, region: Region, place: Place, plan: _AttendPlan, q: Rows) -> None:
        self.region, self.place, self.plan, self.q = region, place, plan, q
        self.deadline = time.monotonic() + region.timeout

    def __del__(self) -> None:
        if not self.place.is_free:
            self.region.give_up(self.place)

    def result(self) -> Attended:
        region, plan, place = self.region, self.plan, self.place
        start = place.start
        failed = region.wait_call(place, self.deadline)[0]
        errors: tuple[QueryError, ...] = ()
        if failed:
            errors = region.read_query_errors(start + plan.errors_at, len(plan.queries))
        memory = region.memory
        out = np.ndarray(plan.shape, plan.dtype, memory, start + plan.out_at).copy()
        lse = np.ndarray(plan.shape[:2], _F32, memory, start + plan.lse_at).copy()
        place.is_free = True
        if self.q.is_torch:
            import torch  # noqa: PLC0415 (the caller has imported it)

            return Attended(self.q.like(out), torch.from_numpy(lse), errors)
        return Attended(out, lse, errors)


class Region:
    """An open region."""

    def __init__(self, path: str, *, namespace: str | None, size: int, timeout: float) -> None:
        self.path, self.timeout = path, timeout
        self._memory = SharedMemory(aligned(size))
        self.memory, self.size = self._memory.memory, self._memory.size
        self._ring = Ring(self._memory)
        self._lock = threading.Lock()
        self._timeout_field = b"\x10" + varint(math.ceil(timeout * 1e6))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._open(namespace)
        except BaseException:
            self._socket.close()
            raise
        finally:
            self._memory.close_file()

    def _open(self, namespace: str | None) -> None:
        request = encode(
            messages.OPEN_REGION, {"namespace": namespace or "", "bytes": self._memory.size}
        )
        patience = min(_OPEN_TIMEOUT, self.timeout)
        self._socket.settimeout(patience)
        try:
            self._socket.connect(self.path)
            framed = struct.pack("<I", len(request)) + request
            sent = socket.send_fds(self._socket, [framed], [self._memory.fd])
            if sent < len(framed):
                self._socket.sendall(framed[sent:])
            head = self._read_exactly(4)
            opened = self._read_exactly(struct.unpack("<I", head)[0])
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"region {self.path}: no answer within {patience:g} s"
            ) from error
        except OSError as error:
            raise Disconnected(f"region {self.path}: {error}") from error
        answer = decode(messages.OPENED_REGION, opened)
        if answer.refused:
            raise error_of_text(answer.refused)
        self.boot_id: str = answer.boot_id
        self._socket.settimeout(None)

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the daemon hung up")
            data += part
        return data

    def begin_attend(
        self, form: AttendForm, layer: int, queries: Queries, q: Rows
    ) -> _RegionAttend:
        """Writes queries and sends an attend."""
        values = q.values
        plan = queries.prepared.get((form, values.dtype))
        if plan is None:
            plan = _AttendPlan(form, queries, values)
            queries.prepared[form, values.dtype] = plan
        with self._lock:
            place = self._ring.take_place(plan.size)
        start, memory = place.start, self._memory.memory
        np.copyto(np.ndarray(values.shape, values.dtype, memory, start + _RECORD_BYTES), values)
        prefix = plan.prefixes.get(start)
        if prefix is None:
            if len(plan.prefixes) >= _PREFIXES_MAX:
                plan.prefixes.clear()
            prefix = plan.prefixes[start] = plan.encode(start, self._timeout_field, 0)[:-1]
        self._clear_record(start)
        if layer <= _LAYER_OF_ONE_BYTE:
            self._send(prefix + bytes((layer,)))
        else:
            self._send(plan.encode(start, self._timeout_field, layer))
        return _RegionAttend(self, place, plan, q)

    def give_up(self, place: Place) -> None:
        """Nobody waits for this call any more: its place is free once the daemon has ended it."""
        with self._lock:
            self._ring.give_up(place)

    def store(self, items: SequenceOf[StoreItem]) -> list[StoreAck]:
        """Stores all ranges or none where they fit half of the region and no layer occurs twice;
        else as `store_each`."""
        if len(items) > 1 and fits_step(items, self.size // 2):
            return store_step(self, items)
        return self.store_each(items)

    def load(self, item: LoadItem) -> tuple[Array, Array]:
        """Reads rows back."""
        return load_rows(self, item)

    def store_each(self, items: SequenceOf[StoreItem]) -> list[StoreAck]:
        """Writes K and V and sends a store for each range; layers do not wait for one another."""
        acks: list[StoreAck] = []
        pending: deque[tuple[StoreItem, Place, float]] = deque()
        busy: set[tuple[int, int]] = set()

        def end_one() -> None:
            item, place, deadline = pending.popleft()
            length, replayed, packed = self.wait_call(place, deadline)
            place.is_free = True
            busy.discard((item.sequence_id, item.layer))
            acks.append(StoreAck(item.layer, length, bool(replayed), packed))

        try:
            for item in items:
                # A store that continues one which has not ended would be refused.
                while (item.sequence_id, item.layer) in busy:
                    end_one()
                while True:
                    try:
                        pending.append((item, *self._send_store(item)))
                        break
                    except QueueFull:
                        if not pending:
                            raise
                        end_one()
                busy.add((item.sequence_id, item.layer))
            while pending:
                end_one()
        except BaseException:
            for _, place, _ in pending:
                self.give_up(place)
            raise
        return acks

    def _send_store(self, item: StoreItem) -> tuple[Place, float]:
        k, v = item.k.values, item.v.values
        k_at = _RECORD_BYTES
        v_at = k_at + aligned(k.nbytes)
        with self._lock:
            place = self._ring.take_place(v_at + aligned(v.nbytes))
        memory, start = self._memory.memory, place.start
        np.copyto(np.ndarray(k.shape, k.dtype, memory, start + k_at), k)
        np.copyto(np.ndarray(v.shape, v.dtype, memory, start + v_at), v)
        request = item.encode_request(
            _in_region(start + k_at, k.nbytes), _in_region(start + v_at, v.nbytes)
        )
        return place, self._send_call(place, messages.STORE_TAG, request)

    def call(self, rpc: str, **fields: Any) -> Message:
        """Any unary rpc, or HoldSession: the session lives as long as the region."""
        room = _ANSWER_BYTES
        while True:
            try:
                return self.call_beside(rpc, 0, lambda _: fields, lambda _: None, room)[0]
            except MessageTooLarge:
                # Only rpcs that change nothing have longer answers.
                if room >= self._memory.size // 4:
                    raise
                room *= 8

    def hold_session(self, **fields: Any) -> Message:
        """Holds a session until the region ends."""
        return self.call("HoldSession", **fields)

    def call_beside(
        self,
        rpc: str,
        size: int,
        fields_of: Callable[[int], dict[str, Any]],
        read: Callable[[int], T],
        room: int = _ANSWER_BYTES,
    ) -> tuple[Message, T]:
        """An rpc beside so many bytes of payload: `fields_of` puts them where it is told and makes
        the request, `read` takes them from there once the answer has come."""
        place = self.reserve(size, room)
        try:
            fields = fields_of(place.start + _RECORD_BYTES)
        except BaseException:
            place.is_free = True
            raise
        answer = self.call_in(place, rpc, fields, room)
        payload_read = read(place.start + _RECORD_BYTES)
        place.is_free = True
        return answer, payload_read

    def reserve(self, size: int, room: int) -> Place:
        """A place for so many bytes of payload, from `payload_offset` on, and `room` for an answer.

        Raises `QueueFull` while calls under way leave no room.
        """
        with self._lock:
            return self._ring.take_place(_RECORD_BYTES + aligned(size) + room)

    def payload_offset(self, place: Place) -> int:
        """Where the payload of a reserved place begins."""
        return place.start + _RECORD_BYTES

    def call_in(self, place: Place, rpc: str, fields: dict[str, Any], room: int) -> Message:
        """An rpc beside the payload of a reserved place, which stays taken where it is answered.
        After an error it is no longer the caller's."""
        request_schema, answer_schema = messages.UNARY[rpc]
        answer_at = place.end - room
        try:
            request = encode(request_schema, fields)
            if len(request) <= _INLINE_BYTES_MAX:
                payload = field_bytes(1, request)
            elif len(request) <= room:
                self.memory[answer_at : answer_at + len(request)] = request
                payload = _in_region(answer_at, len(request))
            else:
                raise MessageTooLarge(
                    f"a request of {len(request)} bytes does not fit {room} bytes of the region"
                )
            call = field_bytes(1, rpc.encode()) + field_bytes(2, payload)
            call += field_bytes(3, _slice(answer_at, room))
            deadline = self._send_call(place, messages.CONTROL_TAG, call)
        except BaseException:
            place.is_free = True
            raise
        answered = self.wait_call(place, deadline, answer_at)[0]
        return decode(answer_schema, self.memory[answer_at : answer_at + answered])

    def _clear_record(self, start: int) -> None:
        at = start >> 2
        self._memory.words[at : at + 6] = _EMPTY_RECORD

    def _send_call(self, place: Place, tag: bytes, call: bytes) -> float:
        """Sends a RegionCall; the time at which its caller gives up."""
        self._clear_record(place.start)
        self._send(_frame(place.start, self._timeout_field, tag, call))
        return time.monotonic() + self.timeout

    def _send(self, message: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(message)
        except OSError as error:
            raise self._why_lost(error) from error

    def wait_call(
        self, place: Place, deadline: float, error_at: int | None = None
    ) -> tuple[int, int, int]:
        """Sleeps until a call has ended; three numbers of its record. `error_at` is where a refusal
        is told in full."""
        memory, done = self._memory, place.start
        while True:
            state = memory.wait_word(done)
            if state == _ANSWERED:
                at = (done >> 2) + 2
                words = memory.words
                return words[at], words[at + 1], words[at + 2]
            if state == _REFUSED:
                error = self._read_refusal(done, error_at)
                place.is_free = True
                raise error
            if state:
                continue
            lost = self._read_notice()
            if lost is not None and memory.words[done >> 2] == 0:
                place.is_free = True
                raise lost
            if time.monotonic() > deadline:
                # Until the record says otherwise the place is the daemon's.
                self.give_up(place)
                raise DeadlineExceeded(f"no answer within {self.timeout} s")

    def _read_refusal(self, done: int, error_at: int | None) -> KvdError:
        words = self._memory.words
        _, size, retry_after_ms, id_boot, whole = words[done >> 2 : (done >> 2) + 5]
        if id_boot:
            return restarted(f"{id_boot:08x}", self.boot_id)
        retry_after = retry_after_ms / 1000 if retry_after_ms else None
        if error_at is not None and whole:
            error = decode(messages.CALL_ERROR, self.memory[error_at : error_at + whole])
            return error_of(error.code, error.message, retry_after)
        begin = done + _RECORD_TEXT
        text = self.memory[begin : begin + min(size, _RECORD_BYTES - _RECORD_TEXT)]
        return error_of_text(text.decode("utf-8", "replace"), retry_after)

    def read_query_errors(self, start: int, queries: int) -> tuple[QueryError, ...]:
        """Why single queries were not answered."""
        errors = []
        for index in range(queries):
            at = start + index * _QUERY_ERROR_BYTES
            text = self._memory.memory[at : at + _QUERY_ERROR_BYTES].partition(b"\0")[0]
            if text:
                errors.append(QueryError(index, error_of_text(text.decode("utf-8", "replace"))))
        return tuple(errors)

    def _read_notice(self) -> KvdError | None:
        """Why the daemon has ended the connection, if it has."""
        try:
            with self._lock:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            return Disconnected(f"region {self.path}: {error}")
        if not data:
            return Disconnected(f"region {self.path}: the daemon hung up")
        notice = decode(messages.OPENED_REGION, data[4:])
        return error_of_text(notice.refused) if notice.refused else None

    def _why_lost(self, error: OSError) -> KvdError:
        return self._read_notice() or Disconnected(f"region {self.path}: {error}")

    def close(self) -> None:
        """Ends the region. Its memory is given back once no call's arrays are left."""
        self._socket.close()


def _frame(done: int, timeout_field: bytes, tag: bytes, call: bytes) -> bytes:
    """A RegionCall behind its length."""
    head = b"\x08" + varint(done) + timeout_field + tag + varint(len(call))
    return struct.pack("<I", len(head) + len(call)) + head + call


def _in_region(offset: int, size: int) -> bytes:
    where = _slice(offset, size)
    return b"\x12" + varint(len(where)) + where


def _slice(offset: int, size: int) -> bytes:
    return b"\x08" + varint(offset) + b"\x10" + varint(size)
