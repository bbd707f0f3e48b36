"""How soon the explorer answers: ``python -m benchmarks.explorer [--out DIR] [--moves N] [--screenshot FILE]``.

Sliders of the tab "Denoise" are moved in a headless Chromium, on the preview of 256 x 256 pixels of the built-in
example. Two times are taken in the page itself: from the move to the first new picture, and to the one of the result.
In the quality ``fast`` these are one; sliders of fidelity and time keep the weights of patches there, those of noise,
width, patch and window compute them anew. In ``best`` the first is coarse. Then a JPEG of 20 megapixels is opened,
from the choice of the file to its result on the
screen. Other programs make all of it slower, so the smallest time of each slider is held against the target, and the
slowest slider counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, keep, machine
from benchmarks.scaleout import processes
from tests.explorer import Page, browsing, missing, serving

TARGET, FIRST, OPENED = 0.3, 0.1, 3.0  # seconds to the result, to the first picture, to a large picture
LARGE = (3648, 5472)  # 20 megapixels
TRIES = 5
SLIDERS = {"fidelity": "weights kept", "steps": "weights kept", "sigma": "weights anew", "width": "weights anew",
           "patch_size": "weights anew", "search_radius": "weights anew"}  # fmt: skip

# Moves one slider as a key would; waits until the pictures have another number and are decoded, and are not coarse;
# returns the times of the first and of the last in milliseconds.
_MOVE = """
const [slider, view, value, done] = arguments;
const start = performance.now();
let first = null, seen = view.dataset.serial;
slider.value = value;
slider.dispatchEvent(new Event("input"));
const look = async () => {
  if (view.dataset.serial === seen) { requestAnimationFrame(look); return; }
  seen = view.dataset.serial;
  const coarse = view.dataset.coarse === "true";
  await Promise.all([...view.querySelectorAll("img")].map((one) => one.decode()));
  const now = performance.now() - start;
  first = first === null ? now : first;
  if (coarse) requestAnimationFrame(look); else done([first, now]);
};
requestAnimationFrame(look);
"""


def measure(page: Page, moves: int, sliders: Iterable[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each move to the first picture and to the result, by slider, but for each first move."""
    page.driver.set_script_timeout(60)
    first: dict[str, list[float]] = {}
    settled: dict[str, list[float]] = {}
    for name in sliders:
        slider, view = page.knob(name), page.one(".views .row").find_element("xpath", "..")
        low, high, step = (float(slider.get_attribute(word)) for word in ("min", "max", "step"))
        count = int((high - low) / step) + 1
        times = []
        for k in range(moves + 1):
            # From a third of the range on, back and forth: each value differs from the one before.
            value = low + step * ((count // 3 + 1 + k % 7) % count)
            times.append(page.driver.execute_async_script(_MOVE, slider, view, str(round(value, 6))))
            time.sleep(0.1)  # the rest of the page: curves and texts
        first[name], settled[name] = ([one[which] / 1000 for one in times[1:]] for which in (0, 1))
        if boxes := page.all(f'.nl-knob[data-name="{name}"] input[type=checkbox]'):
            page.settled(boxes[0].click)
    return first, settled


def large_picture(path: Path) -> Path:
    """Write a noisy JPEG of 20 megapixels."""
    import numpy as np
    from PIL import Image
    from skimage import data

    one = data.astronaut()
    whole = np.tile(one, (LARGE[0] // 512 + 1, LARGE[1] // 512 + 1, 1))[: LARGE[0], : LARGE[1]].astype(np.int16)
    whole += np.random.default_rng(0).integers(-25, 26, whole.shape, dtype=np.int16)
    Image.fromarray(np.clip(whole, 0, 255).astype(np.uint8)).save(path, quality=90)
    return path


def opening(page: Page, path: Path) -> list[float]:
    """Return the seconds from the choice of a file to its result, of several tries."""
    times = []
    for _ in range(TRIES + 1):
        element = page.one('.drop[data-name="noisy"] input')
        start = time.perf_counter()
        page.settled(lambda element=element: element.send_keys(str(path)))
        times.append(time.perf_counter() - start)
    return times[1:]


def photograph(page: Page, path: Path) -> None:
    """Write a picture of the page, in few colours: it belongs into a repository."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(page.driver.get_screenshot_as_png())) as picture:
        picture.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def processor_seconds(roots: list[int]) -> float:
    """Return the processor time that processes and all that they have started have taken so far."""
    ticks = 0
    for pid in (pid for root in roots for pid in processes(root)):
        with suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def summary(times: list[float]) -> dict[str, float]:
    """Return least, median and 95th percentile."""
    last = statistics.quantiles(times, n=20)[18]
    return {"least": min(times), "median": statistics.median(times), "p95": last, "times": len(times)}


def row_of(what: str, groups: list[list[float]], target: float) -> Row:
    """Return a row: the smallest time of each group is what it takes alone; the slowest group counts."""
    alone, found = max(map(min, groups)), summary([t for group in groups for t in group])
    ours = f"{alone:.3f} s alone; {found['median']:.3f} s median, {found['p95']:.3f} s 95 %"
    return Row("explorer", what, "-", ours, alone / target, f"alone <= {target} s", alone <= target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=15, help="of each slider")
    parser.add_argument("--out", type=Path, help="folder for explorer.json")
    parser.add_argument("--screenshot", type=Path, help="also write a picture of the page")
    arguments = parser.parse_args()
    if why := missing():
        parser.error(f"{why} here")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving() as (url, server),
        browsing(url, width=1280, height=1060) as page,
    ):
        page.open()
        roots = [server.pid, page.driver.service.process.pid]
        before = processor_seconds(roots)
        first, settled = measure(page, arguments.moves, SLIDERS)
        spent = (processor_seconds(roots) - before) / (len(SLIDERS) * (arguments.moves + 1))
        if arguments.screenshot is not None:  # now that all is loaded: the page says how long the last run took
            photograph(page, arguments.screenshot)
        page.settled(lambda: page.choice("quality").send_keys("best"))
        coarse, final = (found["strength"] for found in measure(page, arguments.moves, ["strength"]))
        page.settled(lambda: page.choice("quality").send_keys("fast"))
        opened = opening(page, large_picture(Path(folder) / "large.jpg"))
        browser = page.driver.capabilities["browserVersion"]
    kinds = {kind: [t for name in SLIDERS if SLIDERS[name] == kind for t in settled[name]] for kind in SLIDERS.values()}
    every, firsts = (summary([t for times in found.values() for t in times]) for found in (settled, first))
    rows = [
        row_of("a slider of the 256 x 256 preview, fast, move to result", list(settled.values()), TARGET),
        row_of("the same, move to the first picture, which is that of the result", list(first.values()), FIRST),
        row_of("the same in quality best, move to the first picture, which is coarse", [coarse], FIRST),
        row_of("a JPEG of 20 megapixels, choice of the file to its result", [opened], OPENED),
    ]
    report: dict[str, Any] = {
        "machine": machine(),
        "chromium": browser,
        "date": time.strftime("%Y-%m-%d"),
        "load_per_core": os.getloadavg()[0] / (os.cpu_count() or 1),
        "processor_seconds_a_move": spent,
        "all": every,
        "first_picture": firsts,
        "best": {"first": summary(coarse), "settled": summary(final)},
        "large": summary(opened),
        **{kind.replace(" ", "_"): summary(times) for kind, times in kinds.items()},
        "sliders": {name: summary(found) for name, found in settled.items()},
        "rows": [vars(row) for row in rows],
    }
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        from nlflow.desk.explorer import denoise_tab  # noqa: F401  # what the server has loaded: the record's sources

        keep(arguments.out, "explorer", report)


if __name__ == "__main__":
    main()
