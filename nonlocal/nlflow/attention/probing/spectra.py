"""Spectra of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief
from nlflow.attention.probing.operators import Operator
from nlflow.attention.probing.trace import Head, Layer
from nlflow.attention.probing.verdicts import (
    SMOOTHING,
    VERDICTS,
    Ruling,
    contraction_of,
    outermost,
    random_products,
    random_stochastic,
    ruling,
    ruling_of_heads,
)
from nlflow.errors import NlflowError

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]

_FEW, _STEPS, _CLOSE = 400, 300, 1e-9  # tokens from which |mu_2| alone is iterated; steps; residual, relative
_MOST = 4000  # steps to several eigenvalues, which take N^2 operations each
_ALL = 2000  # tokens up to which all eigenvalues of P are computed
_LARGEST, _LEAST = 8, 4  # by modulus, and by real part, of longer sequences
_FAR = 10.0  # from where the farthest eigenvalues within the unit disc are those of the least real part
_LEVEL = 0.95
_DRAWS = 40  # of random weights
_TURNS, _SETTLED = 500, 1e-9  # of the iteration to a singular vector


@dataclass(frozen=True, eq=False)
class Maps:
    """What spectra are made of."""

    operator: Operator
    layer: Layer  # of one sequence
    scale: float  # median over tokens of what the norm before attention multiplies by; 1 without one


@dataclass(frozen=True, eq=False)
class HeadSpectrum:
    """Eigenvalues of one head, beside those under nulls.

    Attributes
    ----------
    omegas : array of shape (d,)
        Eigenvalues of W_V W_O, without the D - d that are 0, by decreasing modulus, with the gains of norms taken in.
    random_size : float
        Modulus of the first that 95 % of random weights of the same norms stay below.
    alphas : array
        Eigenvalues of P by decreasing modulus; of long sequences the largest, and those of least real part.
    ruling
        The `Ruling` of this head with the residual, and the P of this input.
    random_smoothing : float
        Share of random weights of the same norms that smooth with this P.
    rate, rate_keys, rate_random : float
        Modulus of mu_2 of P, with keys of other tokens, and of a random stochastic matrix masked as P, one for a layer.
    bound : float
        2-norm of (I - 11^T/N) P.
    leading : float
        Cosine of 1 and the left singular vector of P with the largest singular value.
    """

    omegas: Complex
    random_size: float
    alphas: Complex
    ruling: Ruling
    random_smoothing: float
    rate: float
    rate_keys: float
    rate_random: float
    bound: float
    leading: float


@dataclass(frozen=True, eq=False, repr=False)
class LayerSpectrum(Brief):
    """The heads of one block, and the verdict of all together.

    Attributes
    ----------
    name : str
    heads : tuple of HeadSpectrum
    omegas : array of shape (D,)
        Eigenvalues of the sum of W_V W_O over heads, by decreasing modulus.
    random_size : float
        Radius of the disc of these eigenvalues for Gaussian weights of the same norms (circular law).
    ruling : Ruling
        Of all heads together.
    scale : float
    """

    name: str
    heads: tuple[HeadSpectrum, ...]
    omegas: Complex
    random_size: float
    ruling: Ruling
    scale: float

    def row(self) -> dict[str, Any]:
        """Return the row of the layer."""
        verdicts = [head.ruling.verdict for head in self.heads]
        first = self.omegas[0]
        return {
            "layer": self.name, "omega": float(first.real), "omega_imaginary": abs(float(first.imag)),
            "omega_random": self.random_size, "scale": self.scale, "smooth": self.ruling.smooth,
            "other": self.ruling.other, "doubt": self.ruling.doubt, "verdict": self.ruling.verdict,
            "layers": self.ruling.layers, "heads_smoothing": verdicts.count(SMOOTHING), "heads": len(verdicts),
            "heads_smoothing_random": float(sum(head.random_smoothing for head in self.heads)),
            "rate": _mean([head.rate for head in self.heads]),
            "rate_keys": _mean([head.rate_keys for head in self.heads]),
            "rate_random": _mean([head.rate_random for head in self.heads]),
            "bound": _mean([head.bound for head in self.heads]),
            "leading": _mean([head.leading for head in self.heads]),
        }  # fmt: skip

    def head_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each head."""
        for number, head in enumerate(self.heads):
            first = head.omegas[0]
            yield {
                "layer": self.name, "head": number, "omega": float(first.real),
                "omega_imaginary": abs(float(first.imag)), "omega_random": head.random_size,
                "negative": float((head.omegas.real < 0).mean()), "verdict": head.ruling.verdict,
                "condition": head.ruling.condition, "layers": head.ruling.layers,
                "smoothing_random": head.random_smoothing, "rate": head.rate, "rate_keys": head.rate_keys,
                "rate_random": head.rate_random, "bound": head.bound, "leading": head.leading,
            }  # fmt: skip


Products = dict[tuple[int, int], Complex]
"""Eigenvalues of random weights of norm 1, by D and d."""


