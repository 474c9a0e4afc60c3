"""Calibrations of any model that runs in transformers.

Its keys, values and queries over some texts are written down for `kvd calibrate --samples`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import InvalidArgument, Unsupported
from ..server import find_binary
from .support import lay_out

_NAME = "kvd-rows"


class _RowTaker:
    """Keeps what attention is called with, of the layers that kvd is to hold."""

    def __init__(self, slots: dict[int, int]) -> None:
        self.slots = slots
        self.rows: dict[str, list[torch.Tensor]] = {}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        slot = self.slots.get(module.layer_idx)
        if slot is not None:
            for name, states in (("k", key), ("v", value), ("q", query)):
                rows = states[0].transpose(0, 1).detach().contiguous().clone()
                self.rows.setdefault(f"layer.{slot}.{name}", []).append(rows)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]


def dump_rows(
    model: Any,
    texts: Iterable[str | torch.Tensor],
    path: str | Path,
    *,
    tokenizer: Any = None,
    tokens: int = 16_384,
    window: int = 2048,
    layers: Iterable[int] | None = None,
) -> int:
    """Runs the model over texts and writes `layer.N.k`, `.v` and `.q` of the layers that kvd would
    hold, for `kvd calibrate --samples`. Texts are strings, with a tokenizer, or token ids.

    Answers the number of tokens; at most `tokens` are taken, `window` at a time.
    """
    held = lay_out(model, layers).held
    taker = _RowTaker({at: slot for slot, at in enumerate(held)})
    AttentionInterface.register(_NAME, taker.attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before, taken = model.config._attn_implementation, 0
    model.set_attn_implementation(_NAME)
    try:
        with torch.no_grad():
            for ids in _windows(texts, tokenizer, window):
                piece = ids[: tokens - taken]
                model(piece[None], use_cache=False)
                taken += len(piece)
                if taken >= tokens:
                    break
    finally:
        model.set_attn_implementation(before)
    if not taken:
        raise InvalidArgument("no text: a calibration needs some thousands of tokens")
    save_file({name: torch.cat(parts) for name, parts in taker.rows.items()}, str(path))
    return taken


def _windows(
    texts: Iterable[str | torch.Tensor], tokenizer: Any, window: int
) -> Iterator[torch.Tensor]:
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise InvalidArgument("texts are strings: pass tokenizer=…, or token ids")
            ids = torch.tensor(tokenizer(text)["input_ids"])
        else:
            ids = torch.as_tensor(text).flatten()
        yield from (piece for piece in ids.split(window) if len(piece))


def calibrate(
    model: Any,
    texts: Iterable[str | torch.Tensor],
    codec: str = "kvd-4",
    *,
    tokenizer: Any = None,
    tokens: int = 16_384,
    window: int = 2048,
    layers: Iterable[int] | None = None,
    binary: str | None = None,
) -> bytes:
    """A calibration of `codec` for this model, to be passed to `KvdCache`.

    Needs a daemon's binary with `kvd calibrate`, found as `kvd.serve` finds it.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-calibrate-") as folder:
        rows, out = Path(folder, "rows.safetensors"), Path(folder, "out.kvdcal")
        dump_rows(
            model, texts, rows, tokenizer=tokenizer, tokens=tokens, window=window, layers=layers
        )
        program = binary or find_binary()
        command = [
            program,
            "calibrate",
            "--samples",
            str(rows),
            "--codec",
            codec,
            "--out",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip()
            raise Unsupported(f"{program} calibrate ended with {done.returncode}: {last}")
        return out.read_bytes()
