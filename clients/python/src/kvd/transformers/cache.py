"""A transformers cache whose older tokens are in kvd.

In mode "tail" the engine keeps the newest tokens. After the last layer of a step whole blocks of
the oldest go to kvd; a step asks kvd once a layer, for the whole batch, and merges. In mode "all"
every token is stored before it is attended, and nothing is kept here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..calls import Attended, PendingAttend
from ..checks import check_uint
from ..client import Client
from ..errors import InvalidArgument, KvdError
from ..model import Model, model_label
from ..sequence import SequenceState
from .attention import NAME, Asked, register
from .held import HeldBatch
from .support import Layout, lay_out, spec_of_codec

# Columns by which a tail's memory grows beyond what a step needs.
_GROWTH = 128


class KvdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: its newest tokens, and where it is in kvd."""

    is_compileable, is_sliding, is_croppable, supports_early_init = False, False, True, False

    def __init__(self, cache: KvdCache, slot: int) -> None:
        super().__init__()
        self.cache, self.slot = cache, slot
        self.tail = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes room for the tail."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to the tail; answers all of it, and on K the handle that leads back here."""
        self.cache.check_batch(key_states.shape[0])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache.mode == "all":
            keys, values = key_states.view_as(key_states), value_states
        else:
            end = self.tail + key_states.shape[2]
            if end > self.keys.shape[2] or key_states.shape[0] != self.keys.shape[0]:
                self._grow(key_states.shape[0], end)
            self.keys[:, :, self.tail : end] = key_states
            self.values[:, :, self.tail : end] = value_states
            self.tail = end
            keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        keys.kvd_layer = self  # the attention function is not given the cache
        return keys, values

    def _grow(self, batch: int, columns: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            room = old.new_empty((batch, old.shape[1], columns + _GROWTH, old.shape[3]))
            if self.tail:
                room[:, :, : self.tail] = old[:, :, : self.tail]
            setattr(self, name, room)

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tail."""
        return self.keys[:, :, : self.tail], self.values[:, :, : self.tail]

    def drop_first(self, columns: int) -> None:
        """Forgets the oldest columns of the tail, which kvd holds by now."""
        left = self.tail - columns
        for side in (self.keys, self.values):
            side[:, :, :left] = side[:, :, columns : self.tail].clone()
        self.tail = left
        if self.keys.shape[2] > left + 4 * _GROWTH:  # after a long prompt
            self.keys, self.values = (
                side[:, :, : left + _GROWTH].clone() for side in (self.keys, self.values)
            )

    def select(self, indices: torch.Tensor) -> None:
        """Takes these sequences of the batch."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def forget(self) -> None:
        """Empties the tail."""
        self.tail, self.keys, self.values, self.is_initialized = 0, None, None, False

    def get_seq_length(self) -> int:
        """Columns, wherever they are."""
        return self.cache.held_columns() + self.tail

    def get_max_length(self) -> int:
        """None."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover all columns, so that layers without kvd can share them."""
        return self.get_seq_length() + query_length, 0


class _PiecewiseAttend(PendingAttend):
    """Attends of some query tokens after others, the first of which is under way."""

    def __init__(self, begin: Callable[[slice], PendingAttend], asked: Asked) -> None:
        self._begin, self._batch = begin, asked.query.shape[0]
        self._pieces = asked.pieces()
        self._first = begin(self._pieces[0])

    def result(self) -> Attended:
        first = self._first.result()
        if len(self._pieces) == 1:
            return first
        answers = [first] + [self._begin(part).result() for part in self._pieces[1:]]
        out, lse = (
            torch.cat([side.view(self._batch, -1, *side.shape[1:]) for side in sides], 1)
            for sides in ([one.out for one in answers], [one.lse for one in answers])
        )
        return Attended(out.flatten(0, 1), lse.flatten(0, 1))


class KvdCache(Cache):  # type: ignore[misc]
    """A cache for `generate(past_key_values=…)`. Close it, or its sequences live as long as the
    client. After an error it is empty: the next `generate` computes its prompt again."""

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        codec: str = "kivi-4",
        calibration: bytes = b"",
        mode: str = "tail",
        keep: int = 64,
        flush: int = 64,
        layers: Iterable[int] | None = None,
    ) -> None:
        """`keep` tokens at least stay here in mode "tail", and `flush` at a time go to kvd: a
        multiple of its pages. `layers` are those to hold in kvd; sliding ones stay here always.

        Raises `Unsupported` for a model that this package does not serve.
        """
        if mode not in ("tail", "all"):
            raise InvalidArgument(f"mode={mode!r} is tail or all")
        keep, flush = check_uint("keep", keep), check_uint("flush", flush)
        if not flush:
            raise InvalidArgument("flush = 0: at least one token goes to kvd at a time")
        layout = lay_out(model, layers)
        self.mode, self.keep, self.flush = mode, keep if mode == "tail" else 0, flush
        self.model = _register_model(client, layout, spec_of_codec(codec, mode), calibration)
        slots = {at: slot for slot, at in enumerate(layout.held)}
        kinds: list[Any] = []
        for at in range(layout.layers):
            if at in slots:
                kinds.append(KvdLayer(self, slots[at]))
            elif at in layout.sliding:
                kinds.append(DynamicSlidingWindowLayer(layout.sliding[at]))
            else:
                kinds.append(DynamicLayer())
        super().__init__(layers=kinds)
        self._kvd_layers = [layer for layer in kinds if isinstance(layer, KvdLayer)]
        self._stock_layers = [layer for layer in kinds if not isinstance(layer, KvdLayer)]
        self._held: HeldBatch | None = None
        register()
        if model.config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)

    def held_columns(self) -> int:
        """Columns that kvd holds."""
        return self._held.columns if self._held is not None else 0

    def describe(self) -> list[SequenceState]:
        """What kvd holds of each sequence of the batch."""
        held = self._held
        return [sequence.describe() for sequence in held.sequences] if held is not None else []

    @contextlib.contextmanager
    def failing_empty(self) -> Iterator[None]:
        """Empties the cache where a call fails: its layers may not agree any more."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def check_batch(self, batch: int) -> None:
        """Refuses tokens of another batch than the one that is held."""
        if self._held is not None and batch != len(self._held.sequences):
            held = len(self._held.sequences)
            with self.failing_empty():
                raise InvalidArgument(f"a batch of {batch} for a cache of {held}: reset it first")

    def attend(self, layer: KvdLayer, asked: Asked) -> torch.Tensor:
        """Answers one layer of a step."""
        if self._held is None:
            self._held = HeldBatch(self.model, asked.query.shape[0])
        held, is_last = self._held, layer is self._kvd_layers[-1]
        columns = held.columns + (asked.tokens if self.mode == "all" else layer.tail)
        if layer is self._kvd_layers[0]:
            held.read_mask(asked.mask, columns)
        if self.mode == "all":
            out = self._attend_stored(held, layer, asked)
            if is_last:
                held.columns = columns
            return out
        pending = None
        if held.columns:
            pending = _PiecewiseAttend(
                lambda part: self._begin_remote(held, layer, asked.part(part)), asked
            )
        out = asked.attend_locally(pending)
        if is_last:
            self._flush_tail(held)
        return out

    def _begin_remote(self, held: HeldBatch, layer: KvdLayer, asked: Asked) -> PendingAttend:
        queries = held.queries(asked.tokens, columns=held.columns, causal=False)
        return self.model.begin_attend(
            layer.slot, queries, asked.rows(), scale=asked.scale, soft_cap=asked.soft_cap
        )

    def _attend_stored(self, held: HeldBatch, layer: KvdLayer, asked: Asked) -> torch.Tensor:
        """Stores the new tokens of a layer and asks kvd for all."""
        held.store([(layer.slot, asked.key, asked.value)], held.columns, asked.tokens)
        parts = []
        for part in asked.pieces():
            parts.append(self._attend_part(held, layer, asked.part(part), held.columns + part.stop))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _attend_part(
        self, held: HeldBatch, layer: KvdLayer, asked: Asked, columns: int
    ) -> torch.Tensor:
        """Asks kvd for the last query tokens of so many columns."""
        batch, heads, tokens, _ = asked.query.shape
        queries = held.queries(tokens, columns=columns, causal=True)
        out = asked.query.new_zeros((batch, tokens, heads, asked.value.shape[-1]))
        if not queries.rows:
            return out
        rows = asked.rows()
        counts = [min(tokens, held.length(index, columns)) for index in range(batch)]
        if queries.rows < batch * tokens:  # padding asks nothing
            every = rows.view(batch, tokens, heads, -1)
            rows = torch.cat([every[b, tokens - count :] for b, count in enumerate(counts)])
        answer = self.model.attend(
            layer.slot, queries, rows, scale=asked.scale, soft_cap=asked.soft_cap
        )
        at = 0
        for index, count in enumerate(counts):
            out[index, tokens - count :] = answer.out[at : at + count]
            at += count
        return out

    def _flush_tail(self, held: HeldBatch) -> None:
        """Gives whole blocks of the oldest tokens to kvd."""
        tail = self._kvd_layers[0].tail
        columns = (tail - self.keep) // self.flush * self.flush
        if columns <= 0:
            return
        slots = [(layer.slot, *layer.kept()) for layer in self._kvd_layers]
        held.store(slots, held.columns, columns)
        held.columns += columns
        for layer in self._kvd_layers:
            layer.drop_first(columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens; the number is negative, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): say how many tokens to remove, negative")
        for layer in self._stock_layers:
            layer.crop(tokens_to_remove)
        tail = self._kvd_layers[0].tail
        for layer in self._kvd_layers:
            layer.tail = max(0, layer.tail + tokens_to_remove)
        beyond = -tokens_to_remove - tail
        if beyond > 0 and self._held is not None:
            with self.failing_empty():
                self._held.truncate(max(0, self._held.columns - beyond))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continues other beams: forks, which copy nothing."""
        self._select(beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self._held is not None:
            batch = len(self._held.sequences)
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences."""
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices.cpu())

    def _select(self, indices: torch.Tensor) -> None:
        with self.failing_empty():
            if self._held is not None:
                self._held.select(indices.tolist())
            for layer in self._kvd_layers:
                layer.select(indices)
            for layer in self._stock_layers:
                if layer.get_seq_length() > 0:
                    layer.batch_select_indices(indices)

    def fork(self) -> KvdCache:
        """A cache of the same tokens that goes its own way. kvd shares what it holds; the tail, and
        layers without kvd, are copied."""
        other = KvdCache.__new__(KvdCache)
        other.__dict__.update(self.__dict__)
        other._held = self._held.fork() if self._held is not None else None
        other.layers = []
        for layer in self.layers:
            copy: Any = object.__new__(type(layer))
            copy.__dict__.update(layer.__dict__)
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    setattr(copy, name, value.clone())
            if isinstance(copy, KvdLayer):
                copy.cache = other
            other.layers.append(copy)
        other._kvd_layers = [one for one in other.layers if isinstance(one, KvdLayer)]
        other._stock_layers = [one for one in other.layers if not isinstance(one, KvdLayer)]
        return other

    def reset(self) -> None:
        """Empties the cache, here and in kvd."""
        held, self._held = self._held, None
        for layer in self._kvd_layers:
            layer.forget()
        for layer in self._stock_layers:
            layer.reset()
        if held is not None:
            # A daemon that is gone holds nothing.
            with contextlib.suppress(KvdError):
                held.close()

    def close(self) -> None:
        """Gives up what kvd holds."""
        self.reset()

    def __enter__(self) -> KvdCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _register_model(client: Client, layout: Layout, codec: str, calibration: bytes) -> Model:
    """Registers the layers that kvd holds, by a name that says which model and which codec."""
    label = model_label(layout.label, 64)
    spec = f"{layout.held}{layout.geometry}{layout.dtype}{codec}".encode() + calibration
    name = f"{label}.{hashlib.sha256(spec).hexdigest()[:12]}"
    return client.model(
        name, layout.geometry, dtype=layout.dtype, codec=codec, calibration=calibration
    )
