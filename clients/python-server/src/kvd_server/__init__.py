"""The kvd daemon's binary: `kvd` on the command line, and where `kvd.serve()` finds it."""

import os
import sys
from pathlib import Path

__version__ = "0.1.0"
__all__ = ["binary_path", "main"]


def binary_path() -> Path:
    """The binary."""
    return Path(__file__).parent / "bin" / "kvd"


def main() -> None:
    """Becomes the binary, with the arguments of the command line."""
    binary = str(binary_path())
    os.execv(binary, [binary, *sys.argv[1:]])
