"""A headless Chromium, driven over its own DevTools protocol."""

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.processes import await_from
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One open page."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count()
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def faults(self) -> list[dict[str, Any]]:
        """What has gone wrong in the page since it was opened: exceptions, and what the console tells of."""
        self.run("0")  # what came before it has been read then
        thrown = [event["params"] for event in self._events if event["method"] == "Runtime.exceptionThrown"]
        return thrown + [event["params"]["entry"] for event in self._events if event["method"] == "Log.entryAdded"]

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        look = f"const look = () => ({condition}) ? resolve() : setTimeout(look, 20)"
        self.run("new Promise((resolve) => { " + look + "; look() })")


@contextmanager
def open_page(path: str, folder: Path, address: str) -> Iterator[Page]:
    """A page at an address, in a Chromium whose profile is in a folder."""
    command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    port_file = folder / "DevToolsActivePort"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            await_from(browser, lambda: port_file.exists() and len(port_file.read_text().splitlines()) == 2)
            port, browser_path = port_file.read_text().splitlines()
            with connect(f"ws://127.0.0.1:{port}{browser_path}", max_size=None) as socket:
                target = Page(socket).call("Target.createTarget", url="about:blank")["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
                page = Page(socket)
                page.call("Runtime.enable")
                page.call("Log.enable")
                page.call("Page.navigate", url=address)  # answered once the blank page has gone
                page.wait_for("document.readyState === 'complete'")
                yield page
        finally:
            browser.terminate()