def spectrum_of(name: str, maps: Maps, rng: np.random.Generator, products: Products) -> LayerSpectrum:
    """Return the spectra of a block, in O(H (N^3 + d^3) + D^3) time; `products` are drawn for each shape once."""
    operator = maps.operator
    values, output = (np.asarray(one.cpu().numpy(), np.float64) for one in (operator.values, operator.output))
    count, width, d = values.shape
    heads = [maps.layer.head(number) for number in range(count)]
    matrices = np.stack([head.matrix for head in heads])
    if (width, d) not in products:
        products[width, d] = random_products(width, d, _DRAWS, rng)
    random = random_stochastic(matrices.shape[1], rng, matrices.sum(axis=0) > 0)
    rate_random = rate_of(eigenvalues_of(random, causal=heads[0].causal))
    found = tuple(
        _head(heads[number], matrices[number], values[number], output[number], maps.scale, products[width, d],
              rate_random, rng)
        for number in range(count)
    )  # fmt: skip
    whole = np.einsum("hij,hjk->ik", values, output)
    sizes = (np.linalg.norm(values, axis=(1, 2)) * np.linalg.norm(output, axis=(1, 2))) ** 2
    return LayerSpectrum(
        name, found, _sorted(np.linalg.eigvals(whole)), math.sqrt(float(sizes.sum()) / (width * d)),
        ruling_of_heads(matrices, values, output, maps.scale), maps.scale,
    )  # fmt: skip


def _head(
    head: Head, matrix: Floats, values: Floats, output: Floats, scale: float, products: Complex, rate_random: float,
    rng: np.random.Generator,
) -> HeadSpectrum:  # fmt: skip
    inner = np.linalg.eigvals(output @ values)
    size = float(np.linalg.norm(values) * np.linalg.norm(output))
    alphas = eigenvalues_of(matrix, causal=head.causal)
    zero = np.zeros(int(len(values) > len(inner)))  # what W does not touch
    drawn = size * products
    smoothing = [ruling(alphas, np.append(each, zero), scale).verdict == SMOOTHING for each in drawn]
    order = rng.permutation(len(matrix))
    return HeadSpectrum(
        _sorted(inner), float(np.quantile(np.abs(drawn).max(axis=1), _LEVEL)), alphas,
        ruling(alphas, np.append(inner, zero), scale), float(np.mean(smoothing)), rate_of(alphas),
        _rate(_other_keys(head, order, matrix), causal=head.causal),
        rate_random, contraction_of(matrix), _leading(matrix),
    )  # fmt: skip


def _other_keys(head: Head, order: NDArray[np.int64], matrix: Floats) -> Floats:
    """Return P with the keys of other tokens."""
    if head.bias is None and head.mask is None:
        return matrix[:, order]
    try:
        return np.asarray(replace(head, k=head.k[order]).matrix)
    except NlflowError:
        return np.full_like(matrix, np.nan)


def eigenvalues_of(matrix: Floats, *, causal: bool = False) -> Complex:
    """Return eigenvalues of P by decreasing modulus; of a large one only the outermost."""
    if not np.isfinite(matrix).all():
        return np.array([math.nan], complex)
    if causal:
        return _sorted(np.diagonal(matrix).astype(complex))
    if len(matrix) <= _ALL:
        return _sorted(np.linalg.eigvals(matrix))
    found = [np.ones(1, complex)]
    less = matrix - matrix.mean(axis=0)  # on what tells tokens apart P has its other eigenvalues
    for count, centre in ((_LARGEST, 0.0), (_LEAST, _FAR)):
        values, residuals = outermost(lambda x: less @ x, len(less), steps=_MOST, centre=centre, most=count)
        found.append(values[residuals <= _CLOSE * np.abs(values - centre)])
    return _sorted(np.concatenate(found))


def rate_of(alphas: Complex) -> float:
    if np.isnan(alphas).any():
        return math.nan
    others = np.delete(alphas, int(np.abs(alphas - 1).argmin()))
    return float(np.abs(others).max()) if len(others) else 0.0


def _rate(matrix: Floats, *, causal: bool) -> float:
    """Return |mu_2| of P, of a large one without its other eigenvalues."""
    if len(matrix) > _FEW and not causal and np.isfinite(matrix).all():
        less = matrix - matrix.mean(axis=0)  # on what tells tokens apart P has its other eigenvalues
        (value,), (residual,) = outermost(lambda x: less @ x, len(matrix), steps=_STEPS, centre=0.0)
        if residual <= _CLOSE * abs(value):
            return float(abs(value))
    return rate_of(eigenvalues_of(matrix, causal=causal))


def _leading(matrix: Floats) -> float:
    """Return |<u, 1>| / sqrt(N) of the first left singular vector u, by iterations with P P^T."""
    u = np.ones(len(matrix)) / math.sqrt(len(matrix))
    for _ in range(_TURNS):
        before = u
        u = matrix @ (matrix.T @ u)
        u /= np.linalg.norm(u)
        if np.abs(u - before).max() <= _SETTLED:
            break
    return float(abs(u.sum()) / math.sqrt(len(matrix)))


def _sorted(values: NDArray[Any]) -> Complex:
    return np.asarray(values[np.argsort(-np.abs(values), kind="stable")], complex)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def verdict_of(layers: Sequence[LayerSpectrum]) -> str:
    depth = len(layers)
    counts = {name: sum(one.ruling.verdict == name for one in layers) for name in VERDICTS}
    within = [one for one in layers if one.ruling.layers <= depth]
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return (
        f"the attention of {depth} layers, each repeated by itself, without MLP and the norm after it, with the P of "
        f"one input held: {told}; in {len(within)} of them the ruling part would be 10 times the other within {depth} "
        "layers"
    )
