"""Whole engine blocks of all layers in a region's memory: filled here and stored by one call, or
loaded by one call and read here. One thread may fill them and another may send them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Array
from .checks import check_uint
from .errors import InvalidArgument, Unsupported
from .region import Region
from .region_steps import error_of_part
from .ring import Place

if TYPE_CHECKING:
    from .client import Link
    from .model import Model
    from .sequence import Sequence

# A store answers a few numbers, a load errors of its parts, of which a layer has one at most.
_ANSWER_BYTES = 4096
_ANSWER_BYTES_PER_LAYER = 256


@dataclass(frozen=True)
class _Range:
    """Consecutive layers, and the first block of them."""

    first: int
    end: int
    first_block: int


def _find_ranges(first_blocks: SequenceOf[int], blocks: int) -> list[_Range]:
    """Layers whose blocks begin at the same one; none that have no block."""
    ranges: list[_Range] = []
    for layer, first in enumerate(first_blocks):
        if ranges and (ranges[-1].end, ranges[-1].first_block) == (layer, first):
            ranges[-1] = _Range(ranges[-1].first, layer + 1, first)
        elif first < blocks:
            ranges.append(_Range(layer, layer + 1, first))
    return ranges


class BlockRows:
    """Room for `blocks` engine blocks of `block_tokens` tokens on all layers of a model.

    `cells` [layers, blocks, kv_heads, block_tokens * (head_dim_k + head_dim_v)]: in each cell the
    rows of K, token by token, and behind them those of V. bf16 is bits in uint16. After `store` or
    `free`, and after any error, the room is given back and `cells` must not be touched.
    """

    def __init__(self, model: Model, link: Link, blocks: int, block_tokens: int) -> None:
        """Raises `QueueFull` while calls under way leave no room, `MessageTooLarge` for more than
        the region holds, and `Unsupported` where the daemon is not reached by a region."""
        payloads = link.payloads
        if not isinstance(payloads, Region):
            raise Unsupported(
                "engine blocks go through shared memory: connect to the path of a region"
                " (server.listen_region)"
            )
        blocks = check_uint("blocks", blocks)
        block_tokens = check_uint("block_tokens", block_tokens)
        if not blocks or not block_tokens:
            raise InvalidArgument(f"{blocks} blocks of {block_tokens} tokens hold nothing")
        self._model, self._link, self._region = model, link, payloads
        # After an error the daemon may write to the place still, or it is given back already.
        self._is_spent = False
        self.block_tokens = block_tokens
        geometry, item = model.geometry, model.dtype.numpy.itemsize
        self._k_bytes = block_tokens * geometry.head_dim_k * item
        cell = block_tokens * (geometry.head_dim_k + geometry.head_dim_v)
        self._cell_bytes = cell * item
        shape = (geometry.layers, blocks, geometry.kv_heads, cell)
        size = int(np.prod(shape)) * item
        self._answer_bytes = _ANSWER_BYTES + _ANSWER_BYTES_PER_LAYER * geometry.layers
        self._place: Place = payloads.reserve(size, self._answer_bytes)
        self.cells: Array = np.ndarray(
            shape, model.dtype.numpy, payloads.memory, payloads.payload_offset(self._place)
        )

    def store(self, sequence: Sequence, start: int, first_block: int = 0) -> None:
        """Appends the blocks from `first_block` on to a sequence at token `start`: all layers or
        none."""
        layers, blocks = self.cells.shape[:2]
        tokens = (blocks - first_block) * self.block_tokens
        part = self._part(
            sequence, start - first_block * self.block_tokens, _Range(0, layers, first_block)
        )
        with self._link.watched():
            self._call("StoreStep", [part])
        self.free()
        sequence.layer_lengths = [start + tokens] * layers

    def load(
        self, sequence: Sequence, start: int, first_blocks: SequenceOf[int] | None = None
    ) -> None:
        """Fills `cells` with the rows of a sequence from token `start` on; of each layer those
        from its block of `first_blocks` on."""
        layers, blocks = self.cells.shape[:2]
        ranges = _find_ranges(first_blocks or [0] * layers, blocks)
        parts = [self._part(sequence, start, one) for one in ranges]
        if not parts:
            return
        with self._link.watched():
            answer = self._call("LoadStep", parts)
        for failed in answer.errors:
            self.free()
            raise error_of_part(failed.error)

    def free(self) -> None:
        """Gives the room back."""
        if not self._is_spent:
            self._place.is_free = True

    def _part(self, sequence: Sequence, start: int, layers: _Range) -> dict[str, Any]:
        """Of a step; the first block here is of token `start`."""
        _, blocks, heads, _ = self.cells.shape
        layer_bytes = blocks * heads * self._cell_bytes
        at = self._region.payload_offset(self._place) + layers.first * layer_bytes
        geometry, item = self._model.geometry, self._model.dtype.numpy.itemsize
        part: dict[str, Any] = {
            "sequence_id": sequence.id,
            "start": start + layers.first_block * self.block_tokens,
            "tokens": (blocks - layers.first_block) * self.block_tokens,
            "first_layer": layers.first,
            "layers": layers.end - layers.first,
        }
        for side, offset, dim in (
            ("k", at, geometry.head_dim_k),
            ("v", at + self._k_bytes, geometry.head_dim_v),
        ):
            part[side] = {
                "offset": offset,
                "head_stride": self._cell_bytes,
                "token_stride": dim * item,
                "layer_stride": layer_bytes,
                "block_tokens": self.block_tokens,
                "block_stride": heads * self._cell_bytes,
                "blocks": range(layers.first_block, blocks),
            }
        return part

    def _call(self, rpc: str, parts: list[dict[str, Any]]) -> Any:
        fields = {"model_id": self._model.id_at(self._link), "parts": parts}
        try:
            return self._region.call_in(self._place, rpc, fields, self._answer_bytes)
        except BaseException:
            self._is_spent = True
            raise
