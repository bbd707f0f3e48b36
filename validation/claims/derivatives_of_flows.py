"""Derivatives of energies, steps, minimizers and limits against torch's of the same formulas, written out densely."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow import (
    AttentionFlow,
    AttentionStep,
    E,
    ExpDotProduct,
    ExplicitEuler,
    GradientFlow,
    J,
    NeutrenoStep,
    Points,
    SemiImplicit,
    affinity,
)
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

N, WIDTH, CHANNELS, STEPS = 7, 3, 2, 5


def run(context: Context) -> Outcome:
    try:
        import torch
    except ImportError as error:
        raise CannotRunError("torch is not installed: pip install 'nlflow[torch]'") from error
    from nlflow.flows import derivatives

    rng = np.random.default_rng(90)
    w = rng.uniform(0.5, 2.0, N) / N
    given = [rng.standard_normal((N, n)) for n in (WIDTH, WIDTH, CHANNELS, CHANNELS)]
    domain, mass = Points(np.zeros(N), weights=w), torch.tensor(w)

    def leaves(strength: Any) -> list[Any]:
        return [torch.tensor(a, requires_grad=True) for a in (*given, np.asarray(strength))]

    def weights_of(q: Any, k: Any) -> Any:
        return torch.exp(q @ k.T / q.shape[1] ** 0.5) * mass

    def apart(ours: Any, theirs: Any, one: list[Any], other: list[Any]) -> float:
        """Return the largest difference of values and of their gradients along a random direction, relative."""
        along = torch.tensor(np.random.default_rng(91).standard_normal(tuple(ours.shape)))
        (ours * along).sum().backward()
        (theirs * along).sum().backward()
        pairs = [(ours.detach(), theirs.detach())]
        pairs += [(a.grad, b.grad) for a, b in zip(one, other, strict=True) if b.grad is not None]
        return largest(*(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))

    worst = dict.fromkeys(("energies", "steps", "minimizers", "limits"), 0.0)
    for strength in (0.6, rng.uniform(0.2, 1.5, N)):
        held = np.reshape(strength, (-1, 1)) if np.ndim(strength) else strength
        for measure in ("l2", "degree"):
            context.step(f"{measure}, {'nodes' if np.ndim(strength) else 'number'}")
            # Of q = k: K = k + k^T is twice the kernel, and d = Σ w K.
            (_, k, u, f, s), (_, k2, u2, f2, s2) = leaves(held), leaves(held)
            energy = E(affinity(ExpDotProduct(), domain, k), f, s[:, 0] if np.ndim(strength) else s, measure=measure)
            both = 2 * weights_of(k2, k2)
            degree = both.sum(dim=1, keepdim=True)
            phi = s2 * (degree if measure == "degree" else torch.ones_like(degree))
            squares = ((u2[:, None] - u2) ** 2).sum(dim=2)
            plain = (mass[:, None] * both * squares).sum() / 4 + (mass[:, None] * phi * (u2 - f2) ** 2).sum() / 2
            told = derivatives.value(energy, u)
            worst["energies"] = largest(worst["energies"], apart(told, plain, [k, u, f, s], [k2, u2, f2, s2]))
            (_, k, u, f, s), (_, k2, u2, f2, s2) = leaves(held), leaves(held)
            energy = E(affinity(ExpDotProduct(), domain, k), f, s[:, 0] if np.ndim(strength) else s, measure=measure)
            both = 2 * weights_of(k2, k2)
            degree = both.sum(dim=1, keepdim=True)
            phi = s2 * (degree if measure == "degree" else torch.ones_like(degree))
            exact = torch.linalg.solve(torch.diag((degree + phi)[:, 0]) - both, phi * f2)
            found = derivatives.minimizer(energy, rtol=1e-13)
            worst["minimizers"] = largest(worst["minimizers"], apart(found, exact, [k, f, s], [k2, f2, s2]))
        # Attention: the limit of queries unlike keys, and layers.
        (q, k, _, f, s), (q2, k2, _, f2, s2) = leaves(held), leaves(held)
        flow = AttentionFlow(affinity(ExpDotProduct(), domain, k, queries=q), f, s[:, 0] if np.ndim(strength) else s)
        p = weights_of(q2, k2)
        p = p / p.sum(dim=1, keepdim=True)
        exact = torch.linalg.solve((1 + s2) * torch.eye(N, dtype=mass.dtype) - p, s2 * f2)
        limit = derivatives.equilibrium(flow, rtol=1e-13)
        worst["limits"] = largest(worst["limits"], apart(limit, exact, [q, k, f, s], [q2, k2, f2, s2]))
    for step, dt in ((ExplicitEuler(0.4), 0.4), (SemiImplicit(0.8), 0.8), (NeutrenoStep(), 1.0)):
        (q, k, u, f, s), (q2, k2, u2, f2, s2) = leaves(0.6), leaves(0.6)
        flow = AttentionFlow(affinity(ExpDotProduct(), domain, k, queries=q), f, s)
        p = weights_of(q2, k2)
        p, now = p / p.sum(dim=1, keepdim=True), u2
        for _ in range(STEPS):
            if isinstance(step, SemiImplicit):
                now = (now + dt * (p @ now - now + s2 * f2)) / (1 + dt * s2)
            else:
                now = now + dt * (p @ now - now + s2 * (f2 - now)) if dt < 1 else p @ now + s2 * (f2 - now)
        told = derivatives.run(flow, u, step, STEPS)
        worst["steps"] = largest(worst["steps"], apart(told, now, [q, k, u, f, s], [q2, k2, u2, f2, s2]))
    # A kernel that each step, or each second one, takes from the signal.
    for every in (1, 2):
        (_, _, u, _, _), (_, _, u2, _, _) = leaves(0.6), leaves(0.6)
        flow = GradientFlow(J(affinity(ExpDotProduct(), domain, u)), "degree", evolving=True, every=every)
        now = u2
        for number in range(4):
            if number % every == 0:
                p = weights_of(now, now)
                p = p / p.sum(dim=1, keepdim=True)
            now = p @ now
        told = derivatives.run(flow, u, AttentionStep(), 4)
        worst["steps"] = largest(worst["steps"], apart(told, now, [u], [u2]))
    return Outcome([Check(f"{what} and their gradients against torch's, relative", off, 1e-9)
                    for what, off in worst.items()])  # fmt: skip


CLAIM = Claim(
    name="derivatives-of-flows",
    title="Derivatives of energies, layers, minimizers and limits",
    statement=(
        "Gradients of J and E, of some steps of a flow, of the minimizer of E and of the limit ((1 + λ̃) − P)⁻¹ λ̃ f "
        "with respect to signals, observed signals, fidelities, queries and keys, those of minimizers by the implicit "
        "function theorem, are those that torch finds through the same formulas, written out with dense matrices."
    ),
    source="derived; implicit function theorem",
    run=run,
)
