"""Daemons that `kvd.serve` starts: where they are, and that nothing of them is left."""

import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

import kvd

PROGRAM = """
import os, sys, kvd
server = kvd.serve(pool="16 MiB")
print(server.pid, server.folder, flush=True)
if sys.argv[1] == "raises":
    raise RuntimeError("a program that fails")
if sys.argv[1].startswith("-"):
    os.kill(os.getpid(), -int(sys.argv[1]))
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
    """Also where that is killed, and can say nothing: by SIGKILL, and by SIGTERM, of which Python
    knows nothing by itself."""
    for how in ("returns", "raises", "-9", "-15"):
        command = [sys.executable, "-c", PROGRAM, how]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        pid, folder = said.stdout.split()
        ends = {"returns": 0, "raises": 1, "-9": -9, "-15": -15}
        assert said.returncode == ends[how], said.stderr
        deadline = time.monotonic() + 60
        while is_running(pid):
            assert time.monotonic() < deadline, "the daemon still runs"
            time.sleep(0.05)
        while pathlib.Path(folder).exists():
            assert time.monotonic() < deadline, "its folder is left"
            time.sleep(0.05)


def test_the_guard_of_a_daemon_ends_with_it():
    with kvd.serve(pool="16 MiB") as server:
        first = server._guard.pid
        assert is_running(first)
        server.kill()
        assert not is_running(first)
        server.restart()
        second = server._guard.pid
        assert is_running(second) and is_running(server.pid)
    assert not is_running(second) and not is_running(server.pid)


def test_a_daemon_that_says_little_is_seen_to_serve():
    """Its client waits for a line of the log, which has the ports."""
    for given in ("error", "off", "kvd::daemon=error", "warn,kvd=off"):
        with kvd.serve(pool="16 MiB", settings={"log.filter": given}, timeout=20) as server:
            with server.connect() as client:
                assert client.info().region_path == server.region
            assert not server.address.endswith(":0")
    with pytest.raises(kvd.InvalidArgument, match=r"log\.format"):
        kvd.serve(settings={"log.format": "text"})


def test_settings_are_python_values():
    settings = {
        "device.prefault": True,
        "access.insecure_probe": None,
        "namespaces.allowed": ["default", "team-a"],
        "server.listen_tcp": "",
        "device.threads": 1,
    }
    with pytest.raises(kvd.InvalidArgument, match=r"access\.insecure_probe"):
        kvd.serve(settings=settings)
    del settings["access.insecure_probe"]
    with kvd.serve(pool="16 MiB", settings=settings) as server:
        assert server.address == ""
        server.connect(namespace="team-a").close()
    with kvd.serve(pool="16 MiB", settings={"device.prefault": np.bool_(False)}) as server:
        server.connect().close()
    for wrong in ([], "device.threads=2", 5):
        with pytest.raises(kvd.InvalidArgument, match="settings"):
            kvd.serve(settings=wrong)
    with pytest.raises(kvd.InvalidArgument, match="timeout"):
        kvd.serve(timeout=0)


def test_a_program_that_cannot_be_started(tmp_path):
    (tmp_path / "text").write_text("no program")
    for path in ("/nope", str(tmp_path), str(tmp_path / "text"), "a\0b"):
        with pytest.raises(kvd.Unsupported, match="cannot be started"):
            kvd.serve(binary=path)


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


def test_a_program_that_cannot_start_a_guard_is_served_without(monkeypatch):
    """A frozen program would be started again by it, and an interpreter may be gone by now."""
    for name, value in (("frozen", True), ("executable", "/nowhere/python3")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, value, raising=False)
            with kvd.serve(pool="16 MiB") as server, server.connect() as client:
                assert server._guard is None and client.boot_id


def test_a_forked_child_that_ends_leaves_the_daemon_alone():
    """`atexit` runs in the child as well."""
    program = """
import os, sys, kvd
with kvd.serve(pool="16 MiB") as server:
    if (child := os.fork()) == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0 and server.folder.exists()
    server.connect().close()
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
