"""vLLM on a kvd daemon: a connector that keeps prefixes which vLLM drops, and loads them back.

LLM(model, kv_transfer_config=kvd.vllm.transfer_config("/run/kvd/region.sock", codec="kivi-4"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvdConnector

# Releases that this package is tested with.
TESTED_MINORS = ("0.32",)


def transfer_settings(region: str, **options: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` takes, as a dict: JSON of it is for the command line.

    `region` is the path of the daemon's region, `options` are those of docs/engines/vllm.md.
    """
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.vllm",
        "kv_role": "kv_both",
        # With vLLM's default, "fail", requests would end empty when the daemon goes away.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"region": region, **options},
    }


def transfer_config(region: str, **options: Any) -> Any:
    """The `KVTransferConfig` of `transfer_settings`."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 (only where vLLM is used)

    return KVTransferConfig(**transfer_settings(region, **options))


def __getattr__(name: str) -> Any:
    """Loads the connector, and with it torch and vLLM, when vLLM asks for it."""
    if name == "KvdConnector":
        from .connector import KvdConnector  # noqa: PLC0415 (see above)

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TESTED_MINORS", "KvdConnector", "transfer_config", "transfer_settings"]
