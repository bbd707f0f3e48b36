"""What objects say in notebooks: their texts and numbers, escaped, pictures of what is cheap, and no more."""

from __future__ import annotations

import base64
import io
import re
from functools import wraps
from html import unescape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nlflow as nl
from nlflow import Batch, Formula, Gaussian, Grid, MarkovChain, Points, affinity
from nlflow.store.notebook import card, picture

U = np.sin(np.arange(40) / 4)


def operator(domain: Any = None) -> Any:
    return affinity(Gaussian(width=2.0), domain or Grid(40, boundary="periodic"))


class Checked(HTMLParser):
    """A parser that keeps the texts, and fails where marks are left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rows_of(html: str) -> dict[str, str]:
    Checked(html)
    found = re.findall(r"<th scope='row'>(.*?)</th><td>(.*?)</td>", html)
    return {unescape(name): unescape(value) for name, value in found}


def captions(html: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<figcaption><small>(.*?)</small>", html)]


def heights(html: str) -> Any:
    """Return the values of the first curve as shares of its range."""
    (points, *_) = re.findall(r'points="(.*?)"', html)
    return 1 - np.array([[float(one) for one in place.split(",")] for place in points.split()])[:, 1] / 80


def test_an_affinity_shows_a_row() -> None:
    P = operator()
    html = P._repr_html_()
    rows = rows_of(html)
    assert rows["nodes"] == "40 (40), Grid"
    assert rows["method"].startswith(f"{P.method}: ")
    assert rows["k is"] == "symmetric, positive semidefinite"
    assert captions(html) == ["row of P: weights of node 20"]
    row = np.array([P.average(one)[20] for one in np.eye(40)])  # by averages, not by laws
    shares = (row - row.min()) / np.ptp(row)
    assert heights(html) == pytest.approx(shares, abs=0.05 / 80 + 1e-12)  # written to a tenth of a pixel


def test_a_row_on_a_plane_is_a_picture() -> None:
    P = operator(Grid((7, 9)))
    (content,) = re.findall(r'src="data:image/png;base64,(.*?)"', P._repr_html_())
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    law = np.zeros((7, 9))
    law[3, 4] = 1
    row = P.push(law)
    assert row.min() > 0
    assert np.array_equal(pixels, np.round(255 * (row - row.min()) / np.ptp(row)))


def test_a_flow_and_a_chain_show_what_is_known() -> None:
    P = operator()
    flow = nl.GradientFlow(nl.E(P, U, 0.5, measure="degree"), "degree")._repr_html_()
    rows = rows_of(flow)
    assert (rows["descends"], rows["metric"], rows["its kernel is"]) == ("E", "degree", "frozen")
    assert rows["observed"] == "a signal of shape (40,)"
    assert captions(flow) == ["row of P: weights of node 20", "eigenvalues of P that differ"]
    chain = MarkovChain(P, laziness=0.25)._repr_html_()
    assert rows_of(chain)["states"] == "40"
    assert rows_of(chain)["laziness"] == "0.25"
    assert captions(chain)[1] == "stationary law pi"
    tokens = np.random.default_rng(0).normal(size=(12, 3))
    given = affinity(nl.ExpDotProduct(), Points(np.arange(12.0)), tokens, queries=tokens[::-1])
    other = nl.AttentionFlow(given)._repr_html_()
    assert rows_of(other)["descends"] == "no functional"
    assert rows_of(other)["k is"] == "not symmetric"
    assert captions(other) == ["row of P: weights of node 6"]
    row = np.array([given.average(one)[6] for one in np.eye(12)])
    assert heights(other) == pytest.approx((row - row.min()) / np.ptp(row), abs=0.05 / 80 + 1e-12)
    evolving = nl.GradientFlow(nl.J(affinity(Gaussian(width=2.0), Grid(40), U)), "degree", evolving=True, every=3)
    assert "3" in rows_of(evolving._repr_html_())["its kernel is"]


def test_a_solution_shows_its_energy() -> None:
    found = nl.solve(nl.GradientFlow(nl.J(operator()), "degree"), U, t_eval=[0, 1, 2, 8], trackers=[nl.Energy()])
    html = found._repr_html_()
    rows = rows_of(html)
    assert rows["status"] == "finished"
    assert rows["t"] == "0 to 8, 4 output times"
    assert rows["u"] == "4 x 40, float64"
    assert rows["energy"] == f"{found.energy[0]:.6g} to {found.energy[-1]:.6g}"
    assert rows["records"] == "energy"
    assert captions(html) == ["energy against t", "u at t = 8"]
    assert heights(html) == pytest.approx((found.energy - found.energy[-1]) / np.ptp(found.energy), abs=1e-3)
    given = affinity(nl.ExpDotProduct(), Points(np.arange(9.0)), np.eye(9), queries=np.eye(9)[::-1])
    plain = nl.solve(nl.AttentionFlow(given), np.eye(9), t=1.0, integrator=nl.AttentionStep())
    assert captions(plain._repr_html_()) == []  # no energy, and signals of many channels


def test_groups_of_patches_say_what_they_are() -> None:
    from nlflow.denoising import problem

    noisy = np.random.default_rng(0).normal(0, 1, (24, 24)) + np.arange(24)
    rows = rows_of(problem(noisy, 1.0).flow._repr_html_())
    assert {"descends", "metric", "its kernel is"} <= set(rows)


@pytest.mark.parametrize("domain", [Grid(4097), Batch(Points(np.arange(5.0)), 3)], ids=["many nodes", "a batch"])
def test_what_would_take_long_is_not_computed(domain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features = np.ones((*domain.shape, 2)) if domain.leading else None
    P = affinity(Gaussian(width=2.0), domain, features)
    for name in ("_push", "_average", "_log_degree", "known_spectrum"):
        own = getattr(type(P), name)  # what stands in its place says that it is the package's: others' code is checked
        monkeypatch.setattr(type(P), name, wraps(own)(lambda *_: pytest.fail("it was computed")))
    for shown in (P, nl.GradientFlow(nl.J(P), "degree"), MarkovChain(P) if not domain.leading else P):
        html = shown._repr_html_()
        assert rows_of(html)["nodes"].startswith(str(domain.size))
        assert captions(html) == []


def test_tensors_have_no_picture() -> None:
    torch = pytest.importorskip("torch", reason="torch is optional")
    tokens = torch.ones(6, 2, requires_grad=True)
    P = affinity(nl.ExpDotProduct(), Points(np.arange(6.0)), tokens)
    assert rows_of(P._repr_html_())["nodes"].startswith("6 (6)")
    assert captions(P._repr_html_()) == []


def test_texts_are_escaped_and_cut_off() -> None:
    html = card("<b>", [("a<script>", "1 < 2 & 3"), ("long", "x" * 10_000), ("none", None)], picture("<i>", U))
    Checked(html)
    assert "<script>" not in html
    assert "<i>" not in html
    assert rows_of(html)["a<script>"] == "1 < 2 & 3"
    assert len(rows_of(html)["long"]) == 400
    assert "none" not in rows_of(html)
    kernel = affinity(Formula("exp(-r**2)"), Grid(5))
    assert rows_of(kernel._repr_html_())["kernel"] == repr(kernel.kernel)


def test_pictures_are_small_and_of_what_can_be_drawn() -> None:
    assert len(picture("long", np.arange(10**6))) < 5000
    assert len(picture("wide", np.random.default_rng(0).normal(size=(2000, 3000)))) < 20_000
    for values in (np.full(4, np.nan), np.zeros(0), np.zeros((2, 2, 2)), np.full((2, 2), np.inf), np.array(["a"])):
        assert picture("none", values) == ""
    Checked(picture("flat", np.ones(5)))
    Checked(picture("some", np.array([1, np.nan, 2])))
    assert heights(picture("large", np.array([-1.7e308, 0, 1.7e308]))).tolist() == [0, 0.5, 1]
