"""Options of engines' plug-ins, as their configuration files give them: what is misspelt or of the
wrong kind is refused by name, and what they all have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .chunks import ChunkHome
from .errors import InvalidArgument

# Of every plug-in that stores what its engine drops: kinds by name.
STORE_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "region": (str,),
    "codec": (str,),
    "calibration": (str,),
    "namespace": (str,),
    "region_mib": (int,),
    "timeout_s": (int, float),
    "weights": (str,),
}


def check_options(
    place: str, options: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]
) -> dict[str, Any]:
    """The options of a plug-in; `place` says where the user wrote them.

    Raises `InvalidArgument`, which names the option.
    """
    unknown = sorted(options.keys() - kinds.keys())
    if unknown:
        raise InvalidArgument(f"{place} has {', '.join(unknown)}; it takes {', '.join(kinds)}")
    for name, value in options.items():
        wanted = kinds[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            kind = " or ".join(kind.__name__ for kind in wanted)
            raise InvalidArgument(f"{place}: {name} = {value!r} is no {kind}")
    if not options.get("region", "").startswith("/"):
        raise InvalidArgument(
            f'{place} needs "region", the absolute path of the daemon\'s region'
            " (server.listen_region)"
        )
    for name in ("region_mib", "timeout_s"):
        if options.get(name, 1) <= 0:
            raise InvalidArgument(f"{place}: {name} = {options[name]}")
    return dict(options)


def chunk_home(engine: str, model: str, identity: bytes, options: Mapping[str, Any]) -> ChunkHome:
    """Where an engine's chunks are kept, by checked options. `identity` tells apart what shares
    a model's name: ranks, and whatever else changes keys and values.

    Raises `InvalidArgument` where the calibration cannot be read.
    """
    path = options.get("calibration")
    try:
        calibration = Path(path).read_bytes() if path else b""
    except OSError as error:
        raise InvalidArgument(f"calibration: {error}") from error
    weights = options.get("weights", "").encode()
    return ChunkHome(
        region=options["region"],
        engine=engine,
        model=model,
        weights=b"\0".join((model.encode(), weights, identity)),
        codec=options.get("codec", "raw"),
        calibration=calibration,
        namespace=options.get("namespace"),
        region_bytes=options.get("region_mib", 256) << 20,
        timeout=float(options.get("timeout_s", 5.0)),
    )
