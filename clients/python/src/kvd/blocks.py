"""Whole engine blocks of all layers in a region's memory: filled here and stored by one call, or
loaded by one call and read here. One thread may fill them and another may send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Array
from .errors import Unsupported
from .region import Region
from .region_steps import error_of_part
from .ring import Place

if TYPE_CHECKING:
    from .client import Link
    from .model import Model
    from .sequence import Sequence

# A store answers a few numbers, a load errors of one part.
_ANSWER_BYTES = 4096


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
        self._place: Place = payloads.reserve(size, _ANSWER_BYTES)
        self.cells: Array = np.ndarray(
            shape, model.dtype.numpy, payloads.memory, payloads.payload_offset(self._place)
        )

    def store(self, sequence: Sequence, start: int, first_block: int = 0) -> None:
        """Appends the blocks from `first_block` on to a sequence at token `start`: all layers or
        none."""
        tokens = (self.cells.shape[1] - first_block) * self.block_tokens
        with self._link.watched():
            self._call("StoreStep", sequence, start, first_block, tokens)
        self.free()
        sequence.layer_lengths = [start + tokens] * self.cells.shape[0]

    def load(self, sequence: Sequence, start: int) -> None:
        """Fills `cells` with the rows of a sequence from token `start` on."""
        tokens = self.cells.shape[1] * self.block_tokens
        with self._link.watched():
            answer = self._call("LoadStep", sequence, start, 0, tokens)
        for failed in answer.errors:
            self.free()
            raise error_of_part(failed.error)

    def free(self) -> None:
        """Gives the room back."""
        if not self._is_spent:
            self._place.is_free = True

    def _call(self, rpc: str, sequence: Sequence, start: int, first_block: int, tokens: int) -> Any:
        layers, blocks, heads, _ = self.cells.shape
        at = self._region.payload_offset(self._place)
        geometry, item = self._model.geometry, self._model.dtype.numpy.itemsize
        part: dict[str, Any] = {"sequence_id": sequence.id, "start": start, "tokens": tokens}
        for side, offset, dim in (
            ("k", at, geometry.head_dim_k),
            ("v", at + self._k_bytes, geometry.head_dim_v),
        ):
            part[side] = {
                "offset": offset,
                "head_stride": self._cell_bytes,
                "token_stride": dim * item,
                "layer_stride": blocks * heads * self._cell_bytes,
                "block_tokens": self.block_tokens,
                "block_stride": heads * self._cell_bytes,
                "blocks": range(first_block, blocks),
            }
        fields = {"model_id": self._model.id_at(self._link), "parts": [{**part, "layers": layers}]}
        try:
            return self._region.call_in(self._place, rpc, fields, _ANSWER_BYTES)
        except BaseException:
            self._is_spent = True
            raise
