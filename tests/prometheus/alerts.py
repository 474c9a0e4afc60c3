#!/usr/bin/env python3
"""Each shipped alert fires in its scenario, and clears, in a real Prometheus that scrapes real daemons.

    python3 tests/prometheus/alerts.py KVD PROMETHEUS      # package: numpy

The rules are the shipped ones with all their times divided by 20; a daemon beside those to which something
happens fires none.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "clients/python/src"), str(ROOT / "tests/python")]
import kvd  # noqa: E402
from daemon_log import await_admin  # noqa: E402
from prometheus_server import Prometheus, free_port, prometheus  # noqa: E402

SHORTER = 20
# Longest wait for an alert, or for its end: the longest window is 90 s.
PATIENCE_SECONDS = 200
GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim_k=64)
# One bit a key: an error that no codec for keeping should have.
COARSE = "k=uniform(b=1,g=64,axis=token); v=fp8; sink=0; recent=0"


def shorten_times(text: str) -> str:
    """The rules and the scrapes, in a twentieth of the time."""

    def shorter(match: re.Match) -> str:
        seconds = int(match[2]) * (60 if match[3] == "m" else 1)
        return f"{match[1]}{max(1, seconds // SHORTER)}{'s' if match[3] else ''}"

    text = re.sub(r"(\[|for: |_interval: )(\d+)([ms])", shorter, text)
    return re.sub(r"(timestamp_seconds < |start_time_seconds < )(\d+)()", shorter, text)


@dataclass
class Site:
    """A daemon to which something happens, and the Prometheus that watches it."""

    program: str
    folder: pathlib.Path
    settings: list[str]
    admin: str
    server: Prometheus | None = None
    process: subprocess.Popen | None = None

    @property
    def region(self) -> str:
        return f"{self.folder}/region.sock"

    def start(self) -> None:
        settings = [f"server.listen_region={self.region}", "device.pool_bytes=16 MiB", "device.threads=1"]
        settings += ["log.format=json"]
        command = [self.program, "serve", "--listen", "127.0.0.1:0", "--admin", self.admin]
        command += [part for one in [*settings, *self.settings] for part in ("--set", one)]
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        await_admin(self.process, self.folder / "log")

    def restart(self) -> None:
        self.end()
        self.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def firing(self) -> set[str]:
        return {alert for alert, instance in self.server.list_firing() if instance == self.admin}

    def await_firing(self, *names: str) -> None:
        """Until each has fired, at one time or another."""
        left = set(names)

        def all_have() -> bool:
            left.difference_update(self.firing())
            return not left

        self.await_that(lambda: f"{left} fire", all_have)

    def await_scrapes(self) -> None:
        """Until what happens next is an increase."""
        scrapes = f'count_over_time(up{{instance="{self.admin}"}}[1m]) > 2'
        self.await_that(lambda: "scrapes", lambda: bool(self.server.read_numbers(scrapes)))

    def await_clear(self, *names: str) -> None:
        self.await_that(lambda: f"{names} clear", lambda: not set(names) & self.firing())
        print(f"fired and cleared: {', '.join(names)}", flush=True)

    def await_that(self, what: Callable[[], str], happens: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not happens():
            if time.monotonic() > end:
                log = (self.folder / "log").read_text()[-3000:]
                raise TimeoutError(f"not seen: {what()}; firing: {self.firing()}\n{log}")
            time.sleep(0.2)


def noise(tokens: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((tokens, 1, 64)).astype(np.float32)


def fill_pool(site: Site) -> None:
    """Raw rows that fill a pool of 1 MiB find no room for their pages, and others none at all."""
    with kvd.connect(site.region) as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="kivi-4; sink=0; recent=0")
        rows = noise(2048)
        full, refused = model.open(), model.open()
        full.store(0, rows, rows)
        try:
            refused.store(0, rows, rows)
        except kvd.PoolFull:
            pass
        else:
            raise AssertionError("a full pool has room")
        site.await_firing("KvdPoolFull", "KvdPoolNearlyFull", "KvdPacksDeferred")
        full.close()
        refused.close()
        site.await_clear("KvdPoolFull", "KvdPoolNearlyFull", "KvdPacksDeferred")


def store_badly(site: Site) -> None:
    """Rows that a codec cannot take, that it keeps badly, and that break its declared bound."""
    rows = noise(1024)
    loud = rows.copy()
    loud[:, :, 0] = 9.0
    bounded = f"{COARSE}; k.bound=0.1"
    models = [("unfit", COARSE, 1e30 * rows), ("coarse", COARSE, loud), ("bound", bounded, rows)]
    with kvd.connect(site.region) as client:
        for name, codec, keys in models:
            model = client.model(name, GEOMETRY, dtype="f32", codec=codec)
            with model.open() as sequence:
                sequence.store(0, keys, rows)
            if name == "coarse":
                coarse = model
        site.await_firing("KvdFallbackPages", "KvdCodecError", "KvdOverBoundPages")
        # An error stays what was measured last, until its model goes; counts are of a time.
        coarse.unregister()
        site.await_clear("KvdCodecError")
        site.await_clear("KvdFallbackPages", "KvdOverBoundPages")


@contextlib.contextmanager
def crowding(work: Callable[[Site, threading.Event], None], site: Site, callers: int = 1) -> Iterator[None]:
    """Does work again and again, by some callers at once."""
    stopped = threading.Event()
    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(work, site, stopped) for _ in range(callers)]
        try:
            yield
        finally:
            stopped.set()
            for call in calls:
                call.result()


def attend_again(site: Site, stopped: threading.Event) -> None:
    with kvd.connect(site.region) as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="raw")
        sequence = model.open()
        rows, queries = noise(8192), np.ones((32, 16, 64), np.float32)
        while not stopped.is_set():
            try:
                if not sequence.length:
                    sequence.store(0, rows, rows)
                model.attend(0, [kvd.Query(sequence, n_q=len(queries))], queries)
            except kvd.QueueFull:
                time.sleep(0.05)


def fill_queue(site: Site) -> None:
    """Four engines at a queue for one."""
    with crowding(attend_again, site, callers=4):
        site.await_firing("KvdQueueFull")
    site.await_clear("KvdQueueFull")


def store_again(site: Site, stopped: threading.Event) -> None:
    with kvd.connect(site.region) as client:
        geometry = kvd.Geometry(layers=1, kv_heads=8, head_dim_k=128)
        model = client.model("m", geometry, dtype="f32", codec="kivi-2; sink=0; recent=0")
        rows = np.random.default_rng(3).standard_normal((2048, 8, 128)).astype(np.float32)
        while not stopped.is_set():
            with model.open() as sequence:
                sequence.store(0, rows, rows)


def crowd_device(site: Site) -> None:
    """Engines whose stores take longer than others should wait."""
    with crowding(store_again, site, callers=12):
        site.await_firing("KvdQueueWaits")
    site.await_clear("KvdQueueWaits")


def break_principals(site: Site) -> None:
    path = site.folder / "principals.toml"
    good = path.read_text()
    path.write_text("[[principals]]\nname = ")
    site.await_firing("KvdReloadFailed")
    path.write_text(good)
    site.await_clear("KvdReloadFailed")


def publish_again(site: Site, stopped: threading.Event) -> None:
    """Publishes other blocks again and again, which go to disk and to the shared store."""
    with kvd.connect(site.region) as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="fp8; sink=0; recent=0", weights=b"w")
        rows = noise(64)
        number = 0
        while not stopped.wait(0.05):
            keys = kvd.Keys.of([f"{number:08}-{at}".encode() for at in range(4)], 16)
            number += 1
            with model.open() as sequence:
                sequence.store(0, rows, rows)
                sequence.publish(0, keys)
            model.match([kvd.Keys.of([f"{number:08}-x-{at}".encode() for at in range(4)], 16)])


def lose_shared_store(site: Site) -> None:
    """Where the folder of the shared store was there is a file, for a time."""
    shared, away = site.folder / "shared", site.folder / "away"
    with crowding(publish_again, site):
        time.sleep(2)
        shared.rename(away)
        shared.write_text("no folder")
        site.await_firing("KvdSharedStore")
        shared.unlink()
        away.rename(shared)
        site.await_clear("KvdSharedStore")


def lose_disk(site: Site) -> None:
    """The folder of the disk tier goes away; after its writes failed the tier wants a restart."""
    cache = site.folder / "cache"
    with crowding(publish_again, site):
        time.sleep(2)
        cache.rename(site.folder / "gone")
        site.await_firing("KvdDiskTier")
    cache.mkdir()
    site.restart()
    site.await_clear("KvdDiskTier")


def find_pages(process: int) -> list[int]:
    """Where a process has pages: by the word that their headers begin with."""
    found = []
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for line in maps:
            bounds, rights, *_, name = [*line.split(), ""][:7]
            first, end = (int(part, 16) for part in bounds.split("-"))
            if rights.startswith("rw") and name.startswith(("", "/dev/zero")) and end - first >= 1 << 20:
                memory.seek(first)
                data = memory.read(end - first)
                found += [first + match.start() for match in re.finditer(b"KVDP", data)]
    return found


def flip_bits(site: Site) -> None:
    """A bit of each page in the daemon's memory turns, as a broken memory module's would."""
    with kvd.connect(site.region) as client:
        model = client.model("m", GEOMETRY, dtype="f32", codec="fp8; sink=0; recent=0")
        sequence = model.open()
        rows = noise(64)
        sequence.store(0, rows, rows)
        pages = find_pages(site.process.pid)
        assert pages, "no page in the daemon's memory"
        with open(f"/proc/{site.process.pid}/mem", "r+b", 0) as memory:
            for page in pages:
                memory.seek(page + 200)
                byte = memory.read(1)[0]
                memory.seek(page + 200)
                memory.write(bytes([byte ^ 1]))
        try:
            sequence.load(0)
        except kvd.CorruptPage:
            pass
        else:
            raise AssertionError("a page with a bit turned was loaded")
        site.await_firing("KvdDefect")
        site.await_clear("KvdDefect")


def stop_process(site: Site) -> None:
    """A daemon that stands still, and one that drains for long."""
    site.process.send_signal(signal.SIGSTOP)
    site.await_firing("KvdDown")
    site.process.send_signal(signal.SIGCONT)
    site.await_clear("KvdDown")


def drain_long(site: Site) -> None:
    begins = threading.Event()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(attend_long, site, begins)
        begins.wait()
        time.sleep(1)
        site.process.send_signal(signal.SIGTERM)
        site.await_firing("KvdNotReady")
        answer.result()
    site.restart()
    site.await_clear("KvdNotReady")


def attend_long(site: Site, begins: threading.Event) -> None:
    try:
        with kvd.connect(site.region) as client:
            model = client.model("m", GEOMETRY, dtype="f32", codec="raw")
            sequence, rows, queries = model.open(), noise(8192), np.ones((512, 64, 64), np.float32)
            for _ in range(3):
                sequence.store(0, rows, rows)
            begins.set()
            model.attend(0, [kvd.Query(sequence, n_q=len(queries))], queries)
    finally:
        begins.set()


# Each scenario, and the settings of its daemon; `{}` is the daemon's folder.
SCENARIOS = [
    (fill_pool, ["device.pool_bytes=1 MiB"]),
    (store_badly, []),
    (fill_queue, ["device.pool_bytes=64 MiB", "device.queue_jobs_max=1"]),
    (crowd_device, ["device.pool_bytes=512 MiB"]),
    (break_principals, ["access.principals={}/principals.toml", "access.check_files_ms=200"]),
    (lose_shared_store, ["cache.remote.url=file://{}/shared", "cache.remote.min_prefix_tokens=0"]),
    (
        lose_disk,
        [
            "cache.disk.path={}/cache",
            "cache.disk.bytes=64 MiB",
            "cache.disk.segment_bytes=1 MiB",
            "cache.disk.reserve_free_bytes=1 MiB",
        ],
    ),
    (flip_bits, []),
    (stop_process, []),
    (drain_long, ["server.grace_period_ms=60000"]),
]
PRINCIPALS = """
[[principals]]
name = "engine"
namespaces = ["*"]
roles = ["use"]
uids = [{uid}]
"""


def make_site(folder: pathlib.Path, program: str, settings: list[str]) -> Site:
    (folder / "shared").mkdir(parents=True)
    (folder / "principals.toml").write_text(PRINCIPALS.format(uid=os.getuid()))
    settings = [setting.replace("{}", str(folder)) for setting in settings]
    # One address for a daemon's whole life and the one after it.
    return Site(program, folder, settings, f"127.0.0.1:{free_port()}")


def main() -> None:
    program, server_program, *wanted = sys.argv[1:]
    shipped = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert not re.search(r"\d[mh]\b", re.sub("#.*", "", shorten_times(shipped))), "a time is not shortened"
    names = set(re.findall("- alert: (.*)", shipped))
    chosen = [(run, settings) for run, settings in SCENARIOS if run.__name__ in wanted or not wanted]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        calm = make_site(folder / "calm", program, [])
        sites = [make_site(folder / run.__name__, program, settings) for run, settings in chosen]
        for site in [calm, *sites]:
            site.start()
            stack.callback(site.end)
        admins = [site.admin for site in [calm, *sites]]
        server = stack.enter_context(prometheus(server_program, folder, admins, shorten_times))
        for site in [calm, *sites]:
            site.server = server
        for site in sites:
            site.await_scrapes()
        with ThreadPoolExecutor(len(sites)) as pool:
            runs = [pool.submit(run, site) for (run, _), site in zip(chosen, sites, strict=True)]
        failures = [failure for one in runs if (failure := one.exception())]
        for failure in failures:
            print(repr(failure), file=sys.stderr)
        assert not failures, f"{len(failures)} scenarios failed"
        firing = server.get_data("query", query='max_over_time(ALERTS{alertstate="firing"}[1h])')["result"]
        fired = {(series["metric"]["alertname"], series["metric"]["instance"]) for series in firing}
        silent = names - {alert for alert, _ in fired}
        assert wanted or not silent, f"never fired: {silent}"
        of_calm = [alert for alert, instance in fired if instance == calm.admin]
        assert not of_calm, f"fired while all was well: {of_calm}"
    print(f"{len({alert for alert, _ in fired})} alerts fired and cleared")


main()
