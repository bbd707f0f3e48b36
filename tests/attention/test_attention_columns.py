"""The table of columns: what probes, surveys, the command, the page, figures and the how-to make of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.attention.probing import columns, trace
from nlflow.attention.probing.columns import COLUMNS, Column
from nlflow.desk.commands import attention as command
from nlflow.desk.explorer import layers_view
from nlflow.plotting import layers
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytest.importorskip("transformers")

from nlflow.attention import LayerTrace, probe, survey  # noqa: E402
from tests.transformer_models import build as known  # noqa: E402

NAMES = [one.name for one in COLUMNS]


@pytest.fixture(scope="module")
def traced() -> LayerTrace:
    return probe(known("bert").eval(), torch.arange(2, 14).view(2, 6))


def test_names_are_unique_and_columns_of_one_quantity_have_one_measure() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for column in COLUMNS:
        assert column.of in ("state", "layer", "heads", "tokens", "chain", "next")
        assert column.low < column.high
        assert column.meaning
        alike = [one for one in COLUMNS if one.quantity == column.quantity]
        assert {(one.of, one.measure, one.low, one.high) for one in alike} == {
            (column.of, column.measure, column.low, column.high)
        }
        assert [bool(one.label) for one in alike] == [True] + [False] * (len(alike) - 1)


def test_rows_have_all_columns_in_their_order_and_within_their_ranges(traced: LayerTrace) -> None:
    rows = traced.rows()
    assert [list(row) for row in rows[1:]] == [["layer", "index", *NAMES]] * len(traced)
    assert list(rows[0]) == ["layer", "index", *(one.name for one in COLUMNS if one.of == "state")]
    cheap = [one.name for one in COLUMNS if one.of not in ("chain", "next")]
    assert list(traced.rows(spectra=False)[-1]) == ["layer", "index", *cheap]
    rounding = 64 * np.finfo(np.float32).eps
    for column in COLUMNS:
        numbers = np.array([row.get(column.name, math.nan) for row in rows])
        numbers = numbers[~np.isnan(numbers)]
        assert numbers.size, column.name
        assert (column.low - rounding <= numbers).all(), column.name
        assert (numbers <= column.high + rounding).all(), column.name


def test_quantities_have_the_shape_of_what_they_are_of(traced: LayerTrace) -> None:
    layer = traced[1]
    items, heads, tokens, _ = layer.q.shape
    shapes = {"state": (items,), "layer": (items,), "heads": (items, heads), "tokens": (items, heads, tokens)}
    for column in COLUMNS:
        if column.of in shapes:
            assert layer.quantities[column.quantity].shape == shapes[column.of], column.name
        elif column.of == "chain":
            assert traced.spectra(1)[column.quantity].shape == (items, heads), column.name
    assert set(layer.quantities) == {one.quantity for one in COLUMNS if one.of in shapes}


def test_a_survey_has_those_of_which_an_input_has_a_number() -> None:
    found = survey(known("bert").eval(), [torch.arange(2, 8)[None], torch.arange(3, 9)[None]])
    of_inputs = {one.name for one in COLUMNS if one.of in ("state", "layer")}
    of_heads = {one.name for one in COLUMNS if one.of == "heads"}
    assert set(found.states[1].values) == set(found.states[0].values) == of_inputs
    assert set(found.states[1].heads) == of_heads
    both = {name for one in of_inputs | of_heads for name in (one, f"{one}_se")}
    assert set(found.rows()[1]) == both | {"layer", "index", "inputs", "isotropy", "isotropy_se"}


def test_the_command_the_page_and_the_how_to_know_all_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "look_into_a_model.md").read_text(encoding="utf-8")
    printed = command.HELP.partition("Columns of table.csv")
    for column in COLUMNS:
        own = printed[0 if column.printed else 2]
        name = column.name.removeprefix("stable_") if column.printed else column.name
        assert f"\n  {name} " in own, column.name
        assert column.meaning.split(",")[0] in " ".join(own.split()), column.name
        assert f"``{column.name}``" in str(LayerTrace.rows.__doc__), column.name
        assert f"`{column.name}`" in page, column.name
    assert set(command._PRINTED) - {"fidelity", "layer"} == {one.name for one in COLUMNS if one.printed}
    assert list(layers_view.QUANTITIES) == [one.name for one in COLUMNS if one.label]
    assert list(layers_view.HEAD_QUANTITIES) == [one.name for one in COLUMNS if one.by_head]


def test_figures_draw_known_columns() -> None:
    drawn = {name for column, _, _, ends in layers._PANELS for name in (column, *ends)}
    surveyed = {column for column, *_ in layers._SURVEYED}
    assert drawn <= set(NAMES)
    assert surveyed - {"isotropy"} <= {one.name for one in COLUMNS if one.of in ("state", "layer", "heads")}


@pytest.mark.parametrize("of", ["state", "heads", "chain", "next"])
def test_a_new_column_arrives_by_its_place_in_the_table(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toys: dict[str, Any] = {
        "state": lambda state, mask=None: state.double().abs().amax((-2, -1)),
        "heads": lambda found: found.values.abs().amax((-2, -1)),
        "chain": lambda head: float(np.trace(head.matrix)),
        "next": lambda head, following: float(np.abs(head.matrix - following.matrix).max()),
    }
    toy = Column("toy", "toy", of, toys[of], 0, math.inf, "a toy", "a toy", "max")
    for module in (columns, trace):
        monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, toy))
    found = probe(known("bert").eval(), torch.arange(2, 8)[None])
    row = found.rows()[1]
    if of == "state":
        assert found[0].after is not None
        expected = float(found[0].after.double().abs().max())
    elif of == "heads":
        expected = max(float(np.abs(head.v - head.v.mean(0)).max()) for head in map(found[0].head, range(4)))
    elif of == "chain":
        expected = max(float(np.trace(found[0].head(h).matrix)) for h in range(4))
    else:
        expected = max(float(np.abs(found[0].head(h).matrix - found[1].head(h).matrix).max()) for h in range(4))
    assert row["toy"] == pytest.approx(expected, rel=1e-6)
    if of in ("heads", "chain"):
        monkeypatch.setattr(command, "COLUMNS", (*COLUMNS, toy))
        assert len(command._by_head(0.0, found, spectra=True)[0]["toy"]) == 4


def test_a_column_without_a_number_is_nan(traced: LayerTrace) -> None:
    assert math.isnan(traced.rows()[-1]["redundancy"])  # there is no next layer
    assert replace(COLUMNS[0], label="").by_head is False


def test_the_table_loads_no_numbers() -> None:
    code = (
        "import json, sys; import nlflow.attention.probing.columns;"
        "print(json.dumps([name for name in ('numpy', 'torch', 'scipy') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
