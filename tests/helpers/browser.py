"""A headless Chromium that a test drives through its debugging pipe."""

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ANSWER_TIMEOUT_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_KEYS = {"Enter": (13, "\r"), " ": (32, " "), "Tab": (9, "")}


#: What has a name in a chart, but for its axes: where a row ends.
MARKS = "[role=graphics-symbol][aria-label]:not([aria-roledescription=axis])"
#: The charts of a report, if it has any, are drawn.
CHARTS_ARE_DRAWN = "(document.getElementById('figures')?.getAttribute('aria-busy') ?? 'false') === 'false'"


def executable() -> str | None:
    """Where a browser is, None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


#: The tests of a module that drives it.
IS_DRIVEN = [
    pytest.mark.slow,  # together
    pytest.mark.skipif(executable() is None, reason="no chromium or google-chrome is installed"),
]


@contextmanager
def chromium(folder: Path) -> Iterator["Browser"]:
    """Start a browser with one page; its profile stands in ``folder``."""
    program = executable()
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
    arguments = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        "--force-color-profile=srgb", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(to_browser, from_browser), start_new_session=True,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        browser = Browser(commands, answers)
        yield browser
        browser.call("Browser.close", of_page=False)
        process.wait(ANSWER_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):  # it has ended, as it should
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(commands)
        os.close(answers)


class Browser:
    """One page; its complaints (errors, warnings, what could not be loaded), and the outer addresses it asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []
        pages = self.call("Target.getTargets", of_page=False)["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        attached = self.call("Target.attachToTarget", of_page=False, targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, *, of_page: bool = True, **parameters: Any) -> dict[str, Any]:
        """Send a command of the Chrome DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if of_page:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280) -> None:
        """Load a page, as wide as told, in the light scheme; complaints and requests begin anew."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self.complaints, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._receive()

    def open_report(self, path: Path, *, width: int = 1280) -> None:
        """Load the page of a report, and wait for its charts."""
        self.open(path, width=width)
        self.wait_for(CHARTS_ARE_DRAWN)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, as plain data; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, as a person would."""
        code, text = _KEYS[key]
        about = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of the first element that fits, brought into view."""
        x, y = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "center", inline: "center" }});
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        return x, y

    def click(self, selector: str) -> None:
        """Click with the pointer on the middle of the first element that fits."""
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        waited = f"new Promise((go) => {{ const look = () => {condition} ? go(true) : setTimeout(look, 5); look(); }})"
        assert self.evaluate(waited), condition

    def point(self, x: float, y: float) -> None:
        """Move the pointer, with no button pressed."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x: float, y: float, *, by: tuple[float, float]) -> None:
        """Press the left button, move the pointer and release it."""
        self.point(x, y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        for share in (0.5, 1.0):
            place = {"x": x + share * by[0], "y": y + share * by[1]}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **place)

    def double_click(self, x: float, y: float) -> None:
        """Click twice in one place."""
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def wheel(self, x: float, y: float, delta: float, *, ctrl: bool = False) -> None:
        """Turn the wheel over a place: what is below scrolls up if ``delta`` is positive."""
        modifiers = 2 if ctrl else 0
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, modifiers=modifiers)

    def _receive(self) -> dict[str, Any]:
        """The next message, after what it says about the page was noted."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_TIMEOUT_S)
            assert ready, f"the browser said nothing for {ANSWER_TIMEOUT_S:g} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        about = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(about["entry"]["text"])
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("data:", "blob:")):
                self.requests.append(about["request"]["url"])
        return message
