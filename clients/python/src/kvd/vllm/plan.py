"""What of a vLLM configuration goes to kvd, and under whose name. What this package does not know
to be right is refused by name: a wrong answer looks like a right one."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ..arrays import DType
from ..client import Client, connect
from ..errors import InvalidArgument, Unsupported
from ..model import Geometry, Model, model_label
from ..options import STORE_OPTIONS, check_options
from . import TESTED_MINORS
from .plugin import ATTENTION_VARIABLE, is_attention_asked

# Tokens of a page where vLLM's blocks divide it.
_PAGE_TOKENS = 64
_NAME_CHARACTERS_MAX = 100
# Files of a model's folder that say which weights it has.
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
_OPTIONS = {**STORE_OPTIONS, "untested_vllm": (bool,)}


@dataclass(frozen=True)
class Plan:
    """The daemon, the model as it is registered there, and vLLM's layers and blocks."""

    region: str
    namespace: str | None
    region_bytes: int
    timeout: float
    codec: str
    calibration: bytes
    name: str
    weights: bytes
    geometry: Geometry
    dtype: DType
    # In the order of kvd's layers.
    layer_names: tuple[str, ...]
    # The group of each layer: those of one have the same block ids.
    layer_groups: tuple[int, ...]
    # Whether vLLM frees blocks of some group while a request runs.
    is_windowed: bool
    # Tokens of vLLM's block, which has one key.
    block_tokens: int
    page_tokens: int
    loads: bool
    stores: bool
    # Whether attention is kvd's, which then holds all keys and values.
    attends: bool
    # Whether vLLM computes again what is lost, instead of failing the request.
    recomputes: bool

    @property
    def page_blocks(self) -> int:
        """vLLM's blocks of a page."""
        return self.page_tokens // self.block_tokens

    def connect(self, region_bytes: int) -> tuple[Client, Model]:
        """A connection of its own, and the model there."""
        client = connect(
            self.region,
            namespace=self.namespace,
            timeout=self.timeout,
            region_bytes=region_bytes,
        )
        try:
            model = client.model(
                self.name,
                self.geometry,
                dtype=self.dtype,
                codec=self.codec,
                calibration=self.calibration,
                weights=self.weights,
            )
        except BaseException:
            client.close()
            raise
        return client, model


def make_plan(vllm_config: Any, kv_cache_config: Any) -> Plan:
    """Reads vLLM's configuration; the scheduler and the worker come to the same plan.

    Raises `Unsupported` for what is not known to be right, `InvalidArgument` for options that are
    none.
    """
    transfer = vllm_config.kv_transfer_config
    options = check_options(
        "kv_connector_extra_config", transfer.kv_connector_extra_config, _OPTIONS
    )
    attends = is_attention_asked()
    _check_engine(vllm_config, options, attends)
    if attends:
        _check_attending(vllm_config)
    layers = _checked_layers(kv_cache_config, attends)
    spec = layers.spec
    geometry = Geometry(
        layers=len(layers.groups),
        kv_heads=spec.num_kv_heads,
        head_dim_k=spec.head_size,
        head_dim_v=spec.head_size_v,
        block_tokens=math.lcm(_PAGE_TOKENS, spec.block_size),
    )
    _check_windows(kv_cache_config, geometry.block_tokens)
    dtype = DType.of(str(spec.dtype))
    codec = options.get("codec", "raw")
    path = options.get("calibration")
    calibration = Path(path).read_bytes() if path else b""
    weights = _digest_weights(vllm_config, options.get("weights"))
    digest = hashlib.sha256(calibration)
    digest.update(repr((geometry, int(dtype), codec, weights)).encode())
    label = model_label(str(vllm_config.model_config.model), _NAME_CHARACTERS_MAX)
    return Plan(
        region=options["region"],
        namespace=options.get("namespace"),
        region_bytes=options.get("region_mib", 256) << 20,
        timeout=float(options.get("timeout_s", 5.0)),
        codec=codec,
        calibration=calibration,
        # A name stands for one registration.
        name=f"{label}-{digest.hexdigest()[:12]}",
        weights=weights,
        geometry=geometry,
        dtype=dtype,
        layer_names=tuple(layers.groups),
        layer_groups=tuple(layers.groups.values()),
        is_windowed=layers.is_windowed,
        block_tokens=spec.block_size,
        page_tokens=geometry.block_tokens,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        attends=attends,
        recomputes=transfer.kv_load_failure_policy == "recompute",
    )


def _check_engine(vllm_config: Any, options: dict[str, Any], attends: bool) -> None:
    minor = ".".join(vllm.__version__.split(".")[:2])
    if minor not in TESTED_MINORS and not options.get("untested_vllm"):
        raise Unsupported(
            f"vLLM {vllm.__version__} is not tested with this package, {', '.join(TESTED_MINORS)}"
            ' is; try it with "untested_vllm": true in kv_connector_extra_config'
        )
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute" and not attends:
        raise InvalidArgument(
            'set kv_load_failure_policy to "recompute" (kvd.vllm.transfer_config does): with'
            f" {transfer.kv_load_failure_policy!r} requests end empty when the daemon goes away"
        )
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{name} = {getattr(parallel, name)}: this version serves one rank")
    if vllm_config.lora_config is not None:
        raise Unsupported("LoRA: vLLM's keys name an adapter and not its weights")
    if vllm_config.speculative_config is not None:
        raise Unsupported("speculative decoding is not tested with this package")
    if vllm_config.weight_transfer_config is not None:
        raise Unsupported("weights that are changed while vLLM runs")
    device = vllm_config.device_config.device_type
    if device != "cpu":
        raise Unsupported(f"KV caches on {device}: this version is tested on vLLM's CPU platform")


