"""Metrics of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, is_numpy, is_tensor, namespace, underflowing
from nlflow._looks import assure
from nlflow.errors import InputError, NumericalError, check_array, checked_call

_ROUNDINGS = 16  # units of rounding: a direction that is shorter, relative to its token, is rounding


@underflowing
def mean_cosine(x: Any, *, mask: Any = None) -> Array:
    """Return the mean cosine of two tokens over all pairs i != j (arXiv 2312.00751, appendix E.3), in O(N D) time.

    Parameters
    ----------
    x : array of shape (..., N, D)
        Tokens, of which those of length 0 are perpendicular to all others.
    mask : array of bool of shape (..., N), optional
        Tokens that count; all by default.

    Returns
    -------
    array of shape (...)
        float64; NaN where fewer than two tokens count.

    Raises
    ------
    InputError
        For fewer than two dimensions, NaN or infinite tokens that count, or a mask of another shape.

    Examples
    --------
    >>> import numpy as np
    >>> float(mean_cosine(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))).__round__(6)
    0.333333
    """
    tokens, counted, xp = _tokens(x, mask)
    tokens = tokens / _unit(xp, tokens, axis=-1)
    lengths = xp.linalg.vector_norm(tokens, axis=-1, keepdims=True)
    units = tokens / xp.where(lengths > 0, lengths, xp.ones_like(lengths))
    count = xp.sum(counted, axis=-1)
    together = xp.sum(xp.sum(units, axis=-2) ** 2, axis=-1) - xp.sum(units**2, axis=(-2, -1))
    return _ratio(xp, together, count * (count - 1))


@underflowing
def token_similarity(x: Any, *, mask: Any = None) -> Array:
    """Return t_sim = |Pi X|^2 / |X|^2 with Pi = 1 1^T / N; NaN where all tokens are 0 (arXiv 2312.06182).

    O(N D) time; parameters, returned shape and errors as in `mean_cosine`.
    """
    tokens, counted, xp = _tokens(x, mask)
    tokens = tokens / _unit(xp, tokens)
    mean, _ = _parts(xp, tokens, counted)
    count = xp.sum(counted, axis=-1)
    return _ratio(xp, count * xp.sum(mean**2, axis=(-2, -1)), xp.sum(tokens**2, axis=(-2, -1)))


@underflowing
def hfc_lfc(x: Any, *, mask: Any = None) -> Array:
    """Return |X - Pi X| / |Pi X|, infinite where the mean token is 0, NaN where all are (arXiv 2203.05962).

    O(N D) time; parameters, returned shape and errors as in `mean_cosine`.
    """
    tokens, counted, xp = _tokens(x, mask)
    tokens = tokens / _unit(xp, tokens)
    mean, rest = _parts(xp, tokens, counted)
    low = xp.sqrt(xp.sum(counted, axis=-1) * xp.sum(mean**2, axis=(-2, -1)))
    high = xp.sqrt(xp.sum(rest**2, axis=(-2, -1)))
    infinite = xp.where(high > 0, xp.full_like(high, float("inf")), xp.full_like(high, float("nan")))
    return xp.where(low > 0, _ratio(xp, high, low), infinite)


@checked_call
@underflowing
def participation_rank(x: Any, *, mask: Any = None, centred: bool = False) -> Array:
    """Return (sum s^2)^2 / sum s^4 of the singular values s of X, in O(N D min(N, D)) time; NaN where all are 0.

    Parameters
    ----------
    centred : bool
        Subtract the mean token first; all else as in `mean_cosine`.
    """
    tokens, counted, xp = _tokens(x, mask)
    tokens = tokens / _unit(xp, tokens)
    if centred:
        tokens = _parts(xp, tokens, counted)[1]
        tokens = tokens / _unit(xp, tokens)
    if _precision(xp, x) > 1e-10:
        tokens = xp.astype(tokens, xp.float32)  # nothing cancels in sums of squares, and the sums are in float64
    turned = xp.matrix_transpose(tokens)
    gram = tokens @ turned if tokens.shape[-2] <= tokens.shape[-1] else turned @ tokens
    trace, square = (xp.sum(part**2, axis=(-2, -1), dtype=xp.float64) for part in (tokens, gram))
    return _ratio(xp, trace**2, square)


@underflowing
def energy_per_token(v: Any, average: Any, average_of_squares: Any, *, mask: Any = None) -> Array:
    """Return J of a head over N, 1/2 sum_ij A_ij |v_i - v_j|^2 / N, with A of row sums 1 (arXiv 2312.00751, eq. 5).

    O(N D) time; mask, returned shape and errors as in `mean_cosine`; 0 where no token counts.

    Parameters
    ----------
    v, average : array of shape (..., N, D)
        Values and Av.
    average_of_squares : array of shape (..., N)
        A|v|^2.

    Raises
    ------
    NumericalError
        When squares of the values overflow.
    """
    values, counted, xp = _tokens(v, mask, "v")
    mean = _alike("average", average, values.shape, mask)
    squares = _alike("average_of_squares", average_of_squares, values.shape[:-1], mask)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
        per_token = xp.vecdot(values, values - 2 * mean) + squares
        count = xp.sum(counted, axis=-1)
        energy = xp.sum(per_token * counted, axis=-1) / (2 * xp.where(count > 0, count, xp.ones_like(count)))
    assure(xp.all(xp.isfinite(energy)), _tell_of_overflow)
    return xp.where(energy > 0, energy, xp.zeros_like(energy))  # rounding may leave it below 0


def _tell_of_overflow() -> None:
    raise NumericalError("v: the squares of the values overflow; scale them down (J is quadratic)")


@underflowing
def gradient_cosine(v: Any, average: Any, symmetric_average: Any, *, mask: Any = None) -> Array:
    """Return the mean cosine of v_i - (Av)_i and v_i - (A_sym v)_i, A_sym having keys as queries, in O(N D) time.

    Without a causal mask the second is a gradient of J (arXiv 2312.00751, appendix E.1). Arguments have the shape (...,
    N, D); mask, returned shape and errors as in `mean_cosine`. Tokens that do not move, to rounding, are left out.
    """
    values, counted, xp = _tokens(v, mask, "v")
    given = {"average": average, "symmetric_average": symmetric_average}
    averages = [_alike(name, array, values.shape, mask) for name, array in given.items()]
    unit = _unit(xp, xp.concat([values, *averages], axis=-1), axis=-1)
    values = values / unit
    ways = [values - array / unit for array in averages]
    lengths = [xp.linalg.vector_norm(way, axis=-1) for way in ways]
    least = _ROUNDINGS * _precision(xp, v) * xp.linalg.vector_norm(values, axis=-1)
    moving = xp.astype((lengths[0] > least) & (lengths[1] > least), xp.float64) * counted
    cosine = _ratio(xp, xp.sum(ways[0] * ways[1], axis=-1), lengths[0] * lengths[1])
    return _ratio(xp, xp.sum(xp.where(moving > 0, cosine, xp.zeros_like(cosine)), axis=-1), xp.sum(moving, axis=-1))


@underflowing
def head_redundancy(matrix: Any, following: Any) -> Array:
    """Return the cosine <A, B> / (|A| |B|) of attention matrices (..., N, N) (arXiv 2312.00751, appendix G.2)."""
    first, _, xp = _tokens(matrix, None, "matrix")
    second = _alike("following", following, first.shape, None)
    first, second = first / _unit(xp, first), second / _unit(xp, second)
    sizes = xp.sum(first**2, axis=(-2, -1)) * xp.sum(second**2, axis=(-2, -1))
    return _ratio(xp, xp.sum(first * second, axis=(-2, -1)), xp.sqrt(sizes))


def attention_share(before: Any, between: Any, after: Any, mask: Any) -> Array | None:
    """Return |x' - x| / (|x' - x| + |x'' - x'|), (B,), of states (B, N, D), or None where they do not fit."""
    if before is None or between is None or after is None:
        return None
    if not before.shape == between.shape == after.shape or before.shape[:2] != mask.shape:
        return None
    xp, counted = namespace(before), mask[..., None]
    first, second = (
        xp.linalg.vector_norm(xp.where(counted, xp.astype(way, xp.float64), 0.0), axis=(-2, -1))
        for way in (between - before, after - between)
    )
    return first / (first + second)


