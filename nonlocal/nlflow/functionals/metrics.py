"""Metrics: the inner products in which gradients are taken, and all that flows, spectra and limits ask of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from nlflow._array import Array
from nlflow.affinities import Affinity
from nlflow.errors import check_choice


class Metric:
    """Inner product of signals; the flow of E in it is du/dt = B (r (Pu - u) + phi (f - u) + R(u) + g).

    r and phi are those of a measure of nodes, in whose densities a reaction R and a source g are given. B is the
    identity where the inner product is a sum over nodes; a metric of another kind overrides `moved`, `diffusion_bound`
    and `bounds`, and everything else follows. `GradientFlow` takes an instance in place of a name.

    Attributes
    ----------
    name : str
        What users and messages call it.
    measure : {'l2', 'degree'}
        The measure of nodes, m = w or m = w d / sum w d; see `Affinity.measure`.
    by_nodes : bool
        Whether the inner product is sum_i m_i a_i . b_i, so that B is the identity.
    """

    name: ClassVar[str]
    measure: ClassVar[str]
    by_nodes: ClassVar[bool] = True

    @property
    def normalized(self) -> bool:
        """Whether the measure is over its sum, since degrees may be out of the range of floats; then r = 1."""
        return self.measure == "degree"

    def rate(self, affinity: Affinity) -> Array | float:
        """Return r, what multiplies u - Pu in the gradient of J: the degree, or 1."""
        return 1.0 if self.normalized else affinity.degree

    def moved(self, force: Array, diffusion: Callable[[Array], Array]) -> Array:
        """Return B times a force; `diffusion` applies I - P, which counts as an average."""
        del diffusion
        return force

    def diffusion_bound(self, bound: float) -> float:
        """Return a bound of the spectrum of B r (I - P), from one of r (I - P)."""
        return bound

    def bounds(self, bound: float, fidelity: tuple[float, float]) -> tuple[float, float]:
        """Return bounds of the spectrum of B (r (I - P) + phi), from one of r (I - P) and from those of phi."""
        return fidelity[0], fidelity[1] + bound


class L2Metric(Metric):
    """sum_i w_i a_i . b_i, in which the gradient of J is Lu."""

    name = measure = "l2"


class DegreeMetric(Metric):
    """sum_i w_i d_i a_i . b_i, in which the gradient of J is u - Pu: what attention does."""

    name = measure = "degree"


_KNOWN: dict[str, Metric] = {metric.name: metric for metric in (L2Metric(), DegreeMetric())}
METRICS = tuple(_KNOWN)
MEASURES = ("l2", "degree")


def as_metric(given: str | Metric) -> Metric:
    """Return the metric of a name, or raise `InputError`; a metric of one's own is taken as it is."""
    return given if isinstance(given, Metric) else _KNOWN[check_choice("metric", given, METRICS)]
