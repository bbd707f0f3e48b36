"""The explorer in a process of its own, and a page of it in a real browser, for tests and benchmarks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Page", "browsing", "missing", "serving"]

_FIND = """
const find = (root, selector) => {
  const found = [...root.querySelectorAll(selector)];
  for (const one of root.querySelectorAll("*")) if (one.shadowRoot) found.push(...find(one.shadowRoot, selector));
  return found;
};
"""
_SEEN = _FIND + "return find(document, arguments[0]).filter((one) => one.checkVisibility())"


def missing() -> str:
    """Return what there is not for a test in a browser; empty where there is all."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program}"
    try:
        import panel  # noqa: F401
        import selenium  # noqa: F401
    except ImportError as error:
        return f"no {error.name}"
    return ""


@contextmanager
def serving(*words: str, cwd: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``nonlocal explore`` on a free port; yields the address of the page, and the process."""
    command = [sys.executable, "-m", "nlflow.desk.commands.main", "explore", "--no-browser", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("nonlocal explore: http://"), (line, process.poll())
            yield line.split()[2], process
        finally:
            process.terminate()
            process.wait(60)


class Page:
    """A page in a browser, whose parts are looked for through all shadow roots."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        self._says: list[Any] = []  # of all tabs; to look for them each time would take long

    def open(self, address: str = "") -> None:
        """Load the page, or another address of it, and wait until it shows something."""
        self.driver.get("about:blank")  # else an address that differs after # would load nothing
        self.driver.get(address or self.url)
        self._says = []
        self.wait(lambda: self.kind() == "done", "the first result")

    def all(self, selector: str) -> list[Any]:
        """Return the elements that can be seen."""
        return list(self.driver.execute_script(_SEEN, selector))

    def one(self, selector: str) -> Any:
        """Return the only element that can be seen."""
        found = self.all(selector)
        assert len(found) == 1, (selector, len(found))
        return found[0]

    def wait(self, what: Callable[[], Any], name: str, seconds: float = 240) -> Any:
        """Wait until something is true, and return it; how long that takes beside other programs is not tested."""
        from selenium.common.exceptions import WebDriverException

        end, last = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            try:
                if value := what():
                    return value
            except (AssertionError, WebDriverException) as error:  # it is not there yet, or is just being replaced
                last = repr(error)
            time.sleep(0.03)
        raise AssertionError(f"{name} did not come: {self.status()} {last}")

    def said(self) -> dict[str, str]:
        """Return the kind and the number of what the tab that is seen says last."""
        if not self._says:
            self._says = list(self.driver.execute_script(_FIND + "return find(document, '.nl-status')"))
        seen = "const seen = arguments[0].filter((one) => one.checkVisibility()); return seen.map((one) => one.dataset)"
        found = self.driver.execute_script(seen, self._says)
        assert len(found) == 1, found
        return dict(found[0])

    def kind(self) -> str:
        """Return whether the tab that is seen is idle, busy, done or in error."""
        return self.said()["kind"]

    def serial(self) -> int:
        """Return the number of the last message of the status."""
        return int(self.said()["serial"])

    def status(self) -> str:
        """Return what the tab that is seen says."""
        return str(self.one(".nl-status .text").text)

    def settled(self, action: Callable[[], Any], kind: str = "done") -> str:
        """Do something, wait until its result is there, and return what the tab says."""
        before = self.said()
        action()
        self.wait(lambda: self.said() != before and self.kind() == kind, f"{kind} after it")
        return self.status()

    def python(self) -> str:
        """Return the text of "Copy as Python"."""
        return str(self.one(".nl-code").find_element("css selector", "pre.python").get_attribute("textContent"))

    def command(self) -> str:
        """Return the text of "Copy as command"."""
        return str(self.one(".nl-code").find_element("css selector", "pre.command").get_attribute("textContent"))

    def numbers(self) -> dict[str, str]:
        """Return the table of numbers."""
        rows = [row.text for row in self.all("table.numbers tr")]
        names = [head.text for head in self.all("table.numbers th")]
        return {name: row.removeprefix(name).strip() for name, row in zip(names, rows, strict=False)}

    def tab(self, name: str) -> None:
        """Go to a tab."""
        next(one for one in self.all("[role=tab]") if one.text == name).click()

    def knob(self, name: str) -> Any:
        """Return the slider of a number."""
        return self.one(f'.nl-knob[data-name="{name}"] input[type=range]')

    def choice(self, name: str) -> Any:
        """Return the box in which one of a few words is chosen."""
        return self.one(f".choice-{name}").shadow_root.find_element("css selector", "select")

    def button(self, start: str) -> Any:
        """Return the button whose text starts so."""
        return next(one for one in self.all("button") if one.text.startswith(start))

    def requests(self) -> set[str]:
        """Return the addresses that the browser has asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        found = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
        return found | {one["params"]["url"] for one in messages if one["method"] == "Network.webSocketCreated"}

    def address(self) -> str:
        """Return what the bar of the browser says."""
        return str(self.driver.current_url)

    def errors(self) -> list[str]:
        """Return the errors in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def browsing(url: str, downloads: Path | None = None, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """Open a headless Chromium for a page; nothing is loaded yet."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 f"--window-size={width},{height}", "--force-device-scale-factor=1"):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if downloads is not None:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Page(driver, url)
    finally:
        driver.quit()