def _tokens(x: Any, mask: Any, name: str = "x") -> tuple[Array, Array, Any]:
    """Return (tokens in float64, 0 where they do not count; 1 where they count and 0 elsewhere; namespace)."""
    array, xp = _finite(name, _without_others(x, mask))
    if array.ndim < 2:
        raise InputError(f"{name}: got shape {tuple(array.shape)}, expected (..., N, D): tokens with channels")
    if mask is None:
        return array, xp.ones_like(array[..., 0]), xp
    if is_numpy(array):
        mask = xp.asarray(mask)
    if str(getattr(mask, "dtype", "")).split(".")[-1] != "bool" or tuple(mask.shape) != tuple(array.shape[:-1]):
        raise InputError(
            f"mask: got {getattr(mask, 'dtype', type(mask).__name__)} of shape {tuple(getattr(mask, 'shape', ()))}, "
            f"expected bool of shape {tuple(array.shape[:-1])}, one for each token"
        )
    counted = xp.astype(mask, xp.float64)
    return array * counted[..., None], counted, xp


def _without_others(x: Any, mask: Any) -> Any:
    """Return what tokens have with 0 for those that do not count: they may be NaN, as padding in some models."""
    shape, fits = tuple(getattr(x, "shape", ())), getattr(mask, "shape", None)
    if fits is None or str(mask.dtype).split(".")[-1] != "bool" or tuple(fits) not in (shape, shape[:-1]):
        return x
    others = ~mask if tuple(fits) == shape else ~mask[..., None]
    if is_numpy(x):
        return np.where(np.asarray(others), 0, x)
    return x.masked_fill(others, 0) if is_tensor(x) and is_tensor(mask) else x


