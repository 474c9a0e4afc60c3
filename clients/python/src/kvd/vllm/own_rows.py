"""Attention of a step's tokens over one another, with its log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def attend_own(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    spans: Sequence[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each span of tokens: [tokens, heads, dim], as precise as `q`, and
    [tokens, heads] in f32.

    `q` [tokens, heads, dim], `k` and `v` [tokens, kv_heads, dim].
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.empty((tokens, heads, v.shape[2]), dtype=q.dtype)
    lse = torch.empty((tokens, heads), dtype=torch.float32)
    single = torch.tensor([first for first, end in spans if end - first == 1], dtype=torch.long)
    # A token that sees itself alone.
    own = k[single].repeat_interleave(group, 1).float()
    lse[single] = (q[single].float() * own).sum(-1).mul_(scale)
    out[single] = v[single].repeat_interleave(group, 1)
    for first, end in spans:
        if end - first == 1:
            continue
        wide = (side[first:end].repeat_interleave(group, 1) for side in (k, v))
        sides = (side.transpose(0, 1)[None] for side in (q[first:end], *wide))
        some, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *sides, is_causal=True, scale=scale
        )
        out[first:end] = some[0].transpose(0, 1)
        lse[first:end] = sums[0].transpose(0, 1)
    return out, lse
