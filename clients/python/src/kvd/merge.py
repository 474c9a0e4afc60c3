"""Attention over two disjoint sets of tokens, made one (contract 29)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import ShapeMismatch


def _check_sides(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    shapes = [tuple(getattr(side, "shape", ())) for side in (out_a, lse_a, out_b, lse_b)]
    if not shapes[0] or shapes[0] != shapes[2] or [shapes[0][:-1]] * 2 != [shapes[1], shapes[3]]:
        raise ShapeMismatch(
            "out_a, lse_a, out_b and lse_b have shapes {}, {}, {} and {}: both outs are [..., d]"
            " and both log-sum-exps [...]".format(*map(list, shapes))
        )


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """`out` [..., d] and `lse` [...] of both sets together; log-sum-exps are natural.

    numpy arrays or torch tensors of f32 or f64. Where neither set has a token, 0 and -inf.
    """
    _check_sides(out_a, lse_a, out_b, lse_b)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out_a, torch.Tensor):
        lse = torch.logaddexp(lse_a, lse_b)
        # -inf - -inf would be NaN.
        base = torch.where(lse == -torch.inf, 0.0, lse)
        share_a, share_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
        return out_a * share_a[..., None] + out_b * share_b[..., None], lse
    lse = np.logaddexp(lse_a, lse_b)
    base = np.where(np.isneginf(lse), 0.0, lse).astype(lse.dtype)
    share_a, share_b = np.exp(lse_a - base), np.exp(lse_b - base)
    return out_a * share_a[..., None] + out_b * share_b[..., None], lse
