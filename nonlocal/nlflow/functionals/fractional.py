"""Fractional Laplacians on grids."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, linalg, ndimage

from nlflow._array import Array, Floats, is_numpy, on_host, power_of_two, underflowing
from nlflow.affinities.fractional import FractionalAffinity, Region, edge_correction
from nlflow.affinities.lattice import Lattice, normalization
from nlflow.affinities.table import wrap
from nlflow.backends.threads import cores
from nlflow.domains import Grid
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_floats,
    check_integer,
    check_number,
    is_number,
    kind_of,
)
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.energies import E, J
from nlflow.functionals.krylov import default_rtol
from nlflow.functionals.minimizer import Minimizer, told

LARGEST, DEAR = 8192, 1e6
"""The matrix is formed for at most this many nodes of the strip (512 MiB), whose cube is at most 1e6 N."""

_HEAVY = 0.1  # of the sum of weights: diagonal entries from which a node belongs to the matrix
_WIDTH = {1: 64, 2: 1, 3: 1}  # of the strip in nodes; on a line a wide one costs nothing


class Capacitance:
    """The inverse of the operator on a periodic box, corrected so that it is 0 in a strip around the domain.

    (Buzbee, Dorr, George and Golub 1971, doi 10.1137/0708066.) O(N log N + |S|^3) for a strip of |S| nodes.
    """

    def __init__(self, region: Region, lattice: Lattice, extra: Floats) -> None:
        shape = region.grid.shape
        self._room = 2 * _WIDTH[len(shape)]  # nodes between the box of the domain and the edge of the periodic box
        self._lengths = tuple(fft.next_fast_len(n + n // 2 + 2 * self._room, real=True) for n in shape)
        self._axes = tuple(range(len(shape)))
        symbol = lattice.total - fft.rfftn(wrap(lattice.table(shape), self._lengths), workers=cores()).real
        # That of constants is 0 where the horizon is small: a constant is what the strip takes away.
        others = symbol.ravel()[1:]
        symbol.flat[0] = max(float(symbol.flat[0]), 0.5 * float(others.min()))
        self._gains = 1 / symbol
        inside = np.ones(shape, bool) if region.inside is None else region.inside
        places = np.argwhere(inside) + self._room
        self._nodes: NDArray[np.intp] = np.asarray(np.ravel_multi_index(tuple(places.T), self._lengths))
        extra = extra.ravel()
        heavy = extra > _HEAVY * lattice.total
        self._set_strip(inside, self._nodes[heavy], extra[heavy])
        self._root = np.sqrt(lattice.total / (lattice.total + np.where(heavy, 0.0, extra)))

    def _set_strip(self, inside: NDArray[np.bool_], heavy: NDArray[np.intp], diagonal: Floats) -> None:
        room, width = self._room, 2 * _WIDTH[inside.ndim] + 1
        box = np.pad(inside, [(room, length - n - room) for n, length in zip(inside.shape, self._lengths, strict=True)])
        strip = np.flatnonzero(ndimage.maximum_filter(box, width, mode="constant") & ~box)
        self._strip = np.concatenate([strip, heavy])
        self._factor: Any = None
        count = len(self._strip)
        if not 0 < count <= LARGEST or count**3 > DEAR * len(self._nodes):
            return
        green = fft.irfftn(self._gains, s=self._lengths, workers=cores())
        places = np.stack(np.unravel_index(self._strip, self._lengths), axis=1)
        lengths = np.array(self._lengths)
        matrix = np.empty((len(places), len(places)))
        for row, place in enumerate(places):
            matrix[row] = green[tuple(((place - places) % lengths).T)]
        added = np.arange(len(strip), len(places))
        matrix[added, added] += 1 / diagonal
        self._factor = linalg.cho_factor(matrix, overwrite_a=True)

    @property
    def size(self) -> int:
        return 0 if self._factor is None else len(self._strip)

    def _green(self, values: NDArray[Any], nodes: NDArray[np.intp]) -> NDArray[Any]:
        field = np.zeros((math.prod(self._lengths), *values.shape[1:]))
        field[nodes] = values
        field = field.reshape(*self._lengths, *values.shape[1:])
        image = fft.rfftn(field, axes=self._axes, workers=cores())
        image *= self._gains.reshape(self._gains.shape + (1,) * (image.ndim - self._gains.ndim))
        back = fft.irfftn(image, s=self._lengths, axes=self._axes, workers=cores())
        return np.asarray(back).reshape(-1, *values.shape[1:])

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, computed in double precision."""
        flat = r.reshape(len(self._nodes), -1).astype(np.float64)
        root = self._root[:, None]
        image = self._green(root * flat, self._nodes)
        if self._factor is not None:
            charges = linalg.cho_solve(self._factor, image[self._strip])
            image -= self._green(charges, self._strip)
        return np.asarray(root * image[self._nodes], dtype=r.dtype).reshape(r.shape)


