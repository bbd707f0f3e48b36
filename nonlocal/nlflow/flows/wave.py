"""Waves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from nlflow._array import Array, Floats, check_real, is_numpy, kept_like, namespace, over_channels, scalar, underflowing
from nlflow.errors import InputError, check_floats, check_number, checked_call, is_number, kind_of
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator
from nlflow.flows.integrators.exponential import chebyshev_coefficients, chebyshev_sums, modes_of
from nlflow.flows.linear import LinearFlow
from nlflow.flows.second_order import SecondOrder, response
from nlflow.flows.spectrum import apply_operator, dense_operator, extreme, is_told, largest_eigenvalue

_DENSE = 400  # nodes up to which the operator is a matrix


@checked_call
@underflowing
class WaveFlow(SecondOrder):
    """Flow of second order, rho u'' = -grad - rho gamma u', as of peridynamic bars and of waves on graphs.

    -grad is the velocity of a gradient flow with its terms (Silling 2000, doi 10.1016/S0022-5096(99)00029-0). The state
    has the shape ``domain.shape + (2 D,)``: D channels of displacement, then D of velocity. `state` makes one,
    `displacement` and `speed_of` take it apart, ``Solution.u`` too. With D = 1 displacements have the shape
    ``domain.shape``.

    Parameters
    ----------
    flow : GradientFlow, AttentionFlow or SystemFlow
        With a frozen kernel.
    damping : float, or array of shape ``domain.shape``
        gamma >= 0.
    density : float, or array of shape ``domain.shape``
        rho > 0.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, GradientFlow, Grid, J, StoermerVerlet, WaveFlow, affinity, solve
    >>> bar = Grid(64, spacing=1 / 64, boundary="periodic")
    >>> flow = WaveFlow(GradientFlow(J(affinity(Gaussian(width=0.05), bar))))
    >>> start = flow.state(np.sin(2 * np.pi * bar.nodes[:, 0]))
    >>> found = solve(flow, start, t=20.0, integrator=StoermerVerlet(0.05))
    >>> flow.displacement(found.u).shape, bool(abs(found.energy[1] / found.energy[0] - 1) < 1e-3)
    ((2, 64), True)
    """

    takes_noise = False
    advice = "integrate it with StoermerVerlet(dt), WaveExponential() where it is linear, or RungeKutta()"

    def __init__(self, flow: LinearFlow, *, damping: float | Array = 0.0, density: float | Array = 1.0) -> None:
        if not isinstance(flow, LinearFlow):
            raise InputError(f"flow: got {kind_of(flow)}, expected a GradientFlow")
        if flow.noise is not None:
            raise InputError(f"flow: got {flow.noise!r}, expected a flow without noise for one of second order")
        if flow.evolving:
            raise InputError("flow: got an evolving kernel, expected a frozen one for a flow of second order")
        super().__init__(flow.affinity, flow.inner, None, evolving=False, every=1)
        self.flow, self._count = flow, flow._count
        self.damping = _per_node("damping", damping, flow, strict=False)
        self.density = _per_node("density", density, flow, strict=True)
        if not float(np.max(self.damping)) < 1e150:
            raise InputError(
                f"damping: got {float(np.max(self.damping)):g}, whose square no float holds; change the unit of time, "
                "or take the flow itself, which is the limit of large dampings"
            )

    # ---- the state

    def state(self, displacement: Any, velocity: Any = None) -> Array:
        """Return the state of a displacement and a velocity, 0 by default, signals of the gradient flow."""
        u = self.flow.check_signal("displacement", displacement)
        v = 0 * u if velocity is None else self.affinity.check_signal("velocity", velocity)
        if tuple(v.shape) != tuple(u.shape):
            raise InputError(f"velocity: got shape {tuple(v.shape)}, expected {tuple(u.shape)}, that of displacement")
        return self.held(self.joined(u, v))

    def displacement(self, state: Array) -> Array:
        """Return the displacement of a state, or of several along leading axes."""
        return self._part(state, 0)

    def speed_of(self, state: Array) -> Array:
        """Return the velocity of a state, or of several along leading axes."""
        return self._part(state, 1)

    def _part(self, state: Array, number: int) -> Array:
        check_real("state", state)
        got, own = tuple(state.shape), self.affinity.domain.shape
        if got[len(got) - 1 - len(own) : -1] != own or got[-1] % 2:
            raise InputError(
                f"state: got shape {got}, expected {(*own, '2 D')}, displacement and velocity side by side, after any "
                "leading axes; make one with state(displacement, velocity)"
            )
        half = int(state.shape[-1]) // 2
        return state[..., number] if half == 1 else state[..., number * half : (number + 1) * half]

    def parts(self, state: Array) -> tuple[Array, Array]:
        return self.displacement(state), self.flow.free(self.speed_of(state))

    def joined(self, displacement: Array, velocity: Array) -> Array:
        xp, both = namespace(displacement), [displacement, velocity]
        alone = displacement.ndim == len(self.affinity.domain.shape)
        return xp.stack(both, axis=-1) if alone else xp.concat(both, axis=-1)

    def check_signal(self, name: str, value: Any) -> Array:
        y = super().check_signal(name, value)
        self.flow.check_signal(name, self.displacement(y))
        return self.held(y)

    def check_kind(self, name: str, y: Array) -> None:
        super().check_kind(name, y)
        if y.ndim != len(self.affinity.domain.shape) + 1 or int(y.shape[-1]) % 2:
            raise InputError(
                f"{name}: got shape {tuple(y.shape)}, expected displacements and velocities side by side as channels, "
                f"{(*self.affinity.domain.shape, 2)} or more; make it with flow.state(displacement, velocity)"
            )

    # ---- what moves it

    @property
    def timed(self) -> bool:
        return self.flow.timed

    def _at_time(self, t: float) -> Self:
        result = super()._at_time(t)
        result.flow = self.flow.when(t)
        return result

    def held(self, u: Array) -> Array:
        if self.flow.terms.constraint is None:
            return u
        displacement, velocity = self.parts(u)
        return self.joined(self.placed(displacement), velocity)

    def placed(self, displacement: Array) -> Array:
        return self.flow.held(displacement)

    def acceleration(self, displacement: Array) -> Array:
        force = self.flow.velocity(displacement)
        return force / over_channels(_like(self.density, force), force)

    def kicked(self, velocity: Array, acceleration: Array, dt: float) -> Array:
        kept, gained = self._damped(dt, velocity)
        return kept * velocity + gained * acceleration

    def _damped(self, dt: float, like: Array) -> tuple[Any, Any]:
        """Return the two factors of `response`, ready to multiply displacements."""
        kept, gained = response(self.damping, dt)
        return over_channels(_like(kept, like), like), over_channels(_like(gained, like), like)

    def velocity(self, u: Array) -> Array:
        displacement, v = self.parts(u)
        gained = self.acceleration(displacement)
        return self.joined(v, gained - over_channels(_like(self.damping, v), v) * v)

    def jacobian(self, u: Array, v: Array) -> Array:
        moved = self.flow.free(self.speed_of(v))
        force = self.flow.jacobian(self.displacement(u), self.displacement(v))
        gained = force / over_channels(_like(self.density, force), force)
        return self.joined(moved, gained - over_channels(_like(self.damping, v), moved) * moved)

    @property
    def functional(self) -> Any:
        return self.flow.functional

    @property
    def has_energy(self) -> bool:
        return self.flow.has_energy and self.flow.inner.by_nodes

    def energy(self, u: Array) -> float:
        """Return 1/2 sum_i m_i rho_i |v_i|^2 + E(u), m being w (w d in the degree metric); NaN without E."""
        if not self.has_energy:
            return math.nan
        v, affinity = self.speed_of(u), self.affinity
        system = self.flow.width(diffusion=True) > 1  # whose channels may have masses of their own
        if system:
            weight = over_channels(self.flow.mass(v), v) * over_channels(_like(self.density, v), v)
        else:
            weight = affinity.measure(self.inner.measure, v) * _like(self.density, v)
        with np.errstate(over="ignore", invalid="ignore"):
            kinetic = 0.5 * scalar(namespace(v).sum(over_channels(weight, v) * v * v, dtype=namespace(v).float64))
        if self.inner.normalized and not system and kinetic > 0:
            exponent = math.log(kinetic) + affinity.log_total()
            kinetic = math.exp(exponent) if exponent < 709 else math.inf
        return kinetic + self.flow.energy(self.displacement(u))

    def given(self) -> list[Any]:
        own = [x if isinstance(x, np.ndarray) else repr(x) for x in (self.damping, self.density)]
        return [repr(self.flow), *self.flow.given(), *own]

    def moments(self, t: float, like: Array) -> list[Array]:
        return self.flow.moments(t, self.displacement(like))

    def largest_frequency(self) -> float:
        """Return the root of the largest eigenvalue of A / rho."""
        if isinstance(self.density, float):
            return math.sqrt(largest_eigenvalue(self.flow) / self.density)
        density = self.density.ravel()
        if self.affinity.domain.size * self.flow.width() <= _DENSE:
            rows = np.repeat(density, self.flow.width())[:, None]
            return math.sqrt(max(float(np.linalg.eigvals(dense_operator(self.flow) / rows).real.max()), 0.0))
        root = np.sqrt(np.repeat(density, self.flow.width()))

        def product(v: Floats) -> Floats:
            return apply_operator(self.flow, (v / root)[:, None])[:, 0] / root

        found = extreme(product, len(root), "LM", tol=1e-6)
        return math.sqrt(float(np.abs(found[0]))) * (1 + 1e-6)

    def fastest(self) -> float:
        real = self.flow.symmetric or not self.flow.inner.by_nodes  # else waves may grow of themselves
        if not (real and is_told(self.flow)):
            return math.nan
        return math.sqrt(self.largest_frequency() ** 2 + self.flow.driving_bound() / float(np.min(self.density)))

    def surely_below(self) -> float:
        if not (self.flow.symmetric and self.flow.plain and is_told(self.flow)):
            return math.inf
        highest = self.flow.spectral_bounds()[1] + self.flow.driving_bound()
        return math.sqrt(highest / float(np.min(self.density)))

    def leaps(self, state: Array, dt: float, memory: dict[str, Any]) -> Callable[[Array, int], Array] | None:
        linear = self.flow
        plain = is_numpy(state) and state.dtype == np.float64 and linear.terms.reaction is None and not linear.timed
        small = self.affinity.domain.size <= _DENSE and linear.width() == 1 and linear.overridden("linear") is None
        if not (plain and small) or linear.inner.varies:
            return None
        if "_matrix" not in memory:
            memory["_matrix"] = dense_operator(linear) / np.reshape(self.density, (-1, 1))
        matrix: Floats = memory["_matrix"]
        like = self.displacement(state)
        flat = (matrix.shape[0], math.prod(like.shape) // matrix.shape[0])
        pull = np.reshape(linear.drawn(0 * like) / over_channels(_like(self.density, like), like), flat)
        kept, gained = (np.broadcast_to(x, like.shape).reshape(flat) for x in self._damped(dt, like))
        damped = bool(np.any(self.damping))

        def many(y: Array, count: int) -> Array:
            part, v = (np.array(np.reshape(x, flat)) for x in self.parts(y))
            aside, force = np.empty_like(part), np.empty_like(part)
            part += dt / 2 * v  # the matrix does not see held nodes, whose velocity is 0
            for k in range(count):
                np.matmul(matrix, part, out=force)
                np.subtract(pull, force, out=force)
                if damped:
                    v *= kept
                force *= gained
                v += force
                np.multiply(v, dt if k < count - 1 else dt / 2, out=aside)
                part += aside
            return self.joined(part.reshape(like.shape), v.reshape(like.shape))

        return many

    def __repr__(self) -> str:
        words = [repr(self.flow)]
        for name, value in (("damping", self.damping), ("density", self.density)):
            words.append(f"{name}={value!r}" if isinstance(value, float) else f"{name} of nodes")
        return f"{type(self).__name__}({', '.join(words)})"


def _per_node(name: str, given: Any, flow: LinearFlow, *, strict: bool) -> float | Floats:
    if is_number(given):
        return check_number(name, given, minimum=0, strict=strict)
    values = check_floats(name, given)
    if values.shape != flow.affinity.domain.shape:
        raise InputError(f"{name}: got shape {values.shape}, expected a number or {flow.affinity.domain.shape}")
    if not (values.min() > 0 if strict else values.min() >= 0):
        raise InputError(f"{name}: got {values.min():g}, expected values {'>' if strict else '>='} 0")
    return values


def _like(value: float | Floats, like: Array) -> Any:
    return value if isinstance(value, float) else kept_like(value, like)


def _as_wave(flow: Flow, integrator: Integrator) -> WaveFlow:
    if not isinstance(flow, WaveFlow):
        raise InputError(
            f"integrator: {type(integrator).__name__} is for a WaveFlow, got {kind_of(flow)}; {flow.advice}"
        )
    return flow


class _Responses:
    """How a mode of eigenvalue a, u'' = f - a u - gamma u' from rest, is at time t: functions of a."""

    def __init__(self, t: float, damping: float) -> None:
        self.t, self.half = t, damping / 2

    def pushed(self, a: Any, t: Any = None) -> Floats:
        """Return u(t) of v(0) = 1, exp(-gamma t / 2) sin(omega t) / omega with omega^2 = a - gamma^2 / 4."""
        t = self.t if t is None else t
        q = np.asarray(a) - self.half**2
        root = np.sqrt(np.abs(q))
        angle = root * t
        small = angle < 1e-4
        safe = np.where(small, 1.0, root)
        decay = np.exp(-self.half * t)
        # exp(-gamma t / 2) sinh(s t) / s without overflow or cancellation.
        slow = 0.5 * np.exp(self._slow(a) * t) * -np.expm1(-2 * angle) / safe
        found = np.where(q > 0, decay * np.sin(angle) / safe, slow)
        return np.asarray(np.where(small, decay * t * (1 - q * t * t / 6), found))

    def coasting(self, a: Any) -> Floats:
        """Return v(t) of v(0) = 1."""
        return self._turned(a) - self.half * self.pushed(a)

    def pulled(self, a: Any) -> Floats:
        """Return u(t) of a force of 1 from rest, (1 - exp(-gamma t / 2) (cos + gamma / 2 sin / omega)) / a."""
        a, t = np.asarray(a, dtype=np.float64), self.t
        if self.half == 0:
            return np.asarray(2 * self.pushed(a, t / 2) ** 2)  # (1 - cos) = 2 sin^2 of half the angle
        # Both roots are real and apart below, where a force moves it slowly.
        clear = (np.abs(a) * t * t > 0.1) & (a > 0.75 * self.half**2)
        direct = (1 - self._turned(a) - self.half * self.pushed(a)) / np.where(clear, a, 1.0)
        if self.half * t > 0.5:
            s = np.sqrt(np.maximum(self.half**2 - np.where(clear, 0.0, a), 0.0))
            slow, fast = self._slow(np.where(clear, 0.0, a)), -(self.half + s)
            safe = np.where(slow == 0, 1.0, slow)
            first = np.where(slow == 0, t, np.expm1(safe * t) / safe)
            near = (first - np.expm1(fast * t) / fast) / (slow - fast)
        else:
            x, w = np.polynomial.legendre.leggauss(16)
            near = np.zeros_like(a)
            for share, weight in zip(x, w, strict=True):
                near = near + t / 2 * weight * self.pushed(np.where(clear, 0.0, a), t / 2 * (1 + share))
        return np.asarray(np.where(clear, direct, near))

    def _slow(self, a: Any) -> Floats:
        """Return the root -gamma / 2 + s of an overdamped mode, with all its digits; 0 of others."""
        a = np.asarray(a, dtype=np.float64)
        over = np.sqrt(np.maximum(self.half**2 - a, 0.0)) + self.half
        return np.asarray(np.where((a <= self.half**2) & (over > 0), -a / np.where(over > 0, over, 1.0), 0.0))

    def _turned(self, a: Any) -> Floats:
        """Return exp(-gamma t / 2) cos(omega t)."""
        q = np.asarray(a) - self.half**2
        root = np.sqrt(np.abs(q))
        slow = 0.5 * (np.exp(self._slow(a) * self.t) + np.exp(-(root + self.half) * self.t))
        return np.asarray(np.where(q > 0, np.exp(-self.half * self.t) * np.cos(root * self.t), slow))


