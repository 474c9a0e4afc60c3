"""SGLang on a kvd daemon: a storage backend of HiCache that keeps pages there.

python -m sglang.launch_server … --enable-hierarchical-cache --page-size 64 \\
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "$(python -c '
import json, kvd.sglang
print(json.dumps(kvd.sglang.storage_settings("/run/kvd/region.sock")))')"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .storage import KvdStorage

# Releases that this package is tested with: their interface changes from one to the next.
TESTED_RELEASES = ("0.5.23",)
# Where options are in HiCache's extra config.
OPTIONS_KEY = "kvd"


def storage_settings(region: str, **options: Any) -> dict[str, Any]:
    """HiCache's extra config, as a dict: JSON of it is for the command line.

    `region` is the path of the daemon's region, `options` are those of docs/engines/sglang.md.
    """
    return {
        "backend_name": "kvd",
        "module_path": "kvd.sglang",
        "class_name": "KvdStorage",
        # Pages go between SGLang's host pool and shared memory without a tensor of their own.
        "interface_v1": 1,
        OPTIONS_KEY: {"region": region, **options},
    }


def __getattr__(name: str) -> Any:
    """Loads the backend, and with it torch and SGLang, when SGLang asks for it."""
    if name == "KvdStorage":
        from .storage import KvdStorage  # noqa: PLC0415 (see above)

        return KvdStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TESTED_RELEASES", "KvdStorage", "storage_settings"]
