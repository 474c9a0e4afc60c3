"""What a daemon says in its log, with `log.format=json`."""

import json
import pathlib
import subprocess
import time


def await_admin(process: subprocess.Popen, log_path: pathlib.Path) -> str:
    """The address of the admin port, once the daemon listens there."""
    for _ in range(400):
        for line in log_path.read_text().splitlines():
            fields = json.loads(line).get("fields", {})
            if "admin" in fields:
                return fields["admin"]
        assert process.poll() is None, log_path.read_text()
        time.sleep(0.05)
    raise TimeoutError(log_path.read_text())
