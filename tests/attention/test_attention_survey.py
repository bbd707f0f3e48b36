"""The probe over many inputs: against the probe of each, and plain sums."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

from nlflow import InputError, NlflowWarning
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytest.importorskip("transformers")

from nlflow.attention import SurveyedState, attach, probe, survey  # noqa: E402
from nlflow.attention.probing.survey import growth_of  # noqa: E402
from nlflow.attention.probing.trace import Layer  # noqa: E402
from nlflow.attention.probing.weights import matrices_of, without_padding  # noqa: E402
from nlflow.plotting import survey_figure  # noqa: E402
from tests.transformer_models import build as known  # noqa: E402


def batches(several: int = 3) -> list[dict[str, Any]]:
    """Return batches of different lengths, the second with padding."""
    generator = torch.Generator().manual_seed(4)
    result = [{"input_ids": torch.randint(1, 40, (2, 5 + length), generator=generator)} for length in range(several)]
    if several > 1:
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[1, 4:] = 0
        result[1]["attention_mask"] = mask
    return result


@pytest.fixture(scope="module")
def model() -> Any:
    return known("bert").eval()


def test_means_and_errors_are_those_of_the_inputs_one_by_one(model: Any) -> None:
    given = batches()
    found = survey(model, given)
    alone = []
    for batch in given:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        alone += [
            probe(model, {"input_ids": row[kept][None]}) for row, kept in zip(batch["input_ids"], mask, strict=True)
        ]
    assert found.count == len(alone) == 6
    rows, heads = found.rows(), found.rows(by_head=True)
    assert [row["index"] for row in rows] == list(range(len(alone[0]) + 1))
    for number, row in enumerate(rows):
        if number == 0:
            each = {"cosine": [one.states["encoder"]["mean_cosine"][0] for one in alone]}
            states = [one[0].before[0].double().mean(0).numpy() for one in alone]
        else:
            layers = [one[number - 1] for one in alone]
            each = {
                "cosine": [one.quantities["mean_cosine"][0] for one in layers],
                "J": [one.quantities["energy"][0].mean() for one in layers],
                "gradient": [one.quantities["gradient_cosine"][0].mean() for one in layers],
                "share": [one.quantities["attention_share"][0] for one in layers],
            }
            states = [one.after[0].double().mean(0).numpy() for one in layers]
            for head in (one for one in heads if one["index"] == number):
                energies = [one.quantities["energy"][0, head["head"]] for one in layers]
                assert head["J"] == pytest.approx(np.mean(energies), rel=1e-4)
                assert head["J_se"] == pytest.approx(np.std(energies, ddof=1) / math.sqrt(6), rel=1e-3)
        for name, values in each.items():
            assert row[name] == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
            assert row[f"{name}_se"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(6), rel=1e-3, abs=1e-6)
        mean, error = jackknife(np.array(states))
        assert row["isotropy"] == pytest.approx(mean, rel=1e-4)
        assert row["isotropy_se"] == pytest.approx(error, rel=1e-3)
    assert len(heads) == sum(layer.heads for layer in alone[0])


@pytest.mark.parametrize(
    ("tokens", "inputs", "verdict"),
    [
        ((0.1, 0.6), (0.5, 0.2), "over-smooths, since"),
        ((0.1, 0.6), (0.2, 0.9), "makes tokens alike, and inputs too"),
        ((0.1, 0.6), (0.97, 0.95), "makes tokens alike, but all inputs point one way already"),
        ((0.6, 0.1), (0.2, 0.9), "does not over-smooth, since tokens grow apart"),
        ((0.3, 0.3), (0.2, 0.2), "is not seen to over-smooth"),
    ],
)
def test_over_smoothing_is_tokens_that_grow_alike_where_inputs_do_not(
    tokens: tuple[float, float], inputs: tuple[float, float], verdict: str
) -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((30, 11)))[0].T
    own, common = basis[:10], basis[10]
    cosines = [mean + 0.01 * rng.standard_normal(10) for mean in tokens]
    states = [math.sqrt(mean) * common + math.sqrt(1 - mean) * own for mean in inputs]  # cosines of all pairs: mean
    growth = growth_of("encoder", cosines, *states)
    assert growth.verdict.startswith(verdict)
    np.testing.assert_allclose(growth.isotropy, inputs, rtol=1e-12)
    expected = stats.ttest_1samp(cosines[1] - cosines[0], 0).confidence_interval(0.95)
    np.testing.assert_allclose(growth.change[1:], tuple(expected), rtol=1e-12)
    falling = growth_of("encoder", [np.full(4, value) for value in (0.9, 0.4, 0.3)], None, None)
    assert falling.steepest == (1, pytest.approx(-0.5))  # and not the layer that lowers it least
    few = growth_of("encoder", [one[:2] for one in cosines], *(one[:2] for one in states))
    assert few.verdict == "may over-smooth or not: to tell takes three inputs or more"
    assert "shows no states" in growth_of("encoder", [np.full(2, np.nan)] * 2, None, None).sentence()


def jackknife(states: Any) -> tuple[float, float]:
    """Return the mean cosine over pairs, and its error from leaving one input out after another, by plain sums."""
    units = states / np.linalg.norm(states, axis=1, keepdims=True)
    cosines = units @ units.T

    def over(some: list[int]) -> float:
        return float(np.mean([cosines[i, j] for i in some for j in some if i != j]))

    count = len(units)
    left = np.array([over([i for i in range(count) if i != out]) for out in range(count)])
    return over(list(range(count))), float(np.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum()))


@pytest.mark.slow
def test_loaders_and_tables(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(60).view(10, 6) % 37 + 1)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    found = survey(model, loader)
    one = survey(model, (batch for batch in [data.tensors[0]]))
    assert found.count == one.count == 10
    for row, other in zip(found.rows(), one.rows(), strict=True):
        assert row["cosine"] == pytest.approx(other["cosine"], rel=1e-5)
    pandas = pytest.importorskip("pandas")
    table = found.to_pandas(by_head=True)
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == ["layer", "index", "inputs", "head", "J", "J_se", "gradient", "gradient_se"]
    assert table.to_dict("records") == found.rows(by_head=True)
    trace = probe(model, data.tensors[0])
    assert trace.to_pandas(spectra=False).to_dict("list").keys() == trace.rows(spectra=False)[1].keys()
    assert list(trace.to_pandas()["layer"]) == [row["layer"] for row in trace.rows()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_pandas: got no package pandas"):
        found.to_pandas()


def test_figures_of_surveys(model: Any) -> None:
    runs = {"as it is": survey(model, batches()).rows()}
    runs["with the term"] = survey(attach(known("bert").eval(), fidelity=0.4), batches()).rows()
    figure = survey_figure(runs, title="two models")
    assert [len(axis.collections) for axis in figure.axes] == [2, 2, 2, 2]  # a band for each run
    assert figure.axes[1].get_title(loc="left") or figure.axes[1].get_title()
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [row["cosine"] for row in runs["as it is"]])
    with pytest.raises(InputError, match="runs"):
        survey_figure({})


def test_padding_may_be_nan(model: Any) -> None:
    given = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
    }
    given["attention_mask"][0, 3] = 0
    expected = survey(model, [given]).rows()[-1]
    hides = given["attention_mask"][..., None] == 0

    def spoil(module: Any, args: Any, output: Any) -> Any:
        return output.masked_fill(hides, torch.nan)

    hook = list(model.encoder.layer)[-1].register_forward_hook(spoil)
    with hook, pytest.warns(NlflowWarning, match="between and share are not told"):
        found = survey(model, [given]).rows()[-1]
    for name in ("cosine", "rank", "isotropy"):
        assert found[name] == expected[name]
    # Queries of the last layer: NaN stays at padding, where a row sees nothing, say.
    with list(model.encoder.layer)[-1].attention.self.query.register_forward_hook(spoil):
        found = survey(model, [given]).rows()[-1]
    for name in ("cosine", "rank", "isotropy", "J", "gradient", "share"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


def test_padding_of_keys_and_values_may_be_nan() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    tokens = torch.ones(2, 5, dtype=torch.bool)
    tokens[0, 3:] = False
    spoiled = [part.masked_fill(~tokens[:, None, :, None], torch.nan) for part in (q, k, v)]

    def found(parts: Any) -> Any:
        layer = Layer("layer", "encoder", False, 0.5, "softmax", *parts, None, tokens)
        place = (slice(None), slice(None))
        return matrices_of(layer, place) @ without_padding(layer, place, layer.v)

    rows = tokens[:, None].expand(2, 2, 5)
    np.testing.assert_array_equal(found(spoiled)[rows], found([q, k, v])[rows])


def test_few_inputs_have_no_errors(model: Any) -> None:
    with pytest.warns(NlflowWarning, match="got one input"):
        row = survey(model, [{"input_ids": torch.arange(1, 6)[None]}]).rows()[1]
    assert math.isnan(row["isotropy"])
    assert math.isnan(row["cosine_se"])
    assert math.isfinite(row["cosine"])
    state = SurveyedState("", 0, {}, {}, np.array([[1.0, 0.0], [0.0, 2.0]]))
    assert state.isotropy()[0] == 0
    assert math.isnan(state.isotropy()[1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": torch.ones(1, 3, dtype=torch.long)}, "inputs: got dict, expected a list or a DataLoader"),
        (torch.ones(1, 3, dtype=torch.long), "inputs: got Tensor, expected a list"),
        (3, "inputs: got int"),
        ([], "inputs: got no batch"),
        ([["text", "text"]], "inputs: got texts for BertModel, whose tokenizer is not known"),
    ],
)
def test_inputs_that_are_refused(model: Any, given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        survey(model, given)
