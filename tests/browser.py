"""A headless Chromium for tests of pages, driven with the Chrome DevTools Protocol over two pipes.

Protocol: https://chromedevtools.github.io/devtools-protocol; each message is JSON followed by a zero byte."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
# The browser reads from file descriptor 3 and writes to 4. Copy the pipes to descriptors from 10 on first, so that
# neither dup2 overwrites the other pipe
START = """import fcntl, os, sys
ours = [fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]]
for theirs, fd in zip((3, 4), ours): os.dup2(fd, theirs)
os.execv(sys.argv[3], sys.argv[3:])"""
CODES = {"Enter": 13, "Escape": 27}


class Browser:
    """A running browser. `errors` are the exceptions, console errors and dialogs of the last opened page;
    `requests` are the addresses that it requested."""

    def __init__(self, folder: Path):
        theirs_in, self.to = os.pipe()
        self.out, theirs_out = os.pipe()
        flags = [*FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        command = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), PROGRAM, *flags]
        pipes = (theirs_in, theirs_out)
        self.process = subprocess.Popen(command, pass_fds=pipes, stderr=subprocess.DEVNULL)
        for fd in pipes:
            os.close(fd)
        self.n, self.left = 0, b""
        self.session: dict[str, str] = {}
        self.target = ""
        self.clear()

    def clear(self) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = 0

    def send(self, method: str, **params: Any) -> int:
        self.n += 1
        os.write(
            self.to, json.dumps({"id": self.n, "method": method, "params": params} | self.session).encode() + b"\0"
        )
        return self.n

    def call(self, method: str, **params: Any) -> dict:
        n = self.send(method, **params)
        while (answer := self.read()).get("id") != n:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def read(self, seconds: float = 60) -> dict:
        """Return the next message. If it is an event, record it."""
        end = time.monotonic() + seconds
        while b"\0" not in self.left:
            ready = select.select([self.out], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"the browser sent nothing for {seconds} s"
            self.left += os.read(self.out, 1 << 20) or sys.exit("the browser ended")
        text, _, self.left = self.left.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.errors.append(json.dumps(params))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {params['message']}")
            self.send("Page.handleJavaScriptDialog", accept=True)
        return message

    def open(self, url: str, width: int = 1200, height: int = 750, dark: bool = False) -> None:
        """Open a page in a new tab with the focus, and wait until it is loaded."""
        self.session, last = {}, self.target
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.call("Target.closeTarget", targetId=last)
        attached = self.call("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.clear()
        self.go("Page.navigate", url=url)

    def go(self, method: str, **params: Any) -> None:
        """Make a call that loads a page, and wait until it is loaded."""
        before = self.loaded
        self.call(method, **params)
        while self.loaded == before:
            self.read()

    def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            code = {"windowsVirtualKeyCode": CODES.get(key, 0), "key": key}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({find}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def tabs(self) -> list[str]:
        return [target["url"] for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]

    def screenshot(self, file: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.session = {}
        self.send("Browser.close")
        self.process.wait(20)
        os.close(self.to)
        os.close(self.out)
