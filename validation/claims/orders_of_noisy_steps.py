"""Strong and weak orders of steps with noise, for processes whose solutions are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import E, GradientFlow, Points, Reaction, Source, solve
from nlflow.affinities import Unlinked
from nlflow.flows import EulerMaruyama, ExponentialEuler, Milstein, Noise, PlatenWeak2
from validation.harness import Check, Claim, Context, Outcome

Floats = NDArray[np.float64]
Step = Callable[[float], Any]

FINE = 512


class Summed(Noise):
    """Noise whose increments are sums of so many of shorter steps, so that steps of several lengths have one path."""

    ratio = 1

    def increments(self, flow: Any, like: Any, step: int, dt: float, *, stream: int = 0) -> Any:
        first, short = step * self.ratio, dt / self.ratio
        return sum(super(Summed, self).increments(flow, like, first + k, short) for k in range(self.ratio))


class Paths:
    """Paths as nodes that see themselves only, du = (-a u + R(u)) dt + s(u) dW, to t = 1."""

    def __init__(self, count: int) -> None:
        self.count, self.alone = count, Unlinked(Points(np.arange(float(count))))

    def ends(self, step: Step, steps: int, rate: float, noise: Noise, start: float, **terms: Any) -> tuple[Floats, Any]:
        u = np.full(self.count, start)
        flow = GradientFlow(E(self.alone, 0 * u, rate), "l2", **terms) + noise
        found = solve(flow, u, t=1.0, integrator=step(1 / steps), energies=False)
        return np.asarray(found.final), flow

    def brownian(self, step: Step, steps: int, rate: float, strength: float) -> tuple[Floats, Floats]:
        """Return ends of du = -a u dt + s u dW, and of the exact path of the same W."""
        noise = Noise(strength=lambda u: strength * u, white="nodes", rng=21)
        found, flow = self.ends(step, steps, rate, noise, 1.0)
        w = sum(noise.increments(flow, found, k, 1 / steps) for k in range(steps))
        return found, np.asarray(np.exp(-(rate + strength**2 / 2) + strength * w))

    def variance(self, step: Step, steps: int, rate: float, strength: float) -> float:
        """Return the error of the variance of du = -a u dt + s dW.

        What increments tell of the exact path is a sum of normals of known variance; the difference is found from both.
        """
        noise = Noise(strength=strength, white="nodes", rng=22)
        found, flow = self.ends(step, steps, rate, noise, 0.0)
        dt = 1 / steps
        share = np.exp(-rate * dt * np.arange(steps - 1, -1, -1)) * -math.expm1(-rate * dt) / (rate * dt)
        told = strength * sum(c * noise.increments(flow, found, k, dt) for k, c in enumerate(share))
        known = strength**2 * dt * float(np.sum(share**2))
        exact = strength**2 * -math.expm1(-2 * rate) / (2 * rate)
        return abs(float(np.mean(found**2 - told**2)) + known - exact)

    def swinging(self, step: Step, steps: int) -> Floats:
        """Return ends of du = (-u / 2 + 2 sin u) dt + dW / 2, of the same paths for all numbers of steps."""
        swing = Reaction(lambda u: 2 * np.sin(u), (-50.0, 50.0), derivative=lambda u: 2 * np.cos(u))
        noise = Summed(strength=0.5, white="nodes", rng=23)
        noise.ratio = FINE // steps
        return self.ends(step, steps, 0.5, noise, 0.3, reaction=swing)[0]

    def driven(self, step: Step, steps: int) -> float:
        """Return the error of du = (-u / 2 + cos 3t) dt + s dW with next to no noise, beside the closed form."""
        push = Source(lambda t: np.full(self.count, np.cos(3 * t)))
        noise = Noise(strength=1e-13, white="nodes", rng=24)
        found = self.ends(step, steps, 0.5, noise, 0.3, source=push)[0]
        forced = (0.5 * np.cos(3.0) + 3 * np.sin(3.0) - 0.5 * np.exp(-0.5)) / (0.25 + 9)
        return abs(float(found[0]) - 0.3 * np.exp(-0.5) - float(forced))


def slope(counts: list[int], errors: list[float]) -> float:
    return float(-np.polyfit(np.log(counts), np.log(errors), 1)[0])


def run(context: Context) -> Outcome:
    paths = Paths(context.pick(100_000, 20_000))
    checks = []
    steps: list[Step] = [EulerMaruyama, Milstein, ExponentialEuler, PlatenWeak2]
    counts = [16, 32, 64]
    for step in steps:
        name, method = getattr(step, "__name__", ""), step(0.1)
        context.step(f"{name}, geometric Brownian motion")
        pairs = [paths.brownian(step, n, 0.3, 0.7) for n in counts]
        strong = [float(np.sqrt(np.mean((found - exact) ** 2))) for found, exact in pairs]
        checks.append(_order(f"{name}: strong, du = −au dt + su dW", counts, strong, method.strong_order))
        if step is not ExponentialEuler:  # whose mean is exact
            pairs = [paths.brownian(step, n, 1.0, 0.3) for n in counts]
            weak = [abs(float(np.mean(found - exact))) for found, exact in pairs]
            checks.append(_order(f"{name}: weak, du = −au dt + su dW", counts, weak, method.weak_order))
    for step, few in ((EulerMaruyama, [8, 16, 32]), (PlatenWeak2, [8, 16, 32])):
        context.step(f"{step.__name__}, Ornstein-Uhlenbeck process")
        errors = [paths.variance(step, n, 1.5, 0.6) for n in few]
        checks.append(_order(f"{step.__name__}: weak, du = −au dt + s dW", few, errors, step(0.1).weak_order))
    few_paths = Paths(3)
    for step in (EulerMaruyama, ExponentialEuler, PlatenWeak2):
        errors = [few_paths.driven(step, n) for n in (8, 16, 32)]
        name, order = getattr(step, "__name__", ""), step(0.1).weak_order
        checks.append(_order(f"{name}: with a source that changes, without noise", [8, 16, 32], errors, order))
    context.step("a reaction: the reference")
    exact = paths.swinging(PlatenWeak2, FINE)
    for step in (EulerMaruyama, ExponentialEuler, PlatenWeak2):
        name, method = getattr(step, "__name__", ""), step(0.1)
        context.step(f"{name}, a reaction")
        few = [4, 8, 16] if method.weak_order > 1 else counts
        ends = [paths.swinging(step, n) for n in few]
        strong = [float(np.sqrt(np.mean((u - exact) ** 2))) for u in ends]
        weak = [abs(float(np.mean(u**2 - exact**2))) for u in ends]
        checks.append(_order(f"{name}: strong, with a reaction", few, strong, method.strong_order_additive))
        checks.append(_order(f"{name}: weak, with a reaction", few, weak, method.weak_order))
    return Outcome(checks, {}, {"paths": paths.count})


def _order(what: str, counts: list[int], errors: list[float], order: float) -> Check:
    return Check(what, slope(counts, errors), 0.1, expected=order)


CLAIM = Claim(
    name="orders-of-noisy-steps",
    title="Strong and weak orders of steps with noise",
    statement=(
        "Errors of paths and of means fall with the step as each method declares: Euler and Maruyama's by ½ and 1, by "
        "1 and 1 where the strength does not depend on the signal, Milstein's by 1 and 1, Platen's by 1 and 2, "
        "exponential Euler's by ½ and 1, and by 1 and 1. Held against geometric Brownian motion and the "
        "Ornstein-Uhlenbeck process, whose solutions are known, and against short steps along the same Brownian paths "
        "with a reaction."
    ),
    source=(
        "P. E. Kloeden and E. Platen 1992, doi 10.1007/978-3-662-12616-5, sections 10.2, 10.3, 14.1 and 15.1; "
        "A. Jentzen and P. E. Kloeden 2009, doi 10.1098/rspa.2008.0325"
    ),
    run=run,
)
