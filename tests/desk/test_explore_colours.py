"""The colours of the explorer: every text can be read, light and dark, and each colour stands in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nlflow.desk.explorer
from nlflow.plotting.base import PALETTE

FOLDER = Path(nlflow.desk.explorer.__file__).parent
THEME = (FOLDER / "components" / "theme.css").read_text(encoding="utf-8")
COLOURS = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", THEME)
}
TEXTS = [("ink", "paper"), ("ink-2", "paper"), ("ink-3", "paper"), ("off", "paper"), ("good", "paper"),
         ("bad", "paper"), ("accent", "paper"), ("ink", "hover"), ("accent", "hover"), ("ink", "box"),
         ("on-accent", "accent"), ("on-accent", "accent-2"), ("bad-ink", "bad-paper"),
         ("ink", "part-paper")]  # fmt: skip
DRAWN = [("edge", "paper"), ("given", "paper"), ("mark", "paper"), ("on-mark", "mark"), ("line-0", "paper"),
         ("line-1", "paper"), ("line-2", "paper"), ("line-5", "paper")]  # fmt: skip


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(share * one for share, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # a known pair that just fails


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize(("pairs", "least"), [(TEXTS, 4.5), (DRAWN, 3.0)], ids=["texts", "drawn"])
def test_what_is_written_and_drawn_is_seen(pairs: list[tuple[str, str]], least: float, mode: str) -> None:
    found = {pair: contrast(*(COLOURS[name][mode] for name in pair)) for pair in pairs}
    assert {pair: ratio for pair, ratio in found.items() if ratio < least} == {}


def test_colours_stand_in_one_place() -> None:
    assert [COLOURS[f"line-{k}"]["light"] for k in range(len(PALETTE))] == list(PALETTE)
    style = (FOLDER / "components" / "style.css").read_text(encoding="utf-8")
    python = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|rgb\(", style) == []
    assert re.findall(r"\"#[0-9a-fA-F]{6}\"", python) == []
    known = {*re.findall(r"--([\w-]+): light-dark", THEME), "move", "main", "room"}
    assert set(re.findall(r"var\(--([\w-]+)\)", style + python)) <= known
