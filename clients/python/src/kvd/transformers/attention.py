"""The attention function that transformers calls.

Local attention over the engine's tail, and kvd's over what it holds, are made one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import Unsupported

if TYPE_CHECKING:
    from .cache import KvdLayer

NAME = "kvd"
# Query tokens of which scores are kept at a time.
_CHUNK = 128
# Of queries and outputs in one call.
_PIECE_BYTES = 8 << 20


def register() -> None:
    """Makes `model.set_attn_implementation("kvd")` work. Calling it again changes nothing."""
    AttentionInterface.register(NAME, kvd_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def kvd_attention(  # noqa: PLR0917 (its arguments are given by transformers)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Answers `query` [batch, heads, tokens, dim] with [batch, tokens, heads, dim].

    `key` and `value` are what the engine keeps. Layers without kvd are answered as stock
    transformers does.
    """
    layer: KvdLayer | None = getattr(key, "kvd_layer", None)
    soft_cap = kwargs.get("softcap") or 0.0
    if layer is None and not soft_cap:
        stock = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock[0], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with layer.cache.failing_empty() if layer is not None else contextlib.nullcontext():
        if dropout or kwargs.get("output_attentions"):
            raise Unsupported("dropout and attention weights: model.eval(), no output_attentions")
        asked = Asked(module, query, key, value, attention_mask, scale=scale, soft_cap=soft_cap)
        if layer is None:
            return asked.attend_locally(None), None
        return layer.cache.attend(layer, asked), None


class Asked:
    """One call of the attention function."""

    def __init__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        soft_cap: float,
    ) -> None:
        self.module = module
        if mask is not None and mask.dtype is not torch.bool:
            raise Unsupported("an attention mask of numbers: pass the 2D mask of padding")
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.scale, self.soft_cap = scale, soft_cap

    @property
    def tokens(self) -> int:
        """Query tokens of each sequence."""
        return int(self.query.shape[2])

    def pieces(self) -> list[slice]:
        """Query tokens whose queries and outputs are no more than a call should have."""
        step = max(1, _PIECE_BYTES // max(1, 2 * self.query[:, :, :1].nbytes))
        ends = range(0, self.tokens, step)
        return [slice(at, min(at + step, self.tokens)) for at in ends]

    def part(self, tokens: slice) -> Asked:
        """The same for some of the query tokens."""
        if tokens.stop - tokens.start == self.tokens:
            return self
        copy = object.__new__(Asked)
        copy.__dict__.update(self.__dict__)
        copy.query = self.query[:, :, tokens]
        return copy

    def rows(self) -> torch.Tensor:
        """Queries as kvd takes them, [batch x tokens, heads, dim]."""
        batch, heads, tokens, dim = self.query.shape
        return self.query.transpose(1, 2).reshape(batch * tokens, heads, dim)

    def attend_locally(self, remote: Any) -> torch.Tensor:
        """Attention over `key` and `value`, merged with the answer of a pending attend, if any.

        [batch, tokens, heads, dim]. What kvd answers counts as one more token, whose score is its
        log-sum-exp and whose value is its output.
        """
        if remote is None and not self.soft_cap:
            stock: torch.Tensor = sdpa_attention_forward(
                self.module, self.query, self.key, self.value, self.mask, scaling=self.scale
            )[0]
            return stock
        query, key = self.query, self.key
        batch, heads, tokens, dim = query.shape
        kv_heads, local = key.shape[1], key.shape[2]
        group = heads // kv_heads
        key, value = key.float(), self.value.float()
        mask = None if self.mask is None else self.mask[..., -local:].unsqueeze(2)
        if mask is None and tokens > 1:
            # Without a mask transformers means a causal one.
            ones = torch.ones(tokens, local, dtype=torch.bool)
            mask = ones.tril(local - tokens)[None, None, None]
        q = query.float().view(batch, kv_heads, group, tokens, dim)
        kt = key.transpose(-1, -2).unsqueeze(2)
        parts, answer = [], None
        for begin in range(0, tokens, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            if tokens == 1:
                # The group's rows share their keys: no copy for each query head.
                scores = torch.matmul(q.squeeze(3), kt.squeeze(2)).unsqueeze(3)
            else:
                scores = torch.matmul(q[:, :, :, part], kt)
            scores.mul_(self.scale)
            if self.soft_cap:
                scores = torch.tanh(scores / self.soft_cap).mul_(self.soft_cap)
            if mask is not None:
                scores.masked_fill_(~mask[..., part, :], torch.finfo(torch.float32).min)
            if remote is not None and answer is None:
                answer = remote.result()
                shape = (batch, tokens, kv_heads, group)
                lse = answer.lse.view(shape).permute(0, 2, 3, 1).unsqueeze(-1)
                out = answer.out.float().view(*shape, -1).permute(0, 2, 3, 1, 4)
            if answer is not None:
                weights = torch.softmax(torch.cat((scores, lse[..., part, :]), -1), -1)
                mixed = _values(weights[..., :local], value)
                mixed = mixed.addcmul_(weights[..., local:], out[..., part, :])
            else:
                mixed = _values(torch.softmax(scores, -1), value)
            parts.append(mixed)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return whole.reshape(batch, heads, tokens, -1).to(query.dtype).transpose(1, 2)


def _values(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if weights.shape[3] == 1:
        return torch.matmul(weights.squeeze(3), value).unsqueeze(3)
    return torch.matmul(weights, value.unsqueeze(2))