_CLOSEST = 1e-6  # of the spacing: nodes nearer to the edge count as outside


@underflowing
class FractionalLaplacian:
    """The fractional Laplacian on a grid, also truncated or tempered, with values given outside the domain.

    (A u)(x) = integral of (u(x) - u(y)) C |x - y|^(-m-2s) exp(-tempering |x - y|) over y with |x - y| < horizon. On the
    nodes inside A u = L u + kappa (u - f): L belongs to `affinity`, kappa is the rate at which a walker leaves the
    domain, and f is what it finds there.

    Parameters
    ----------
    grid : Grid
        Of up to three axes with one spacing. ``isolated``: the domain is the box of its cells, or what `inside` says
        of it. ``periodic``: a torus, without an outside.
    s : float
        Order, 0 < s < 1.
    inside : array of shape ``grid.shape``, optional
        Of bool: which nodes are inside. Of float: the distance to the edge of the domain, in units of length, negative
        outside. Signals are arrays of shape (N,) of the nodes inside, in C order; see `on_grid`.
    horizon : float
        > spacing; infinite by default.
    tempering : float
        >= 0, in reciprocal units of length, and at most one over the spacing.
    scaling : {'fractional', 'local'}
        The constant C. ``fractional``: 4^s Gamma(m/2 + s) / (pi^(m/2) |Gamma(-s)|), that of (-Laplace)^s. ``local``:
        twice m over the second moment, for which A tends to -Laplace as the horizon tends to 0; asks for a horizon or
        tempering.
    corrected : bool, optional
        Correct sums near an edge, where u is like dist^s; by default unless `inside` is of bool. With distances in
        three dimensions it has to be False.
    memory_limit : float, optional
        Bytes.

    Attributes
    ----------
    affinity : Affinity
        Of k = K / 2 between the nodes inside, with K = C |x - y|^(-m-2s) exp(-tempering |x - y|) within the horizon,
        another weight between nearest nodes, and a sum over all periods on a torus; its domain is the grid, or
        `Points`.
    killing : array of shape ``domain.shape``
        kappa >= 0; zeros on a torus.

    Raises
    ------
    InputError
        For an order outside of (0, 1), a horizon of at most one spacing, fewer than two nodes inside, reflecting grids,
        unequal spacings, and more than three axes.
    MemoryLimitError
        When the transforms would pass the limit.

    Notes
    -----
    Sums are O(N log N) by the Fourier transform. For smooth u and no horizon the error of A u is O(h^(4-2s)). That of a
    corrected solution on an interval, like dist^s at the edge, falls as h^(1+s).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import FractionalLaplacian, Grid
    >>> a = FractionalLaplacian(Grid(100, spacing=0.02, boundary="isolated"), s=0.5)  # on (-1, 1)
    >>> u = a.solve(1.0).u
    >>> x = a.affinity.domain.nodes[:, 0] - 1
    >>> float(np.abs(u - np.sqrt(1 - x**2)).max()) < 1e-3
    True
    """

    def __init__(
        self,
        grid: Grid,
        s: float,
        *,
        inside: Any = None,
        horizon: float = math.inf,
        tempering: float = 0.0,
        scaling: str = "fractional",
        corrected: bool | None = None,
        memory_limit: float | None = None,
    ) -> None:
        check_detached("memory_limit", memory_limit)
        self.grid = _check_grid(grid)
        self.s = check_number("s", s, minimum=0, strict=True, below=1, hint="1 is the local Laplacian, no kernel")
        h = grid.spacing[0]
        self.horizon = check_number(
            "horizon", horizon, minimum=h, strict=True, finite=False, hint="the spacing; nodes nearer see no other"
        )
        if abs(2 * math.log10(h)) > 280:
            raise InputError(f"grid: got the spacing {h:g}, whose square a float can hardly hold; change the unit")
        self.tempering = check_number("tempering", tempering, minimum=0)
        if self.tempering * h > 1:
            raise InputError(
                f"tempering: got {self.tempering:g} on a grid of spacing {h:g}, expected at most {1 / h:g}: the kernel "
                "would vanish between nodes; use a finer grid"
            )
        self._region = _region(grid, inside)
        corrected = _check_corrected(corrected, self._region)
        self._lattice = Lattice(grid.ndim, self.s, self.horizon / h, self.tempering * h, self._constant(scaling))
        affinity = FractionalAffinity(self._region, self._lattice, memory_limit)
        self.affinity = affinity
        self._plain = np.zeros(self.domain.shape)
        self._extra = np.zeros(self.domain.shape)
        if grid.boundary == "isolated":
            # What rounding makes negative where the horizon does not reach the edge.
            lost = self._lattice.total - affinity.sums(np.ones(self.domain.shape))
            self._plain = np.where(lost > 1e-12 * self._lattice.total, lost, 0.0)
            if corrected:
                # Where little of the kernel leaves, a negative correction must not make a gain of it.
                self._extra = np.maximum(edge_correction(self._region, self._lattice), -0.9 * self._plain)
        self.killing: Floats = self._plain + self._extra

    def _constant(self, scaling: str) -> float:
        check_choice("scaling", scaling, ("fractional", "local"))
        h, ndim = self.grid.spacing[0], self.grid.ndim
        if scaling == "fractional":
            return float(normalization(ndim, self.s) * h ** (-2 * self.s))
        if math.isinf(self.horizon) and self.tempering == 0:
            raise InputError("scaling: got 'local' without a horizon, expected a horizon or tempering > 0 with it")
        unit = Lattice(ndim, self.s, self.horizon / h, self.tempering * h, 1.0)
        return float(2 * ndim / unit.radial(0.0, 2.0, unit.horizon) * h**-2)

    @property
    def domain(self) -> Any:
        """The grid, or `Points`."""
        return self.affinity.domain

    def apply(self, u: Array, exterior: Any = 0.0) -> NDArray[Any]:
        """Return A u at the nodes inside.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        exterior : float or array of shape ``grid.shape``
            u outside the domain. An array, for nodes of the grid that are outside, implies 0 beyond the grid.

        Raises
        ------
        InputError
            For a wrong shape, NaN or infinity, and on a torus for an exterior that is not 0.
        """
        u = self._check_signal("u", u)
        with np.errstate(over="ignore", invalid="ignore"):  # found out in what comes of it
            return _in_range("u", self._operator(u) - _as(self._from_exterior(exterior), u))

    def functional(self, exterior: Any = 0.0, *, rhs: Any = None) -> J:
        """Return the functional whose gradient in the L2 metric is A u - rhs: J plus a fidelity kappa.

        Parameters
        ----------
        exterior : float or array of shape ``grid.shape``
            See `apply`.
        rhs : float or array of shape ``domain.shape``, optional

        Raises
        ------
        InputError
            For a right-hand side where kappa is 0 at some node; `GradientFlow` takes it as a source.
        """
        source = self._from_exterior(exterior)
        if rhs is not None:
            source = source + self._check_rhs(rhs)
        reached = self.killing > 0
        if rhs is not None and not reached.all():
            raise InputError(
                f"rhs: {int((~reached).sum())} node(s) do not see the exterior, so no fidelity can hold a source; "
                "give it to GradientFlow(functional, source=...), or call solve"
            )
        if self.grid.boundary == "periodic":
            return J(self.affinity)
        observed = np.where(reached, source, 0.0) / np.where(reached, self.killing, 1.0)
        return E(self.affinity, observed, self.killing)

    def solve(self, rhs: Any, exterior: Any = 0.0, *, rtol: float | None = None, maxiter: int = 1000) -> Minimizer:
        """Return u with A u = rhs inside and u = exterior outside, by preconditioned conjugate gradients.

        On a torus u has mean 0.

        Parameters
        ----------
        rhs : float or array of shape ``domain.shape`` or ``domain.shape + (D,)``
        exterior : float or array of shape ``grid.shape``
            See `apply`.
        rtol : float, optional
            Residual relative to the right-hand side; by default 1e-10 in float64 and 1e-5 in float32, or what rounding
            allows where that is more.
        maxiter : int

        Returns
        -------
        Minimizer

        Raises
        ------
        InputError
            For a wrong shape, NaN or infinity; on a torus for a right-hand side whose mean is not 0.
        """
        b = self._check_rhs(rhs)
        if rtol is not None:
            rtol = check_number("rtol", rtol, minimum=0, strict=True)
        maxiter = check_integer("maxiter", maxiter, minimum=1)
        given = _as(self._from_exterior(exterior), b)
        if self.grid.boundary == "periodic":
            return self._solve_torus(b, rtol)
        with np.errstate(over="ignore"):
            b = _in_range("rhs", b + given)
        size = power_of_two(float(np.abs(b).max()))  # taken out, so that squares stay in range
        b = b / size
        axes = tuple(range(len(self.domain.shape)))
        precondition = self._capacitance
        # In units of the sum of weights, so that squares stay in range for any unit of length.
        unit = power_of_two(self._lattice.total)
        if rtol is None:
            rtol = self._reachable(precondition(b), b)
        diagonal = _as((self._lattice.total + self._extra) / unit, b)
        rows = Rows(
            lambda v: self._operator(v / unit), lambda v: v / diagonal, lambda v: v * diagonal,
            _as(self.killing / unit, b) / diagonal, axes,
        )  # fmt: skip

        run = rows.by_conjugate_gradients(1.0, maxiter, lambda r: precondition(r) * unit)
        result = rows.solved(run, b, np.zeros_like(b), rtol)
        found = told(result, rtol, f"capacitance matrix of {precondition.size} nodes")
        with np.errstate(over="ignore"):
            return replace(found, u=_in_range("rhs", result.x / unit * size))

    @cached_property
    def _capacitance(self) -> Capacitance:
        return Capacitance(self._region, self._lattice, self._extra)

    def on_grid(self, u: Array, outside: float = math.nan) -> NDArray[Any]:
        """Return a signal of the nodes inside as an array on the grid, with a value at all other nodes."""
        return self._region.embed(self._check_signal("u", u), outside)

    def _operator(self, u: NDArray[Any]) -> NDArray[Any]:
        sums = self.affinity.sums(u)
        if self.grid.boundary == "periodic":
            return np.asarray(_as(self.affinity.degree * 2, u) * u - sums)
        return np.asarray(_as(self._lattice.total + self._extra, u) * u - sums)

    def _from_exterior(self, exterior: Any) -> Floats:
        """Return kappa f, what the exterior adds to A u with its sign changed."""
        if is_number(exterior):
            value = check_number("exterior", exterior)
            if value and self.grid.boundary == "periodic":
                raise InputError(f"exterior: got {value} on a periodic grid, which has no outside; leave it out")
            with np.errstate(over="ignore"):
                return _in_range("exterior", self.killing * value)
        if self.grid.boundary == "periodic":
            raise InputError("exterior: got an array on a periodic grid, which has no outside; leave it out")
        field = check_floats("exterior", exterior)
        if field.shape != self.grid.shape:
            raise InputError(f"exterior: got shape {field.shape}, expected a number or {self.grid.shape}")
        if self._region.inside is None:
            raise InputError("exterior: got an array where all nodes of the grid are inside, expected a number")
        sums = self.affinity.sums_from(np.where(self._region.inside, 0.0, field))
        if not self._extra.any():
            return np.asarray(sums)
        # The correction is for u less what it is at the edge, for which stands the nearest node outside.
        nearest = ndimage.distance_transform_edt(self._region.inside, return_distances=False, return_indices=True)
        return np.asarray(sums + self._extra * self._region.restrict(field[tuple(nearest)]))

    def _check_signal(self, name: str, value: Any) -> NDArray[Any]:
        array = self.affinity.check_signal(name, value)
        if not is_numpy(array):  # not reached: the affinity has refused it
            raise InputError(f"{name}: expected a NumPy array")
        return np.asarray(array)

    def _check_rhs(self, rhs: Any) -> NDArray[Any]:
        if is_number(rhs):
            return np.full(self.domain.shape, check_number("rhs", rhs))
        return self._check_signal("rhs", rhs)

    def _solve_torus(self, b: NDArray[Any], rtol: float | None) -> Minimizer:
        axes = tuple(range(self.grid.ndim))
        mean = np.abs(b.mean(axis=axes)).max()
        if mean > 1e-6 * np.abs(b).max():
            raise InputError(
                f"rhs: its mean is {mean:.3g}, expected 0 on a periodic grid, where A u has none; subtract it"
            )
        from nlflow.functionals.preconditioners.transform import Diagonal

        transform = Diagonal(self.affinity)
        eigenvalues = transform.rest * float(2 * self.affinity.degree.flat[0])
        eigenvalues.flat[0] = math.inf
        u = transform.back(transform.times(1 / eigenvalues, transform.forward(b)), b.dtype)
        unit = power_of_two(float(np.abs(b).max()))
        left, b = self._operator(u / unit) - (b - b.mean(axis=axes)) / unit, b / unit
        rest, size = (np.linalg.norm(v.reshape(self.domain.size, -1).astype(np.float64), axis=0) for v in (left, b))
        residual = float(np.max(rest / np.where(size > 0, size, 1.0)))
        if rtol is None:
            rtol = self._reachable(u / unit, b)
        success = residual <= rtol
        advice = "" if success else f", above rtol={rtol:g}, which {u.dtype} does not reach"
        return Minimizer(u, residual, 0, success, f"residual {residual:.3g} by the Fourier transform{advice}")

    def _reachable(self, u: NDArray[Any], b: NDArray[Any]) -> float:
        """Return the relative residual that rounding allows a solution of about `u`, for a `b` of size about 1."""
        # Sums are off by some roundings of the sum of weights times u.
        largest = float(np.abs(u).max()) * power_of_two(self._lattice.total)
        return max(default_rtol(b), 64 * float(np.finfo(b.dtype).eps) * largest)


