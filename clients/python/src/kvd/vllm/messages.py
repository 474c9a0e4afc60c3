"""What the scheduler's connector tells the worker's in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ..keys import Keys

# Blocks of consecutive tokens for each group of layers, of equal length. A windowed group has
# `NULL_BLOCK` where its layers need no rows any more.
GroupBlocks = tuple[list[int], ...]
NULL_BLOCK = 0


@dataclass(frozen=True)
class LoadOrder:
    """Rows that vLLM waits for."""

    request_id: str
    # Times that the request was preempted: block ids and sequences are of one life.
    life: int
    # All of the request so far.
    keys: Keys
    lease_id: int
    # First token, and the blocks of vLLM for it and those after it, by group of layers.
    start: int
    blocks: GroupBlocks


@dataclass(frozen=True)
class StoreOrder:
    """Pages of a request that are full once this step is computed."""

    request_id: str
    life: int
    # Of the blocks from `first_page` on, which follow those of earlier orders.
    first_page: int
    keys: Keys
    blocks: GroupBlocks
    # Pages that the daemon had when it was asked: they need not be stored.
    held_pages: int
    # First page that vLLM's blocks still hold; 0 without windowed layers.
    readable_from: int


@dataclass(frozen=True)
class AttendOrder:
    """A request of a step whose older tokens kvd holds."""

    request_id: str
    life: int
    # Tokens before this step's.
    computed: int
    # Blocks that take the request's first token and its last, which is no other request's.
    first_block: int
    last_block: int
    # Keys of what it begins with, where it begins with what is cached.
    prefix: Keys | None
    lease_id: int
    # Of the blocks of pages that this step fills.
    keys: Keys


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    attends: list[AttendOrder] = field(default_factory=list)
    # Requests that ended or were preempted.
    ended: list[str] = field(default_factory=list)
