"""Daemons that `kvd.serve` starts: where they are, and that nothing of them is left."""

import pathlib
import subprocess
import sys
import time

import kvd

PROGRAM = """
import sys, kvd
server = kvd.serve(pool="16 MiB")
print(server.pid, server.folder, flush=True)
if sys.argv[1] == "raises":
    raise RuntimeError("a program that fails")
"""


def is_running(pid):
    return pathlib.Path(f"/proc/{pid}").exists()


def test_two_daemons_have_places_of_their_own():
    with kvd.serve(pool="16 MiB") as first, kvd.serve(pool="16 MiB") as second:
        assert first.address != second.address and first.region != second.region
        with first.connect() as client, second.connect() as other:
            assert client.boot_id != other.boot_id
            assert client.info().pool_capacity_bytes == 16 << 20
        pids, folders = [first.pid, second.pid], [first.folder, second.folder]
    assert not any(map(is_running, pids)) and not any(folder.exists() for folder in folders)


def test_a_daemon_ends_with_its_program():
    for how in ("returns", "raises"):
        command = [sys.executable, "-c", PROGRAM, how]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        pid, folder = said.stdout.split()
        assert said.returncode == (how == "raises"), said.stderr
        deadline = time.monotonic() + 60
        while is_running(pid):
            assert time.monotonic() < deadline, "the daemon still runs"
            time.sleep(0.05)
        assert not pathlib.Path(folder).exists()


def test_settings_and_environment(monkeypatch):
    monkeypatch.setenv("KVD_DEVICE__POOL_BYTES", "1 TiB")
    with kvd.serve(pool="32 MiB", settings={"device.precision": "single"}) as server:
        with server.connect() as client:
            info, codecs = client.info(), {codec.name: codec for codec in client.codecs()}
            assert info.region_path == server.region and "steps" in info.features
            assert client.model("m", kvd.Geometry(1, 2, 64), dtype="f16").codec_spec == (
                codecs[info.codec_default].spec
            )
    assert codecs["kvd-2"].needs_calibration and not codecs["kivi-4"].needs_calibration
    assert codecs["kvd-2"].bits_v < codecs["kivi-4"].bits_v < codecs["raw"].bits_v < 17
    assert (info.pool_capacity_bytes, info.precision) == (32 << 20, "single")
