"""LMCache on a kvd daemon: a remote storage plugin that keeps LMCache's chunks there, and an L2
adapter for its server.

LMCacheEngineConfig.from_defaults(**kvd.lmcache.storage_settings("/run/kvd/region.sock"))
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported

if TYPE_CHECKING:
    from .connector import KvdAdapter, KvdConnector
    from .l2 import KvdL2Adapter

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


def l2_settings(region: str, **options: Any) -> dict[str, Any]:
    """What `--l2-adapter` of LMCache's server takes, as a dict; JSON of it is for the command line.

    Options are those of `storage_settings`, and `head_dim`.
    """
    return {
        "type": "plugin",
        "module_path": "kvd.lmcache",
        "class_name": "KvdL2Adapter",
        "adapter_params": {"region": region, **options},
    }


def check_release(options: Mapping[str, Any]) -> None:
    """Raises `Unsupported` where LMCache is of a release that is not tested, and not asked for."""
    installed = version("lmcache")
    if installed.rpartition(".")[0] not in TESTED_MINORS and not options.get("untested_lmcache"):
        raise Unsupported(
            f"LMCache {installed} is not tested with this package, {', '.join(TESTED_MINORS)}"
            " is; try it with untested_lmcache: true"
        )


def __getattr__(name: str) -> Any:
    """Loads the plugin, and with it torch and LMCache, when LMCache asks for it."""
    if name in ("KvdAdapter", "KvdConnector"):
        from . import connector  # noqa: PLC0415 (see above)

        return getattr(connector, name)
    if name == "KvdL2Adapter":
        from . import l2  # noqa: PLC0415 (see above)

        return l2.KvdL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TESTED_MINORS",
    "KvdAdapter",
    "KvdConnector",
    "KvdL2Adapter",
    "l2_settings",
    "storage_settings",
]
