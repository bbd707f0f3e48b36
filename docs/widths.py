"""Look for pages that are wider than the window, tables included: python docs/widths.py [FOLDER]

Opens each page of FOLDER (docs/_build/html, as ``make docs`` writes it) in Chromium, 390 and 1280 pixels wide, prints
those that overflow, and ends with 1 if there are any. What scrolls within its own frame is no overflow.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (390, 1280)
LEFT_OUT = {"_static", "_modules", "_downloads"}
WIDER = """
const page = document.documentElement, found = [];
for (const part of document.querySelectorAll(".bd-article table, .bd-article pre, .bd-article img, .bd-article p")) {
  const box = part.getBoundingClientRect();
  let frame = part.parentElement;
  while (frame !== page && getComputedStyle(frame).overflowX === "visible") frame = frame.parentElement;
  if (box.width && frame === page && box.right > page.clientWidth + 1) found.push(part.textContent.trim().slice(0, 50));
}
return [page.scrollWidth - page.clientWidth, found.slice(0, 3)];
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Open a headless Chromium."""
    from selenium import webdriver

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise SystemExit("docs/widths.py needs chromium and chromedriver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()


def main(folder: Path) -> int:
    """Return how many pages are too wide."""
    pages = [page for page in sorted(folder.resolve().rglob("*.html")) if not LEFT_OUT & set(page.parts)]
    if not pages:
        raise SystemExit(f"{folder}: no pages; make docs writes them")
    wide = 0
    with chromium() as browser:
        for width in WIDTHS:
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
            )
            for page in pages:
                browser.get(page.as_uri())
                more, parts = browser.execute_script(WIDER)
                if more > 0 or parts:
                    wide += 1
                    print(f"{width}: {page.relative_to(folder.resolve())} by {more} pixels", *parts, sep="; ")
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {wide} too wide")
    return wide


if __name__ == "__main__":
    sys.exit(min(main(Path(*(sys.argv[1:] or ["docs/_build/html"]))), 1))
