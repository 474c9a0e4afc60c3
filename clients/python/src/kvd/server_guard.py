"""Ends a daemon of `kvd.serve` whose program was killed, and removes its folder.

A program of its own, of the standard library alone, that waits beside both: a signal at the
parent's death (PR_SET_PDEATHSIG) would come when the thread ends that began the daemon, and setting
it between fork and exec is unsafe where there are threads. Run as `server_guard.py PARENT DAEMON
FOLDER`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

# A daemon that drains has this long.
_DRAIN_MS = 20_000


def guard_daemon(parent: int, daemon: int, folder: str) -> None:
    """Sleeps until one of both has ended."""
    # These name the processes even if their numbers are given to others.
    daemon_fd, parent_fd = os.pidfd_open(daemon), None
    with contextlib.suppress(ProcessLookupError):
        parent_fd = os.pidfd_open(parent)
    if parent_fd is not None and os.getppid() == parent:
        watch = select.poll()
        for fd in (daemon_fd, parent_fd):
            watch.register(fd, select.POLLIN)
        if parent_fd not in [fd for fd, _ in watch.poll()]:
            return  # the daemon alone: its program knows
    drained = select.poll()
    drained.register(daemon_fd, select.POLLIN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            signal.pidfd_send_signal(daemon_fd, number)
        except ProcessLookupError:
            break
        if drained.poll(_DRAIN_MS):
            break
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard_daemon(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
