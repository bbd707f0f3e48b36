"""Searches for equilibria and branches step by step, against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import Gaussian, GradientFlow, Grid, J, Points, Reaction, SystemFlow, affinity, from_matrix
from nlflow.affinities import Unlinked
from nlflow.equilibria import continue_equilibria, find_equilibrium, stability
from nlflow.equilibria.continuation import Continuation, Family, Stand
from nlflow.equilibria.equations import Equations
from nlflow.equilibria.newton import Search
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

AT = 1.7  # where the branch begins that the others cross: no value of a signal is 0
LOW, HIGH = 1.0, 1.5  # of the parameter, which crosses at 1.2
CROSSING = 1.2
W = np.array([0.7, 1.6])


def scalar(function: Callable[[Floats, float], Any], slope: Callable[[Floats, float], Any]) -> Callable[[float], Any]:
    """Return flows of a function of v = u − 1.7 at each of two nodes that do not see each other."""

    def make_flow(p: float) -> GradientFlow:
        reaction = Reaction(
            lambda u: function(u - AT, p - CROSSING), (-9, 9), derivative=lambda u: slope(u - AT, p - CROSSING)
        )
        return GradientFlow(J(Unlinked(Points([0.0, 1.0], weights=W))), "l2", reaction=reaction)

    return make_flow


def transcritical(v: Floats, r: float) -> Floats:
    return r * v - v**2


def crossing(v: Floats, r: float) -> Floats:
    return r - 2 * v


def cubic(v: Floats, r: float) -> Floats:
    return r * v - v**3


def steep(v: Floats, r: float) -> Floats:
    return r - 3 * v**2


def run_of(make_flow: Callable[[float], Any], u: Floats, size: float) -> Continuation:
    p = CROSSING
    return Continuation(Family(make_flow, Equations(make_flow(p), "u", u), (LOW, HIGH)), size, 0.02, 0.05, 30, 2, 1e-11)


def geometry() -> float:
    """Return errors of products, tangents, points between and ends of steps, relative."""
    asked: list[float] = []

    def make_flow(p: float) -> Any:
        asked.append(p)
        return scalar(lambda v, r: r - v**2, lambda v, r: -2 * v)(p)  # p = 1.2 + v²

    size, v = 0.8, 0.4
    x = np.full(2, AT + v)
    run = run_of(make_flow, x, size)
    q = run.family.place(CROSSING + v**2)
    share = W / W.sum()
    worst = largest(abs(q - (CROSSING + v**2 - LOW) / (HIGH - LOW)), abs(run.family.parameter(q) - CROSSING - v**2))
    a, b = (np.array([0.3, -1.1]), 0.4), (np.array([0.9, 0.2]), -0.7)
    worst = largest(worst, abs(run.inner(a, b) - share @ (a[0] * b[0]) / size**2 + 0.28))
    unit = run.unit(a)
    worst = largest(worst, abs(run.inner(unit, unit) - 1), float(np.abs(unit[0] / unit[1] - a[0] / a[1]).max()))
    # dv/dq = (HIGH − LOW) / (2 v) at both nodes; forth and back.
    steep_ = (HIGH - LOW) / (2 * v)
    length = math.sqrt((steep_ / size) ** 2 + 1)
    for sign in (1.0, -1.0):
        moved, ahead = run.tangent(x, q, (0 * x, sign))
        worst = largest(worst, float(np.abs(moved - sign * steep_ / length).max()), abs(ahead - sign / length))
    here = Stand(x, q, (np.full(2, steep_ / length), 1 / length), np.array([-0.8 + 0j]), np.array([-1]))
    # Between: on the curve, and on the plane at right angles to the tangent.
    s = 0.11
    there = Stand(x, q, here.tangent, here.values, here.signs)
    y, at = run._between(here, there, 0.2, s)
    gap = (y - x - s * here.tangent[0], at - q - s * here.tangent[1])
    worst = largest(
        worst,
        abs(run.inner(gap, here.tangent)),
        float(np.abs((y - AT) ** 2 + CROSSING - run.family.parameter(at)).max()),
    )
    worst = largest(worst, float(run._between(here, there, 0.2, 0.0)[1] != q))
    # A step that leaves the range is shortened to its end.
    for toward, end in ((1.0, 1.0), (-1.0, 0.0)):
        flat = run_of(scalar(lambda v, r: r - 4 * v, lambda v, r: 0 * v - 4), x, size)  # v = r / 4
        place = 0.93 if toward > 0 else 0.07
        begin = np.full(2, AT + (flat.family.parameter(place) - CROSSING) / 4)
        tangent = flat.tangent(begin, place, (0 * x, toward))
        last, reached = flat._tried(Stand(begin, place, tangent, here.values, here.signs), 0.6)
        worst = largest(worst, abs(last.q - end), abs(reached - (end - place) / tangent[1]))
        worst = largest(worst, float(np.abs(last.x - AT - (flat.family.parameter(end) - CROSSING) / 4).max()))
    # No flow is asked for beyond the bounds, and lengths of steps follow corrections.
    worst = largest(worst, float(not all(LOW - 1e-12 <= p <= HIGH + 1e-12 for p in asked)))
    for corrections, grown in ((3, 1.5), (4, 1.0), (6, 1.0), (7, 0.5)):
        next_ = run._next(0.02, Stand(x, q, here.tangent, here.values, here.signs, corrections))
        worst = largest(worst, abs(next_ - 0.02 * grown))
    return worst


def events() -> float:
    """Return errors of what is told where branches cross or turn, and of branches that begin there."""
    worst = 0.0
    # v = 0 and v = r cross at r = 0; the second node stays where it is.
    kinds = {
        "transcritical": (transcritical, lambda v, r: r - 2 * v, 0.0),
        "pitchfork": (cubic, steep, 0.0),
        "fold": (lambda v, r: r + 0.1 - v**2, lambda v, r: -2 * v, math.sqrt(0.3)),
    }
    for kind, (function, slope, v) in kinds.items():
        make_flow = _first(function, slope)
        begin = 1.4 if kind == "fold" else LOW
        branch = continue_equilibria(
            make_flow,
            np.array([AT + v, AT]),
            begin,
            (LOW, HIGH),
            size=0.8,
            step=0.1,
            longest=0.2,
            direction=-1 if kind == "fold" else 1,
        )
        (point,) = branch.points
        exact = CROSSING - (0.1 if kind == "fold" else 0.0)
        worst = largest(worst, float(point.kind != kind or point.multiplicity != 1), abs(point.parameter - exact),
                        1e2 * point.error)  # fmt: skip
        worst = largest(worst, float(np.abs(np.abs(point.vectors[0]) - [math.sqrt(W.sum() / W[0]), 0]).max()))
    # From v = r along the null vector at right angles to the branch: to v = 0.
    make_flow, size = _first(transcritical, lambda v, r: r - 2 * v), 0.8
    branch = continue_equilibria(
        make_flow, np.array([AT - 0.2, AT]), LOW, (LOW, HIGH), size=size, step=0.1, longest=0.2
    )
    (point,) = branch.points
    width, share = HIGH - LOW, math.sqrt(W[0] / W.sum()) / size  # a unit of v of the first node, as steps are measured
    along = np.array([width * share, 1.0]) / math.hypot(width * share, 1.0)  # of v = r
    worst = largest(worst, abs(point._tangent[1] - along[1]), abs(point._tangent[0][0] * share - along[0]))
    for sign in (1, -1):
        aside = sign * np.array([1.0, 0.0])
        aside = aside - (aside @ along) * along
        aside /= np.linalg.norm(aside)
        step = 0.03
        other = branch.switch(point, sign=sign * int(np.sign(point.vectors[0][0])), step=step)
        place = (CROSSING - LOW) / width + step / aside[1]  # where the plane through the guess meets v = 0
        back = (np.diff(other.parameter) * np.sign(aside[1]) <= 0).any()
        worst = largest(worst, abs(other.parameter[1] - LOW - width * place), float(np.abs(other.u[1:, 0] - AT).max()),
                        float(not other.success or back))  # fmt: skip
    # What is told where the eigenvalue is not quite 0: it over its slope.
    run = branch._run
    make = np.array

    def stand(r: float, along: tuple[Floats, float]) -> Stand:
        return run.stand(make([AT + r, AT]), run.family.place(CROSSING + r), along)

    here = stand(-0.03, (make([0.0, 0.0]), 1.0))
    there = stand(0.02, here.tangent)
    reached = run.inner((there.x - here.x, there.q - here.q), here.tangent)
    s, off = 0.6 * reached, 4e-7
    s = s + off / width / here.tangent[1]
    told = run._told(here, there, reached, s, [int(np.argmin(np.abs(here.values)))], 5)
    worst = largest(
        worst, abs(told.parameter - CROSSING - off), abs(told.error / off - 1) / 1e2, float(told.after != 5)
    )
    return worst


def _first(function: Any, slope: Any) -> Callable[[float], GradientFlow]:
    """Return flows whose first node follows a function of v = u − 1.7, and whose second tends to v = 0."""

    def make_flow(p: float) -> GradientFlow:
        r = p - CROSSING
        reaction = Reaction(
            lambda t, x, u: np.where(x[..., 0] == 0, function(u - AT, r), AT - u), (-9, 9), bound=1e3,
            derivative=lambda t, x, u: np.where(x[..., 0] == 0, slope(u - AT, r), -1.0),
        )  # fmt: skip
        return GradientFlow(J(Unlinked(Points(np.array([0.0, 1.0]), weights=W))), "l2", reaction=reaction)

    return make_flow


def hopf() -> float:
    """Return errors of a Hopf point and of the wave that begins there, u* + a √2 Re w of frequency Im μ."""

    def make_flow(p: float) -> SystemFlow:
        def turn(u: Floats) -> Floats:
            x, y = u[..., 0] - AT, u[..., 1]
            r = p - CROSSING - x * x - y * y
            return np.stack([x * r - 2.3 * y, y * r + 2.3 * x], axis=-1)

        def slopes(u: Floats) -> Floats:
            x, y = u[..., 0] - AT, u[..., 1]
            r = p - CROSSING - x * x - y * y
            rows = [[r - 2 * x * x, -2 * x * y - 2.3], [2.3 - 2 * x * y, r - 2 * y * y]]
            return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)

        reaction = Reaction(turn, (-3.0, 3.0), derivative=slopes, components=2)
        return SystemFlow(J(Unlinked(Points([0.0], weights=[0.7]))), [1.0, 1.0], reaction=reaction)

    branch = continue_equilibria(make_flow, np.array([[AT, 0.0]]), LOW, (LOW, HIGH), size=0.8, step=0.1, longest=0.2)
    (point,) = branch.points
    u, period = point.cycle(0.05)
    wave = np.asarray(point.vectors[0])
    size = math.sqrt(float(np.sum(np.abs(wave) ** 2)))
    return largest(
        float(point.kind != "hopf"), abs(point.parameter - CROSSING), abs(abs(point.eigenvalue.imag) - 2.3),
        abs(size - 1), abs(period - 2 * np.pi / 2.3),
        float(np.abs(u - np.asarray(point.u) - 0.05 * math.sqrt(2) * wave.real).max()),
    )  # fmt: skip


def searches() -> float:
    """Return errors of implicit Euler steps, of a Newton step, of errors that are told and of margins, relative."""
    slope, worst = -1.3, 0.0
    bent = Reaction(lambda u: slope * (u - AT) - 0.2 * (u - AT) ** 2, (-9, 9),
                    derivative=lambda u: slope - 0.4 * (u - AT))  # fmt: skip
    flow = GradientFlow(J(Unlinked(Points([0.0], weights=[0.7]))), "l2", reaction=bent)
    x = 0.9
    u = np.array([AT + x])

    def force(x: float) -> float:
        return slope * x - 0.2 * x * x

    newton = find_equilibrium(flow, u, method="newton", maxiter=1)
    worst = largest(worst, abs(float(newton.u[0]) - AT - x + force(x) / (slope - 0.4 * x)))
    # Implicit Euler: from one over the rate on, times how much |F| has fallen, between 0.3 and 10.
    step, at = 1 / abs(slope - 0.4 * x), x
    for count in range(1, 5):
        moved = at + force(at) / (1 / step - (slope - 0.4 * at))
        step *= min(max(abs(force(at) / force(moved)), 0.3), 10.0)
        at = moved
        found = find_equilibrium(flow, u, method="transient", maxiter=count)
        worst = largest(worst, abs(float(found.u[0]) - AT - at), float(found.iterations != count))
    # One more Newton step is what it may be off, relative to its size.
    search = Search(Equations(flow, "start", u), 1e-10, u.copy())
    search.result("newton")
    search._step(u, np.array([force(x)]))
    worst = largest(worst, abs(search.error / (abs(force(x) / (slope - 0.4 * x)) / (AT + x)) - 1))
    # Stability: the largest real part, of nodes that see each other.
    rng, n = np.random.default_rng(3), 5
    k, w = rng.random((n, n)), rng.uniform(0.5, 2.0, n) / n
    links = (k + k.T) * w
    growth = Reaction(lambda u: 0.4 * (u - u**3), (-2, 2), derivative=lambda u: 0.4 * (1 - 3 * u * u))
    system = GradientFlow(J(from_matrix(k, Points(np.zeros(n), weights=w))), "l2", reaction=growth)
    for rest, there in ((np.ones(n), -0.8), (np.zeros(n), 0.4)):
        found_ = stability(system, rest)
        values = np.sort(np.linalg.eigvals(links - np.diag(links.sum(axis=1)) + there * np.eye(n)).real)[::-1]
        worst = largest(worst, abs(found_.margin + values[0]), float(np.abs(found_.eigenvalues.real - values).max()),
                        float(found_.unstable != np.sum(values > 0)), 1e-2 * found_.error)  # fmt: skip
    # The Jacobian, of which a frozen linear part is formed once: one product with vectors for each channel then.
    equations, there_ = Equations(system, "start", np.ones(n)), rng.uniform(-1, 1, n)
    equations.matrix(np.ones(n))
    taken, products = equations.times, list[Floats]()

    def times(x: Floats, v: Floats) -> Floats:
        products.append(v)
        return taken(x, v)

    vars(equations)["times"] = times
    whole = links - np.diag(links.sum(axis=1)) + 0.4 * np.diag(1 - 3 * there_**2)
    worst = largest(worst, float(np.abs(equations.matrix(there_) - whole).max()), float(len(products) != 1))
    # A start that is nearly at 0 is at rest where one Newton step ends at the same Jacobian.
    near = stability(system, 1e-9 * rng.standard_normal(n))
    return largest(worst, float(near.verdict != "unstable"))


def neutral() -> float:
    """Return errors of directions that conserve or move: 1 and derivatives along both axes of a ring, orthonormal."""
    rng, shape = np.random.default_rng(7), (6, 5)
    flow = GradientFlow(J(affinity(Gaussian(1.1), Grid(shape, spacing=0.7, boundary="periodic"))))
    u = rng.standard_normal(shape)
    equations = Equations(flow, "start", u)
    slopes = [np.ones(30)]
    for axis, count in enumerate(shape):
        waves = np.fft.fftfreq(count, 1 / count)
        waves[2 * np.abs(waves) == count] = 0  # of the shortest wave of an even number of nodes no slope is seen
        turned = 1j * waves.reshape([-1 if i == axis else 1 for i in range(2)])
        slopes.append(np.fft.ifft(turned * np.fft.fft(u, axis=axis), axis=axis).real.ravel())
    basis, _ = np.linalg.qr(np.stack(slopes, axis=1))
    found = equations.neutral(u.ravel(), math.inf)
    worst = float(np.abs(found.columns @ found.columns.T / 30 - basis @ basis.T).max())
    worst = largest(worst, float(np.abs(found.columns.T @ found.columns / 30 - np.eye(3)).max()))
    worst = largest(worst, float(found.words != "1 conserved mean and 2 translations"))
    # A mean is kept, and it is said.
    rest = find_equilibrium(flow, u + 0.4)
    said = "it keeps the 1 conserved mean of the start" in rest.message and "changed" not in rest.message
    return largest(worst, float(np.abs(rest.u - np.mean(u) - 0.4).max()), float(not said))


def run(context: Context) -> Outcome:
    del context
    return Outcome([
        Check("products, tangents, points between and ends of steps against closed forms", geometry(), 1e-9),
        Check("what is told where branches cross or turn, and branches that begin there", events(), 1e-7),
        Check("a Hopf point, and the wave that begins there", hopf(), 1e-9),
        Check("directions that conserve, and that move signals along a ring, against Fourier sums", neutral(), 1e-9),
        Check("Newton's and implicit steps, errors and margins, against closed forms", searches(), 1e-9),
    ])  # fmt: skip


CLAIM = Claim(
    name="branches-by-formula",
    title="Branches and searches go step by step as their formulas say",
    statement=(
        "Of nodes with closed forms, r − v², r v − v², r v − v³: tangents, steps that are shortened to an end of the "
        "range, places and kinds of crossings, the errors that are told and the branches that begin there are those "
        "written out. Newton's steps, implicit Euler steps that grow as |F| falls, and margins are too."
    ),
    source=(
        "Keller 1977; Doedel 2007, doi 10.1007/978-1-4020-6356-5_1; Kelley and Keyes 1998, doi "
        "10.1137/S0036142996304796"
    ),
    run=run,
)
