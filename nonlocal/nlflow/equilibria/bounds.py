"""How much of a signal an equilibrium keeps (arXiv 2312.00751, Proposition 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, namespace, power_of_two, scalar, to_numpy, underflowing
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.equilibria.limits import check_frozen
from nlflow.errors import InputError, NumericalError, check_number, kind_of, warn_caller
from nlflow.flows.gradient import AttentionFlow
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator, dense_operator, extreme, largest_eigenvalue, relaxation_rate
from nlflow.markov import MarkovChain

# Up to this many nodes eigenvalues and singular values come from the whole matrix.
_DENSE_NODES = 1000
_CLEAR = 1e-8  # of the largest value: a diversity that is not so small is far above rounding


@underflowing
def diversity(flow: LinearFlow, u: Any) -> float:
    """Return how far `u` is from constant: |u - mean(u)|, root mean square, channels added up.

    The mean is the one that the flow conserves. For a P that is not symmetric it is pi^T u, and the norm is that of
    L2(pi), or of L2(w) with transient states (causal attention), where pi = 0.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
    u : array of shape ``domain.shape`` or ``domain.shape + (D,)``

    Raises
    ------
    InputError
        Where P is not symmetric, for a batch and for several classes of nodes that no walk leaves.
    NumericalError
        When it is out of the range of floats, or the logarithm of pi is not known.
    """
    if not isinstance(flow, LinearFlow):
        raise InputError(f"flow: got {kind_of(flow)}, expected a GradientFlow or an AttentionFlow")
    u = flow.affinity.check_signal("u", u)
    if flow.symmetric:
        usual, xp = flow.distance_to_constant(u), namespace(u)
        if not flow.inner.normalized or flow.affinity.domain.leading or usual > _CLEAR * scalar(xp.max(xp.abs(u))):
            return usual
        return _in_log_space(MarkovChain(flow.affinity), u) if _on_host(flow) else usual
    # The lazy chain has the same stationary law, and a limit where the chain itself is periodic.
    chain = MarkovChain(flow.affinity, laziness=0.5)
    return float(chain.distance_to_limit(u, 0)[0]) if chain.log_law is None else _in_log_space(chain, u)


def _on_host(flow: LinearFlow) -> bool:
    return flow.affinity.whole_shape == flow.affinity.domain.shape


def _in_log_space(chain: MarkovChain, u: Array) -> float:
    """Return |u - pi^T u| in L2(pi) from log pi, without the underflow of pi and without cancellation."""
    logs = chain.log_law
    if logs is None:  # not reached: callers have looked, or k is symmetric
        raise InputError("affinity: got transient states")
    values = np.asarray(to_numpy(u), dtype=np.float64).reshape(chain.states, -1)
    # About the node where pi is largest: what differs from it there is exact, and has the size of what is looked for.
    values = values - values[np.argmax(logs)]
    size = power_of_two(float(np.abs(values).max()))
    values = values / size
    deviation = np.exp(logs / 2)[:, None] * (values - np.exp(logs) @ values)
    unit = power_of_two(float(np.abs(deviation).max()))  # squares of what is small have no float
    found = float(np.linalg.norm(deviation / unit)) * (unit * size)
    if found == 0 and np.any(values):
        raise NumericalError(
            "u: its diversity is below the smallest float, since pi is almost all at nodes where u is constant; scale "
            "the logits down"
        )
    return found


@underflowing
def diversity_bounds(flow: LinearFlow) -> tuple[float, float]:
    """Return bounds of diversity(u*) / diversity(f) for the equilibrium u* of any f.

    They are lambda / (lambda + mu_max) and lambda / (lambda + mu_2), mu_max and mu_2 being the largest and the second
    smallest eigenvalue of r (I - P). For a P that is not symmetric they come from singular values of
    (1 + lambda~) I - P on deviations from the mean; beyond 1000 nodes they are lambda~ / (lambda~ + 2) and 1.

    Parameters
    ----------
    flow : GradientFlow of E or AttentionFlow with a fidelity

    Returns
    -------
    (float, float)

    Raises
    ------
    InputError
        For a flow without fidelity, with several fidelities, or with one weighted by the other metric's measure; where
        P is not symmetric, for a single node, several classes of nodes that no walk leaves, and transient states among
        more than 1000 nodes.
    """
    check_frozen(flow)
    if flow.fidelity is None:
        raise InputError("flow: got a flow without fidelity, whose limit is constant; give it a fidelity > 0")
    fidelity = flow.fidelity.uniform
    if fidelity is None:
        raise InputError(
            "fidelity: got one value for each node (or a matrix) in the flow's metric, expected one number for all; in "
            "GradientFlow use the measure that belongs to the metric"
        )
    if fidelity == 0:
        return 0.0, 0.0
    if flow.symmetric:
        highest = largest_eigenvalue(flow, diffusion=True)
        # Eigenvalues are off by some roundings of the largest, and a difference by some of what it is taken from.
        eps, n = float(np.finfo(np.float64).eps), flow.affinity.domain.size
        off = min(4 * n, 64 + 4 * math.sqrt(n)) * eps * highest
        lowest = relaxation_rate(flow) - fidelity - off - 4 * eps * fidelity
        return fidelity / (fidelity + highest + off), min(fidelity / (fidelity + max(lowest, 0.0)), 1.0)
    if flow.affinity.domain.size > _DENSE_NODES:
        _check_irreducible(flow)
        return fidelity / (fidelity + 2), 1.0
    values = _singular_values(flow, fidelity)
    return fidelity / float(values[0]), fidelity / float(values[-1])


def _check_irreducible(flow: LinearFlow) -> None:
    if not MarkovChain(flow.affinity).irreducible:
        raise InputError(
            f"affinity: got {flow.affinity.domain.size} nodes with transient states (causal attention, say), expected "
            f"at most {_DENSE_NODES}: beyond, bounds are known in L2(pi) only, which does not see them"
        )


def _singular_values(flow: LinearFlow, fidelity: float) -> Floats:
    """Return those of I - P + fidelity on signals with pi^T v = 0, decreasing, in the norm of diversity."""
    chain = MarkovChain(flow.affinity)
    if chain.states == 1:
        raise InputError("affinity: got a single node, expected at least two: one has no diversity")
    logs = chain.log_law
    if logs is None:
        root = np.sqrt(chain.norm_weights.ravel())
        mean = chain.stationary.ravel() / root
        a = root[:, None] * dense_operator(flow, diffusion=True) / root
    else:
        mean = np.exp(logs / 2)
        a = _similar(chain, logs)
    mean /= np.linalg.norm(mean)
    # An orthonormal basis of the signals of mean 0: the columns but the first of the reflection that takes the first
    # unit vector to the direction of the mean.
    reflected = mean.copy()
    reflected[0] += math.copysign(1.0, mean[0])
    basis = (np.eye(len(mean)) - np.outer(reflected, reflected) / (1 + abs(mean[0])))[:, 1:]
    return np.asarray(np.linalg.svd(basis.T @ a @ basis + fidelity * np.eye(len(mean) - 1), compute_uv=False))


def _similar(chain: MarkovChain, logs: Floats) -> Floats:
    """Return sqrt(pi_i) (I - P)_ij / sqrt(pi_j); between nodes at most 1, since pi_i P_ij is at most pi_i and pi_j."""
    moves = chain.log_moves
    between = np.minimum(moves + (logs[:, None] - logs) / 2, 0.0)
    np.fill_diagonal(moves, -np.inf)
    np.fill_diagonal(between, -np.inf)
    return np.asarray(np.diag(np.exp(moves).sum(axis=1)) - np.exp(between))


@underflowing
def fidelity_for_diversity(flow: LinearFlow, fraction: float) -> float:
    """Return a fidelity that guarantees a fraction of every signal's diversity in the equilibrium.

    It is fraction / (1 - fraction) mu_max with the largest eigenvalue mu_max of r (I - P). Where P is not symmetric
    mu_max is the norm of I - P on deviations from the mean, or 2 beyond 1000 nodes.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Of which the fidelity does not count.
    fraction : float
        Least diversity(u*) / diversity(f), in (0, 1).

    Returns
    -------
    float
        lambda in the L2 metric, lambda~ in the degree metric and for attention.

    Raises
    ------
    InputError
        For a fraction outside (0, 1), an evolving kernel, where no node sees another, and as `diversity_bounds` where P
        is not symmetric.

    Warns
    -----
    NlflowWarning
        When a NeuTRENO layer with this fidelity would be unstable.
    """
    check_frozen(flow)
    hint = "to keep all would need an infinite fidelity"
    fraction = check_number("fraction", fraction, minimum=0, strict=True, below=1, hint=hint)
    if flow.symmetric:
        highest = largest_eigenvalue(flow, diffusion=True)
    elif flow.affinity.domain.size <= _DENSE_NODES:
        highest = float(_singular_values(flow, 0.0)[0])
    else:
        _check_irreducible(flow)
        highest = 2.0
    if not highest > 0:
        raise InputError(
            f"affinity: got {flow.affinity.domain.size} node(s) of which none sees another in float64, expected some "
            "that do: without, every fidelity > 0 keeps all of the diversity, and none is the smallest; use a wider "
            "kernel, or smaller logits"
        )
    fidelity = fraction / (1 - fraction) * highest
    limit = 2 - highest if flow.symmetric else largest_stable_fidelity(flow.affinity)
    if flow.inner.normalized and fidelity >= limit:
        warn_caller(
            f"a NeuTRENO layer with lambda~ = {fidelity:.4g} is unstable (limit {limit:.4g}); use SemiImplicit, which "
            "has the same equilibrium",
        )
    return fidelity


@underflowing
def largest_stable_fidelity(affinity: Affinity) -> float:
    """Return the fidelity lambda~ up to which the NeuTRENO step u <- Pu + lambda~ (f - u) converges.

    For symmetric k below 1 + mu_min(P), otherwise below the smallest Re mu + sqrt(1 - (Im mu)^2) over the eigenvalues
    mu of P.

    Parameters
    ----------
    affinity : Affinity
        Not symmetrized.
    """
    flow = AttentionFlow(check_affinity(affinity))
    if affinity.symmetric:
        return 2 - largest_eigenvalue(flow, diffusion=True)
    if affinity.domain.size <= _DENSE_NODES:
        values = 1 - np.linalg.eigvals(dense_operator(flow))
        return _limit_of(values)
    return _limit_by_iteration(flow)


def _limit_of(values: NDArray[Any]) -> float:
    # Rounding can put an eigenvalue of modulus 1 just outside the disk.
    return max(float(np.min(values.real + np.sqrt(np.maximum(1 - values.imag**2, 0)))), 0.0)


def _limit_by_iteration(flow: LinearFlow) -> float:
    """Go down from 2 to the limit of the eigenvalue farthest from where we are, until none is farther than 1."""
    n = flow.affinity.domain.size

    def farthest(fidelity: float) -> complex:
        def product(v: Floats) -> Floats:
            return (1 - fidelity) * v - apply_operator(flow, v).ravel()  # (P - lambda~ I) v, of the operator I - P

        # A wide basis: eigenvalues on a circle, as those of a walk in one direction, are hard to tell apart.
        return complex(extreme(product, n, "LM", ncv=min(n, 120), tol=1e-9, maxiter=100)[0])

    limit = 2.0
    try:
        while limit > 0:
            value = farthest(limit)
            if abs(value) <= 1 + 1e-8:
                break
            lower = _limit_of(np.array([limit + value]))
            if lower > limit - 1e-8:  # rounding of P is all that is left
                break
            limit = lower
        return limit
    except NumericalError as error:
        raise NumericalError(
            f"affinity: the limit was not found by Arnoldi iteration; use at most {_DENSE_NODES} nodes, where all "
            "eigenvalues are computed"
        ) from error
