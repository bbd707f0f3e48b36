"""The explorer in a real browser: what is seen is what the copied texts compute, and nothing leaves this machine."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.io import wavfile
from skimage import data

from nlflow import NlflowWarning
from nlflow.desk.explorer import pictures
from tests.desk.test_explore_colours import contrast, luminance
from tests.desk.test_explore_views import executed, layers_report, small_image, small_sound
from tests.explorer import Page, browsing, missing, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is all")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explorer")
    small_image(folder / "a.png")
    small_image(folder / "large.png", (500, 700))
    small_sound(folder / "a.wav")
    dark = 3600 / 255 * data.camera() + 200 + np.random.default_rng(0).normal(0, 120, (512, 512))  # 12 bits
    tifffile.imwrite(folder / "twelve.tif", np.clip(np.rint(dark), 0, 4095).astype(np.uint16))
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "huge.png").write_bytes(bytes(3 * 2**20))
    (folder / "result.json").write_text(json.dumps(layers_report()))
    (folder / "downloads").mkdir()
    return folder


@pytest.fixture(scope="module")
def page(place: Path) -> Iterator[Page]:
    with serving("--max-upload", "2") as (url, _), browsing(url, place / "downloads") as one:
        one.open()
        yield one


@pytest.fixture(autouse=True)
def nothing_is_wrong(page: Page) -> Iterator[None]:
    """After each test: no error in the console, and no request to anywhere else."""
    yield
    assert page.errors() == []
    for address in page.requests():
        assert address.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:http://127.0.0.1:")), address


def keys(*names: str) -> str:
    from selenium.webdriver.common.keys import Keys

    return "".join(getattr(Keys, name) for name in names)


def send(page: Page, path: Path, name: str = "noisy", kind: str = "done") -> str:
    element = page.one(f'.drop[data-name="{name}"] input')
    return page.settled(lambda: element.send_keys(str(path)), kind)


def seen(page: Page, name: str) -> np.ndarray[Any, Any]:
    """Return the pixels of a picture that is shown."""
    element = next(one for one in page.all(".frame img") if one.get_attribute("alt") == f"{name} picture")
    content = base64.b64decode(element.get_attribute("src").partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)))


def last_line(page: Page) -> str:
    """Return the path of the line that the first chart has drawn last."""
    return str(page.all(".chart")[0].find_elements("css selector", "path")[-1].get_attribute("d"))


def agrees(page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python text that the page shows, hold what is seen against it, and return what it makes."""
    monkeypatch.chdir(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NlflowWarning)
        copied = executed(page.python())
    shown = [one.text for one in page.all("p.note")]
    assert all(str(one.message) in shown for one in told), (told, shown)
    levels = pictures.grey_scale(copied["noisy"]).levels
    assert np.array_equal(seen(page, "noisy"), levels(copied["noisy"]))
    assert np.array_equal(seen(page, "result"), levels(copied["result"]))
    rest = pictures.residual_scale(copied["info"].sigma)
    assert np.array_equal(seen(page, "removed"), rest.levels(copied["noisy"].astype(float) - copied["result"]))
    shown = page.numbers()
    assert shown["noise σ"].startswith(f"{copied['info'].sigma:.4g} ")
    assert shown["removed, rms"].startswith(f"{copied['info'].residual:.4g} ")
    assert shown["width"] == f"{copied['info'].parameters['width']:.4g}"
    return copied