@underflowing
class WaveExponential(Integrator):
    """Exact solution of a linear `WaveFlow`.

    With omega^2 = A / rho - gamma^2 / 4 and the acceleration a_0 = (N - A u) / rho at the start::

        u(t) = u + S(t) v + R(t) a_0,    v(t) = S'(t) v + S(t) a_0,
        S = exp(-gamma t / 2) sin(omega t) / omega,    R = integral of S from 0 to t

    By a transform where `Exponential` takes one and the density is one number, else by Chebyshev expansions, about
    t omega_max / 2 averages for long t. A reaction, terms that depend on time, and a damping of nodes are refused.

    Parameters
    ----------
    tol : float, optional
        Bound of what expansions leave out of each step, relative to the largest displacement, velocity over the largest
        frequency, and static response; 1e-12 in float64 and 1e-6 in float32 by default.
    """

    order = math.inf
    takes_constraint = True
    keeps_limit = True

    def __init__(self, tol: float | None = None) -> None:
        self.tol = None if tol is None else check_number("tol", tol, minimum=0, strict=True)

    def stability_limit(self, flow: Flow) -> float:
        del flow
        return math.inf

    def check_kind(self, flow: Flow) -> None:
        wave = _as_wave(flow, self)
        linear = wave.flow
        advice = "use StoermerVerlet(dt)"
        if linear.timed:
            raise InputError(f"integrator: WaveExponential needs a force that does not depend on time; {advice}")
        if linear.terms.reaction is not None or linear.inner.varies:
            raise InputError(f"integrator: WaveExponential needs a linear force, got {linear!r}; {advice}")
        if not isinstance(wave.damping, float):
            raise InputError(f"integrator: WaveExponential needs one damping for all nodes; {advice}")
        if not linear.symmetric:
            raise InputError(f"integrator: WaveExponential needs a self-adjoint force; {advice}")
        if name := linear.overridden("linear"):
            raise InputError(
                f"integrator: WaveExponential is made of linear() of the gradient flow, whose {name}() says more; "
                f"{advice}"
            )

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        wave = _as_wave(flow, self)
        linear = wave.flow
        part, v = wave.parts(u)
        gained = wave.acceleration(part)
        parts = [linear.free(part), v]
        for index, moved in enumerate(self._moved(wave, target - t, v, gained, memory)):
            parts[index] = parts[index] + moved
        return wave.held(wave.joined(linear.held(parts[0]), parts[1])), target

    def _moved(self, wave: WaveFlow, t: float, v: Array, a: Array, memory: dict[str, Any]) -> tuple[Array, Array]:
        """Return by how much displacement and velocity change."""
        say, linear, xp = _Responses(t, float(wave.damping)), wave.flow, namespace(v)
        modes = modes_of(linear, v) if isinstance(wave.density, float) else None
        if modes is not None and modes.alike is not None:
            values, basis = np.maximum(modes.alike / float(wave.density), 0.0), modes.basis
            vs, as_ = basis.forward(v), basis.forward(a)
            pushed, pulled = say.pushed(values), say.pulled(values)
            response = pushed
            if linear.conserves_mean:  # no force moves it, and what rounding leaves of one would act for all of t
                pulled, response = (np.where(values > 0, found, 0.0) for found in (pulled, pushed))
            change = basis.times(pushed, vs) + basis.times(pulled, as_)
            speed = basis.times(say.coasting(values) - 1, vs) + basis.times(response, as_)
            return basis.back(change, v.dtype), basis.back(speed, v.dtype)
        tol = self.tol if self.tol is not None else (1e-6 if v.dtype == xp.float32 else 1e-12)
        low, high = linear.spectral_bounds()
        low, high = low / float(np.max(wave.density)), max(high / float(np.min(wave.density)), 1e-300)
        root = math.sqrt(high)

        def phase(x: Floats) -> Floats:
            return t * np.sqrt(np.maximum(x, 0.0))

        pushed, first = chebyshev_coefficients(lambda x: root * say.pushed(x), low, high, tol, phase=phase)
        pulled, second = chebyshev_coefficients(lambda x: high * say.pulled(x), low, high, tol, phase=phase)
        coasting, third = chebyshev_coefficients(lambda x: say.coasting(x) - 1, low, high, tol, phase=phase)
        memory["error_bound"] = memory.get("error_bound", 0.0) + max(first, second, third)
        flat = (*v.shape, 1) if v.ndim == len(wave.affinity.domain.shape) else tuple(v.shape)
        both = xp.concat([xp.reshape(v, flat), xp.reshape(a, flat)], axis=-1)

        def operator(x: Array) -> Array:
            return linear.on_free(x) / over_channels(_like(wave.density, x), x)

        by_push, by_pull, by_coast = chebyshev_sums(operator, both, low, high, [pushed, pulled, coasting])
        width = flat[-1]

        def of(x: Array, number: int) -> Array:
            return xp.reshape(x[..., number * width : (number + 1) * width], v.shape)

        change = of(by_push, 0) / root + of(by_pull, 1) / high
        return change, of(by_coast, 0) + of(by_push, 1) / root
