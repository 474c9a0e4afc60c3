"""HiCache's storage over a daemon's cache. SGLang calls it from its prefetch and backup threads."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from ..arrays import Array, DType
from ..chunks import Chunk, ChunkCache, ChunkShape, RowOrder
from ..errors import InvalidArgument, KvdError, Unsupported
from ..options import STORE_OPTIONS, check_options, chunk_home
from . import OPTIONS_KEY, TESTED_RELEASES

# Smaller pages cost more calls than they are worth.
_PAGE_TOKENS_MIN = 16
_OPTIONS = {**STORE_OPTIONS, "untested_sglang": (bool,)}
# Layouts of the host pool, and how the rows of its pages follow one another.
_ORDERS = {
    "layer_first": RowOrder.LAYERS_FIRST,
    "page_first": RowOrder.TOKENS_FIRST,
    "page_first_direct": RowOrder.LAYERS_FIRST,
}


class KvdStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's host pool, each under its hash. A failure is a page that is not there."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Raises `Unsupported` for what is not known to be right, `InvalidArgument` for options
        that are none."""
        config = storage_config.extra_config or {}
        options = config.get(OPTIONS_KEY)
        if not isinstance(options, dict):
            raise InvalidArgument(f'HiCache\'s extra config needs "{OPTIONS_KEY}": {{"region": …}}')
        self._options = check_options(f'extra config, "{OPTIONS_KEY}"', options, _OPTIONS)
        release = version("sglang")
        if release not in TESTED_RELEASES and not self._options.get("untested_sglang"):
            raise Unsupported(
                f"SGLang {release} is not tested with this package,"
                f' {", ".join(TESTED_RELEASES)} is; try it with "untested_sglang": true'
            )
        if storage_config.is_mla_model or storage_config.should_split_heads:
            raise Unsupported("MLA, and ranks that split heads otherwise (tp_lcm_size)")
        self._config = storage_config
        self._chunks: ChunkCache | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the pool whose pages are kept; raising fails SGLang's attach."""
        super().register_mem_pool_host(mem_pool_host)
        shape = _read_shape(mem_pool_host)
        config = self._config
        ranks = (
            config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            mem_pool_host.storage_format_tag,
        )
        home = chunk_home(
            "sglang", config.model_name or "model", repr(ranks).encode(), self._options
        )
        self.close()
        # Bytes of the pool, [2, …, head_dim * itemsize], which views of its pages share.
        self._bytes: Array = mem_pool_host.kv_buffer.view(torch.uint8).numpy()
        self._chunks = ChunkCache(home, shape)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        raise Unsupported(f"pool {host_pool_name}: this version serves models of full attention")

    def exists(self, key: str) -> bool:
        return self._kept.contains([_key_bytes(key)])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        found = self._kept.contains([_key_bytes(key) for key in keys])
        return found.index(False) if False in found else len(found)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._kept.get(self._pages(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._kept.put(self._pages(keys, host_indices))

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        targets = target_locations
        if targets is None:
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        found = self._kept.get(self._flat_pages(keys, targets))
        return [page if is_found else None for page, is_found in zip(targets, found, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return all(self._kept.put(self._flat_pages(keys, values or [])))

    def clear(self) -> None:
        """Drops all pages of this model and rank, for everyone who shares them."""
        self._kept.drop_all()

    def close(self) -> None:
        """Hangs up; what is kept stays."""
        if self._chunks is not None:
            self._chunks.close()

    @property
    def _kept(self) -> ChunkCache:
        if self._chunks is None:
            raise Unsupported("pages before SGLang has registered its host pool")
        return self._chunks

    def _pages(self, keys: SequenceOf[str], host_indices: torch.Tensor) -> list[Chunk]:
        """Keys with views of their pages in the host pool."""
        size, pool = self._kept.shape.tokens, self.mem_pool_host
        starts = host_indices[::size].tolist()
        pages = []
        for key, start in zip(keys, starts, strict=True):
            if pool.layout == "layer_first":
                rows = self._bytes[:, :, start : start + size]
            elif pool.layout == "page_first":
                rows = self._bytes[:, start : start + size]
            else:
                rows = self._bytes[:, start // size]
            pages.append(Chunk(_key_bytes(key), rows))
        return pages

    def _flat_pages(self, keys: SequenceOf[str], values: SequenceOf[torch.Tensor]) -> list[Chunk]:
        return [
            Chunk(_key_bytes(key), value.view(torch.uint8).numpy())
            for key, value in zip(keys, values, strict=True)
        ]


def _read_shape(pool: Any) -> ChunkShape:
    if not isinstance(pool, MHATokenToKVPoolHost) or not isinstance(pool.kv_buffer, torch.Tensor):
        raise Unsupported(f"{type(pool).__name__}: this version serves models of full attention")
    if pool.layout not in _ORDERS:
        raise Unsupported(f"hicache-mem-layout {pool.layout}: take {', '.join(_ORDERS)}")
    if pool.head_dim != pool.v_head_dim:
        raise Unsupported(f"keys of {pool.head_dim} and values of {pool.v_head_dim} channels")
    if pool.page_size < _PAGE_TOKENS_MIN:
        raise Unsupported(f"pages of {pool.page_size} tokens: start SGLang with --page-size 64")
    try:
        dtype = DType.of(str(pool.dtype))
    except KvdError as error:
        raise Unsupported(
            f"a KV cache of {pool.dtype}: leave kv-cache-dtype alone, kvd compresses"
        ) from error
    return ChunkShape(
        pool.layer_num, pool.head_num, pool.head_dim, pool.page_size, dtype, _ORDERS[pool.layout]
    )


def _key_bytes(key: str) -> bytes:
    return key.encode()
