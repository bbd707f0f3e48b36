"""The explorer in a real browser under fingers, the wheel and a dragged slider, on a wide page and on a telephone's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.explorer import Page, browsing, missing, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is all")]

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
CTRL = 2  # of the modifiers of CDP


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with serving() as (url, _), browsing(url) as one:
        one.open()
        yield one
        assert one.errors() == []


@pytest.fixture
def phone(page: Page) -> Iterator[Page]:
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 5})
    page.wait(lambda: page.driver.execute_script("return innerWidth") == PHONE["width"], "the width")
    yield page
    page.driver.execute_script("scrollTo(0, 0)")
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(autouse=True)
def whole(page: Page) -> None:
    page.one(".zoom [data-do=fit]").click()


def box(page: Page, element: Any) -> dict[str, float]:
    """Return where an element is in the window."""
    found = page.driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", element)
    return {name: float(found[name]) for name in ("left", "top", "width", "height", "bottom")}


def lens(page: Page) -> tuple[float, float, float]:
    """Return how much larger the first picture is than its frame, and where it begins, in shares of the frame."""
    frame, image = box(page, page.all(".frame")[0]), page.all(".frame img")[0]
    found = page.driver.execute_script("return getComputedStyle(arguments[0]).transform", image)
    scale, _, _, _, x, y = (float(word) for word in found[7:-1].split(","))
    return scale, x / frame["width"], y / frame["height"]


def touch(page: Page, kind: str, *points: tuple[float, float]) -> None:
    fingers = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})


def below(share: float, place: tuple[float, float, float], axis: int) -> float:
    """Return what of the picture, in shares, lies under a place of the frame."""
    return (share - place[1 + axis]) / place[0]


def test_the_wheel_zooms_about_the_pointer(page: Page) -> None:
    frame = box(page, page.all(".frame")[0])
    px, py = 0.7, 0.3
    at = {"x": frame["left"] + px * frame["width"], "y": frame["top"] + py * frame["height"]}
    before = lens(page)
    for _ in range(3):
        page.driver.execute_cdp_cmd(
            "Input.dispatchMouseEvent", {"type": "mouseWheel", "deltaX": 0, "deltaY": -120, "modifiers": CTRL, **at}
        )
    after = page.wait(lambda: lens(page) if lens(page)[0] > 3 else None, "a larger picture")
    assert after[0] == pytest.approx(2.718281828 ** (3 * 120 / 300), rel=1e-3)
    assert below(px, after, 0) == pytest.approx(below(px, before, 0), abs=2e-3)
    assert below(py, after, 1) == pytest.approx(below(py, before, 1), abs=2e-3)
    # Without the key the wheel scrolls the page.
    page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseWheel", "deltaX": 0, "deltaY": 200, **at})
    page.wait(lambda: page.driver.execute_script("return scrollY") > 0, "a scrolled page")
    assert lens(page) == after
    page.driver.execute_script("scrollTo(0, 0)")


def test_two_fingers_zoom_and_one_moves(phone: Page) -> None:
    frame = box(phone, phone.all(".frame")[0])
    x, y, side = frame["left"], frame["top"], frame["width"]
    before = lens(phone)
    touch(phone, "touchStart", (x + 0.4 * side, y + 0.5 * side), (x + 0.6 * side, y + 0.5 * side))
    for k in range(1, 11):  # apart, and both to the right by a tenth
        spread, right = 0.1 + 0.02 * k, 0.01 * k
        touch(
            phone, "touchMove",
            (x + (0.5 - spread + right) * side, y + 0.5 * side), (x + (0.5 + spread + right) * side, y + 0.5 * side),
        )  # fmt: skip
    touch(phone, "touchEnd")
    after = phone.wait(lambda: lens(phone) if lens(phone)[0] > 2.9 else None, "a larger picture")
    assert after[0] == pytest.approx(3.0, rel=0.01)
    # What lay between the fingers still does.
    assert below(0.6, after, 0) == pytest.approx(below(0.5, before, 0), abs=0.01)
    assert below(0.5, after, 1) == pytest.approx(below(0.5, before, 1), abs=0.01)
    touch(phone, "touchStart", (x + 0.2 * side, y + 0.2 * side))
    for k in range(1, 6):
        touch(phone, "touchMove", (x + (0.2 + 0.02 * k) * side, y + (0.2 + 0.03 * k) * side))
    touch(phone, "touchEnd")
    moved = lens(phone)
    assert moved[0] == after[0]
    assert moved[1] - after[1] == pytest.approx(0.10, abs=0.01)
    assert moved[2] - after[2] == pytest.approx(0.15, abs=0.01)
    assert phone.driver.execute_script("return scrollY") == 0
    assert phone.driver.execute_script("return visualViewport.scale") == 1  # the page itself is not zoomed


def test_a_double_tap_enlarges_and_fits_again(phone: Page) -> None:
    frame = box(phone, phone.all(".frame")[0])
    at = frame["left"] + 0.25 * frame["width"], frame["top"] + 0.25 * frame["height"]

    def tap_twice() -> None:
        for _ in range(2):
            touch(phone, "touchStart", at)
            touch(phone, "touchEnd")

    before = lens(phone)
    tap_twice()
    after = phone.wait(lambda: lens(phone) if lens(phone)[0] > 1 else None, "a larger picture")
    assert below(0.25, after, 0) == pytest.approx(below(0.25, before, 0), abs=0.01)
    time.sleep(0.5)  # else three taps
    tap_twice()
    phone.wait(lambda: lens(phone) == before, "the whole picture")


def test_a_finger_moves_the_divider(phone: Page) -> None:
    frame, row = box(phone, phone.all(".frame")[0]), phone.one(".views .row")
    y = frame["top"] + 0.5 * frame["height"]
    touch(phone, "touchStart", (frame["left"] + 0.5 * frame["width"], y))
    for share in (0.4, 0.3, 0.2):
        touch(phone, "touchMove", (frame["left"] + share * frame["width"], y))
    touch(phone, "touchEnd")
    cut = phone.driver.execute_script("return arguments[0].style.getPropertyValue('--cut')", row)
    assert float(cut.rstrip("%")) == pytest.approx(20, abs=1)
    assert lens(phone)[0] == 1


def test_a_telephone_keeps_the_picture_in_view(phone: Page) -> None:
    last = phone.knob("white")
    phone.driver.execute_script("arguments[0].scrollIntoView({block: 'end'})", last)
    frame = phone.one(".frame")  # one picture at a time
    place = box(phone, frame)
    assert phone.driver.execute_script("return scrollY") > PHONE["height"] / 2
    assert place["top"] >= 0
    assert place["bottom"] <= 0.52 * PHONE["height"]
    assert place["height"] > 0.3 * PHONE["height"]
    assert box(phone, phone.one(".nl-status"))["top"] >= 0
    knob = box(phone, last)
    # The control lies below the picture, and a finger on it meets it.
    assert place["bottom"] < knob["top"] < PHONE["height"]
    which = phone.one(".tools .which")
    assert [one.text for one in which.find_elements("css selector", "option")] == ["noisy | result", "removed", "clean"]
    which.send_keys("removed")
    phone.wait(lambda: phone.one(".frame img").get_attribute("alt") == "removed picture", "the other picture")
    assert box(phone, phone.one(".frame"))["height"] == pytest.approx(place["height"], abs=1)
    which.send_keys("noisy")
    phone.wait(lambda: len(phone.all(".frame img")) == 2, "both again")


DRAG = """
const [slider, view, done] = arguments, [low, high] = [Number(slider.min), Number(slider.max)];
const grey = () => {
  for (let one = view; one; one = one.parentNode || one.host)
    if (one.nodeType === 1 && getComputedStyle(one).opacity < 1) return true;
  return false;
};
const start = performance.now();
let pictures = 0, early = 0, last = 0, serial = view.dataset.serial;
const step = () => {
  const now = performance.now() - start;
  if (view.dataset.serial !== serial) { serial = view.dataset.serial; pictures++; last = now; }
  if (now - last < 450 && grey()) early++;
  if (now > 3000) { done([pictures, early]); return; }
  slider.value = low + (high - low) * (0.3 + 0.3 * now / 3000);
  slider.dispatchEvent(new Event("input"));
  requestAnimationFrame(step);
};
requestAnimationFrame(step);
"""


def test_a_dragged_slider_shows_pictures_and_is_not_grey(page: Page) -> None:
    """At every frame of the screen the slider moves on: answers come, and only a late one lets it turn grey."""
    slider, view = page.knob("width"), page.one(".views .row").find_element("xpath", "..")
    page.driver.set_script_timeout(60)
    page.settled(lambda: page.knob("width").send_keys("\ue014"))  # all is compiled
    pictures, early = page.driver.execute_async_script(DRAG, slider, view)
    page.wait(lambda: page.kind() == "done", "the last picture")
    assert pictures >= 2
    assert early == 0