def _precision(xp: Any, value: Any) -> float:
    single = str(getattr(value, "dtype", "")).split(".")[-1] in ("float32", "float16", "bfloat16")
    return float(xp.finfo(xp.float32 if single else xp.float64).eps)


def _alike(name: str, value: Any, shape: tuple[int, ...], mask: Any) -> Array:
    array, _ = _finite(name, _without_others(value, mask))
    if tuple(array.shape) != tuple(shape):
        raise InputError(f"{name}: got shape {tuple(array.shape)}, expected {tuple(shape)}")
    return array


def _finite(name: str, value: Any) -> tuple[Array, Any]:
    array = check_array(name, value)
    xp = namespace(array)
    return xp.astype(array, xp.float64, copy=False), xp


def _parts(xp: Any, tokens: Array, counted: Array) -> tuple[Array, Array]:
    """Return the mean token (..., 1, D), and the counted tokens without it."""
    count = xp.sum(counted, axis=-1)[..., None, None]
    mean = xp.sum(tokens, axis=-2, keepdims=True) / xp.where(count > 0, count, xp.ones_like(count))
    return mean, (tokens - mean) * counted[..., None]


def _unit(xp: Any, x: Array, axis: int | tuple[int, ...] = (-2, -1)) -> Array:
    """Return the power of two (1 for zeros) below the largest modulus over some axes, broadcastable to `x`.

    Numbers divided by it keep their digits, and their squares do not overflow.
    """
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True)
    exponent = xp.floor(xp.log2(xp.where(largest > 0, largest, xp.ones_like(largest))))
    return xp.full_like(exponent, 2.0) ** xp.clip(exponent, -1074, 1023)


def _ratio(xp: Any, above: Array, below: Array) -> Array:
    """Return above / below, NaN where `below` is 0."""
    some = below > 0
    return xp.where(some, above / xp.where(some, below, xp.ones_like(below)), xp.full_like(below, float("nan")))
