"""Linux: sealed memory files, futexes, and waiting for a word that another process writes.

Numbers of system calls are those of x86-64 and aarch64. Nothing here knows what a region holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import threading

from .errors import InvalidArgument, Unsupported

# Of <linux/fcntl.h>: the file may not shrink, not grow, and its seals may not change.
_F_ADD_SEALS = 1033
_SEALS = 0x2 | 0x4 | 0x1
_FUTEX_WAIT = 0
# Seconds after which a sleeper looks whether the other side still lives.
LOOK_INTERVAL = 0.1
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """A memory file that can be handed to a daemon, mapped."""

    def __init__(self, size: int) -> None:
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _FUTEX_CALLS:
            raise Unsupported(
                f"regions need Linux on x86_64 or aarch64, not {sys.platform} on {machine}:"
                " connect by gRPC (pip install grpcio)"
            )
        self.size = size
        fd = os.memfd_create("kvd-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(fd, size)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise InvalidArgument(f"region_bytes = {size}: {error}") from error
        self.fd = fd
        self.words = memoryview(self.memory).cast("I")
        anchor = ctypes.c_char.from_buffer(self.memory)
        self._address = ctypes.addressof(anchor)
        self._anchor = anchor
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
        )
        self._pause = _Timespec(0, int(LOOK_INTERVAL * 1e9))
        self._pause_address = ctypes.addressof(self._pause)
        self._futex = _FUTEX_CALLS[machine]
        self._fence = None if machine == "x86_64" else threading.Lock()

    def close_file(self) -> None:
        """Gives the descriptor up; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def wait_word(self, offset: int) -> int:
        """Sleeps until the word at `offset` is not 0, at most `LOOK_INTERVAL`; the word."""
        index = offset >> 2
        word: int = self.words[index]
        if not word:
            self._syscall(self._futex, self._address + offset, _FUTEX_WAIT, 0, self._pause_address)
            word = self.words[index]
        if self._fence is not None:
            # Two turns of a lock are a full barrier: what the daemon wrote before the word is read
            # after it.
            for _ in range(2):
                self._fence.acquire()
                self._fence.release()
        return word