def test_the_example_is_what_its_text_computes(
    page: Page, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agrees(page, place, monkeypatch)
    before, after = (float(word) for word in capsys.readouterr().out.splitlines()[0].split()[1:])
    assert page.numbers()["PSNR"] == f"{before:.2f} dB → {after:.2f} dB"


def test_marks_of_an_axis_differ(page: Page) -> None:
    """What is constant to rounding is drawn as a constant."""
    for drawing in page.all(".chart svg"):
        marks = [one.text for one in drawing.find_elements("css selector", "text[text-anchor=end]")]
        assert len(set(marks)) == len(marks), marks


@pytest.mark.parametrize("name", ["sigma", "fidelity", "steps", "width", "patch_size", "search_radius"])
def test_every_slider_by_keyboard(page: Page, name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, text = seen(page, "result"), page.python()
    slider = page.knob(name)
    page.settled(lambda: slider.send_keys(keys("ARROW_RIGHT")))
    page.settled(lambda: slider.send_keys(keys("ARROW_RIGHT", "ARROW_RIGHT")))
    assert page.python() != text
    assert f"{name}=" in page.python()
    assert not np.array_equal(seen(page, "result"), picture)
    copied = agrees(page, place, monkeypatch)
    field = page.one(f'.nl-knob[data-name="{name}"] input[type=number]')
    # An automatic number is a step of the slider only by chance.
    assert float(field.get_attribute("value")) == pytest.approx(float(slider.get_attribute("value")), rel=1e-3)
    assert f"{name}={float(field.get_attribute('value')):g}" in page.python()
    assert copied["result"].shape == picture.shape
    box = page.one(f'.nl-knob[data-name="{name}"] input[type=checkbox]')
    assert not box.is_selected()
    page.settled(lambda: box.send_keys(" "))  # chosen again
    assert np.array_equal(seen(page, "result"), picture)


def test_undo_swipe_and_blink(page: Page) -> None:
    picture = seen(page, "result")
    page.settled(lambda: page.knob("sigma").send_keys(keys("HOME")))
    assert not np.array_equal(seen(page, "result"), picture)
    undo = page.button("Undo to defaults")
    page.settled(undo.click)
    assert np.array_equal(seen(page, "result"), picture)
    frame, divider = page.one(".views .row"), page.one(".divider")
    divider.send_keys(keys("HOME"))
    assert page.driver.execute_script("return arguments[0].style.getPropertyValue('--cut')", frame) == "0%"
    page.one("button.blink").click()
    page.wait(lambda: "first" in frame.get_attribute("class"), "the noisy picture")
    page.wait(lambda: "first" not in frame.get_attribute("class"), "the result")
    page.one("button.blink").click()
    assert "blink" not in frame.get_attribute("class")


def test_files_are_opened_and_saved(page: Page, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(page, place / "a.png").startswith("a.png: ")
    copied = agrees(page, place, monkeypatch)
    assert copied["noisy"].shape == (40, 52)
    send(page, place / "clean-a.png", "clean")
    assert "PSNR" in page.numbers()
    assert executed(page.python())["clean"].shape == (40, 52)
    words = page.command().split()
    assert words[:3] == ["nonlocal", "denoise", "a.png"]
    done = subprocess.run(
        [sys.executable, "-m", "nlflow.desk.commands.main", *words[1:]], cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    save = page.button("Download result")
    page.settled(save.click)
    saved = place / "downloads" / "a-denoised.png"
    page.wait(saved.exists, "the file")
    with Image.open(saved) as ours, Image.open(place / "a-denoised.png") as theirs:
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_broken_and_large_files_are_refused_and_nothing_is_left(page: Page, place: Path) -> None:
    def empty() -> bool:
        return not page.all(".frame, table.numbers, .nl-code, .chart, .nl-knob")

    assert send(page, place / "broken.png", kind="error").startswith("broken.png: got a text file")
    page.wait(empty, "an empty page")
    assert "huge.png: got 3 MiB, expected at most 2 MiB" in send(page, place / "huge.png", kind="error")
    # Dropped, not chosen: the browser hands over files of a drag in this form.
    drop = """
    const files = new DataTransfer();
    files.items.add(new File(["no picture either"], "dropped.png"));
    arguments[0].dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true}));
    """
    element = page.one('.drop[data-name="noisy"]')
    words = page.settled(lambda: page.driver.execute_script(drop, element), "error")
    assert words.startswith("dropped.png: got ")
    assert words.endswith("Nothing is shown: open another file.")
    assert empty()
    assert send(page, place / "a.png").startswith("a.png: ")
    page.wait(lambda: page.all(".frame") and page.all(".nl-knob"), "the page again")


def test_all_pictures_are_moved_together(page: Page, place: Path) -> None:
    send(page, place / "large.png")
    row = page.one(".views .row")

    def moves() -> list[tuple[float, ...]]:
        look = "return arguments[0].map((one) => getComputedStyle(one).transform)"
        found = page.driver.execute_script(look, page.all(".frame img"))
        return [tuple(float(word) for word in one[7:-1].split(",")) for one in found]

    def zoom() -> float:
        return float(page.one(".zoom output").text.split()[0]) / 100

    fit = zoom()
    assert {one[0] for one in moves()} == {1.0}
    page.one(".zoom [data-do=true]").click()
    assert zoom() == 1.0
    assert [one[0] for one in moves()] == pytest.approx([1 / fit] * 3, rel=0.01)
    page.one(".zoom [data-do=fit]").click()
    frame = page.all(".frame")[0]
    frame.send_keys("++")
    assert [one[0] for one in moves()] == pytest.approx([1.5**2] * 3)
    before = moves()
    drag = """
    const [frame] = arguments, box = frame.getBoundingClientRect();
    const at = (type, x, y) => frame.dispatchEvent(new PointerEvent(type, {pointerId: 1, buttons: 1, bubbles: true,
      clientX: box.left + x, clientY: box.top + y}));
    frame.setPointerCapture = () => {};
    at("pointerdown", 50, 50); at("pointermove", 80, 70); at("pointerup", 80, 70);
    """
    page.driver.execute_script(drag, frame)
    after = moves()
    assert after[0][4] - before[0][4] == pytest.approx(30, abs=0.01)
    assert after[0][5] - before[0][5] == pytest.approx(20, abs=0.01)
    assert after[1] == after[0]  # the result lies on the noisy one
    shares = [(one[4] / image.size["width"] * one[0]) for one, image in zip(after, page.all(".frame img"), strict=True)]
    assert shares == pytest.approx([shares[0]] * 3, rel=0.01)  # the others, which are smaller, show the same place
    page.settled(lambda: page.knob("sigma").send_keys(keys("ARROW_RIGHT")))
    assert moves() == after  # a new result is seen where the user looks
    send(page, place / "a.png")
    page.wait(lambda: {one[0] for one in moves()} == {1.0}, "the whole of another picture")
    assert row.is_displayed()


def test_twelve_bits_are_not_black(page: Page, place: Path) -> None:
    """A picture whose noise was white to rounding once ended the scripts of its page."""
    send(page, place / "twelve.tif")
    levels = seen(page, "noisy")
    assert levels.mean() > 60
    assert (levels == 255).mean() < 0.01
    black = page.knob("black")
    text = page.python()
    page.settled(lambda: black.send_keys(keys("END")))
    assert seen(page, "noisy").mean() < 10
    assert page.python() == text  # it is only looked at in another way
    box = page.one('.nl-knob[data-name="black"] input[type=checkbox]')
    page.settled(box.click)
    assert np.array_equal(seen(page, "noisy"), levels)


def test_the_last_picture_is_grey_until_the_next(page: Page, place: Path) -> None:
    send(page, place / "large.png")
    quality = page.choice("quality")
    script = """
    const dim = (one) => one.nodeType === 1 && getComputedStyle(one).opacity < 1;
    const grey = (one) => one && (dim(one) || grey(one.parentNode || one.host));
    return [...arguments].filter(grey).length;
    """

    def grey() -> int:
        """Return how many of the picture and the numbers are grey, at one moment; a result brings new ones."""
        return int(page.driver.execute_script(script, page.all(".frame")[0], page.one("table.numbers")))

    assert grey() == 0

    def begin() -> None:
        quality.send_keys("best")
        page.wait(lambda: grey() == 2, "grey")

    page.settled(begin)
    page.wait(lambda: grey() == 0, "the new picture")
    page.settled(lambda: quality.send_keys("fast"))


def test_a_large_picture_is_shown_in_part_and_a_long_run_can_be_ended(page: Page, place: Path) -> None:
    send(page, place / "large.png")
    part = page.one("p.part").text
    assert "256 × 256" not in part
    assert "of 500 × 700" in part
    assert seen(page, "result").shape == (256, 256)
    top = page.knob("place_0")
    page.settled(lambda: top.send_keys(keys("HOME")))
    assert "pixels 0–255 × " in page.one("p.part").text
    assert "Compute in full" not in page.python()
    picture = seen(page, "result")
    quality = page.choice("quality")
    page.settled(lambda: quality.send_keys("balanced"))
    page.wait(lambda: not page.all('.nl-knob[data-name="steps"]'), "what balanced has not")
    full = page.button("Compute in full")
    quality.send_keys("best")
    page.wait(lambda: page.kind() == "busy", "the long run")
    full.click()
    cancel = page.wait(lambda: page.one(".nl-status button.cancel"), "the button")
    bar = page.one(".nl-status progress")
    page.wait(lambda: float(bar.get_attribute("value") or 0) > 0.01, "progress")
    page.settled(cancel.click, "idle")
    assert page.status().startswith("cancelled")
    # And the page goes on, at once.
    page.settled(lambda: quality.send_keys("fast"))
    assert seen(page, "result").shape == picture.shape
    page.settled(full.click)
    assert seen(page, "result").shape == (500, 700)
    assert page.all("p.part") == []


def test_a_sound_is_shown_as_lines(page: Page, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(page, place / "a.wav")
    assert page.all(".frame") == []
    page.wait(lambda: "time in seconds" in "".join(one.text for one in page.all(".chart")), "seconds")
    monkeypatch.chdir(place)
    copied = executed(page.python())
    assert copied["result"].shape == (900,)
    assert page.numbers()["noise σ"].startswith(f"{copied['info'].sigma:.4g} ")
    before = last_line(page)
    page.settled(lambda: page.knob("fidelity").send_keys(keys("END")))
    page.wait(
        lambda: page.all(".chart")[0].find_elements("css selector", "path")[-1].get_attribute("d") != before, "lines"
    )
    assert "fidelity=4.0" in page.python()


def test_a_sound_is_heard_before_and_after(page: Page, place: Path) -> None:
    """What the browser plays is the file, the denoised file, and their difference, sample by sample."""
    send(page, place / "a.wav")
    players = page.wait(lambda: page.all(".nl-sounds audio"), "the players")
    assert [one.get_attribute("aria-label") for one in players] == ["noisy", "result", "removed"]
    read = """
    const [audio, done] = arguments;
    fetch(audio.src).then((answer) => answer.arrayBuffer()).then((content) => done([...new Uint8Array(content)]));
    """
    noisy, result, removed = (
        wavfile.read(io.BytesIO(bytes(page.driver.execute_async_script(read, one)))) for one in players
    )
    assert np.array_equal(noisy[1], wavfile.read(place / "a.wav")[1])
    assert np.abs(noisy[1] - result[1].astype(int) - removed[1]).max() <= 1  # both are rounded
    duration = "return arguments[0].duration"
    page.wait(lambda: page.driver.execute_script(duration, players[1]) == pytest.approx(900 / 8000), "a sound")
    assert "PNG" not in page.button("Download result").text
    save = place / "downloads" / "a-denoised.wav"
    page.settled(page.button("Download result").click)
    page.wait(save.exists, "the file")
    assert np.array_equal(wavfile.read(save)[1], result[1])


def test_the_flow(page: Page) -> None:
    page.tab("Flow")
    page.wait(lambda: page.all(".choice-signal") and page.kind() == "done", "the flows")
    copied = executed(page.python())
    shown = page.numbers()
    assert shown["slowest rate μ₂ of J"].startswith(f"{copied['rate']:.4g}: ")
    assert shown["distance to the constant, E, at the end"] == f"{copied['distance_e'][-1]:.4g}"
    assert shown["kept in the equilibrium of E"].startswith(f"{copied['kept']:.4g} ")
    for name in ("noise", "width", "fidelity", "span"):
        before = page.python()
        page.settled(lambda name=name: page.knob(name).send_keys(keys("ARROW_RIGHT")))
        assert page.python() != before
    told = page.one(".nl-player output")
    line = states(page)
    page.one(".nl-player input").send_keys(keys("HOME"))
    page.wait(lambda: told.text == "t = 0", told.text)
    assert states(page) != line
    page.wait(lambda: "moment=0" in page.address(), "the moment in the address")
    page.settled(lambda: page.choice("signal").send_keys("a disc"))
    assert (len(page.all("img")), len(page.all("canvas"))) == (2, 2)
    copied = executed(page.python())
    page.one(".nl-player .restart").click()
    page.one(".nl-player .play").click()  # pause
    page.one(".nl-player input").send_keys(keys("END"))
    shown = page.driver.execute_script(LEVELS, page.all("canvas")[1])
    levels = pictures.grey_scale(copied["observed"]).levels(copied["e"][-1])
    assert np.array_equal(np.array(shown).reshape(128, 128), levels)


def states(page: Page) -> list[str]:
    """Return the paths of the lines of the first chart."""
    return [one.get_attribute("d") for one in page.all(".chart")[0].find_elements("css selector", "path")]


LEVELS = """
const [canvas] = arguments, {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return [...data].filter((_, k) => k % 4 === 0);
"""
FRAMES = """
const [player, canvas, done] = arguments, seen = [];
let last = "";
const start = performance.now(), context = canvas.getContext("2d");
player.querySelector(".restart").click();
const look = () => {
  const now = performance.now() - start, sum = context.getImageData(0, 0, 128, 128).data.reduce((a, b) => a + b, 0);
  if (sum !== last) { last = sum; seen.push(now); }
  if (now < 3000) requestAnimationFrame(look); else { player.querySelector(".play").click(); done(seen.length); }
};
requestAnimationFrame(look);
"""


def test_a_flow_of_128_x_128_runs_with_ten_pictures_a_second(page: Page) -> None:
    """Pictures are counted on the canvas: those that differ from the one before, in three seconds."""
    page.open(f"{page.address().split('#')[0]}#tab=flow&signal=photograph")
    page.driver.set_script_timeout(60)
    pictures = page.driver.execute_async_script(FRAMES, page.one(".nl-player"), page.all("canvas")[0])
    assert pictures >= 30
    curve = [one.find_elements("css selector", "path")[1] for one in page.all(".chart")[:1]]
    assert curve[0].get_attribute("d").count("L") < 160  # it is drawn as far as the flow has run
    moment = page.one(".nl-player output").text
    page.one(".nl-player .on").click()
    assert page.one(".nl-player output").text != moment
    calm = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", calm)
    calm_pictures = page.driver.execute_async_script(FRAMES, page.one(".nl-player"), page.all("canvas")[0])
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert calm_pictures <= 5
    print(pictures, "pictures in 3 s")


def test_the_layers(page: Page, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.tab("Layers")
    page.wait(lambda: page.status().startswith("example.json: ViTModel"), "the example")
    assert "broken.png: got a file of another kind" in send(page, place / "broken.png", "trace", "error")
    assert send(page, place / "result.json", "trace") == "result.json: ViTModel, 2 run(s), 17 tokens"
    monkeypatch.chdir(place)
    copied = executed(page.python())
    assert copied["quantity"] == "J"
    titles = [one.find_elements("css selector", "title") for one in page.all(".chart rect")]
    cells = {title.get_attribute("textContent") for found in titles for title in found}
    for layer, values in copied["heads"][0.0].items():
        for head, value in enumerate(values):
            assert any(
                cell.startswith(f"{layer}, head {head}: ") and float(cell.split()[-1]) == value for cell in cells
            )
    page.choice("run").send_keys("NeuTRENO")
    page.wait(lambda: "NeuTRENO" in page.all(".chart figcaption")[-1].text, "the other run")
    assert page.command() == "nonlocal explore --trace result.json"


def test_tabs_and_parts_are_reached_by_keyboard(page: Page) -> None:
    page.tab("Layers")
    bar = [one for one in page.all("[role=tab]") if one.get_attribute("tabindex") == "0"]
    assert len(bar) == 1
    bar[0].send_keys(keys("ARROW_RIGHT"))  # round to the first
    page.wait(lambda: page.all('.drop[data-name="noisy"]'), "the tab")
    names = {one.get_attribute("textContent").strip() or one.get_attribute("aria-label") for one in page.all("button")}
    assert "" not in names
    for element in page.all("input, select"):
        label = page.driver.execute_script("return arguments[0].labels.length || arguments[0].ariaLabel", element)
        assert label, element.get_attribute("outerHTML")
        assert int(element.get_attribute("tabIndex")) >= 0


def test_names_in_files_are_no_html(page: Page, place: Path) -> None:
    """Names come from outside: they are shown letter by letter, as text."""
    name = "<img src=x onerror=\"document.title='taken over'\"> &lt;b&gt; &amp; $x$"
    text = json.dumps({**layers_report(), "kind": name}).replace('"layer.1"', json.dumps(name))
    (place / "odd.json").write_text(text)
    page.tab("Layers")
    page.wait(lambda: page.all('.drop[data-name="trace"]'), "the tab")
    assert send(page, place / "odd.json", "trace") == f"odd.json: {name}, 2 run(s), 17 tokens"
    page.wait(lambda: name in [one.text for one in page.all("table.numbers th")], "the name")
    assert page.all("table.numbers img, .nl-status img") == []
    assert page.driver.title == "nonlocal explore"


COLOURS = """
const texts = [], root = (one) => one.parentElement ?? one.getRootNode().host;
const visit = (top) => {
  for (const one of top.querySelectorAll("*")) {
    if (one.shadowRoot) visit(one.shadowRoot);
    const text = [...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || one.matches("style, script, option") || one.disabled || one.closest(".off, .frame, svg")
      || !one.checkVisibility()) continue;
    let under = one;
    while (under && getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)") under = root(under);
    texts.push([text, getComputedStyle(one).color, getComputedStyle(under ?? document.body).backgroundColor]);
  }
};
visit(document);
return texts;
"""
TABS = ["Denoise", "Flow", "Proposition 1", "Layers"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", TABS)
def test_every_text_can_be_read(page: Page, name: str, scheme: str) -> None:
    wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
    page.tab(name)
    page.wait(lambda: page.kind() == "done", "the tab")
    page.wait(lambda: not page.driver.execute_script("return document.getAnimations().length"), "rest")
    texts = page.driver.execute_script(COLOURS)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(texts) > 10
    assert (luminance(hexadecimal(texts[0][2])) < 0.1) == (scheme == "dark")
    weak = [one for one in texts if contrast(*map(hexadecimal, one[1:])) < 4.5]
    assert weak == []


def hexadecimal(colour: str) -> str:
    """Return a colour as styles are computed, ``rgb(1, 2, 3)``, in the form #010203."""
    return "#" + "".join(f"{int(word):02x}" for word in re.findall(r"\d+", colour)[:3])


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", TABS)
def test_no_page_needs_scrolling_to_the_side(page: Page, name: str, width: int) -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    page.tab(name)
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.wait(lambda: page.driver.execute_script("return innerWidth") == width, "the width")
        page.wait(lambda: page.driver.execute_script("return document.documentElement.scrollWidth") <= width, "room")
        for element in page.all("button, input, select, figure, table.numbers td, .drop"):
            box = element.rect
            inside = page.driver.execute_script("return !!arguments[0].closest('.wide')", element)
            assert inside or (box["x"] >= 0 and box["x"] + box["width"] <= width + 1), element.get_attribute(
                "outerHTML"
            )[:200]
        if name == "Denoise" and width < 500:  # the picture comes first, as large as half the height allows
            picture = page.all(".frame, .chart")[0].rect
            assert picture["y"] < 260
            assert picture["width"] > 340 or picture["height"] > 290
            assert all(one.rect["y"] > picture["y"] for one in page.all(".nl-knob, .drop"))
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_address_opens_the_page_as_it_was(page: Page) -> None:
    """A control is moved, the address is opened in another page: it shows the same; nonsense in it is named there."""
    page.open()
    address = page.address()
    page.settled(lambda: page.knob("sigma").send_keys(keys("HOME")))
    page.wait(lambda: page.address() != address, "the address of the new setting")
    assert "sigma=0.5&" in page.address()
    text, picture, address = page.python(), seen(page, "result"), page.address()
    page.open(address)
    assert page.python() == text
    assert np.array_equal(seen(page, "result"), picture)
    assert page.all("p.refused") == []
    page.driver.execute_script("location.hash = 'tab=flow&width=9&kernel=Laplace'")
    page.wait(lambda: page.all("p.refused") and page.kind() == "done", "the other tab")  # which counts from anew
    assert page.one("p.refused").text == "width: got '9', expected a number from 0.01 to 0.3"
    assert "Laplace(0.03)" in page.python()
    page.open()  # as the other tests expect it


def test_the_page_says_when_the_server_has_gone() -> None:
    with serving() as (url, process), browsing(url) as other:
        other.open()
        assert other.all(".nl-gone") == []
        process.terminate()
        notice = other.wait(lambda: other.one(".nl-gone"), "the notice")
        assert notice.get_attribute("role") == "alert"
        assert "Start `nonlocal explore` again" in notice.text
