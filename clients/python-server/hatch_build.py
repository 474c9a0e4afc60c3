"""Puts the daemon's binary, $KVD_BINARY, into the wheel, and tags it with what the binary needs."""

import os
import pathlib
import platform
import re
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BinaryHook(BuildHookInterface[Any]):
    """The build hook of this project."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the binary."""
        if version == "editable":
            raise ValueError("kvd-server carries a binary: build a wheel")
        binary = pathlib.Path(os.environ.get("KVD_BINARY", ""))
        if not binary.is_file():
            raise ValueError(f"KVD_BINARY = {binary} is no file: see build.sh")
        build_data["force_include"][str(binary)] = "kvd_server/bin/kvd"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(binary.read_bytes())}"


def platform_tag(binary: bytes) -> str:
    """The oldest manylinux that has all symbols of glibc which the binary asks for."""
    versions = re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", binary)
    newest = max((int(version) for version in versions), default=17)
    return f"manylinux_2_{max(newest, 17)}_{platform.machine()}"
