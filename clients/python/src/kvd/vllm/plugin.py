"""Entry point of vLLM's plugins: offers kvd's attention where the environment asks for it.

Runs in each of vLLM's processes before a model is loaded, and changes nothing without the variable.
"""

from __future__ import annotations

import os

# With "1", attention is kvd's: it holds all keys and values.
ATTENTION_VARIABLE = "KVD_VLLM_ATTENTION"


def is_attention_asked() -> bool:
    """Whether the environment asks for kvd's attention."""
    return os.environ.get(ATTENTION_VARIABLE, "") not in ("", "0")


def register() -> None:
    """Registers the attention backend, if it is asked for."""
    if not is_attention_asked():
        return
    from vllm.v1.attention.backends.registry import (  # noqa: PLC0415 (only where vLLM is used)
        AttentionBackendEnum,
        register_backend,
    )

    path = "kvd.vllm.attention.KvdAttention"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    # vLLM's platform for CPUs takes this one whatever is chosen.
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
