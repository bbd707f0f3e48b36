"""The pieces that a flow is made of, and which of them a subclass says more than."""

from __future__ import annotations

from nlflow.flows.flow import Flow
from nlflow.flows.terms import Terms


class Pieces(Flow):
    """A flow made of pieces: `average` makes `diffusion`, this makes `linear` and `velocity`.

    `pulled` and `driven` are what `velocity` has beside `linear`. Where a subclass overrides `velocity` or `linear` and
    not both of them, they follow from these two (`LinearFlow.toward`, `LinearFlow.drawn`).

    Attributes
    ----------
    terms : Terms
        What there is beside the linear part; in `velocity` alone.
    """

    terms: Terms

    def more_than(self, piece: str) -> str | None:
        """Return the method by which the flow is more than one of its linear pieces makes it, None if there is none.

        `average` makes `diffusion`, this makes `linear` and `velocity`. A method that a subclass (or the object)
        overrides adds to the pieces below it, unless they are overridden there too. Terms are in `velocity` alone.

        Parameters
        ----------
        piece : {'average', 'diffusion', 'linear'}
            What an integrator is made of, beside the fidelity.

        Examples
        --------
        >>> from nlflow import Gaussian, GradientFlow, Grid, J, affinity
        >>> class Reaction(GradientFlow):
        ...     def velocity(self, u):
        ...         return super().velocity(u) + u - u**3
        >>> weights = affinity(Gaussian(width=1.0), Grid(5))
        >>> GradientFlow(J(weights)).more_than("linear"), Reaction(J(weights)).more_than("linear")
        (None, 'velocity')
        """
        return "velocity" if self.terms.words else self.overridden(piece)

    def overridden(self, piece: str) -> str | None:
        """Return what `more_than` does, terms left aside."""
        order = ("average", "diffusion", "linear", "velocity")
        depth = self._depth(piece)
        above = order[order.index(piece) + 1 :]
        return next((name for name in reversed(above) if self._depth(name) < depth), None)

    @property
    def split(self) -> bool:
        """Whether `pulled` and `driven` are those of `velocity` and `linear`, and need not be taken from them."""
        said = max(self._depth("pulled"), self._depth("driven"))
        return said <= min(self._depth("velocity"), self._depth("linear"))

    @property
    def plainly_linear(self) -> bool:
        """Whether A is that of P, the rate and the fidelity: no piece of it is overridden."""
        depth = self._depth("_take")
        return all(self._depth(piece) >= depth for piece in ("average", "diffusion", "linear"))

    @property
    def plain(self) -> bool:
        """Whether no piece is overridden: P, the rate, the fidelity and the terms say all."""
        return self.overridden("average") is None and self._depth("average") >= self._depth("_take")

    def _depth(self, name: str) -> int:
        """Return how far from this object a method is defined: 0 on itself, then class by class."""
        if name in vars(self):
            return 0
        return 1 + next(i for i, cls in enumerate(type(self).__mro__) if name in vars(cls))
