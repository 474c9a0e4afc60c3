"""The tokens of a batch that kvd holds: one sequence for each, all layers at the same length.

Columns are those of the batch, as transformers counts them. Left padding is never stored: sequence
`b` holds columns from `pads[b]` on.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch

from ..calls import Queries, Query
from ..errors import Unsupported
from ..model import Model
from ..sequence import Sequence


class HeldBatch:
    """Sequences of a batch at the daemon."""

    def __init__(self, model: Model, batch: int) -> None:
        self.model = model
        # Columns that kvd holds.
        self.columns = 0
        self.pads = [0] * batch
        # Whether every sequence has begun, so that no more padding can come.
        self.has_begun = False
        self.sequences: list[Sequence] = []
        try:
            for _ in range(batch):
                self.sequences.append(model.open())
        except BaseException:
            self.close()
            raise
        self._asked: tuple[tuple[int, int, bool], Queries] | None = None

    def read_mask(self, mask: torch.Tensor | None, columns: int) -> None:
        """Learns padding from the mask of a step, [batch, 1, tokens, columns].

        Raises `Unsupported` where it hides other tokens than those on the left.
        """
        if mask is None:
            self.has_begun = True
            return
        seen = mask[:, 0, -1, :columns].expand(len(self.sequences), -1)
        counts = seen.sum(-1).tolist()
        if not self.has_begun:
            self.pads = [columns - count for count in counts]
            self.has_begun = all(counts)
            first = torch.arange(columns)[None, :] >= torch.tensor(self.pads)[:, None]
            if not torch.equal(first, seen):
                raise Unsupported("a mask with holes or right padding: pad on the left")
        elif counts != [columns - pad for pad in self.pads]:
            raise Unsupported("a mask that hides tokens which were seen before")

    def length(self, index: int, columns: int) -> int:
        """Tokens of a sequence in the first `columns` columns."""
        return max(0, columns - self.pads[index])

    def queries(self, tokens: int, *, columns: int, causal: bool) -> Queries:
        """A batch of `tokens` query tokens each, over the first `columns` columns: all of it, or
        ending with the query tokens themselves. Equal ones are made once a step."""
        key = (tokens, columns, causal)
        if self._asked is None or self._asked[0] != key:
            made = []
            for index, sequence in enumerate(self.sequences):
                length = self.length(index, columns)
                n_q = min(tokens, length) if causal else tokens
                if n_q:
                    position = None if causal else length
                    made.append(Query(sequence, n_q, length, position))
            self._asked = (key, Queries(made))
        return self._asked[1]

    def store(
        self, slots: Iterable[tuple[int, torch.Tensor, torch.Tensor]], columns: int, tokens: int
    ) -> None:
        """Stores `tokens` columns from `columns` on: for each slot K and V that begin there,
        [batch, kv_heads, tokens or more, dim]."""
        items = []
        for slot, keys, values in slots:
            for index, sequence in enumerate(self.sequences):
                skip = min(tokens, max(0, self.pads[index] - columns))
                if skip == tokens:
                    continue
                k, v = (side[index, :, skip:tokens].transpose(0, 1) for side in (keys, values))
                start = self.length(index, columns)
                items.append((sequence, sequence.item(slot, k, v, start)))
        if items:
            self.model.store(items)

    def truncate(self, columns: int) -> None:
        """Forgets the columns from there on."""
        self._asked = None
        for index, sequence in enumerate(self.sequences):
            sequence.truncate(self.length(index, columns))
        self.columns = columns
        self.has_begun = self.has_begun and all(pad < max(columns, 1) for pad in self.pads)

    def select(self, indices: SequenceOf[int]) -> None:
        """Makes sequence `i` a continuation of what `indices[i]` was: the first one that continues
        it keeps its sequence, further ones are forks, and what nobody continues is closed."""
        self._asked = None
        old, taken = self.sequences, set()
        new: list[Sequence] = []
        try:
            for index in indices:
                new.append(old[index].fork() if index in taken else old[index])
                taken.add(index)
        except BaseException:
            # Those that are still the batch's are closed with it.
            self.sequences = old + [one for one in new if one not in old]
            raise
        self.sequences = new
        self.pads = [self.pads[index] for index in indices]
        for index, sequence in enumerate(old):
            if index not in taken:
                sequence.close()

    def fork(self) -> HeldBatch:
        """Another batch of the same tokens."""
        other = HeldBatch(self.model, 0)
        other.columns, other.pads, other.has_begun = self.columns, list(self.pads), self.has_begun
        try:
            for sequence in self.sequences:
                other.sequences.append(sequence.fork())
        except BaseException:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Gives the sequences up."""
        for sequence in self.sequences:
            sequence.close()
        self.sequences = []
