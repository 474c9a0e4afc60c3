"""LMCache on a kvd daemon: a remote storage plugin that keeps LMCache's chunks there.

LMCacheEngineConfig.from_defaults(**kvd.lmcache.storage_settings("/run/kvd/region.sock"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvdAdapter, KvdConnector

# Releases that this package is tested with.
TESTED_MINORS = ("0.5",)
PLUGIN = "kvd"


def storage_settings(region: str, **options: Any) -> dict[str, Any]:
    """What LMCache's configuration needs, as a dict; its file takes the same as YAML.

    `region` is the path of the daemon's region, `options` are those of docs/engines/lmcache.md.
    """
    prefix = f"remote_storage_plugin.{PLUGIN}."
    given = {
        "module_path": "kvd.lmcache",
        "class_name": "KvdAdapter",
        "region": region,
        **options,
    }
    return {
        "remote_storage_plugins": [PLUGIN],
        "extra_config": {prefix + name: value for name, value in given.items()},
    }


def __getattr__(name: str) -> Any:
    """Loads the plugin, and with it torch and LMCache, when LMCache asks for it."""
    if name in ("KvdAdapter", "KvdConnector"):
        from . import connector  # noqa: PLC0415 (see above)

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TESTED_MINORS", "KvdAdapter", "KvdConnector", "storage_settings"]
