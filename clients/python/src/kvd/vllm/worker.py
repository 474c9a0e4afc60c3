"""The worker's side: copies rows out of vLLM's caches and tells what was loaded.

Runs in vLLM's worker thread and never waits for the daemon, but for room in the region."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterable
from typing import Any

import torch

from ..client import Link
from ..errors import Internal, KvdError, Unsupported
from ..keys import Keys
from .cells import PagedCells
from .messages import StepOrders, StoreOrder
from .plan import Plan
from .stats import Counters
from .transfers import Held, StoreJob, Transfers

logger = logging.getLogger("vllm.kvd")


class WorkerSide:
    """Follows the requests whose rows go to kvd or come from there."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        self._plan, self._counters = plan, counters
        self._requests: dict[str, Held] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        client, model = plan.connect(plan.region_bytes)
        self._client, self._model = client, model
        self._transfers: Transfers | None = None

    def register(self, layers: dict[str, Any], caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's attention layers and caches, by name."""
        if self._transfers is not None:
            raise Unsupported("KV caches that are made again while vLLM runs")
        missing = [name for name in self._plan.layer_names if name not in caches]
        if missing:
            raise Internal(f"vLLM has no cache of {missing[0]}")
        names = self._plan.layer_names
        self._cells = PagedCells(
            [layers[name] for name in names],
            [caches[name] for name in names],
            self._plan.layer_groups,
        )
        self._transfers = Transfers(
            self._plan, self._client, self._model, self._cells, self._counters
        )
        logger.info(
            "kvd: %s as %s, pages of %d tokens",
            self._model.name,
            self._model.codec_spec,
            self._plan.page_tokens,
        )

    @property
    def transfers(self) -> Transfers:
        if self._transfers is None:
            raise Internal("vLLM has registered no caches yet")
        return self._transfers

    def start_loads(self, orders: StepOrders) -> None:
        """Begins what the scheduler wants loaded."""
        for order in orders.loads:
            self.transfers.load(self._follow(order.request_id, order.life), order)

    def store(self, orders: StepOrders) -> None:
        """Copies full pages of the step out of vLLM's caches."""
        if orders.stores:
            began = time.monotonic()
            for order in orders.stores:
                self._store(order)
            self._counters.add(copy_seconds=time.monotonic() - began)
        for request_id in orders.ended:
            held = self._requests.pop(request_id, None)
            if held is not None:
                held.is_ended = True
                self.transfers.close_sequence(held)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended, well or not."""
        ended: set[str] = set()
        while True:
            try:
                end = self.transfers.load_ends.get_nowait()
            except queue.Empty:
                return ended
            ended.add(end.request_id)
            if not self._plan.is_windowed:
                self._failed_blocks.update(end.failed_blocks[0])
            elif end.failed_blocks[0]:
                # vLLM computes all of it: what was loaded does not say which windows it has.
                self._failed_requests.add(end.request_id)

    def take_failed_requests(self) -> set[str]:
        """Requests of which vLLM computes all, since something was not loaded."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were not loaded."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Ends the threads and hangs up."""
        if self._transfers is not None:
            self._transfers.close()
        else:
            self._client.close()

    def _follow(self, request_id: str, life: int) -> Held:
        held = self._requests.get(request_id)
        if held is None or held.life != life:
            if held is not None:
                held.is_ended = True
                self.transfers.close_sequence(held)
            held = self._requests[request_id] = Held(life)
        return held

    def _store(self, order: StoreOrder) -> None:
        held = self._follow(order.request_id, order.life)
        if not held.blocks:
            held.sent_pages = order.held_pages
        if not held.blocks:
            held.blocks = tuple([] for _ in order.blocks)
        for blocks, more in zip(held.blocks, order.blocks, strict=True):
            blocks.extend(more)
        held.keys = held.keys.joined(order.keys)
        if held.resend_from is not None:
            held.attempt += 1
            held.sent_pages, held.resend_from = held.resend_from, None
        held.sent_pages = max(held.sent_pages, order.readable_from)
        link = self._client.link_if_open()
        if link is None:
            # The thread that stores looks for the daemon.
            self._counters.add(store_failures=1)
            held.attempt += 1
            held.sent_pages = 0
            return
        if held.is_refused:
            return
        for first, end in self._pieces(held):
            if not self._send(held, link, first, end):
                return
            held.sent_pages = end

    def _pieces(self, held: Held) -> Iterable[tuple[int, int]]:
        pages, step = len(held.keys) // self._plan.page_blocks, self.transfers.pages_max
        return [(at, min(at + step, pages)) for at in range(held.sent_pages, pages, step)]

    def _send(self, held: Held, link: Link, first: int, end: int) -> bool:
        """Copies some pages to the region; False where there is no room in time."""
        size = self._plan.page_blocks
        try:
            rows = self.transfers.wait_for_room(link, (end - first) * size)
        except KvdError as error:
            self._counters.add(store_failures=1)
            logger.warning("kvd: rows were not copied: %s", error)
            return False
        blocks = tuple(group[first * size : end * size] for group in held.blocks)
        self._cells.read(blocks, rows.cells)
        keys: Keys = held.keys.cut(0, end * size)
        self.transfers.store(StoreJob(held, held.attempt, first, keys, rows))
        return True
