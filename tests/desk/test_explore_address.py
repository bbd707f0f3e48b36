"""The state of the explorer in its address: what is written is read again, and nonsense is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nlflow import InputError
from nlflow.desk.explorer import address

pytest.importorskip("panel")

from nlflow.desk.explorer.denoise_tab import DenoiseTab
from nlflow.desk.explorer.desk import Desk
from nlflow.desk.explorer.flow_tab import FlowTab
from nlflow.desk.explorer.layers_tab import LayersTab
from nlflow.desk.explorer.proposition_tab import PropositionTab
from nlflow.desk.explorer.uploads import Limits
from nlflow.desk.explorer.worker import Worker
from tests.desk.test_explore_server import little, sent, settle, small, until

TABS = ("denoise", "flow", "layers")


@pytest.fixture
def desk() -> Iterator[Desk]:
    worker = Worker()
    yield Desk(worker, Limits(content=10_000), None)
    worker.close()


def test_what_is_written_is_read_again() -> None:
    words = {"file": "a b&c=d#é%.png", "width": "0.05", "sigma": "automatic"}
    found = address.read(f"#{address.written('flow', words)}", TABS)
    assert found == address.Address("flow", words, ())
    assert address.read("", TABS) == address.Address("", {}, ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [("#tab=worst", "tab: got 'worst', expected one of 'denoise', 'flow', 'layers'"),
     ("#tab=flow&x", "address: got 'x' after #, expected name=value"),
     ("#tab=flow&=3", "address: got '=3' after #"),
     ("#a=%zz", "address: got 'a=%zz' after #"),
     ("#a=%ff", "address: got 'a=%ff' after #"),
     ("#a=1&a=2", "a: got it twice in the address"),
     ("#" + "x" * 9000, "address: got 9000 characters after #, expected at most 4000")],
)  # fmt: skip
def test_nonsense_in_an_address_is_named(text: str, fault: str) -> None:
    found = address.read(text, TABS)
    assert len(found.faults) == 1
    assert found.faults[0].startswith(fault)


@pytest.mark.parametrize("word", ["", "x", "nan", "inf", "1e999", "4.1", "-1", "2_0", "٣", "automatic", "0x10", "2.5"])
def test_what_a_number_cannot_be_is_named(word: str) -> None:
    with pytest.raises(InputError, match=r"^steps: got .*, expected a number from 1 to 4 in steps of 1$"):
        address.number("steps", word, 1, 4, step=1, optional=False)


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_decimal_steps_are_taken_in_spite_of_rounding(low: float) -> None:
    for k in range(1, 10):
        assert address.number("x", f"{k / 10}", low, 1, step=0.1, optional=False) == k / 10
    with pytest.raises(InputError, match=r"in steps of 0\.1$"):
        address.number("x", "0.35", low, 1, step=0.1, optional=False)


def test_numbers_keep_all_their_digits() -> None:
    for value in (0.1 + 0.2, 3.0, None, 1e-7):
        assert address.number("x", address.word_of(value), 0, 4, step=None, optional=True) == value


@pytest.mark.parametrize("kind", [DenoiseTab, FlowTab, PropositionTab, LayersTab])
def test_every_control_comes_back(desk: Desk, kind: type) -> None:
    """All controls are moved; another page that opens the address says and computes the same."""
    tab, other = (kind(desk, little()) if kind is DenoiseTab else kind(desk) for _ in range(2))
    tab.restore({})
    before = tab.words()
    for control in tab.controls.values():
        if not control.visible or control is getattr(tab, "quality", None):
            continue
        shown = getattr(control, "shown", None)
        if shown is None:
            control.value = list(control.options.values())[-1]
        elif "moment" in shown:
            control._take({"moment": 3})
        else:
            control._take({"value": (2 * shown["low"] + shown["high"]) / 3, "automatic": False, "move": 1})
    words = tab.words()
    assert all(words[name] != before[name] for name in words.keys() & before.keys() - {"file", "quality"})
    assert other.restore(words) == []
    assert other.words() == words
    if kind is DenoiseTab:
        assert other.settings(full=False) == tab.settings(full=False)


def test_what_a_tab_cannot_show_is_named_and_the_rest_is_taken(desk: Desk) -> None:
    tab = FlowTab(desk)
    faults = tab.restore({"width": "9", "kernel": "Worst", "fidelty": "1", "noise": "0.4"})
    assert faults[0].startswith("kernel: got 'Worst', expected one of 'Gaussian'")
    assert faults[1] == "width: got '9', expected a number from 0.01 to 0.3"
    assert faults[2].startswith("fidelty: got '1', expected a setting that this tab has: signal, kernel")
    assert (tab.settings().noise, tab.settings().width) == (0.4, 0.03)
    denoise = DenoiseTab(desk, little())
    (fault,) = denoise.restore({"quality": "best", "patch_size": "5"})
    assert fault.startswith("patch_size: got '5', expected a setting that this set-up has: file, quality")


def test_the_settings_of_a_file_wait_until_it_is_open(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    (fault,) = tab.restore({"file": "a.png", "sigma": "12"})
    assert fault.startswith("file: got 'a.png', expected 'camera.png', which is open; open the other")
    assert tab.settings(full=False).sigma is None
    tab.start()
    settle(tab)
    tab.upload._handle_msg(sent("a.png", small()))
    until(lambda: tab.file == "a.png")
    settle(tab)
    assert tab.settings(full=False).sigma == 12.0


def test_a_number_that_is_not_computed_yet_is_not_shown(desk: Desk) -> None:
    tab = DenoiseTab(desk, little())
    known = {name: knob.shown["word"] for name, knob in tab.knobs.items()}
    assert {name for name, word in known.items() if word != "computing"} == {"strength"}
    assert {chart.shown["empty"] for chart in (tab.energies, tab.distances, tab.histogram)} == {"computing"}
    tab.start()
    settle(tab)
    assert {knob.shown["word"] for knob in tab.knobs.values()} == {""}
    tab.knobs["sigma"]._take({"value": 9.0, "automatic": True, "move": 1})
    assert tab.knobs["sigma"].shown["word"] == "computing"
