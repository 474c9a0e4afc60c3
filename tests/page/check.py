#!/usr/bin/env python3
"""Opens the web page of a daemon's admin port in headless Chromium, and looks at what it shows.

    python3 tests/page/check.py KVD CHROMIUM [SCREENSHOT]      # package: numpy

Without principals, with a token that is missing, and on a phone, 360 points wide, where nothing may scroll
sideways; any word of the browser about the page's policy or an error of its script fails.
"""

import contextlib
import hashlib
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from phone import phone

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "clients/python/src"), str(ROOT / "tests/python")]
import kvd  # noqa: E402
from daemon_log import await_admin  # noqa: E402

# Milliseconds of the page's own clock: some looks at the daemon.
BUDGET_MS = 9000


@contextlib.contextmanager
def daemon(program: str, folder: str, *settings: str):
    """A daemon on ports of its own; its admin address."""
    log_path = pathlib.Path(folder) / "log"
    arguments = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--set", "log.format=json"]
    for setting in settings:
        arguments += ["--set", setting]
    with open(log_path, "wb") as log:
        process = subprocess.Popen([program, "serve", *arguments], stderr=log)
    try:
        yield await_admin(process, log_path)
    finally:
        process.terminate()
        process.wait(timeout=20)


def browse(chromium: str, address: str, *options: str) -> str:
    """What the page has become."""
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--virtual-time-budget={BUDGET_MS}"]
        command += ["--enable-logging=stderr", *options, f"http://{address}/"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    # A refused request is told of, too, and shown by the page.
    told = [line for line in run.stderr.splitlines() if "CONSOLE" in line and "status of 401" not in line]
    assert not told, "\n".join(told)
    return run.stdout


def check_figures(program: str, chromium: str, screenshot: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        region = f"{folder}/region.sock"
        with daemon(program, folder, f"server.listen_region={region}", "device.threads=1") as admin:
            with kvd.connect(region) as client:
                shape = kvd.Geometry(layers=2, kv_heads=2, head_dim_k=64)
                model = client.model("meta-llama/Llama-3.1-8B-Instruct", shape, dtype="f16", codec="kivi-4; recent=0")
                sequences = [model.open() for _ in range(3)]
                rows = np.random.default_rng(1).standard_normal((640, 2, 64)).astype(np.float16)
                for count, sequence in enumerate(sequences, 1):
                    for layer in range(2):
                        sequence.store(layer, rows[: 192 * count], rows[: 192 * count])
                page = browse(chromium, admin, "--dump-dom")
                for part in [">serving<", "Llama-3.1-8B-Instruct", ">kivi-4", "pool 0 (host)", ">576<", " B/s<"]:
                    assert part in page, f"the page has no {part!r}:\n{page}"
                assert page.count('<td class="text') == 3 + 3 * len(sequences), page
                check_phone(chromium, admin, screenshot)


def check_phone(chromium: str, admin: str, screenshot: str | None) -> None:
    with phone(chromium) as shown:
        # Rates need a second look at the daemon.
        shown.open_page(f"http://{admin}/", "document.body.innerText.includes('B/s')")
        assert shown.list_too_wide() == [], shown.list_too_wide()
        if screenshot:
            shown.save_picture(screenshot)


def check_door(program: str, chromium: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hashed = hashlib.sha256(b"secret").hexdigest()
        principals = pathlib.Path(folder) / "principals.toml"
        principals.write_text(
            '[[principals]]\nname = "team"\nnamespaces = ["*"]\nroles = ["use"]\n'
            f'tokens = ["sha256:{hashed}"]\n'
        )
        with daemon(program, folder, f"access.principals={principals}") as admin:
            page = browse(chromium, admin, "--dump-dom")
    assert "UNAUTHENTICATED" in page and '<form id="door">' in page, page
    assert '<main id="shown" hidden="">' in page, page


def main() -> None:
    program, chromium, *screenshot = sys.argv[1:]
    check_figures(program, chromium, screenshot[0] if screenshot else None)
    check_door(program, chromium)
    print("page: shows pool, models and sequences, and asks for a token where it is refused")


main()
