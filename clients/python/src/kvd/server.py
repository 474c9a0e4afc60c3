"""A daemon of one's own, for notebooks and tests: started on free loopback ports and sockets of a
temporary folder, stopped and cleaned away at the end, also where its program is killed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import server_guard
from .checks import check_bool, check_seconds, check_text
from .client import Client, connect
from .errors import DeadlineExceeded, Disconnected, InvalidArgument, Unsupported

_STOP_SECONDS = 20.0
# Of this target is the line that says that the daemon serves, and where.
_FILTER_NEEDED = "kvd::daemon=info"


def _setting_text(key: str, value: Any) -> str:
    """A setting as `--set` takes it: as TOML writes it."""
    if isinstance(value, str):
        return check_text(key, value)
    if value is None or isinstance(value, (bytes, bytearray, dict, set, frozenset)):
        raise InvalidArgument(f"settings: {key} = {value!r} is no text, number, bool or list")
    if isinstance(value, (list, tuple)):
        items = (
            json.dumps(of, ensure_ascii=False) if isinstance(of, str) else _setting_text(key, of)
            for of in value
        )
        return f"[{', '.join(items)}]"
    if type(value).__name__ in ("bool", "bool_"):
        return "true" if check_bool(key, value) else "false"
    return str(value)


def _setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a caller. What the client reads of the log stays in it."""
    texts = {
        check_text("settings", key): _setting_text(key, value) for key, value in settings.items()
    }
    if texts.get("log.format", "json") != "json":
        raise InvalidArgument("settings: log.format: kvd.serve reads the log, which must be json")
    if texts.get("log.filter", "").strip():
        texts["log.filter"] += f",{_FILTER_NEEDED}"
    return texts


class Server:
    """A daemon that this process has started."""

    def __init__(self, binary: str, settings: Mapping[str, Any], timeout: float) -> None:
        self.binary, self._settings = binary, _setting_texts(settings)
        self._timeout = check_seconds("timeout", timeout, is_positive=True)
        self._guard: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
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
        try:
            self._process = subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
        except (OSError, ValueError) as error:
            raise Unsupported(f"{self.binary} cannot be started: {error}") from error
        self._start_guard()
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
        # Empty where a setting has turned it off.
        self.address, self.admin = self._said.get("tcp", ""), self._said.get("admin", "")
        self.region, unix = self._said.get("region", ""), self._said.get("unix")
        self.unix = f"unix:{unix}" if unix else ""

    def _start_guard(self) -> None:
        """Starts what ends the daemon if this process is killed; none in a program that embeds
        Python, or before Linux 5.3."""
        # A frozen program or a server that embeds Python would start itself again.
        is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
        if not is_python or getattr(sys, "frozen", False) or not hasattr(os, "pidfd_open"):
            return
        script = server_guard.__file__
        pids = (str(os.getpid()), str(self._process.pid))
        with contextlib.suppress(OSError):  # without it the daemon serves as well
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", script, *pids, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # a key of the terminal ends this program, not the guard
            )

    def _stop_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

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
        self._stop_guard()

    def restart(self) -> None:
        """Starts it again on the same ports and sockets, after `kill` or `stop`-like ends."""
        if self._process.poll() is None:
            self.kill()
        self._stop_guard()
        self._start()

    def stop(self) -> None:
        """Ends it: it answers what is in flight, and its folder goes away. Nothing in a process
        that was forked from the one that started it."""
        atexit.unregister(self.stop)
        if os.getpid() != self._owner:
            return
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stop_guard()
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

    `settings` are those of `kvd config --print-default`, as {"device.threads": 2}. The daemon ends
    with this process, however that ends.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise InvalidArgument(f"settings is no mapping but {type(settings).__name__}")
    every = {"device.pool_bytes": pool, **(settings or {})}
    return Server(binary or find_binary(), every, timeout)
