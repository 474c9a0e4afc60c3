"""vLLM's attention backend of which kvd holds all keys and values.

vLLM's own blocks are places in its books: they hold nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ..errors import InvalidArgument, Unsupported


class KvdAttention(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KvdAttentionImpl]:
        return KvdAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """One value a token instead of its keys and values: vLLM keeps books of blocks alone."""
        if type(spec) is not FullAttentionSpec:
            raise Unsupported(f"{type(spec).__name__}: kvd's attention serves full attention")
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)


@dataclass
class Batch:
    """The requests of a step, in the order of their tokens."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class BatchBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Takes from vLLM's description of a step what is needed."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        common = common_attn_metadata
        if common.causal is not True:
            raise Unsupported("attention that is not causal")
        return Batch(common.query_start_loc, common.seq_lens, common.block_table_tensor)


class KvdAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(  # noqa: PLR0917 (vLLM's order)
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"a sliding window of {sliding_window}": sliding_window is not None,
            f"a soft cap of {logits_soft_cap}": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share keys and values": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
            f"a KV cache of {kv_cache_dtype}": kv_cache_dtype not in self._dtypes(),
        }
        for what, is_there in refused.items():
            if is_there:
                raise Unsupported(f"{what}: kvd's attention in vLLM does not serve it")
        transfer = get_current_vllm_config().kv_transfer_config
        if transfer is None or transfer.kv_connector != "KvdConnector":
            raise InvalidArgument(
                "kvd's attention needs its connector: give kv_transfer_config, made by"
                " kvd.vllm.transfer_config"
            )
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)

    @staticmethod
    def _dtypes() -> tuple[str, ...]:
        return tuple(KvdAttention.supported_kv_cache_dtypes)

    def forward(  # noqa: PLR0917 (vLLM's order)
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Batch | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's tokens: over one another, and over what kvd holds."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("outputs of attention that are quantized")
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        if attn_metadata is None or group is None or not group.has_connector_metadata():
            # vLLM tries the model out.
            return output.zero_()
        group.attending.attend(
            layer.layer_name, self.scale, (query, key, value), attn_metadata, output
        )
        return output
