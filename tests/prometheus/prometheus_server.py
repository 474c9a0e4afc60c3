"""A real Prometheus with the shipped files, and what it answers."""

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def running(command: list[str], log_path: pathlib.Path) -> Iterator[subprocess.Popen]:
    with open(log_path, "wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


class Prometheus:
    """The queries of one server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get_data(self, path: str, **fields: str) -> dict:
        query = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            answer = json.loads(get_text(query))
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read())
        assert answer["status"] == "success", f"{path} {fields}: {answer}"
        return answer["data"]

    def read_numbers(self, expression: str) -> list[float]:
        result = self.get_data("query", query=expression)["result"]
        return [float(series["value"][1]) for series in result]

    def list_firing(self) -> set[tuple[str, str]]:
        """Alerts and the daemons, by their addresses, that they are of."""
        alerts = self.get_data("alerts")["alerts"]
        labels = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {(of["alertname"], of["instance"]) for of in labels}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def prometheus(
    program: str,
    folder: pathlib.Path,
    admins: list[str],
    change: Callable[[str], str] = str,
) -> Iterator[Prometheus]:
    """The shipped files, with these daemons' addresses and what `change` does to them as the only changes."""
    files = folder / "prometheus"
    shutil.copytree(ROOT / "deploy/prometheus", files)
    (files / "targets.yml").write_text(json.dumps([{"targets": admins}]))
    for name in ("alerts.yml", "prometheus.yml"):
        (files / name).write_text(change((files / name).read_text()))
    # It cannot say which port it was given, so another may take the one that was free.
    for _ in range(5):
        address = f"127.0.0.1:{free_port()}"
        command = [program, f"--config.file={files}/prometheus.yml", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={folder}/data"]
        with running(command, folder / "prometheus.log") as process:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    get_text(f"http://{address}/-/ready")
                    yield Prometheus(address)
                    return
                if process.poll() is not None:
                    break
                time.sleep(0.1)
    raise TimeoutError((folder / "prometheus.log").read_text())
