"""vLLM's paged KV caches in host memory, and where in them each value lies.

Attention backends order the values of a block and head as their kernels like it, which depends on
the processor. The order is found by writing known values through the backend itself."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from ..arrays import Array
from ..errors import Internal, Unsupported
from .messages import NULL_BLOCK, GroupBlocks

# Digits of positions while an order is found: bf16 has whole numbers up to 256.
_BASE = 200
_BITS = {4: torch.int32, 2: torch.int16}


class PagedCells:
    """The caches of all layers as [blocks, kv_heads, values], and the order of the values."""

    def __init__(
        self,
        layers: SequenceOf[Any],
        caches: SequenceOf[torch.Tensor],
        groups: SequenceOf[int],
    ) -> None:
        """Attention layers of vLLM, their caches, and the group of each, which has its own blocks.

        Raises `Unsupported` where keys and values cannot be found in them.
        """
        first = caches[0]
        self._order: Array = _find_order(layers[0], first)
        for layer in layers[1:]:
            _check_order(layer, first, self._order)
        self._inverse: Array = np.argsort(self._order)
        self._is_plain = bool((self._order == np.arange(len(self._order))).all())
        self._caches = [_as_numbers(cache) for cache in caches]
        self._groups = tuple(groups)

    def read(self, blocks: GroupBlocks, cells: Array) -> None:
        """Copies blocks of all layers to [layers, blocks, kv_heads, values], K before V."""
        target = cells.view(self._caches[0].dtype)
        for layer, cache in enumerate(self._caches):
            for at, block in enumerate(blocks[self._groups[layer]]):
                if block == NULL_BLOCK:
                    raise Internal("rows of a window that vLLM has moved on")
                self._copy(cache[block], self._order, target[layer, at])

    def write(self, blocks: GroupBlocks, cells: Array) -> None:
        """Copies them back, where vLLM has a block for them."""
        source = cells.view(self._caches[0].dtype)
        for layer, cache in enumerate(self._caches):
            for at, block in enumerate(blocks[self._groups[layer]]):
                if block != NULL_BLOCK:
                    self._copy(source[layer, at], self._inverse, cache[block])

    def _copy(self, source: Array, order: Array, target: Array) -> None:
        if self._is_plain:
            np.copyto(target, source)
        else:
            np.take(source, order, axis=1, out=target, mode="clip")


def _as_numbers(cache: torch.Tensor) -> Array:
    if cache.device.type != "cpu":
        raise Unsupported(f"a KV cache on {cache.device}")
    bits = cache.detach().view(_BITS[cache.element_size()])
    try:
        return np.asarray(bits.view(*cache.shape[:2], -1).numpy())
    except RuntimeError as error:
        raise Unsupported(f"a KV cache with strides {cache.stride()}") from error


class _Scratch:
    """A cache of two blocks of which a backend writes the second."""

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        _, self.heads, self.tokens, width = cache.shape
        self._layer, self._cache = layer, torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype)
        self.dim_k = int(getattr(layer, "head_size", width // 2))
        self.dim_v = width - self.dim_k
        self.size = self.tokens * width

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """Writes values [kv_heads, size], K before V; the cells [kv_heads, size] afterwards."""
        split = self.tokens * self.dim_k
        key = values[:, :split].reshape(self.heads, self.tokens, self.dim_k)
        value = values[:, split:].reshape(self.heads, self.tokens, self.dim_v)
        slots = torch.arange(self.tokens, 2 * self.tokens)
        self._cache.zero_()
        rows = (side.to(self._cache.dtype).transpose(0, 1).contiguous() for side in (key, value))
        try:
            self._layer.impl.do_kv_cache_update(self._layer, *rows, self._cache, slots)
        except (AttributeError, TypeError, RuntimeError) as error:
            name = type(self._layer.impl).__name__
            raise Unsupported(f"the attention backend {name}: {error}") from error
        if self._cache[0].any():
            raise Unsupported("an attention backend that writes beside its block")
        return self._cache[1].reshape(self.heads, -1)


def _find_order(layer: Any, cache: torch.Tensor) -> Array:
    """Where in a cell each value of K, then of V, lies."""
    scratch = _Scratch(layer, cache)
    positions = torch.arange(scratch.size)
    found, scale = torch.zeros(scratch.size, dtype=torch.int64), 1
    while scale <= scratch.size:
        digits = positions // scale % _BASE + 1
        cells = scratch.fill(digits.expand(scratch.heads, -1))
        found += (cells[0].to(torch.int64) - 1) * scale
        scale *= _BASE
    if not torch.equal(found.sort().values, positions):
        raise Unsupported("an attention backend that does not keep keys and values as they came")
    order: Array = found.argsort().numpy()
    _check_order(layer, cache, order)
    return order


def _check_order(layer: Any, cache: torch.Tensor, order: Array) -> None:
    scratch = _Scratch(layer, cache)
    generator = torch.Generator().manual_seed(0)
    shape = (scratch.heads, scratch.size)
    values = torch.randn(shape, generator=generator).to(cache.dtype)
    if not torch.equal(scratch.fill(values)[:, torch.from_numpy(order)], values):
        raise Unsupported("an attention backend that does not keep keys and values as they came")
