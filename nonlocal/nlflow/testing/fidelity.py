"""Promises of fidelities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, Floats
from nlflow.affinities import affinity
from nlflow.domains import Grid
from nlflow.equilibria import equilibrium
from nlflow.errors import InputError, NlflowError, check_integer
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.spectrum import dense_operator
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import Fidelity, MatrixFidelity, NodeFidelity
from nlflow.kernels import Gaussian
from nlflow.testing.contract import Contract, ContractError, numbers, random

_STEPS = (1e-3, 1.0, 1e3)


def check_fidelity(fidelity: Fidelity, nodes: tuple[int, ...], channels: int | None = None) -> None:
    """Check the promises of a fidelity operator against the matrices by which it multiplies the vectors of nodes.

    Takes O(n^3) time, where n is the number of nodes times that of the channels that are mixed.

    Parameters
    ----------
    fidelity : Fidelity
    nodes : tuple of int
        Shape of the nodes that it is for; a few suffice.
    channels : int, optional
        D, for signals of shape nodes + (D,). By default the number that it mixes, and no axis of channels if that is 1.

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no fidelity, and for `nodes` or `channels` that are no numbers >= 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.functionals.fidelity import NodeFidelity
    >>> from nlflow.testing import check_fidelity
    >>> check_fidelity(NodeFidelity(np.linspace(0.0, 2.0, 6)), (6,))
    """
    contract = Contract("fidelity", fidelity, Fidelity)
    given: Any = nodes
    if not isinstance(given, tuple | list) or not given:
        raise InputError(f"nodes: got {given!r}, expected a shape such as (6,)")
    shape = tuple(check_integer("nodes", one, minimum=1) for one in given)
    own = _own_nodes(fidelity) or shape
    # Axes of length 1 share what they have.
    if len(own) != len(shape) or any(count not in (1, there) for count, there in zip(own, shape, strict=True)):
        raise InputError(f"nodes: got {shape}, expected {own}, for which the fidelity has values")
    if channels is not None:
        channels = check_integer("channels", channels, minimum=1)
    width: Any = fidelity.width
    if channels is None and width != 1:
        channels = width
    contract.holds(
        width >= 1 and (channels or 1) % width == 0, "width divides the channels", width,
        f"a number that divides {channels or 1}",
    )  # fmt: skip
    case = _Case(contract, fidelity, shape, () if channels is None else (channels,))
    case.check_operator()
    case.check_systems()
    case.check_multiples()
    case.check_centre()
    case.check_limits()


def _own_nodes(fidelity: Fidelity) -> tuple[int, ...]:
    """Return the axes of nodes of its values; none for one number, and where they are not known."""
    if isinstance(fidelity, MatrixFidelity):
        return fidelity.nodes
    return tuple(getattr(fidelity.values, "shape", ())) if isinstance(fidelity, NodeFidelity) else ()


@dataclass(frozen=True)
class _Case:
    """A fidelity beside the matrix of each node, (*nodes, width, width)."""

    contract: Contract
    fidelity: Fidelity
    nodes: tuple[int, ...]
    channels: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.nodes + self.channels

    @property
    def blocks(self) -> Floats:
        width = self.fidelity.width
        if width == 1:
            ones = np.ones(self.shape)
            alike = np.asarray(self.asked("times(v) keeps shape and dtype", self.fidelity.times, ones, like=ones))
            alike = alike[..., :1] if self.channels else alike[..., None]
            return np.asarray(alike[..., None])
        units = np.broadcast_to(np.eye(width).ravel(), (*self.nodes, width * width)) + 0.0
        promise = "times(v) takes several vectors side by side in the last axis"
        found = self.asked(promise, self.fidelity.times, units, like=units)
        return np.swapaxes(np.asarray(found).reshape(*self.nodes, width, width), -1, -2)

    def asked(self, promise: str, function: Any, *arguments: Any, like: Array) -> Array:
        return self.contract.kept(promise, self.contract.asked(promise, function, *arguments), like)

    def applied(self, blocks: Floats, v: Floats) -> Floats:
        """Return the product of each node's matrix with its vectors."""
        rows = v.reshape(*self.nodes, -1, blocks.shape[-1])
        return np.asarray((rows @ np.swapaxes(blocks, -1, -2)).reshape(v.shape))

    def over_nodes(self, values: Floats) -> Floats:
        """Return what multiplies nodes beside a signal."""
        return values[..., None] if self.channels else values

    def check_operator(self) -> None:
        near, v, blocks = self.contract.near, random(*self.shape), self.blocks
        moved = self.asked("times(v) keeps shape and dtype", self.fidelity.times, v, like=v)
        near(
            "times(v) is linear, belongs to each node alone, and takes channels alike",
            moved,
            self.applied(blocks, v),
            1e-10,
        )
        near("Lambda is symmetric", blocks, np.swapaxes(blocks, -1, -2), 1e-10)
        values = np.linalg.eigvalsh(blocks)
        least = float(values.min())
        self.contract.holds(
            least >= -1e-9 * max(float(values.max()), 1e-300), "Lambda is positive semidefinite", least, ">= 0"
        )
        told = self.contract.asked("bounds() are two numbers", self.fidelity.bounds)
        exact = [max(float(values.min()), 0.0), max(float(values.max()), 0.0)]
        near("bounds() are the smallest and the largest eigenvalue", list(told), exact, 1e-8)
        if self.fidelity.uniform is not None:
            near("uniform is the one number", moved, self.fidelity.uniform * v, 1e-10)
        single = v.astype(np.float32)
        part = self.contract.asked("over_degree", self.fidelity.over_degree, np.zeros(self.nodes), single)
        self.asked("over_degree(log d, like) takes the precision of `like`", part.times, single, like=single)

    def check_systems(self) -> None:
        v, f, blocks = random(*self.shape), random(*self.shape, seed=1), self.blocks
        for step in _STEPS:
            inverse = np.asarray(np.linalg.inv(np.eye(blocks.shape[-1]) + step * blocks), dtype=np.float64)
            promise = f"damped(v, {step:g}) is (I + step Lambda)^-1 v"
            found = self.asked(promise, self.fidelity.damped, v, step, like=v)
            self.contract.near(promise, found, self.applied(inverse, v), 1e-8)
            promise = f"implicit_step(v, f, {step:g}) is (I + step Lambda)^-1 (v + step Lambda f)"
            found = self.asked(promise, self.fidelity.implicit_step, v, f, step, like=v)
            exact = self.applied(inverse, v + step * self.applied(blocks, f))
            self.contract.near(promise, found, exact, 1e-8)

    def check_multiples(self) -> None:
        v, factor = random(*self.shape), 0.5 + np.abs(random(*self.nodes, seed=4))
        plain = self.applied(self.blocks, v)
        cases: list[tuple[str, Any, tuple[Any, ...], Floats]] = [
            ("scaled(c) is c Lambda, for one number", self.fidelity.scaled, (2.5,), 2.5 * plain),
            (
                "scaled(c) is c Lambda, for a number for each node", self.fidelity.scaled, (factor,),
                self.over_nodes(factor) * plain,
            ),
            (
                "over_degree(log d, like) is Lambda / d", self.fidelity.over_degree, (np.log(factor), v),
                plain / self.over_nodes(factor),
            ),
        ]  # fmt: skip
        for promise, method, arguments, exact in cases:
            made = self.contract.asked(promise, method, *arguments)
            self.contract.holds(isinstance(made, Fidelity), promise, type(made).__name__, "a Fidelity")
            self.contract.near(promise, self.asked(promise, made.times, v, like=v), exact, 1e-9)
        promise = "stated(like) says what it multiplies by"
        stated = self.contract.asked(promise, self.fidelity.stated, v)
        other = self.contract.asked(promise, self.fidelity.scaled(2.5).stated, v)
        self.contract.near(promise, other, 2.5 * numbers(stated), 1e-10)

    def check_centre(self) -> None:
        blocks, f = self.blocks, random(*self.shape, seed=5)
        if blocks.max() <= 0:
            return
        axes = tuple(range(len(self.nodes)))
        measure = self.over_nodes(0.5 + np.abs(random(*self.nodes, seed=6)))
        promise = "centre(f, m, axes) is c with sum m Lambda (f - c) = 0"
        c = np.asarray(self.contract.asked(promise, self.fidelity.centre, f, measure, axes))
        left = (measure * self.applied(blocks, f - np.broadcast_to(c, f.shape))).sum(axis=axes)
        size, most = float(np.abs(measure * self.applied(blocks, f)).sum(axis=axes).max()), float(np.abs(left).max())
        self.contract.holds(most <= 1e-8 * size, promise, f"a sum of {most:.3g}", "0")

    def check_limits(self) -> None:
        """Compare the minimizer and the limit of a flow with the solution of their dense system."""
        blocks, f = self.blocks, random(*self.shape, seed=7)
        if np.linalg.eigvalsh(blocks.reshape(-1, *blocks.shape[-2:]).sum(axis=0))[0] <= 0:
            return  # then it is not unique
        weights = affinity(Gaussian(width=2.0), Grid(self.nodes))
        flow = GradientFlow(E(weights, f, self.fidelity, measure="degree"), metric="degree")
        try:
            found = {"minimizer": flow.functional.minimizer().u, "equilibrium": equilibrium(flow).u}
        except NlflowError:
            raise
        except Exception as error:
            raise ContractError(
                f"{self.contract.name}: minimizer and equilibrium take it: {type(error).__name__} ({error}) was "
                "raised, expected a result"
            ) from error
        exact = self.limit(dense_operator(GradientFlow(J(weights), "degree")), f)
        for name, u in found.items():
            self.contract.near(f"{name}() solves (I - P + Lambda) u = Lambda f", np.asarray(u), exact, 1e-5)

    def limit(self, diffusion: Floats, f: Floats) -> Floats:
        """Return u with (I - P + Lambda) u = Lambda f, by a dense solution."""
        n, width = len(diffusion), self.fidelity.width
        apart = np.zeros((n, width, n, width))
        apart[np.arange(n), :, np.arange(n), :] = self.blocks.reshape(n, width, width)
        pull = apart.reshape(n * width, n * width)
        columns = f.reshape(n, -1, width).transpose(0, 2, 1).reshape(n * width, -1)
        u = np.linalg.solve(np.kron(diffusion, np.eye(width)) + pull, pull @ columns)
        return np.asarray(u.reshape(n, width, -1).transpose(0, 2, 1).reshape(f.shape))
