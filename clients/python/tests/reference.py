"""Attention in f64, and how far an answer may be from it.

The bound follows from the daemon's precision (ADR 8): four times what plain attention of that
precision errs on the same rows, at least four roundings of the largest product.
"""

import numpy as np


def attention(q, k, v, scale, seen, float_type=np.float64, rounded=lambda x: x, soft_cap=0.0):
    """Textbook attention. q [n, q_heads, d], k and v [tokens, kv_heads, d]; `seen` [n, tokens]."""
    q, k, v = (rounded(x.astype(float_type)).astype(float_type) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = float_type(scale) * np.einsum("ihd,jhd->ihj", q, k)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen[:, None, :], scores, -np.inf)
    top = scores.max(axis=2, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.einsum("ihj,jhd->ihd", rounded(weights).astype(float_type), v) / total[:, :, None]
        lse = np.log(total) + top[:, :, 0]
    return np.nan_to_num(out), lse


def causal(n_q, tokens, position=None, window=0):
    """Which tokens each query token sees."""
    first = tokens - n_q if position is None else position
    at = first + np.arange(n_q)[:, None]
    token = np.arange(tokens)[None, :]
    return (token <= at) & ((token > at - window) if window else True)


def budget(q, k, v, scale, seen, precision, soft_cap=0.0):
    """Outputs and log-sum-exps in f64, and the largest errors that they may have."""
    question = (q, k, v, scale, seen)
    out, lse = attention(*question, soft_cap=soft_cap)
    rounded, one = {
        "single": (lambda x: x, 0.0),
        "fast": (lambda x: x.astype(np.float16), 2.0**-11),
        "int8": (_to_bytes, 2.0**-8),
    }[precision]
    epsilon = float(np.finfo(np.float32).eps)
    finite = np.abs(lse[np.isfinite(lse)])
    # Of one channel of a query and a key.
    term = scale * (np.abs(q).max((0, 1)) * np.abs(k).max((0, 1))).max()
    out_error = max(epsilon, one) * float(np.abs(v).max())
    lse_error = max(epsilon * max(1.0, float(finite.max(initial=1.0))), one * float(term))
    for by in (lambda x: x, rounded):
        near = attention(*question, np.float32, by, soft_cap)
        out_error = max(out_error, float(np.abs(near[0] - out).max()))
        both = np.isfinite(lse)
        lse_error = max(lse_error, float(np.abs(near[1][both] - lse[both]).max(initial=0.0)))
    return out, lse, 4 * out_error, 4 * lse_error


def _to_bytes(x):
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    step = np.where(step > 0, step, 1)
    return np.rint(x / step) * step
