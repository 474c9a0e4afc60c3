"""Loads and stores of a worker, in two threads: vLLM computes meanwhile.

A store's rows are in the region before its order leaves vLLM's thread, so vLLM may write its blocks
again. The threads talk to the daemon; vLLM's thread never does."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..blocks import BlockRows
from ..client import Client, Link
from ..errors import (
    DeadlineExceeded,
    Disconnected,
    InvalidArgument,
    KvdError,
    QueueFull,
    RangeNotStored,
    Restarted,
    UnknownLease,
)
from ..keys import Keys
from ..model import Model
from ..sequence import Sequence
from .cells import PagedCells
from .messages import NULL_BLOCK, GroupBlocks, LoadOrder
from .plan import Plan
from .stats import Counters

logger = logging.getLogger("vllm.kvd")

# How often a lost daemon is looked for, and one that did not answer in time.
_RETRY_SECONDS = 1.0
_LONG_RETRY_SECONDS = 10.0
# Share of the region that one call takes.
_CALL_SHARE = 4
# How long anybody waits for room in the region where calls are behind, and how often one looks.
_ROOM_SECONDS = 0.5
_ROOM_INTERVAL = 0.001
# How long the threads may take to end.
_END_SECONDS = 10.0


@dataclass
class Held:
    """What kvd holds of a request of vLLM, in one life of it."""

    life: int
    # Of vLLM, from the request's first on; written by vLLM's thread. Those of a windowed group are
    # the request's own only in the step that brings them.
    blocks: GroupBlocks = ()
    keys: Keys = field(default_factory=lambda: Keys.of(()))
    # Pages whose rows are on the way, and the number of times that they were begun again.
    sent_pages: int = 0
    attempt: int = 0
    # Written by the threads: the sequence, and the page from which rows are to be sent again.
    sequence: Sequence | None = None
    resend_from: int | None = None
    is_refused: bool = False
    is_ended: bool = False


@dataclass(frozen=True)
class StoreJob:
    """Rows of whole pages."""

    held: Held
    attempt: int
    first_page: int
    # All of the request up to the last of these pages.
    keys: Keys
    rows: BlockRows


@dataclass(frozen=True)
class LoadEnd:
    """How a load has ended."""

    request_id: str
    failed_blocks: GroupBlocks


class Transfers:
    """The two threads of a worker and its connection."""

    def __init__(
        self, plan: Plan, client: Client, model: Model, cells: PagedCells, counters: Counters
    ) -> None:
        self.plan, self.client, self.model = plan, client, model
        self._cells, self._counters = cells, counters
        self._look_after = 0.0
        block = plan.block_tokens * plan.dtype.numpy.itemsize * plan.geometry.kv_heads
        block *= (plan.geometry.head_dim_k + plan.geometry.head_dim_v) * plan.geometry.layers
        # Pages of one call.
        self.pages_max = plan.region_bytes // _CALL_SHARE // (block * plan.page_blocks)
        if not self.pages_max:
            need = _CALL_SHARE * block * plan.page_blocks
            raise InvalidArgument(f"region_mib: a page of this model needs {-(-need >> 20)} MiB")
        self.load_ends: queue.SimpleQueue[LoadEnd] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"kvd-{name}", daemon=True)
            for name, jobs in (("load", self._loads), ("store", self._stores))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, held: Held, order: LoadOrder) -> None:
        """Loads rows to vLLM's blocks; a `LoadEnd` tells of it."""
        self._loads.put(lambda: self._load(held, order))

    def store(self, job: StoreJob) -> None:
        """Stores and publishes pages."""
        self._stores.put(lambda: self._store(job))

    def close_sequence(self, held: Held) -> None:
        """Gives up what only this request holds, behind its stores."""
        self._stores.put(lambda: self._end(held))

    def close(self) -> None:
        """Ends the threads, once they have done what they were told, and hangs up."""
        for jobs in (self._loads, self._stores):
            jobs.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.client.close()

    def wait_for_room(self, link: Link, blocks: int) -> BlockRows:
        """Room for so many blocks in the region.

        Raises `QueueFull` where there is none in time.
        """
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                return BlockRows(self.model, link, blocks, self.plan.block_tokens)
            except QueueFull:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ROOM_INTERVAL)

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            try:
                job = jobs.get(timeout=_RETRY_SECONDS)
            except queue.Empty:
                if jobs is self._stores:
                    self._look_for_daemon()
                continue
            if job is None:
                return
            job()

    def _look_for_daemon(self) -> None:
        if self.client.link_if_open() is not None or time.monotonic() < self._look_after:
            return
        try:
            self.model.id_at(self.client.link())
        except KvdError as error:
            self._rest(error)
            logger.debug("kvd: still away: %s", error)
        else:
            logger.info("kvd: connected again to %s", self.plan.region)

    def _rest(self, error: KvdError) -> None:
        """Looks for the daemon no sooner than it makes sense."""
        is_slow = isinstance(error, DeadlineExceeded)
        pause = _LONG_RETRY_SECONDS if is_slow else _RETRY_SECONDS
        self._look_after = time.monotonic() + pause

    def _open(self, keys: Keys, lease_id: int = 0) -> Sequence:
        try:
            return self.model.open(keys, lease_id=lease_id)
        except UnknownLease:
            return self.model.open(keys)

    def _load(self, held: Held, order: LoadOrder) -> None:
        began, size, done = time.monotonic(), self.plan.block_tokens, 0
        asked = len(order.blocks[0])
        try:
            sequence = held.sequence = self._open(order.keys, order.lease_id)
            step = self.pages_max * self.plan.page_blocks
            while done < asked:
                start = order.start + done * size
                # What is still there of a prefix that was evicted meanwhile.
                there = min(step, asked - done, (sequence.length - start) // size)
                if there <= 0:
                    raise RangeNotStored(f"{sequence.length} of {start} tokens are left")
                blocks = tuple(group[done : done + there] for group in order.blocks)
                self._load_blocks(sequence, start, blocks)
                done += there
        except KvdError as error:
            self._counters.add(load_failures=1)
            logger.warning("kvd: a load failed, its tokens are computed: %s", error)
            self._forget(held, error)
        except Exception:
            # A defect: vLLM computes the tokens, and must hear that the load is over.
            self._counters.add(load_failures=1)
            logger.exception("kvd: a load failed, its tokens are computed")
        finally:
            spent = time.monotonic() - began
            self._counters.add(loaded_tokens=done * size, load_seconds=spent)
            failed = tuple(group[done:] for group in order.blocks)
            self.load_ends.put(LoadEnd(order.request_id, failed))
        if held.is_ended:
            self._end(held)

    def _load_blocks(self, sequence: Sequence, start: int, blocks: GroupBlocks) -> None:
        rows = self.wait_for_room(sequence.check_boot(), len(blocks[0]))
        # A window's older blocks are not wanted.
        gone = [
            next((at for at, one in enumerate(group) if one != NULL_BLOCK), len(group))
            for group in blocks
        ]
        rows.load(sequence, start, [gone[group] for group in self.plan.layer_groups])
        try:
            self._cells.write(blocks, rows.cells)
        finally:
            rows.free()

    def _store(self, job: StoreJob) -> None:
        held, page = job.held, self.plan.page_tokens
        if job.attempt != held.attempt or held.is_refused or held.resend_from is not None:
            job.rows.free()
            return
        began = time.monotonic()
        try:
            if self.client.link_if_open() is None:
                raise Disconnected(f"{self.plan.region}: not connected")
            if held.sequence is None:
                held.sequence = self._open(job.keys)
            sequence = held.sequence
            start = sequence.length // page
            end = len(job.keys) // self.plan.page_blocks
            if start < job.first_page:
                # What the daemon had is gone, and behind a window vLLM's rows are too.
                if self.plan.is_windowed:
                    held.is_refused = True
                    logger.info("kvd: pages of a request are gone, it is stored no further")
                else:
                    held.resend_from = start
            if start < job.first_page or start >= end:
                job.rows.free()
                return
            job.rows.store(sequence, start * page, (start - job.first_page) * self.plan.page_blocks)
            first = start * self.plan.page_blocks
            published = sequence.publish(start * page, job.keys.cut(first, len(job.keys)))
            self._counters.add(
                stored_tokens=(end - start) * page,
                published_pages=published.published,
                store_seconds=time.monotonic() - began,
            )
            if published.stopped_by:
                held.is_refused = True
                logger.info("kvd: no more pages of a request: %s", published.stopped_by)
        except KvdError as error:
            job.rows.free()
            self._counters.add(store_failures=1)
            logger.warning("kvd: a store failed: %s", error)
            self._forget(held, error)
        except Exception:
            job.rows.free()
            held.is_refused = True
            self._counters.add(store_failures=1)
            logger.exception("kvd: a store failed, the request is stored no further")

    def _forget(self, held: Held, error: KvdError) -> None:
        """After an error: what was lost with the daemon is sent again, other errors end it."""
        if isinstance(error, RangeNotStored):
            return
        sequence, held.sequence = held.sequence, None
        if isinstance(error, DeadlineExceeded | Disconnected | Restarted):
            held.resend_from = 0
            link = self.client.link_if_open()
            if isinstance(error, DeadlineExceeded):
                # A daemon that does not answer is as good as none, until it lets us in again.
                self._rest(error)
                if link is not None:
                    link.is_lost = True
            elif link is None:
                self._look_for_daemon()
            return
        held.is_refused = True
        if sequence is not None:
            self._close(sequence)

    def _end(self, held: Held) -> None:
        held.is_ended = True
        sequence, held.sequence = held.sequence, None
        if sequence is not None:
            self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        try:
            sequence.close()
        except KvdError as error:
            logger.debug("kvd: a sequence was not closed: %s", error)
