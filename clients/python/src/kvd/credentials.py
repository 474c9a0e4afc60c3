"""Who a client is, and whom it trusts. Nothing here is printed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypeAlias

PathLike: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class Credentials:
    """A token, and paths of PEM files: authorities, a certificate and its key."""

    token: str | None = field(default=None, repr=False)
    ca: PathLike | None = None
    cert: PathLike | None = None
    key: PathLike | None = None