def _check_attending(vllm_config: Any) -> None:
    """What kvd's attention needs of vLLM beyond what the connector does."""
    cache = vllm_config.cache_config
    if cache.enable_prefix_caching:
        raise InvalidArgument(
            "set enable_prefix_caching=False: with kvd's attention vLLM's blocks hold nothing, and"
            " prefixes are found in kvd"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise InvalidArgument(
            "set async_scheduling=False: a step after one that lost its rows must not have begun"
        )
    if cache.num_gpu_blocks_override is None:
        raise InvalidArgument(
            "set num_gpu_blocks_override: vLLM runs as many tokens as it has blocks, and kvd's pool"
            " must hold them"
        )


@dataclass(frozen=True)
class _Layers:
    """vLLM's attention layers: the group of each by name, in their order."""

    groups: dict[str, int]
    # Of the first group: the others' is equal but for windows.
    spec: Any
    is_windowed: bool


def _checked_layers(kv_cache_config: Any, attends: bool) -> _Layers:
    """The attention layers, which have all but windows in common."""
    groups = kv_cache_config.kv_cache_groups
    spec, by_name = groups[0].kv_cache_spec, {}
    for at, group in enumerate(groups):
        _check_spec(group.kv_cache_spec, kv_cache_config, attends)
        if _describe_rows(group.kv_cache_spec) != _describe_rows(spec):
            raise Unsupported("layers whose keys and values differ in shape, type or block size")
        by_name.update(dict.fromkeys(group.layer_names, at))
    is_windowed = any(type(group.kv_cache_spec) is SlidingWindowSpec for group in groups)
    if len(groups) != 1 and not is_windowed:
        raise Unsupported(f"{len(groups)} groups of layers without a window")
    in_order = {name: by_name[name] for name in sorted(by_name, key=_natural)}
    return _Layers(in_order, spec, is_windowed)


def _describe_rows(spec: Any) -> tuple[Any, ...]:
    return (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype, spec.block_size)


def _check_spec(spec: Any, kv_cache_config: Any, attends: bool) -> None:
    kinds = (FullAttentionSpec,) if attends else (FullAttentionSpec, SlidingWindowSpec)
    if type(spec) not in kinds or getattr(spec, "non_causal", False):
        raise Unsupported(
            f"{type(spec).__name__}: this version serves causal full attention and, without"
            " kvd's attention, sliding windows"
        )
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"a KV cache of {spec.dtype}: leave kv_cache_dtype alone, kvd compresses")
    if attends and spec.num_head_slots != 1:
        raise Unsupported(
            f"{ATTENTION_VARIABLE} is set and vLLM's layers have another attention: it must be set"
            " before vLLM starts, and VLLM_PLUGINS must not leave kvd out"
        )
    if spec.tokens_per_state != 1 or (spec.num_heads != spec.num_kv_heads and not attends):
        raise Unsupported("packed KV caches")
    if attends and spec.head_size != spec.head_size_v:
        raise Unsupported("kvd's attention in vLLM with values of another width than keys")
    hashed = kv_cache_config.hash_block_size or spec.block_size
    if hashed != spec.block_size:
        raise Unsupported(f"keys of {hashed} tokens beside blocks of {spec.block_size}")


def _check_windows(kv_cache_config: Any, page_tokens: int) -> None:
    """A page is stored when its last token is computed: its first must be there still."""
    for group in kv_cache_config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        if type(spec) is SlidingWindowSpec and spec.sliding_window < page_tokens:
            raise Unsupported(
                f"a window of {spec.sliding_window} tokens, less than a page of {page_tokens}:"
                " beside full attention, start vLLM with --disable-hybrid-kv-cache-manager"
            )


def _natural(name: str) -> list[Any]:
    """Sorts layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _digest_weights(vllm_config: Any, named: str | None) -> bytes:
    """Tells models with other keys and values apart: 32 bytes."""
    model, load = vllm_config.model_config, vllm_config.load_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if not k.startswith("_")}
    config.pop("transformers_version", None)
    said = {
        "weights": named or _find_weights(model),
        "config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "random": [model.seed] if str(load.load_format) == "dummy" else None,
    }
    text = json.dumps(said, sort_keys=True, default=_describe)
    return hashlib.sha256(text.encode()).digest()


def _describe(value: Any) -> str:
    is_plain = isinstance(value, torch.dtype | Path)
    return str(value) if is_plain else type(value).__name__


def _find_weights(model: Any) -> Any:
    """Files with size and time of a local model, the commit of one of a hub."""
    path = Path(model.model)
    if path.exists():
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.suffix in _WEIGHT_FILES]
        if not stats:
            raise InvalidArgument(f'no weights in {path}: name them with "weights"')
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if commit is None or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise InvalidArgument(
            f"which weights {model.model} has is not known: give its commit as `revision`, or say"
            ' "weights": "…" in kv_connector_extra_config, another for each checkpoint'
        )
    return [model.model, commit]
