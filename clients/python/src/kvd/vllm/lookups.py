"""Asks the daemon which prefixes it has, in a thread: a scheduler's step waits for no daemon."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from ..client import Client
from ..errors import DeadlineExceeded, Disconnected, KvdError, Restarted, UnknownLease
from ..keys import Keys, Matches
from ..model import Model
from .stats import Counters

logger = logging.getLogger("vllm.kvd")

# Seconds for which what was found stays. A request that waits longer is looked up again.
LEASE_SECONDS = 30.0
_STALE_SECONDS = 20.0
# A scheduler waits so long for an answer at first: most come within it.
_GRACE_SECONDS = 0.002
# After a failure requests are misses for so long, and for longer after one that took its time.
_PAUSE_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Found:
    """What was found of a request's keys."""

    tokens: int = 0
    lease_id: int = 0


class Lookup:
    """A question under way, or its answer."""

    def __init__(self, future: Future[Found]) -> None:
        self._future = future
        self._asked = time.monotonic()
        self._was_waited_for = False

    def answer(self) -> Found | None:
        """What was found; None while that is not known."""
        grace = 0.0 if self._was_waited_for else _GRACE_SECONDS
        self._was_waited_for = True
        try:
            return self._future.result(grace)
        except FutureTimeout:
            return None

    @property
    def is_stale(self) -> bool:
        """Whether the lease may have ended."""
        return time.monotonic() - self._asked > _STALE_SECONDS


class Lookups:
    """The thread, and the scheduler's connection."""

    def __init__(self, client: Client, model: Model, counters: Counters) -> None:
        self._client, self._model, self._counters = client, model, counters
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvd-lookup")
        self._paused_until = 0.0
        self._is_closed = threading.Event()

    def ask(self, keys: Keys) -> Lookup:
        """Looks keys up, with a lease on what is found."""
        return Lookup(self._pool.submit(self._match, keys))

    def release(self, lease_id: int) -> None:
        """Ends a lease that nobody needs."""
        self._pool.submit(self._release, lease_id)

    def drop_all(self) -> bool:
        """Drops all cached pages of the model, and waits for that; whether none is left."""
        try:
            dropped = self._model.drop()
        except KvdError as error:
            logger.warning("kvd: pages were not dropped: %s", error)
            return False
        logger.info("kvd: %d pages were dropped, %d are held", dropped.pages, dropped.held)
        return not dropped.held

    def close(self) -> None:
        """Hangs up; what is not asked yet is given up."""
        self._is_closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _match(self, keys: Keys) -> Found:
        if time.monotonic() < self._paused_until:
            self._counters.add(lookups=1, lookup_failures=1)
            return Found()
        try:
            matches = self._match_again([keys])
        except KvdError as error:
            if not self._is_closed.is_set():
                logger.warning("kvd: a look-up failed, so it is a miss: %s", error)
            is_slow = isinstance(error, DeadlineExceeded)
            pause = _LONG_PAUSE_SECONDS if is_slow else _PAUSE_SECONDS
            self._paused_until = time.monotonic() + pause
            self._counters.add(lookups=1, lookup_failures=1)
            return Found()
        self._counters.add(lookups=1, matched_tokens=matches.tokens[0])
        return Found(matches.tokens[0], matches.lease_id)

    def _match_again(self, chains: list[Keys]) -> Matches:
        """Asks a daemon that was restarted a second time."""
        try:
            return self._model.match(chains, lease=LEASE_SECONDS)
        except (Disconnected, Restarted):
            return self._model.match(chains, lease=LEASE_SECONDS)

    def _release(self, lease_id: int) -> None:
        try:
            self._client.release_lease(lease_id)
        except UnknownLease:
            pass  # its time is over
        except KvdError as error:
            logger.debug("kvd: a lease was not released: %s", error)
