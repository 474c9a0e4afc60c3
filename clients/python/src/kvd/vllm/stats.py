"""What the connector has done, for vLLM's log and its Prometheus metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

_MEANINGS = {
    "lookups": "Look-ups of prefixes.",
    "lookup_failures": "Look-ups that the daemon did not answer: taken as misses.",
    "matched_tokens": "Tokens that look-ups found.",
    "loaded_tokens": "Tokens loaded from kvd.",
    "load_failures": "Loads that failed: vLLM computes their tokens.",
    "load_seconds": "Seconds that loads took.",
    "stored_tokens": "Tokens stored in kvd.",
    "published_pages": "Pages that others find from now on.",
    "store_failures": "Stores that failed or found the daemon away.",
    "store_seconds": "Seconds that stores took, beside the engine.",
    "attend_failures": "Requests whose keys and values were lost: vLLM computes or fails them.",
    "copy_seconds": "Seconds in which the engine waited for rows to be copied out.",
}


@dataclass
class KvdStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class Counters:
    """Sums that threads add to, since they were last taken and in all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._total: dict[str, float] = dict.fromkeys(_MEANINGS, 0)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._since[name] = self._since.get(name, 0) + amount
                self._total[name] += amount

    def take(self) -> KvdStats | None:
        """What was added since the last call, if anything."""
        with self._lock:
            taken, self._since = self._since, {}
        return KvdStats(data=taken) if taken else None

    def total(self) -> dict[str, float]:
        with self._lock:
            return dict(self._total)


class KvdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter `vllm:kvd_…` for each sum."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        counters = {
            name: counter(name=f"vllm:kvd_{name}", documentation=text, labelnames=labelnames)
            for name, text in _MEANINGS.items()
        }
        # Those that are 0 are shown too.
        self._by_engine = {
            engine: {name: one.labels(*values) for name, one in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._by_engine[engine_idx][name].inc(amount)
