"""What tells problems apart: every number of what a problem is made of counts, to the last bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.denoising.noise import Noise
from nlflow.denoising.patches import CompiledFilter, PlainFilter
from nlflow.errors import FileFormatError
from nlflow.flows import AllenCahn, FisherKPP
from nlflow.flows.checkpoints import fingerprint
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.flows.reactions import Reaction
from nlflow.functionals.misfits import Misfit
from nlflow.kernels import Kernel
from nlflow.store.identity import describe, described
from nlflow.store.storage import load_archive, save_archive
from nlflow.studies.options import kernel_label, parse_kernel
from tests.attention.test_tracked_numbers import TABLE

pytestmark = pytest.mark.numerical

CHANGE = 1 + 1e-9
U = np.sin(np.arange(12.0))
GRID = nl.Grid(12)
P = nl.affinity(nl.Gaussian(1.0), GRID)
PARTS = [
    pytest.param(make, {**needed}, name, value, id=f"{make.__name__}-{name}")
    for make, needed, numbers in TABLE
    if isinstance(make, type) and (issubclass(make, Kernel | Integrator | Misfit | Reaction | Noise))
    for name, value in numbers.items()
    if not isinstance(value, int) and name not in ("nu", "covariance", "matrix", "widths")
]


def changed(value: Any) -> Any:
    return tuple(map(changed, value)) if isinstance(value, tuple) else value * CHANGE


@pytest.mark.parametrize(("make", "needed", "name", "value"), PARTS)
def test_a_billionth_of_any_number_makes_another_part(make: Any, needed: Any, name: str, value: Any) -> None:
    if make is nl.Reaction and name == "interval":
        needed = {**needed, "bound": 2.0}
    same, again, other = (described(make(**{**needed, name: v})) for v in (value, value, changed(value)))
    assert same == again
    assert same != other


@pytest.mark.parametrize("name", ["widths", "matrix", "covariance"])
def test_maps_of_kernels_count_to_the_last_bits(name: str) -> None:
    value = np.array([1.0, 2.0]) if name == "widths" else np.diag([1.0, 2.0])
    same, other = (described(nl.Anisotropic(nl.Gaussian(1.0), **{name: v})) for v in (value, value * CHANGE))
    assert same != other


FLOWS: dict[str, Callable[[float], Flow]] = {
    "fidelity of E": lambda c: nl.GradientFlow(nl.E(P, U, 0.5 * c)),
    "observed": lambda c: nl.GradientFlow(nl.E(P, U * c, 0.5)),
    "fidelity of Ep": lambda c: nl.PFlow(nl.Ep(P, U, 0.5 * c, p=1.5)),
    "p": lambda c: nl.PFlow(nl.Ep(P, U, 0.5, p=1.5 * c)),
    "p of Jp": lambda c: nl.PFlow(nl.Jp(P, 1.5 * c)),
    "misfit": lambda c: nl.PFlow(nl.Ep(P, U, 0.5, p=2.0, misfit=nl.Huber(0.1 * c))),
    "reaction": lambda c: nl.GradientFlow(nl.J(P), "degree", reaction=nl.AllenCahn(1.0 * c)),
    "own reaction": lambda c: nl.GradientFlow(
        nl.J(P), "degree", reaction=nl.Reaction(lambda u: -c * u, (-2, 2), bound=2)
    ),
    "interval": lambda c: nl.GradientFlow(nl.J(P), "degree", reaction=nl.AllenCahn(1.0, interval=(-1.0, 1.0 * c))),
    "source": lambda c: nl.GradientFlow(nl.J(P), "degree", source=U * c),
    "constraint": lambda c: nl.GradientFlow(nl.J(P), "degree", constraint=nl.Constraint([0], 1.0 * c)),
    "kernel": lambda c: nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0 * c), GRID))),
    "formula": lambda c: nl.GradientFlow(nl.J(nl.affinity(nl.Formula("exp(-r**1.5)", 1.0 * c), GRID))),
    "laziness": lambda c: nl.AttentionFlow(P, fidelity=0.5 * c, observed=U),
}


@pytest.mark.parametrize("name", FLOWS)
def test_a_billionth_of_any_number_makes_another_problem(name: str) -> None:
    def told(c: float, step: float = 1.0) -> str:
        return fingerprint(FLOWS[name](c), U, np.array([0.0, 1.0]), nl.ExplicitEuler(0.1 * step))

    assert told(1.0) == told(1.0)
    assert told(1.0) != told(CHANGE)
    assert told(1.0) != told(1.0, CHANGE)


def test_a_fingerprint_of_six_digits_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path, flow = tmp_path / "checkpoint", nl.GradientFlow(nl.J(P))
    nl.solve(flow, U, t=0.5, integrator=nl.ExplicitEuler(0.1), trackers=[nl.Checkpoint(path)])
    arrays, meta = load_archive(path, "checkpoint")
    save_archive(path, arrays, {**meta, "fingerprint": meta["fingerprint"].removeprefix("bits:")})
    with pytest.raises(FileFormatError, match=r"six digits of some numbers.*resume with that version, or start afresh"):
        nl.solve(flow, U, t=1.0, integrator=nl.ExplicitEuler(0.1), resume=path)


def test_labels_of_kernels_have_all_digits() -> None:
    kernel = nl.Gaussian(0.1 * CHANGE)
    assert parse_kernel(kernel_label(kernel)) == kernel


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.complex128(1 + 2j), np.complex128(1 + 2.0000000000000004j)),
        (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
        (np.longdouble(1) / 3, np.nextafter(np.longdouble(1) / 3, np.longdouble(1))),
    ],
    ids=["complex", "date", "longdouble"],
)
def test_single_values_of_any_type_have_all_their_bits(value: Any, other: Any) -> None:
    assert described({"x": value}) == described({"x": value.copy()})
    assert described({"x": value}) != described({"x": other})


def test_sets_are_told_by_their_members_in_any_order() -> None:
    assert list({0, 8}) != list({8, 0})  # of one place in the table: as names are in another process
    assert described({0, 8}) == described({8, 0}) != described({0, 16})


def test_objects_without_fields_are_told_by_their_class_and_not_by_their_place() -> None:
    class Other(CompiledFilter):
        def find(self, *given: Any) -> Any:
            return super().find(*given)

    kept = [CompiledFilter(), CompiledFilter()]  # both alive: one place cannot be used twice
    assert described(kept[0]) == described(kept[1])
    assert described(kept[0]) != described(PlainFilter())
    assert described(kept[0]) != described(Other())


def test_a_class_that_has_moved_is_known_by_its_former_place() -> None:
    steps = (nl.ETD2RK(0.1), nl.ETD4RK(0.1), nl.GeodesicEuler(0.1), nl.GeodesicMidpoint(0.1), nl.LayerStep(0.1))
    places = [describe(step)["type"].rpartition(".")[0] for step in steps]
    assert places == ["nlflow.flows.integrators.etd"] * 2 + ["nlflow.flows.sphere.steps"] * 3
    reactions = [describe(reaction)["type"].rpartition(".")[0] for reaction in (AllenCahn(), FisherKPP())]
    assert reactions == ["nlflow.flows.reactions"] * 2
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.3), nl.Grid((5,)))))
    assert describe(flow)["type"] == "nlflow.flows.linear.GradientFlow"
    adaptive = describe(nl.Adaptive(nl.ETD4RK(0.1)))
    assert adaptive["type"] == "nlflow.flows.integrators.adaptive.Adaptive"
    assert adaptive["fields"]["_tolerances"]["type"] == "nlflow.flows.integrators.control.Tolerances"
