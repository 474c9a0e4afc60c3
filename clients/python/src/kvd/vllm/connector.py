"""vLLM's connector interface. vLLM makes two of it, in its scheduler and in its worker, which may
be other processes; they share nothing but the orders of a step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ..errors import Internal
from .attending import AttendingSide
from .lookups import Lookups
from .messages import StepOrders
from .plan import make_plan
from .scheduler import SchedulerSide
from .stats import Counters, KvdPromMetrics, KvdStats
from .worker import WorkerSide

# The scheduler's region holds messages alone.
_SCHEDULER_REGION_BYTES = 16 << 20


class KvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps prefixes in kvd and loads them back.

    vLLM may keep only the windows of windowed layers (`SupportsHMA`): kvd has all tokens of all
    layers, since a page is stored before a window moves on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.plan = make_plan(vllm_config, kv_cache_config)
        self.counters = Counters()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | AttendingSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            client, model = self.plan.connect(_SCHEDULER_REGION_BYTES)
            lookups = Lookups(client, model, self.counters)
            self._scheduler = SchedulerSide(self.plan, lookups)
        elif self.plan.attends:
            self._worker = AttendingSide(self.plan, self.counters)
        else:
            self._worker = WorkerSide(self.plan, self.counters)

    @property
    def scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise Internal("a worker's connector has no scheduler's side")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide | AttendingSide:
        if self._worker is None:
            raise Internal("a scheduler's connector has no worker's side")
        return self._worker

    @property
    def attending(self) -> AttendingSide:
        """The worker's side where attention is kvd's."""
        if not isinstance(self._worker, AttendingSide):
            raise Internal("kvd's attention without a connector that was made for it")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not stored is a miss."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens) and not self.plan.attends

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.order_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self.scheduler.take_orders(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.end_request(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.end_request(request)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        self.worker.register(layers, kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Loads may begin behind a step's computation, which is too late for attention.
        if isinstance(self._worker, AttendingSide):
            self._worker.begin_step(self._orders())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs once all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """All layers are copied at once, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self.worker.store(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker.take_loaded() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self.worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> KvdStats | None:
        return self.counters.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats:
        return KvdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdPromMetrics:
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        return self.scheduler.drop_all()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.lookups.close()
        if self._worker is not None:
            self._worker.close()

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        if not isinstance(orders, StepOrders):
            raise Internal(f"orders of a step are {type(orders).__name__}")
        return orders