def _in_range(name: str, values: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise NumericalError(f"{name}: so large that the result overflows; scale it down")
    return np.asarray(values)


def _as(values: Floats, like: NDArray[Any]) -> NDArray[Any]:
    return values.astype(like.dtype, copy=False).reshape(values.shape + (1,) * (like.ndim - values.ndim))


def _check_grid(grid: Any) -> Grid:
    if not isinstance(grid, Grid):
        raise InputError(f"grid: got {kind_of(grid)}, expected a Grid")
    if grid.boundary == "reflect":
        raise InputError("grid: got the boundary 'reflect', expected 'isolated' (values given outside) or 'periodic'")
    if grid.ndim > 3:
        raise InputError(f"grid: got {grid.ndim} axes, expected at most 3")
    if len(set(grid.spacing)) > 1:
        raise InputError(f"grid: got the spacings {grid.spacing}, expected the same along each axis")
    return grid


def _region(grid: Grid, inside: Any) -> Region:
    if inside is None:
        if grid.size < 2:
            raise InputError("grid: got one node, expected two or more")
        return Region(grid)
    if grid.boundary == "periodic":
        raise InputError("inside: got a mask on a periodic grid, expected boundary='isolated' with it")
    given = on_host(inside, "inside")
    flags = given.dtype == bool
    if given.dtype.kind in "iu":
        raise InputError(
            f"inside: got integers ({given.dtype}), expected which nodes are inside (bool), or their distance to the "
            "edge (floats); convert them with .astype(bool) or .astype(float)"
        )
    values = given if flags else check_floats("inside", inside) / grid.spacing[0]
    if values.shape != grid.shape:
        raise InputError(f"inside: got shape {values.shape}, expected {grid.shape}, that of the grid")
    mask = values if flags else values > _CLOSEST
    if mask.sum() < 2:
        raise InputError(f"inside: got {int(mask.sum())} node(s), expected two or more (True, or a distance > 0)")
    if not flags:
        lines = (np.minimum(i, n - 1 - i) + 1.5 for i, n in zip(np.indices(grid.shape), grid.shape, strict=True))
        past = mask & (values > np.minimum.reduce(list(lines)))
        if past.any():
            raise InputError(
                f"inside: the distance at {tuple(int(i) for i in np.argwhere(past)[0])} is more than that to the edge "
                "of the grid, expected a grid that holds the domain; use a larger one"
            )
    return Region(grid, np.array(mask), None if flags else values)


def _check_corrected(corrected: Any, region: Region) -> bool:
    torus = region.grid.boundary == "periodic"
    known = not torus and (region.inside is None or (region.distance is not None and region.grid.ndim < 3))
    if corrected is None and region.distance is not None and not known:
        raise InputError(
            "inside: got distances in three dimensions, where edges are not corrected; give a mask of bool, or "
            "corrected=False, for which only their sign counts"
        )
    if corrected is None:
        return known
    if not isinstance(corrected, bool):
        raise InputError(f"corrected: got {corrected!r}, expected True, False or None")
    if corrected and not known:
        why = "there is no edge on a periodic grid" if torus else (
            "the distance to the edge has to be known: give inside as distances (in one or two dimensions)"
        )  # fmt: skip
        raise InputError(f"corrected: got True, but {why}; use corrected=False")
    return corrected
