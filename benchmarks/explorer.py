"""How soon the explorer answers: ``python -m benchmarks.explorer [--out DIR] [--moves N] [--screenshot FILE]``.

Sliders of the tab "Denoise" are moved by keyboard in a headless Chromium, on the preview of 256 x 256 pixels of the
built-in example, and the time from the move to the changed picture is taken in the page itself. Sliders of fidelity and
time keep the weights of patches, those of noise, width, patch and window compute them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, machine
from benchmarks.scaleout import processes
from tests.explorer import Page, browsing, missing, serving

TARGET = 0.3  # seconds
SLIDERS = {"fidelity": "weights kept", "steps": "weights kept", "sigma": "weights anew", "width": "weights anew",
           "patch_size": "weights anew", "search_radius": "weights anew"}  # fmt: skip

# Moves one slider as a key would and waits until the pictures have another number and are decoded.
_MOVE = """
const [slider, view, value, done] = arguments;
const start = performance.now(), before = view.dataset.serial;
slider.value = value;
slider.dispatchEvent(new Event("input"));
const look = async () => {
  if (view.dataset.serial === before) { requestAnimationFrame(look); return; }
  await Promise.all([...view.querySelectorAll("img")].map((one) => one.decode()));
  done(performance.now() - start);
};
requestAnimationFrame(look);
"""


def measure(page: Page, moves: int) -> dict[str, list[float]]:
    """Return the seconds of each move, by slider; the first move of each is not counted."""
    page.driver.set_script_timeout(60)
    found: dict[str, list[float]] = {}
    for name in SLIDERS:
        slider, view = page.knob(name), page.one(".views")
        low, high, step = (float(slider.get_attribute(word)) for word in ("min", "max", "step"))
        count = int((high - low) / step) + 1
        times = []
        for k in range(moves + 1):
            # From a third of the range on, back and forth: each value differs from the one before.
            value = low + step * ((count // 3 + 1 + k % 7) % count)
            times.append(page.driver.execute_async_script(_MOVE, slider, view, str(round(value, 6))) / 1000)
            time.sleep(0.1)  # the rest of the page: curves and texts
        found[name] = times[1:]
        box = page.one(f'.nl-knob[data-name="{name}"] input[type=checkbox]')
        page.settled(box.click)
    return found


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
    """Return median and 95th percentile."""
    return {"median": statistics.median(times), "p95": statistics.quantiles(times, n=20)[18], "moves": len(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=15, help="of each slider")
    parser.add_argument("--out", type=Path, help="folder for explorer.json")
    parser.add_argument("--screenshot", type=Path, help="also write a picture of the page")
    arguments = parser.parse_args()
    if why := missing():
        parser.error(f"{why} here")
    with serving() as (url, server), browsing(url, width=1280, height=1060) as page:
        page.open()
        if arguments.screenshot is not None:
            photograph(page, arguments.screenshot)
        roots = [server.pid, page.driver.service.process.pid]
        before = processor_seconds(roots)
        times = measure(page, arguments.moves)
        spent = (processor_seconds(roots) - before) / (len(SLIDERS) * (arguments.moves + 1))
        browser = page.driver.capabilities["browserVersion"]
    kept = [t for name, found in times.items() if SLIDERS[name] == "weights kept" for t in found]
    anew = [t for name, found in times.items() if SLIDERS[name] == "weights anew" for t in found]
    every = summary([*kept, *anew])
    ours = f"{every['median']:.3f} s median, {every['p95']:.3f} s 95 %"
    row = Row("explorer", "a slider of the 256 x 256 preview, move to picture", "-", ours, every["p95"] / TARGET,
              f"95 % <= {TARGET} s", every["p95"] <= TARGET)  # fmt: skip
    report: dict[str, Any] = {
        "machine": machine(),
        "chromium": browser,
        "date": time.strftime("%Y-%m-%d"),
        "load_per_core": os.getloadavg()[0] / (os.cpu_count() or 1),
        "processor_seconds_a_move": spent,
        "all": every,
        "weights_kept": summary(kept),
        "weights_anew": summary(anew),
        "sliders": {name: summary(found) for name, found in times.items()},
        "row": vars(row),
    }
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "explorer.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
