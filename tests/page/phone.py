"""A page as a phone shows it: Chromium by its debugging pipe, which lays a page out narrower than any
window of its own can be."""

import base64
import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator

PHONE = {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
PATIENCE_S = 60

# Whatever is wider than its place: the page itself, or a box that would scroll or be cut off.
TOO_WIDE = """JSON.stringify([document.documentElement, ...document.querySelectorAll('body, main, .wide')]
  .filter(box => box.scrollWidth > box.clientWidth)
  .map(box => `${box.tagName}.${box.className}: ${box.scrollWidth} of ${box.clientWidth}`))"""


class Phone:
    """One tab of a browser."""

    def __init__(self, chromium: str, profile: str) -> None:
        # It reads its commands from descriptor 3 and answers at 4, each ended by a zero byte.
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        arguments = ["sh", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "sh", *command]
        self._process = subprocess.Popen(
            arguments, pass_fds=[theirs_in, theirs_out], stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread, self._number, self._session = b"", 0, ""
        tab = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.ask("Emulation.setDeviceMetricsOverride", **PHONE)

    def ask(self, method: str, **fields: object) -> dict:
        self._number += 1
        call = {"id": self._number, "method": method, "params": fields}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            message, zero, rest = self._unread.partition(b"\0")
            if zero:
                self._unread = rest
                answer = json.loads(message)
                if answer.get("id") == self._number:
                    assert "error" not in answer, f"{method}: {answer}"
                    return answer["result"]
            elif select.select([self._from], [], [], max(0, end - time.monotonic()))[0]:
                more = os.read(self._from, 1 << 16)
                assert more, f"the browser ended before it answered {method}"
                self._unread += more
            else:
                raise TimeoutError(method)

    def evaluate(self, expression: str) -> object:
        return self.ask("Runtime.evaluate", expression=expression)["result"].get("value")

    def open_page(self, address: str, shown: str) -> None:
        """Opens a page and waits until the expression is true in it."""
        self.ask("Page.navigate", url=address)
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(shown):
            assert time.monotonic() < end, f"{address} never had {shown}"
            time.sleep(0.1)

    def list_too_wide(self) -> list[str]:
        assert self.evaluate("innerWidth") == PHONE["width"], self.evaluate("innerWidth")
        return json.loads(str(self.evaluate(TOO_WIDE)))

    def save_picture(self, path: str) -> None:
        picture = self.ask("Page.captureScreenshot", format="webp", quality=80)
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))

    def end_browser(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        self._process.wait(timeout=30)


@contextlib.contextmanager
def phone(chromium: str) -> Iterator[Phone]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Phone(chromium, profile)
        try:
            yield opened
        finally:
            opened.end_browser()
