"""Whether an equilibrium is stable: the rightmost eigenvalues of the Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats, underflowing
from nlflow.equilibria.equations import DENSE, Equations, Neutral
from nlflow.equilibria.tangents import Border, Tangent
from nlflow.errors import NumericalError, check_integer, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.spectrum import extreme_pairs

_AT_REST = 1e-6, 1e-3  # |F| relative to what cancels in it, up to which a signal counts as at rest; in float32
_MOST = 64  # eigenvalues up to which iterations go on while all real parts are positive
_DIGITS = 1e-11  # residual of an iteration, relative to the Jacobian


@dataclass(frozen=True, repr=False)
class Stability(Brief):
    """What the Jacobian at an equilibrium says of the flow near it.

    Neutral directions are left out: translations, and those of conserved means, one for each channel of a connected
    component. A chain with several closed classes in a component, as of an `AttentionFlow`, conserves more.

    Attributes
    ----------
    verdict : {'stable', 'unstable', 'cannot tell'}
        Whether all real parts are below 0 by more than the error, or one is above 0 by more.
    margin : float
        Minus the largest real part: the rate at which a stable equilibrium is approached.
    error : float
        Of the largest real part: an estimate, for a self-adjoint Jacobian a bound.
    unstable : int
        How many eigenvalues have real parts above 0 by more than their error; beyond 600 unknowns of those that were
        computed.
    eigenvalues : array of shape (k,), complex
        By decreasing real part.
    vectors : array of shape (k, ...), complex
        Their eigenvectors, shaped like the signal; root mean square 1.
    residuals : array of shape (k,)
        Root mean square of J v - mu v.
    neutral : int
        How many directions were left out.
    symmetric : bool
        Whether the Jacobian is self-adjoint in the flow's measure.
    residual : float
        |du/dt| at the signal, relative to the size of what cancels in it.
    message : str
    """

    verdict: str
    margin: float
    error: float
    unstable: int
    eigenvalues: NDArray[np.complex128]
    vectors: NDArray[np.complex128]
    residuals: Floats
    neutral: int
    symmetric: bool
    residual: float
    message: str


@checked_call
@underflowing
def stability(flow: Flow, u: Any, k: int = 6) -> Stability:
    """Return whether an equilibrium of a flow is stable, with the rightmost eigenvalues of the Jacobian.

    All eigenvalues are computed up to 600 unknowns, O(n^3); beyond, `k` by Lanczos or Arnoldi iteration.

    Parameters
    ----------
    flow : Flow
    u : array
        An equilibrium, as `find_equilibrium` returns it.
    k : int
        How many eigenvalues are returned.

    Returns
    -------
    Stability

    Raises
    ------
    InputError
        As `find_equilibrium`.
    NumericalError
        When the iteration does not converge.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity
    >>> from nlflow.equilibria import stability
    >>> flow = GradientFlow(J(affinity(Gaussian(width=9.0), Grid(4))), "degree", reaction=AllenCahn(0.1))
    >>> one, zero = stability(flow, np.ones(4)), stability(flow, np.zeros(4))
    >>> one.verdict, round(one.margin, 6), zero.verdict, zero.unstable
    ('stable', 0.2, 'unstable', 1)
    """
    k = check_integer("k", k, minimum=1)
    equations = Equations(flow, "u", u)
    x = equations.start
    left, size = equations.norm(equations(x)), equations.cancelling(x)
    residual = left / size if size > 0 else (0.0 if left == 0 else math.inf)
    spectrum = Spectrum.of(equations, x, k)
    error = float(spectrum.errors[0]) if len(spectrum.errors) else 0.0
    leading = float(spectrum.values[0].real) if len(spectrum.values) else -math.inf
    verdict = "stable" if leading < -error else "unstable" if leading > error else "cannot tell"
    message = f"largest real part {leading:.6g}, off by at most {error:.2g}"
    if verdict == "cannot tell":
        message += ", which does not tell its sign: nonlinear terms decide; follow the flow with solve()"
    if not spectrum.symmetric:
        message = message.replace("at most", "about")
    if spectrum.neutral.count:
        message += f"; up to {spectrum.neutral.words}, in which the equilibrium may be moved"
    if residual > _AT_REST[equations.single] and not _near_rest(equations, x):
        verdict = "cannot tell"
        message = (
            f"u is not at rest: du/dt is {residual:.2g} of what cancels in it; take u of find_equilibrium; {message}"
        )
    vectors, residuals = eigenvectors(equations, x, spectrum, list(range(len(spectrum.values)))[:k])
    return Stability(
        verdict, -leading, error, spectrum.unstable, spectrum.values[:k],
        np.array([equations.shaped(v) for v in vectors.T]), residuals,
        spectrum.neutral.count, spectrum.symmetric, residual, message,
    )  # fmt: skip


def eigenvectors(
    equations: Equations, x: Floats, spectrum: Spectrum, members: Sequence[int]
) -> tuple[NDArray[Any], Floats]:
    """Return some eigenvectors of a spectrum, columns, and |J v - mu v|."""
    neutral, values, vectors = spectrum.neutral, spectrum.values[members], spectrum.vectors[:, members]
    columns, rows = neutral.columns[:, neutral.conserved :], neutral.rows[neutral.conserved :]
    if spectrum.symmetric or not columns.shape[1] or not len(values):
        return vectors, spectrum.residuals[members]

    def left(v: NDArray[Any], mu: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], Floats]:
        v = v / np.linalg.norm(equations.root[:, None] * v, axis=0)
        image = [equations.times(x, one.real) + 1j * equations.times(x, one.imag) for one in v.T]
        rest = np.stack(image, axis=1) - mu * v
        return v, rest, np.linalg.norm(equations.root[:, None] * rest, axis=0)

    # Translations that were moved away are mixed into the others, where rows are no left null vectors.
    found, rest, residuals = left(vectors, values)
    share = np.divide(rows @ rest, values, out=np.zeros((len(rows), len(values)), complex), where=values != 0)
    mended, _, less = left(found + columns @ share, values)
    return np.where(less < residuals, mended, found), np.fmin(less, residuals)


def _near_rest(equations: Equations, x: Floats) -> bool:
    """Whether one Newton step leads to where the Jacobian is the same, as it does near an equilibrium 0."""
    neutral = equations.neutral(x)
    step = Tangent(equations, x).solve(-equations(x), Border.of(neutral), np.zeros(neutral.count)).v
    if not np.isfinite(step).all():
        return False
    probe = np.random.default_rng(3).standard_normal(len(x))
    here, there = equations.times(x, probe), equations.times(x + step, probe)
    return equations.norm(here - there) <= _AT_REST[equations.single] * equations.norm(here)


@dataclass(frozen=True)
class Spectrum:
    """Rightmost eigenpairs of a Jacobian without neutral directions; `size` is |J v| / |v| of a random v, no bound."""

    values: NDArray[Any]
    vectors: NDArray[Any]
    residuals: Floats
    errors: Floats
    unstable: int
    neutral: Neutral
    symmetric: bool
    size: float

    @classmethod
    def of(cls, equations: Equations, x: Floats, k: int, *, moved: bool = False) -> Spectrum:
        """Return all eigenpairs up to `DENSE` unknowns, else about k; with `moved` without those of translations."""
        tangent = Tangent(equations, x)
        neutral = equations.neutral(x)
        n, root = len(x), equations.root
        rng = np.random.default_rng(2)
        v, w = rng.standard_normal((2, n))
        image, other = tangent.times(v / root), tangent.times(w / root)
        size = max(float(np.linalg.norm(root * image) / np.linalg.norm(v)), 1e-300)
        both = tangent.equations.times(x, (v + w) / root)
        noise = float(np.linalg.norm(root * (both - image - other))) / (2 * size * math.sqrt(n))
        noise = max(noise, equations.rounding)
        skew = abs(float(w @ (root * image) - v @ (root * other)))
        symmetric = bool(skew <= 1e2 * noise * size * np.linalg.norm(v) * np.linalg.norm(w))
        away = 10 * size  # beyond most eigenvalues, whose root mean square is about `size`, if not beyond the largest
        columns, rows = root[:, None] * neutral.columns, neutral.rows / root

        def product(y: Floats) -> Floats:
            # In units in which the measure is that of the Euclidean inner product (Brauer's shift of eigenvalues).
            return np.asarray(root * tangent.times(y / root) - away * (columns @ (rows @ y)))

        held = neutral.columns[:, :0]
        if moved:
            every = equations.neutral(x, math.inf).columns
            known = neutral.columns @ (neutral.rows @ every)
            held = every[:, [equations.norm(v) > 0.5 for v in (every - known).T]]
        k += held.shape[1]
        if n <= DENSE:
            matrix = root[:, None] * tangent.matrix / root
            # Beyond each eigenvalue: one large degree among many small ones hardly shows in `size`.
            beyond = 2 * max(min(float(np.linalg.norm(matrix, kind)) for kind in (1, np.inf, "fro")), size)
            matrix -= beyond * columns @ rows
            values, vectors, conditions = _all_pairs(matrix, symmetric)
            kept = slice(0, n - neutral.count)  # the others are those that were moved away
            values, vectors, conditions = values[kept], vectors[:, kept], conditions[kept]
            residuals = np.linalg.norm(matrix @ vectors - values * vectors, axis=0)
        else:
            digits = max(_DIGITS, 10 * noise)
            values, vectors, residuals = _some_pairs(product, n, k, symmetric, digits, size)
            while len(values) < _MOST and values.real.min() > 0:
                values, vectors, residuals = _some_pairs(product, n, 2 * len(values), symmetric, digits, size)
            conditions = np.ones(len(values))
        off = conditions * (residuals + 10 * noise * size)
        for direction in held.T:
            alike = np.abs((root * direction) @ vectors)
            left = np.arange(len(values)) != int(np.argmax(alike))
            values, vectors, residuals, off = values[left], vectors[:, left], residuals[left], off[left]
        unstable = int(np.sum(values.real > off))
        return cls(values, vectors / root[:, None], residuals, off, unstable, neutral, symmetric, size)


def _all_pairs(matrix: Floats, symmetric: bool) -> tuple[NDArray[Any], NDArray[Any], Floats]:
    """Return eigenvalues by decreasing real part, eigenvectors of length 1, and condition numbers of eigenvalues."""
    from scipy.linalg import eig

    if not np.isfinite(matrix).all():
        raise NumericalError("u: the Jacobian has values that are not finite there; take another signal")
    if symmetric:
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        return values[::-1] + 0j, vectors[:, ::-1] + 0j, np.ones(len(values))
    found: Any = eig(matrix, left=True, right=True)
    values, left, right = found
    order = np.lexsort((values.imag < 0, -values.real))
    values, left, right = values[order], left[:, order], right[:, order]
    likeness = np.abs(np.sum(left.conj() * right, axis=0))
    return values, right, 1 / np.maximum(likeness, 1e-300)


def _some_pairs(
    product: Callable[[Floats], Floats], n: int, k: int, symmetric: bool, digits: float, size: float
) -> tuple[NDArray[Any], NDArray[Any], Floats]:
    # ARPACK asks for digits relative to an eigenvalue, and drops those of 0 that it finds to no such digits.
    shift = 0.0 if symmetric else size
    try:
        values, vectors, residuals = extreme_pairs(
            lambda y: product(y) + shift * y,
            n,
            "LA" if symmetric else "LR",
            min(k, n - 2),
            symmetric=symmetric,
            rounding=digits,
            tol=digits / 10,
        )
    except NumericalError as error:
        raise NumericalError(
            f"u: {k} eigenvalues of the Jacobian were not found by iteration; ask for more (k) or at most {DENSE} "
            f"unknowns, where all are computed ({error})"
        ) from error
    values = values - shift
    order = np.lexsort((values.imag < 0, -values.real))
    return values[order] + 0j, vectors[:, order] + 0j, residuals[order]
