"""Which models this package serves, and what of them goes to kvd. Anything else is refused by name:
a wrong answer looks like a right one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..arrays import DType
from ..errors import InvalidArgument, Unsupported
from ..model import Geometry

# Classes of models whose attention is softmax over keys after RoPE, tested with this package.
SUPPORTED_MODELS = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Layout:
    """The layers of a model that kvd holds, in their order, and their geometry."""

    held: tuple[int, ...]
    sliding: dict[int, int]
    layers: int
    geometry: Geometry
    dtype: DType
    # For the name under which the daemon knows the model.
    label: str


def lay_out(model: Any, layers: Iterable[int] | None) -> Layout:
    """What goes where; `layers` are those to hold in kvd, all with full attention by default.

    Raises `Unsupported` for a model that this package does not know to be right.
    """
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if kind not in SUPPORTED_MODELS:
        raise Unsupported(f'model_type "{kind}" is not one of {", ".join(SUPPORTED_MODELS)}')
    if model.config is not config:
        raise Unsupported(
            f"a model of several parts ({model.config.model_type}): pass the text model"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported("bidirectional attention (use_bidirectional_attention)")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise Unsupported(f"a model on {device}: this version serves models on the CPU")
    kinds = _layer_kinds(config)
    sliding = {
        at: config.sliding_window for at, kind in enumerate(kinds) if kind != "full_attention"
    }
    held = tuple(_checked_layers(layers, kinds))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = Geometry(len(held), config.num_key_value_heads, dim)
    label = getattr(config, "name_or_path", "") or kind
    return Layout(held, sliding, len(kinds), geometry, _dtype_of(model), label)


def _layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        kind = "sliding_attention" if window is not None else "full_attention"
        kinds = [kind] * config.num_hidden_layers
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise Unsupported(f"layers of {', '.join(strange)}")
    return list(kinds)


def _checked_layers(layers: Iterable[int] | None, kinds: list[str]) -> list[int]:
    full = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        raise Unsupported(
            "all layers attend to a sliding window, which transformers keeps in bounds itself:"
            " kvd would hold nothing"
        )
    if layers is None:
        return full
    chosen = sorted(set(layers))
    wrong = [at for at in chosen if at not in full]
    if wrong or not chosen:
        raise InvalidArgument(f"layers {wrong or chosen} are none with full attention, {full} are")
    return chosen


def _dtype_of(model: Any) -> DType:
    kinds = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
    dtype = kinds.get(model.dtype)
    if dtype is None:
        raise Unsupported(f"a model of {model.dtype}: kvd holds f32, f16 and bf16")
    return dtype


def spec_of_codec(codec: str, mode: str) -> str:
    """The codec as it is registered: with a tail in the engine, kvd's own recent window would keep
    the same tokens twice."""
    if mode != "tail" or "recent" in codec or codec.partition(";")[0].strip() == "raw":
        return codec
    return f"{codec}; recent=0"
