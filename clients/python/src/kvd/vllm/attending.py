"""The worker's side where attention is kvd's: it holds the keys and values of all tokens but those
of the present step.

A step's tokens attend one another here and older ones at the daemon; both are merged, and once the
last layer is computed the step's rows are stored. So a request whose rows are lost is computed
again from its first token: its first step needs nothing of the daemon."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..calls import Attended, PendingAttend, Queries, Query
from ..errors import (
    DeadlineExceeded,
    Disconnected,
    Internal,
    KvdError,
    RangeNotStored,
    Restarted,
    UnknownLease,
    Unsupported,
)
from ..merge import merge
from ..sequence import Sequence
from .messages import AttendOrder, StepOrders
from .own_rows import attend_own
from .plan import Plan
from .stats import Counters

if TYPE_CHECKING:
    from .attention import Batch

logger = logging.getLogger("vllm.kvd")

# Of queries and outputs in one call.
_PIECE_BYTES = 8 << 20
# How often a lost daemon is looked for.
_RETRY_SECONDS = 0.1
# How often a request is computed again before its error ends the engine.
_RECOMPUTES_MAX = 8


@dataclass
class _Kept:
    """What kvd holds of a request, in one life of it."""

    life: int
    sequence: Sequence | None = None
    # Pages of it that are in the cache; None where they no longer follow one another.
    published: int | None = 0
    # Why its rows are lost.
    loss: KvdError | None = None
    losses: int = 0


@dataclass
class _Row:
    """A request of a step and its tokens in the batch."""

    order: AttendOrder
    kept: _Kept
    first: int = 0
    end: int = 0

    @property
    def asks(self) -> bool:
        """Whether kvd has older tokens of it."""
        return self.order.computed > 0 and self.kept.loss is None


@dataclass(frozen=True)
class _Piece:
    """Queries of one call."""

    queries: Queries
    rows: list[_Row]
    tokens: torch.Tensor


@dataclass(frozen=True)
class _Call:
    """A piece on a layer; `q` is of the whole step."""

    layer: int
    scale: float
    piece: _Piece
    q: torch.Tensor


@dataclass
class _Step:
    """A step while it is computed."""

    # By the block that takes the request's last token, which no other request has.
    orders: dict[int, _Row] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    pieces: list[_Piece] | None = None
    # By layer: the step's keys and values.
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class AttendingSide:
    """Attends for vLLM's worker and stores what a step has added."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        self._plan, self._counters = plan, counters
        self._client, self._model = plan.connect(plan.region_bytes)
        self._layers = {name: at for at, name in enumerate(plan.layer_names)}
        self._requests: dict[str, _Kept] = {}
        self._step = _Step()

    def register(self, layers: dict[str, Any], caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's attention layers, by name."""
        from .attention import KvdAttentionImpl  # noqa: PLC0415 (it is imported by vLLM)

        for name in self._plan.layer_names:
            if not isinstance(layers[name].impl, KvdAttentionImpl):
                raise Unsupported(f"{name} has the attention of {type(layers[name].impl).__name__}")
        logger.info("kvd: %s attends as %s", self._model.name, self._model.codec_spec)

    def begin_step(self, orders: StepOrders) -> None:
        """Before a step is computed: requests that ended go, others are found or begun."""
        for request_id in orders.ended:
            kept = self._requests.pop(request_id, None)
            if kept is not None:
                self._drop(kept)
        self._step = _Step()
        if not orders.attends:
            return
        self._find_daemon()
        for order in orders.attends:
            self._step.orders[order.last_block] = _Row(order, self._begin(order))

    def start_loads(self, orders: StepOrders) -> None:
        """Nothing is loaded."""

    def attend(
        self,
        layer_name: str,
        scale: float,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: Batch,
        output: torch.Tensor,
    ) -> None:
        """Writes the attention of a step's tokens to `output`."""
        step, layer = self._step, self._layers[layer_name]
        if not step.rows:
            self._read_batch(batch)
        total = step.rows[-1].end
        q, k, v = (side[:total] for side in rows)
        # vLLM may write the memory again before the step ends.
        step.keys[layer], step.values[layer] = k.clone(), v.clone()
        pending = self._ask(layer, scale, q)
        out, lse = attend_own(q, k, v, scale, [(row.first, row.end) for row in step.rows])
        for piece, answer in pending:
            at = piece.tokens
            both, _ = merge(answer.out.float(), answer.lse, out[at].float(), lse[at])
            out[at] = both.to(out.dtype)
        output.view(-1, *out.shape[1:])[:total] = out

    def store(self, orders: StepOrders) -> None:
        """Stores the rows of the step."""
        step = self._step
        if len(step.keys) != len(self._layers):
            return
        began = time.monotonic()
        stored = [row for row in step.rows if row.kept.loss is None and self._open(row)]
        try:
            self._store(step, stored)
        except KvdError as error:
            self._mark_lost(error)
            if len(stored) == 1 or self._client.link_if_open() is None:
                self._lose(stored, error)
            else:
                # One of them cannot be stored, and must not take the others with it.
                for row in stored:
                    self._store_alone(step, row)
        for row in stored:
            if row.kept.loss is None:
                self._counters.add(stored_tokens=row.end - row.first)
                self._publish(row)
        step.keys.clear()
        step.values.clear()
        self._counters.add(store_seconds=time.monotonic() - began)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended: none is waited for."""
        return set()

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads failed as a whole: none is loaded."""
        return set()

    def take_failed_blocks(self) -> set[int]:
        """A block of each request that was computed without its older tokens, so that vLLM drops
        the step's token and computes the request again, or fails it."""
        failed = set()
        for row in self._step.orders.values():
            if row.kept.loss is None or not row.order.computed:
                continue
            failed.add(row.order.first_block)
            row.kept.losses += 1
            if self._plan.recomputes and row.kept.losses > _RECOMPUTES_MAX:
                raise row.kept.loss
        return failed

    def close(self) -> None:
        """Hangs up, which ends the session and all sequences."""
        self._client.close()

    def _find_daemon(self) -> None:
        """Connects again to a daemon that went away.

        Raises the error where requests are to be computed again and it does not come back in time.
        """
        deadline = time.monotonic() + self._plan.timeout
        while True:
            try:
                self._model.id_at(self._client.link())
                return
            except KvdError as error:
                if not self._plan.recomputes:
                    logger.warning("kvd: still away, requests fail: %s", error)
                    return
                if not error.retryable or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _begin(self, order: AttendOrder) -> _Kept:
        """What kvd holds of a request: all its computed tokens, or it is lost."""
        kept = self._requests.get(order.request_id)
        if kept is None or kept.life != order.life:
            if kept is not None:
                self._drop(kept)
            kept = self._requests[order.request_id] = _Kept(order.life)
            if order.computed:
                self._attach(kept, order)
        elif not order.computed:
            self._drop(kept)
            kept.loss, kept.published = None, 0
        if order.computed:
            self._check_held(kept, order)
        return kept

    def _check_held(self, kept: _Kept, order: AttendOrder) -> None:
        link = self._client.link_if_open()
        sequence = kept.sequence
        if kept.loss is not None:
            return
        if sequence is None or sequence.length != order.computed:
            kept.loss = RangeNotStored(f"{order.computed} tokens of a request are not there")
        elif link is None or link.boot_id != sequence.boot_id:
            kept.loss = Restarted("the daemon was restarted under a request")
        else:
            return
        self._counters.add(attend_failures=1)

    def _attach(self, kept: _Kept, order: AttendOrder) -> None:
        """Begins a request with what is cached of it."""
        try:
            try:
                kept.sequence = self._model.open(order.prefix, lease_id=order.lease_id)
            except UnknownLease:
                kept.sequence = self._model.open(order.prefix)
        except KvdError as error:
            self._mark_lost(error)
            kept.loss = error
            self._counters.add(attend_failures=1)
            return
        kept.published = order.computed // self._plan.page_tokens
        self._counters.add(loaded_tokens=kept.sequence.length)

    def _read_batch(self, batch: Batch) -> None:
        """Finds the requests of vLLM's batch, which has no names."""
        step, size = self._step, self._plan.block_tokens
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for at, length in enumerate(lengths):
            first, end = starts[at], starts[at + 1]
            if first == end:
                continue
            row = step.orders.get(int(batch.block_table[at, (length - 1) // size]))
            if row is None or row.order.computed + end - first != length:
                raise Internal(f"a request of {length} tokens that the scheduler did not name")
            row.first, row.end = first, end
            step.rows.append(row)
        if len(step.rows) != len(step.orders):
            raise Internal(f"{len(step.rows)} requests of {len(step.orders)} are in the batch")

    def _ask(self, layer: int, scale: float, q: torch.Tensor) -> Iterable[tuple[_Piece, Attended]]:
        """Attends at the daemon: the first call is under way when this returns."""
        step = self._step
        if step.pieces is None:
            step.pieces = self._cut(q)
        calls = [_Call(layer, scale, piece, q) for piece in step.pieces]
        first = self._begin_call(calls[0]) if calls else None
        return self._answers(calls, first)

    def _answers(
        self, calls: list[_Call], pending: PendingAttend | None
    ) -> Iterable[tuple[_Piece, Attended]]:
        """Two calls are under way at a time: those that wait for others would be late."""
        for at, call in enumerate(calls):
            following = self._begin_call(calls[at + 1]) if at + 1 < len(calls) else None
            answer = None if pending is None else self._await_call(call, pending)
            pending = following
            if answer is not None:
                yield call.piece, answer

    def _begin_call(self, call: _Call) -> PendingAttend | None:
        piece = call.piece
        try:
            return self._model.begin_attend(
                call.layer, piece.queries, call.q[piece.tokens], scale=call.scale, partial=True
            )
        except KvdError as error:
            self._lose(piece.rows, error)
            return None

    def _await_call(self, call: _Call, pending: PendingAttend) -> Attended | None:
        rows = call.piece.rows
        try:
            answer = pending.result()
        except KvdError as error:
            self._lose(rows, error)
            return None
        for bad in answer.errors:
            self._lose([rows[bad.query]], bad.error)
        return answer

    def _cut(self, q: torch.Tensor) -> list[_Piece]:
        """The queries of a step, in calls of no more bytes than one should have."""
        most = max(1, _PIECE_BYTES // (2 * q[0].nbytes))
        pieces: list[_Piece] = []
        asked: list[tuple[_Row, int, int]] = []

        def end_piece() -> None:
            queries, tokens = [], []
            for row, first, end in asked:
                computed = row.order.computed
                queries.append(Query(_sequence(row), end - first, computed, computed))
                tokens.append(torch.arange(first, end))
            if asked:
                rows = [row for row, _, _ in asked]
                pieces.append(_Piece(Queries(queries), rows, torch.cat(tokens)))
            asked.clear()

        room = most
        for row in self._step.rows:
            at = row.first
            while row.asks and at < row.end:
                end = min(row.end, at + room)
                asked.append((row, at, end))
                room -= end - at
                at = end
                if not room:
                    end_piece()
                    room = most
        end_piece()
        return pieces

    def _open(self, row: _Row) -> bool:
        """Whether a request has a sequence to store to."""
        if row.kept.sequence is None:
            try:
                row.kept.sequence = self._model.open()
            except KvdError as error:
                self._lose([row], error)
                return False
        return True

    def _store(self, step: _Step, rows: list[_Row]) -> None:
        items = []
        for row in rows:
            sequence, tokens = _sequence(row), slice(row.first, row.end)
            for layer in range(len(self._layers)):
                k, v = step.keys[layer][tokens], step.values[layer][tokens]
                items.append((sequence, sequence.item(layer, k, v, row.order.computed)))
        if items:
            self._model.store(items)

    def _store_alone(self, step: _Step, row: _Row) -> None:
        try:
            self._store(step, [row])
        except KvdError as error:
            self._lose([row], error)

    def _publish(self, row: _Row) -> None:
        """Puts pages that are full into the cache, where others find them."""
        kept, keys = row.kept, row.order.keys
        first = row.order.computed // self._plan.page_tokens
        if not len(keys) or kept.published != first:
            if len(keys):
                kept.published = None
            return
        try:
            done = _sequence(row).publish(first * self._plan.page_tokens, keys)
        except KvdError as error:
            self._mark_lost(error)
            kept.published = None
            self._counters.add(store_failures=1)
            logger.warning("kvd: pages of a request are not shared: %s", error)
            return
        kept.published = first + len(keys) // self._plan.page_blocks
        self._counters.add(published_pages=done.published)
        if done.stopped_by:
            kept.published = None
            logger.info("kvd: no more pages of a request: %s", done.stopped_by)

    def _lose(self, rows: list[_Row], error: KvdError) -> None:
        """Gives requests up whose rows cannot be read or stored; they get nothing more."""
        self._mark_lost(error)
        for row in rows:
            if row.kept.loss is None:
                row.kept.loss = error
                self._counters.add(attend_failures=1)
                logger.warning("kvd: %s is not held any more: %s", row.order.request_id, error)
        self._step.pieces = None

    def _mark_lost(self, error: KvdError) -> None:
        """A daemon that hangs is as good as none, until it lets us in again."""
        link = self._client.link_if_open()
        if link is not None and isinstance(error, DeadlineExceeded | Disconnected | Restarted):
            link.is_lost = True

    def _drop(self, kept: _Kept) -> None:
        sequence, kept.sequence = kept.sequence, None
        if sequence is None:
            return
        try:
            sequence.close()
        except KvdError as error:
            self._mark_lost(error)
            logger.debug("kvd: a sequence was not closed: %s", error)


def _sequence(row: _Row) -> Sequence:
    if row.kept.sequence is None:
        raise Internal("a request without a sequence")
    return row.kept.sequence
