"""The scheduler's side: which requests begin with what kvd has, and which pages they fill.

Runs in vLLM's scheduler thread alone and never waits for the daemon longer than a moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import Internal
from ..keys import Keys
from .lookups import Lookup, Lookups
from .messages import (
    NULL_BLOCK,
    AttendOrder,
    GroupBlocks,
    LoadOrder,
    StepOrders,
    StoreOrder,
)
from .plan import Plan


@dataclass
class _Request:
    """What is known of a request of vLLM, of its present life."""

    request: Any
    life: int
    lookup: Lookup | None = None
    # Tokens that vLLM has itself, as it said when it asked.
    local_tokens: int = 0
    found_tokens: int = 0
    lease_id: int = 0
    # Whether a load was ordered: after one that failed nothing is asked again.
    was_loaded: bool = False
    # Whether the worker was told of it, where attention is kvd's.
    is_begun: bool = False
    # Pages of which the worker has been told.
    told_pages: int = 0


@dataclass
class SchedulerSide:
    """Follows the requests of an engine."""

    plan: Plan
    lookups: Lookups
    _requests: dict[str, _Request] = field(default_factory=dict)
    _orders: StepOrders = field(default_factory=StepOrders)

    def match(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that kvd has; None while that is not known."""
        known = self._follow(request)
        known.local_tokens = local_tokens
        if not self.plan.loads or request.skip_reading_prefix_cache or known.was_loaded:
            return 0
        blocks = len(request.block_hashes)
        if blocks < self.plan.page_blocks:
            return 0
        if known.lookup is None or known.lookup.is_stale:
            known.lookup = self.lookups.ask(self._keys(request, blocks))
        found = known.lookup.answer()
        if found is None:
            return None
        known.found_tokens, known.lease_id = found.tokens, found.lease_id
        # The last token is computed in any case, for its logits.
        unit = self.plan.page_tokens if self.plan.attends else self.plan.block_tokens
        usable: int = min(found.tokens, (request.num_tokens - 1) // unit * unit)
        return max(0, usable - local_tokens)

    def order_load(self, request: Any, blocks: Any, tokens: int) -> None:
        """Blocks are allocated for a request, `tokens` of them to be loaded."""
        known = self._follow(request)
        if self.plan.attends and tokens:
            # Nothing is loaded: the request's first step attends what is cached.
            known.was_loaded = True
            return
        lease_id, known.lease_id = known.lease_id, 0
        if tokens:
            size = self.plan.block_tokens
            first = known.local_tokens // size
            end = first + tokens // size
            ids = tuple(list(group[first:end]) for group in blocks.get_block_ids())
            order = LoadOrder(
                request_id=request.request_id,
                life=known.life,
                keys=self._keys(request, len(request.block_hashes)),
                lease_id=lease_id,
                start=known.local_tokens,
                blocks=ids,
            )
            self._orders.loads.append(order)
            known.was_loaded = True
        elif lease_id:
            self.lookups.release(lease_id)

    def take_orders(self, scheduled: Any) -> StepOrders:
        """The orders of a step."""
        orders, self._orders = self._orders, StepOrders()
        for request_id in scheduled.preempted_req_ids or ():
            orders.ended.append(request_id)
        order = self._order_attend if self.plan.attends else self._order_store
        if self.plan.attends or self.plan.stores:
            for new in scheduled.scheduled_new_reqs:
                order(orders, scheduled, new.req_id, new.num_computed_tokens)
            cached = scheduled.scheduled_cached_reqs
            for request_id, computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            ):
                order(orders, scheduled, request_id, computed)
        return orders

    def _order_attend(
        self, orders: StepOrders, scheduled: Any, request_id: str, computed: int
    ) -> None:
        known = self._requests.get(request_id)
        if known is None:
            raise Internal(f"a request that was not announced, {request_id}")
        request, plan = known.request, self.plan
        known = self._follow(request)
        tokens = computed + scheduled.num_scheduled_tokens[request_id]
        table = scheduled.kv_connector_block_state.get_block_ids(request_id)[0]
        size, page = plan.page_blocks, plan.page_tokens
        # A block has a key once all its tokens are decided.
        pages = min(tokens, len(request.block_hashes) * plan.block_tokens) // page
        pages = pages if plan.stores else 0
        keys = self._keys(request, pages * size)
        begins = known.was_loaded and not known.is_begun
        order = AttendOrder(
            request_id=request_id,
            life=known.life,
            computed=computed,
            first_block=table[0],
            last_block=table[(tokens - 1) // plan.block_tokens],
            prefix=self._keys(request, computed // plan.block_tokens) if begins else None,
            lease_id=known.lease_id if begins else 0,
            keys=keys.cut(computed // page * size, pages * size),
        )
        known.lease_id, known.is_begun = 0, True
        orders.attends.append(order)

    def _order_store(
        self, orders: StepOrders, scheduled: Any, request_id: str, computed: int
    ) -> None:
        known = self._requests.get(request_id)
        if known is None:
            return
        request, plan = known.request, self.plan
        known = self._follow(request)
        tokens = computed + scheduled.num_scheduled_tokens[request_id]
        # A block has a key once all its tokens are decided.
        tokens = min(tokens, len(request.block_hashes) * plan.block_tokens)
        pages = tokens // plan.page_tokens
        if pages <= known.told_pages:
            return
        tables = scheduled.kv_connector_block_state.get_block_ids(request_id)
        size = plan.page_blocks
        first, end = known.told_pages * size, pages * size
        blocks = tuple(list(table[first:end]) for table in tables)
        order = StoreOrder(
            request_id=request_id,
            life=known.life,
            first_page=known.told_pages,
            keys=self._keys(request, end).cut(first, end),
            blocks=blocks,
            held_pages=known.found_tokens // plan.page_tokens,
            readable_from=self._find_readable(known.told_pages, blocks),
        )
        orders.stores.append(order)
        known.told_pages = pages

    def drop_all(self) -> bool:
        """Drops all pages of the model, for all who share it; whether none is left."""
        return self.lookups.drop_all()

    def end_request(self, request: Any) -> None:
        """A request has ended, however."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return
        if known.lease_id:
            self.lookups.release(known.lease_id)
        if known.told_pages or known.was_loaded or known.is_begun:
            self._orders.ended.append(request.request_id)

    def _follow(self, request: Any) -> _Request:
        known = self._requests.get(request.request_id)
        if known is None or known.life != request.num_preemptions:
            if known is not None and known.lease_id:
                self.lookups.release(known.lease_id)
            known = _Request(request, request.num_preemptions)
            self._requests[request.request_id] = known
        return known

    def _find_readable(self, first_page: int, blocks: GroupBlocks) -> int:
        """The first page from which on blocks are there for all layers."""
        if not self.plan.is_windowed:
            return 0
        gone = max(
            (at + 1 for group in blocks for at, one in enumerate(group) if one == NULL_BLOCK),
            default=0,
        )
        return first_page + -(-gone // self.plan.page_blocks)

    def _keys(self, request: Any, blocks: int) -> Keys:
        return Keys.of(request.block_hashes[:blocks], self.plan.block_tokens)
