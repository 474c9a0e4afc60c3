"""A daemon of one's own, for notebooks and tests: started on free loopback ports and sockets of a
temporary folder, stopped and cleaned away at the end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .client import Client, connect
from .errors import DeadlineExceeded, Disconnected, Unsupported

_STOP_SECONDS = 20.0


class Server:
    """A daemon that this process has started."""

    def __init__(self, binary: str, settings: Mapping[str, Any], timeout: float) -> None:
        self.binary = binary
        self._settings, self._timeout = dict(settings), timeout
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.region = str(self.folder / "region.sock")
        self.unix = f"unix:{self.folder / 'kvd.sock'}"
        self.address = self.admin = "127.0.0.1:0"
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        settings = {
            "server.listen_tcp": self.address,
            "server.listen_unix": self.unix.removeprefix("unix:"),
            "server.listen_region": self.region,
            "admin.listen": self.admin,
            "log.format": "json",
            **self._settings,
        }
        command = [self.binary, "serve"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        self.log: list[str] = []
        self._said: dict[str, Any] = {}
        ready = threading.Event()
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, text=True
        )
        self._reader = threading.Thread(target=self._read_log, args=(ready,), daemon=True)
        self._reader.start()
        if not ready.wait(self._timeout):
            raise DeadlineExceeded(
                f"{self.binary} did not say that it serves: {self._last_words()}"
            )
        if not self._said:
            self._process.wait()
            raise Disconnected(
                f"{self.binary} ended with exit code {self._process.returncode}:"
                f" {self._last_words()}"
            )
        self.address, self.admin = self._said["tcp"], self._said["admin"]

    def _read_log(self, ready: threading.Event) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                del self.log[:-1000]
                with contextlib.suppress(ValueError):
                    fields = json.loads(line).get("fields", {})
                    if fields.get("message") == "kvd serves":
                        self._said = fields
                        ready.set()
        ready.set()

    def _last_words(self) -> str:
        return " / ".join(self.log[-3:]) or "it said nothing"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def connect(self, **options: Any) -> Client:
        """A client of it by its region; `options` as of `kvd.connect`."""
        return connect(self.region, **options)

    def kill(self) -> None:
        """Ends it without a word, as a crash does."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Starts it again on the same ports and sockets, after `kill` or `stop`-like ends."""
        if self._process.poll() is None:
            self.kill()
        self._start()

    def stop(self) -> None:
        """Ends it: it answers what is in flight, and its folder goes away."""
        atexit.unregister(self.stop)
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_binary() -> str:
    """The daemon: KVD_BINARY, that of the wheel `kvd-server`, or `kvd` of PATH.

    Raises `Unsupported` where there is none.
    """
    named = os.environ.get("KVD_BINARY")
    if named:
        if not os.access(named, os.X_OK):
            raise Unsupported(f"KVD_BINARY = {named} is no program")
        return named
    try:
        import kvd_server  # noqa: PLC0415 (another package, which may be absent)
    except ImportError:
        pass
    else:
        return str(kvd_server.binary_path())
    found = shutil.which("kvd")
    if found is None:
        raise Unsupported(
            "no daemon here: put the program kvd on PATH, or set KVD_BINARY to its path"
        )
    return found


def serve(
    *,
    pool: str = "1 GiB",
    settings: Mapping[str, Any] | None = None,
    binary: str | None = None,
    timeout: float = 60.0,
) -> Server:
    """Starts a daemon and waits until it serves.

    `settings` are those of `kvd config --print-default`, as {"device.threads": 2}.
    """
    every = {"device.pool_bytes": pool, **(settings or {})}
    return Server(binary or find_binary(), every, timeout)
