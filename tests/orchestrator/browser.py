"""A headless browser, driven through its debugging pipe: no package, no network, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. ``run`` evaluates JavaScript in it, ``press`` and ``click`` act as a person would."""

    def __init__(self, home: Path, width: int = 1300, height: int = 900) -> None:
        assert PROGRAM is not None
        read_end, self.to_browser = os.pipe()
        self.from_browser, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        os.set_inheritable(write_end, True)
        # The browser talks on descriptors 3 and 4.
        shell = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage",
            f"--user-data-dir={home / 'profile'}", f"--window-size={width},{height}", "--no-first-run",
            "--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", PROGRAM, *options], pass_fds=[read_end, write_end],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self.number, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = os.read(self.from_browser, 1 << 16)
            assert data, "the browser went away"
            self.rest += data
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def open(self, path: Path, fragment: str = "", ready: str = "typeof DATA === 'object'") -> None:
        """Load the page anew and wait until its script has drawn it."""
        page = f"file://{path.resolve()}{fragment}"
        for url, condition in (
            ("about:blank", "location.href === 'about:blank'"),
            (page, f"document.readyState === 'complete' && location.href !== 'about:blank' && {ready}"),
        ):
            self.call("Page.navigate", url=url)
            until = time.monotonic() + 30
            while not self.call("Runtime.evaluate", expression=condition)["result"].get("value"):
                assert time.monotonic() < until, "the page does not load"
                time.sleep(0.02)

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def click(self, selector: str) -> None:
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def shoot(self, path: Path, selector: str = "") -> None:
        """A picture of the window, or of one element with all that lies below the fold."""
        more: dict[str, Any] = {}
        if selector:
            box = self.run(
                f"(b => [b.x, b.y, b.width, b.height])(document.querySelector('{selector}').getBoundingClientRect())"
            )
            more["clip"] = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(selector), **more)["data"]
        path.write_bytes(base64.b64decode(data))

    def problems(self) -> list[str]:
        """Errors in the console, and everything that was fetched beside the page itself."""
        out = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
                ("file:", "about:")
            ):
                out.append(parameters["request"]["url"])
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                out.append(parameters["entry"]["text"])
            elif method == "Runtime.exceptionThrown":
                out.append(str(parameters["exceptionDetails"]))
        return out

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
