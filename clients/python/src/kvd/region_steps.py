"""Rows of many layers in one call, through a region: all of a step is stored, or nothing."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Array
from .calls import LoadItem, StoreAck, StoreItem
from .errors import KvdError, error_of, restarted
from .ring import aligned

if TYPE_CHECKING:
    from .region import Region

# Of a step: 4,096 parts, and what `limits.step_rows_max` is by default; a layer counts for some
# rows at least.
_PARTS_MAX = 4096
_ROWS_MAX = 4_194_304
_ROWS_MIN = 64
# Share of a region that one load takes at a time.
_LOAD_SHARE = 4


def fits_step(items: SequenceOf[StoreItem], bytes_max: int) -> bool:
    """Whether these ranges can be one step: no layer of a sequence twice, and not too much."""
    if len(items) > _PARTS_MAX or len({(one.sequence_id, one.layer) for one in items}) < len(items):
        return False
    counts = [item.k.values.shape[0] * item.k.values.shape[1] for item in items]
    rows = sum(2 * max(_ROWS_MIN, count) for count in counts)
    return rows <= _ROWS_MAX and _size_of(items) <= bytes_max


def _size_of(items: SequenceOf[StoreItem]) -> int:
    return sum(aligned(item.k.values.nbytes) + aligned(item.v.values.nbytes) for item in items)


def _runs(items: SequenceOf[StoreItem]) -> list[list[StoreItem]]:
    """Items of consecutive layers with the same range, which are one part of a step."""
    runs: list[list[StoreItem]] = []
    for item in items:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and item.sequence_id == last.sequence_id
            and item.layer == last.layer + 1
            and item.start == last.start
            and item.k.values.shape == last.k.values.shape
        ):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def store_step(region: Region, items: SequenceOf[StoreItem]) -> list[StoreAck]:
    """Stores ranges of one model, all or none. The blocks that a part of the step has packed are
    told with its first layer."""
    runs = _runs(items)

    def put_rows(at: int) -> dict[str, Any]:
        parts = []
        for run in runs:
            first = run[0]
            part: dict[str, Any] = {
                "sequence_id": first.sequence_id,
                "start": first.start,
                "tokens": first.k.values.shape[0],
                "first_layer": first.layer,
                "layers": len(run),
            }
            for side in ("k", "v"):
                stride = aligned(getattr(first, side).values.nbytes)
                part[side] = {"offset": at, "layer_stride": stride}
                for item in run:
                    rows = getattr(item, side).values
                    np.copyto(np.ndarray(rows.shape, rows.dtype, region.memory, at), rows)
                    at += stride
            parts.append(part)
        return {"model_id": items[0].model_id, "parts": parts}

    room = max(4096, 64 * len(runs))
    answer, _ = region.call_beside("StoreStep", _size_of(items), put_rows, lambda _: None, room)
    acks = []
    for run, part in zip(runs, answer.parts, strict=True):
        for item in run:
            packed = part.packed_blocks if item is run[0] else 0
            acks.append(StoreAck(item.layer, part.length, bool(part.replayed), packed))
    return acks


def load_rows(region: Region, item: LoadItem) -> tuple[Array, Array]:
    """Rows of a layer, in pieces that fit the region."""
    tokens = item.end - item.start
    k, v = (np.empty((tokens, *shape), item.dtype.numpy) for shape in item.shapes)
    row_bytes = sum(heads * dim for heads, dim in item.shapes) * item.dtype.numpy.itemsize
    step = max(1, region.size // _LOAD_SHARE // row_bytes)
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        _load_piece(region, item, begin, k[begin:end], v[begin:end])
    return k, v


def _load_piece(region: Region, item: LoadItem, begin: int, k: Array, v: Array) -> None:
    v_at = aligned(k.nbytes)

    def fields_of(at: int) -> dict[str, Any]:
        part = {
            "sequence_id": item.sequence_id,
            "start": item.start + begin,
            "tokens": len(k),
            "first_layer": item.layer,
            "layers": 1,
            "k": {"offset": at},
            "v": {"offset": at + v_at},
        }
        return {"model_id": item.model_id, "parts": [part], "dtype": int(item.dtype)}

    def read(at: int) -> None:
        np.copyto(k, np.ndarray(k.shape, k.dtype, region.memory, at))
        np.copyto(v, np.ndarray(v.shape, v.dtype, region.memory, at + v_at))

    answer, _ = region.call_beside("LoadStep", v_at + aligned(v.nbytes), fields_of, read, 4096)
    for failed in answer.errors:
        raise error_of_part(failed.error)


def error_of_part(error: Any) -> KvdError:
    """Why a part of a step was not done."""
    if error.id_boot:
        return restarted(error.id_boot, error.boot_id)
    retry = error.retry_after_ms
    return error_of(error.code, error.message, None if retry is None else retry / 1000)
