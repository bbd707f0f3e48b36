"""The kinds of attention that are compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nlflow.errors import check_choice

__all__ = ["DEFAULT", "VARIANTS", "Variant", "variant"]


@dataclass(frozen=True)
class Variant:
    """One kind of attention.

    Attributes
    ----------
    affinity : str
        One of `nlflow.attention.terms.averages.AFFINITIES`.
    term : bool
        Whether it has NeuTRENO's term, with the fidelity of its task.
    feat_scale : bool
    kind : str
        One of `nlflow.attention.terms.modules.KINDS`, another term of the literature; only for scenes, whose model
        is in plain torch.
    without : str
        The variant that it is compared with, beside softmax: the same without the term.
    """

    affinity: str = "softmax"
    term: bool = False
    feat_scale: bool = False
    kind: str = ""
    without: str = ""

    @property
    def stock(self) -> bool:
        """Whether this is the attention that the model comes with."""
        return self == Variant()

    def options(self, fidelity: float) -> dict[str, Any]:
        """Return the arguments of `nlflow.attention.attach` and of `nlflow.attention.NeutrenoAttention`.

        Those of `nlflow.attention.NeighbourAttention` for another term of the literature.
        """
        if self.kind:
            return {"kind": self.kind}
        chosen = {name: value for name, value in asdict(self).items() if name in ("affinity", "feat_scale")}
        return {**chosen, "fidelity": fidelity if self.term else 0.0}


VARIANTS = {
    "softmax": Variant(),
    "neutreno": Variant(term=True, without="softmax"),
    "featscale": Variant(feat_scale=True),
    "neutreno-featscale": Variant(term=True, feat_scale=True, without="featscale"),
    "symmetric": Variant("symmetric"),
    "symmetric-neutreno": Variant("symmetric", term=True, without="symmetric"),
    "gaussian": Variant("gaussian"),
    "gaussian-neutreno": Variant("gaussian", term=True, without="gaussian"),
    "value-residual": Variant(kind="value-residual"),
    "laplacian": Variant(kind="laplacian"),
    "gated": Variant(kind="gated"),
    "differential": Variant(kind="differential"),
    "sinkhorn": Variant(kind="sinkhorn"),
}
"""By name. The Gaussian ones are kernel attention, whose comparison is Table 8 of arXiv 2312.00751."""

DEFAULT = ("softmax", "neutreno", "neutreno-featscale", "symmetric", "gaussian", "gaussian-neutreno")


def variant(name: str) -> Variant:
    """Return the variant of this name."""
    return VARIANTS[check_choice("--variants", name, tuple(VARIANTS))]
