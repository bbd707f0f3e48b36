"""What a probe has seen."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from nlflow._array import to_numpy, underflowing
from nlflow.affinities import Affinity, affinity, from_matrix
from nlflow.attention.probing.columns import COLUMNS, measures, write_columns
from nlflow.attention.terms.averages import capped, log_affinity, seen
from nlflow.backends.progress import bar
from nlflow.domains import Points
from nlflow.domains.mask import Mask, Sight
from nlflow.equilibria import largest_stable_fidelity
from nlflow.errors import InputError, NlflowError, check_integer, check_number, checked_call, warn_caller
from nlflow.kernels import ExpDotProduct, Gaussian, Kernel
from nlflow.markov import MarkovChain

Floats = NDArray[np.float64]

_MATRIX_TOKENS = 2048  # a masked head with more tokens keeps no matrix; its rows are computed when needed


@underflowing
@dataclass(frozen=True, eq=False)
class Head:
    """One head of one layer on one sequence, without padding, in float64.

    Degrees d_i of `affinity` are the denominators of a softmax, and of a Gaussian of keys alone, so that 1 / d_i is the
    step of the L2 flow (arXiv 2312.00751, theorem 1). They are 1 for other kernels and with a bias.

    Attributes
    ----------
    q, k : array of shape (N, d)
        Queries and keys.
    v : array of shape (N, d_v)
    scaling : float
        Factor of the dot products.
    bias : array of shape (N, N), optional
        Added to log k; -inf where token i does not see token j.
    kernel : str
        One of `nlflow.attention.terms.averages.AFFINITIES`.
    mask : Mask, optional
        In place of `bias`, where visibility is a rule.
    softcap : float, optional
        c of the logits c tanh(l / c).
    """

    q: Floats
    k: Floats
    v: Floats
    scaling: float
    bias: Floats | None = None
    kernel: str = "softmax"
    mask: Mask | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and self.bias is not None:
            raise InputError("mask: got one beside a bias, expected either; put -inf into the bias where it hides")

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.v)

    @cached_property
    def causal(self) -> bool:
        """Whether later tokens are hidden."""
        if self.bias is None:
            return self.mask is not None and self.mask.causal
        return bool(np.isneginf(self.bias[np.triu_indices(self.tokens, 1)]).all())

    @cached_property
    def symmetric(self) -> bool:
        """Whether `affinity` is symmetric."""
        return self.affinity.symmetric

    def along(self, q: Floats, k: Floats) -> Affinity:
        """Return the affinity of this head for other queries and keys."""
        nodes = Points(np.arange(len(k)), weights=np.ones(len(k)))
        same = q is k or (q.shape == k.shape and bool((q == k).all()))
        kernel = self._kernel(same)
        if kernel is not None:
            queries = None if same else q
            if self.mask is None or len(k) <= _MATRIX_TOKENS:
                return affinity(kernel, nodes, features=k, queries=queries, mask=self.mask)
            # Masked sums without a matrix exist for tensors only.
            features, other = (None if part is None else torch.from_numpy(part) for part in (k, queries))
            return _OnHost(affinity(kernel, nodes, features, queries=other, method="tiled", mask=self.mask))
        both = torch.from_numpy(q), torch.from_numpy(k)
        logarithms = capped(log_affinity(*both, self.kernel, self.scaling), self.softcap).numpy()
        if self.mask is not None:
            logarithms = Sight(self.mask, (), len(k), k).applied(logarithms, slice(None))
        logarithms = logarithms if self.bias is None else logarithms + self.bias
        if not np.isfinite(logarithms.max(axis=1)).all():
            raise InputError("mask: got a token that sees none, not even itself; expected one seen token for each")
        return from_matrix(softmax(logarithms, axis=1), nodes)

    def _kernel(self, same: bool) -> Kernel | None:
        """Return k as a kernel of the package, if it is one; `same` says whether queries are the keys."""
        if self.bias is not None or self.softcap is not None:
            return None
        if self.kernel in ("softmax", "symmetric"):
            return ExpDotProduct(scale=self.scaling)
        if self.kernel == "gaussian" and same and self.scaling > 0:
            return Gaussian(width=self.scaling**-0.5)
        return None

    @cached_property
    def affinity(self) -> Affinity:
        """The affinity whose averages are P."""
        return self.along(self.q, self.k)

    @cached_property
    def chain(self) -> MarkovChain:
        """The Markov chain with transition matrix P."""
        return MarkovChain(self.affinity)

    @property
    def matrix(self) -> Floats:
        """P, shape (N, N)."""
        return self.chain.matrix()

    @property
    def stationary(self) -> Floats:
        """The stationary law of P."""
        return self.chain.stationary

    @cached_property
    def eigenvalues(self) -> NDArray[Any]:
        """All eigenvalues of P by decreasing modulus, in O(N^3) time, causal ones in O(N^2 d)."""
        if self.causal:
            diagonal = self._diagonal
            return diagonal[np.argsort(-diagonal, kind="stable")]
        return self.chain.eigenvalues()

    @property
    def _diagonal(self) -> Floats:
        """P_ii, from k_ii and the degree where there is no matrix."""
        matrix = getattr(self.affinity, "matrix", None)
        if matrix is not None:
            return np.diagonal(matrix)
        own = 0.0 if isinstance(self.affinity.kernel, Gaussian) else self.scaling * (self.q * self.k).sum(axis=1)
        return np.asarray(np.exp(own - self.affinity.log_degree))

    @property
    def spectral_gap(self) -> float:
        """1 - |mu_2|."""
        if self.causal:
            return float(1 - self.eigenvalues[1]) if self.tokens > 1 else 1.0
        return self.chain.spectral_gap

    def mixing_time(self, eps: float = 0.25) -> int:
        """Return after how many layers a walker's law is within `eps` of pi from any token."""
        return self.chain.mixing_time(eps)

    @property
    def fidelity_limit(self) -> float:
        """The lambda~ up to which NeuTRENO steps converge; see `nlflow.equilibria.largest_stable_fidelity`."""
        if self.causal:
            return 1 + float(self.eigenvalues[-1])
        return largest_stable_fidelity(self.affinity)

    def spectral_radius(self, fidelity: float) -> float:
        """Return rho(P - lambda~ I) in O(N^3) time.

        It is below 1 exactly where NeuTRENO steps with lambda~ > 0 converge; at 0 it is 1.
        """
        return float(np.abs(self.eigenvalues - check_number("fidelity", fidelity)).max())


def rule_or_bias(mask: torch.Tensor) -> tuple[Mask | None, Floats | None]:
    visible = seen(mask)
    adds = mask.is_floating_point() and bool((mask.masked_fill(~visible, 0) != 0).any())
    if not adds:
        if bool(visible.all()):
            return None, None
        widest = int(visible[-1].sum())
        if torch.equal(visible, torch.ones_like(visible).tril().triu(1 - widest)):
            return Mask(causal=True, window=None if widest == len(mask) else widest - 1), None
    added = mask.detach().double().cpu().numpy() if adds else 0.0
    return None, np.where(visible.cpu().numpy(), added, -np.inf)


class _OnHost(Affinity):
    """An affinity of tensors in float64 on the CPU, for signals of NumPy; its kernel has the amplitude 1."""

    method = "tiled"

    def __init__(self, tensors: Affinity) -> None:
        super().__init__(
            tensors.domain, tensors.kernel, symmetric=tensors.symmetric,
            positive_semidefinite=tensors.positive_semidefinite, dtype=np.dtype(np.float64),
        )  # fmt: skip
        self._tensors, self.reason = tensors, tensors.reason

    @property
    def memory_bytes(self) -> int:
        return self._tensors.memory_bytes

    def _average(self, u: Floats) -> Floats:
        return to_numpy(self._tensors._average(torch.from_numpy(np.ascontiguousarray(u))))

    def _push(self, law: Floats) -> Floats:
        return to_numpy(self._tensors._push(torch.from_numpy(np.ascontiguousarray(law))))

    def _log_transitions(self) -> Floats | None:
        return self._tensors._log_transitions()

    def _log_degree(self) -> Floats:
        return to_numpy(self._tensors.log_degree)

    def _symmetrized(self) -> Affinity:
        return _OnHost(self._tensors.symmetrized())


@underflowing
@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of self-attention on one batch.

    Attributes
    ----------
    name : str
        Name of the attention module in the model.
    stack : str
        ``'encoder'`` or ``'decoder'``.
    causal : bool
    scaling : float
        Factor of the dot products.
    kernel : str
        One of `nlflow.attention.terms.averages.AFFINITIES`.
    q, k, v : tensor of shape (B, H, N, d)
        Keys and values are repeated for all heads; v may have another d.
    mask : tensor of 4 dimensions that broadcasts to (B, H, N, N), or None
        Boolean (True: i sees j) or added to the logarithms; None where all see all.
    tokens : tensor of bool of shape (B, N)
        False at padding.
    before, between, after : tensor of shape (B, N, D), or None
        Hidden states: before the layer, after attention is added to them, after the layer; None where not known.
    quantities : dict of str to array
        What the columns of `LayerTrace.rows` are made of: ``energy`` and ``gradient_cosine``, shape (B, H);
        ``log_degree``, shape (B, H, N), NaN at padding; of the state after the layer, and ``attention_share``, shape
        (B,).
    differentiable : dict of str to tensor
        The same as tensors, with ``gradients=True``.
    matrices : tensor of shape (B, H, N, N), or None
        Attention matrices, with ``keep_matrices=True``.
    softcap : float, optional
        c of the logits c tanh(l / c).
    sink : tensor of shape (B, H, N, 1), optional
        A logit that takes a share of each row without a value.
    """

    name: str
    stack: str
    causal: bool
    scaling: float
    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    tokens: Tensor
    before: Tensor | None = None
    between: Tensor | None = None
    after: Tensor | None = None
    quantities: dict[str, Floats] = field(default_factory=dict)
    differentiable: dict[str, Tensor] = field(default_factory=dict)
    matrices: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    def __repr__(self) -> str:
        items, heads, tokens, width = self.q.shape
        return (
            f"<Layer {self.name} ({self.stack}{', causal' * self.causal}): {items} x {tokens} tokens, {heads} heads of "
            f"{width} features, {self.kernel}>"
        )

    @cached_property
    def padded(self) -> bool:
        """Whether some token is padding."""
        return not bool(self.tokens.all())  # a device is asked once

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.q.shape[1])

    @property
    def items(self) -> int:
        """Number of sequences."""
        return int(self.q.shape[0])

    @property
    def time_step(self) -> Floats:
        """The step 1 / d_i of the L2 flow at token i, shape (B, H, N), NaN at padding."""
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(np.exp(-self.quantities["log_degree"]))

    def of(self, rows: Tensor) -> Layer:
        """Return the layer on some sequences, without states and quantities."""
        mask, sink = (
            one if one is None or len(one) == 1 else one[rows] for one in (self.mask, self.sink)
        )  # fmt: skip
        q, k, v, tokens = (one[rows] for one in (self.q, self.k, self.v, self.tokens))
        return Layer(
            self.name, self.stack, self.causal, self.scaling, self.kernel, q, k, v, mask, tokens,
            softcap=self.softcap, sink=sink,
        )  # fmt: skip

    def head(self, head: int, item: int = 0) -> Head:
        """Return a head on a sequence of the batch, padding and sinks left out."""
        h = check_integer("head", head, minimum=0, below=self.heads)
        b = check_integer("item", item, minimum=0, below=self.items)
        inside = self.tokens[b]
        q, k, v = (part[b, h][inside].detach().cpu().double().numpy() for part in (self.q, self.k, self.v))
        rule = bias = None
        if self.mask is not None:
            mask = self.mask.expand(self.items, self.heads, len(inside), len(inside))[b, h]
            rule, bias = rule_or_bias(mask if bool(inside.all()) else mask[inside][:, inside])
        return Head(q, k, v, self.scaling, bias, self.kernel, rule, self.softcap)


@underflowing
class LayerTrace:
    """The layers of a model on one batch.

    Attributes
    ----------
    layers : tuple of Layer
    model : str
        Name of the model's class.
    states : dict of str to dict
        For each stack the quantities of the hidden state before its first layer.
    """

    def __init__(self, layers: Sequence[Layer], model: str, states: dict[str, dict[str, Floats]]) -> None:
        self.layers = tuple(layers)
        self.model = model
        self.states = states
        self._spectra: dict[int, dict[str, Floats]] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, layer: int | str) -> Layer:
        return self.layers[self.number(layer)]

    def __repr__(self) -> str:
        first = self.layers[0]
        size = f"{first.items} x {first.q.shape[-2]} tokens"
        return f"<LayerTrace of {self.model}: {len(self)} layers of {first.heads} heads, {size}>"

    def number(self, layer: int | str) -> int:
        """Return the number of a layer, given by its number or name."""
        names = [one.name for one in self.layers]
        if isinstance(layer, str):
            if layer not in names:
                raise InputError(f"layer: got {layer!r}, expected one of {', '.join(names)}, or a number")
            return names.index(layer)
        number = check_integer("layer", layer)
        if not -len(self) <= number < len(self):
            raise InputError(f"layer: got {number}, expected a number from 0 to {len(self) - 1}, or a name")
        return number % len(self)

    def head(self, layer: int | str, head: int, item: int = 0) -> Head:
        """Return one head of one layer (a number or a name) on one sequence."""
        return self[layer].head(head, item)

    def _begins(self, number: int) -> bool:
        return number == 0 or self.layers[number].stack != self.layers[number - 1].stack

    # ---- what costs O(N^3)

    def spectra(self, layer: int | str) -> dict[str, Floats]:
        """Return ``gap``, ``mixing_time`` and ``stable_fidelity`` of the heads of a layer, arrays of shape (B, H).

        NaN where a head has none; O(B H N^3) time when first asked for.
        """
        number = self.number(layer)
        if number not in self._spectra:
            one = self.layers[number]
            of_chains = measures("chain")
            found = {name: np.full((one.items, one.heads), math.nan) for name in of_chains}
            for b, h in np.ndindex(one.items, one.heads):
                head = one.head(h, b)
                for name, measure in of_chains.items():
                    with suppress(NlflowError):  # reducible, periodic or underflowing: there is no number
                        found[name][b, h] = measure(head)
            self._spectra[number] = found
        return self._spectra[number]

    def stationary(self, layer: int | str, item: int = 0) -> Floats:
        """Return the stationary law of every head, shape (H, N), for the N tokens without padding, in O(H N^3) time."""
        one = self[layer]
        return np.stack([one.head(h, item).stationary for h in range(one.heads)])

    def spectral_radius(self, fidelity: float, layer: int | str) -> Floats:
        """Return rho(P - lambda~ I) of every head of a layer, shape (B, H): below 1 where NeuTRENO steps converge."""
        one = self[layer]
        found = [one.head(h, b).spectral_radius(fidelity) for b, h in np.ndindex(one.items, one.heads)]
        return np.array(found).reshape(one.items, one.heads)

    def stable_fidelity(self) -> Floats:
        """Return for each layer the fidelity up to which the steps of all its heads are stable, shape (L,)."""
        return np.array([_over(np.min, self.spectra(i)["stable_fidelity"]) for i in range(len(self))])

    def check_fidelity(self, fidelity: Any) -> bool:
        """Return whether repeated NeuTRENO steps with a fidelity, or one for each layer, converge, and warn if not.

        Neither first layers count nor heads whose limit is not known. O(B H N^3) time a layer when first asked for.
        """
        values = [check_number("fidelity", value, minimum=0) for value in np.ravel(np.asarray(fidelity))]
        if len(values) not in (1, len(self)):
            raise InputError(f"fidelity: got {len(values)} values, expected one, or {len(self)}, one for each layer")
        beyond = heads = 0
        least, where = math.inf, ""
        for i, one in enumerate(self.layers):
            if self._begins(i):
                continue
            limits = self.spectra(i)["stable_fidelity"]
            heads += limits.size
            beyond += int(np.sum(values[i % len(values)] >= limits))
            if _over(np.min, limits) < least:
                least, where = _over(np.min, limits), one.name
        if beyond == 0:
            return True
        warn_caller(
            f"fidelity: got {max(values):g}, which is beyond the stable range, rho(P - fidelity I) >= 1, in {beyond} "
            f"of {heads} heads; the least limit is {least:.4g} ({where}); use a smaller one, or semi_implicit=True",
        )
        return False

    def head_redundancy(self) -> Floats:
        """Return the cosine between the matrices of head h in successive layers, shape (L - 1, B, H).

        NaN between layers of different stacks, or with different numbers of sequences, heads or tokens. O(B H N^2) time
        a layer up to 2048 tokens, and up to O(B H N^3) beyond.
        """
        return self._beside_next()["redundancy"]

    def _beside_next(self) -> dict[str, Floats]:
        """Return what is measured of each head and that of the next layer, arrays of shape (L - 1, B, H)."""
        of_both = measures("next")
        size = (len(self) - 1, *(max(getattr(one, name) for one in self.layers) for name in ("items", "heads")))
        found = {name: np.full(size, math.nan) for name in of_both}
        for i, (one, following) in enumerate(pairwise(self.layers)):
            if one.stack != following.stack or one.q.shape[:3] != following.q.shape[:3]:
                continue
            for b, h in np.ndindex(one.items, one.heads):
                heads = one.head(h, b), following.head(h, b)
                for name, measure in of_both.items():
                    found[name][i, b, h] = measure(*heads)
        return found

    # ---- tables

    @checked_call
    @write_columns
    def rows(self, *, spectra: bool = True, progress: bool = False) -> list[dict[str, Any]]:
        """Return one row for each state: the embeddings of each stack, then its layers.

        Parameters
        ----------
        spectra : bool
            With all from ``gap`` on, in O(N^3) time.
        progress : bool
            Progress bar on stderr.

        Returns
        -------
        list of dict
            ``layer``, its name, ``index``, 0 for the input of a stack, and means or medians over the batch, heads and
            tokens that have a number, NaN where none has:

            {columns}
        """
        beside = self._beside_next() if spectra else {}
        result: list[dict[str, Any]] = []
        shown = bar(self.layers, desc="layers", progress=progress, mininterval=1)
        for i, one in enumerate(shown):
            if self._begins(i):
                result.append({"layer": f"{one.stack} input", "index": 0, **_reduce(self.states[one.stack])})
            values = dict(one.quantities)
            if spectra:
                last = np.array([])
                values |= self.spectra(i) | {name: (*all_of, last)[i] for name, all_of in beside.items()}
            result.append({"layer": one.name, "index": result[-1]["index"] + 1, **_reduce(values)})
        return result

    @checked_call
    def to_pandas(self, *, spectra: bool = True, progress: bool = False) -> Any:
        """Return `rows` as a `pandas.DataFrame`."""
        return as_frame(self.rows(spectra=spectra, progress=progress))


def as_frame(rows: list[dict[str, Any]]) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise InputError(f"to_pandas: got no package pandas ({error}), expected one; pip install pandas") from error
    return pandas.DataFrame(rows)


def _reduce(quantities: Mapping[str, Floats]) -> dict[str, float]:
    return {
        one.name: _over(getattr(np, one.reduce) if isinstance(one.reduce, str) else one.reduce, values)
        for one in COLUMNS
        if (values := quantities.get(one.quantity)) is not None
    }


def _over(reduce: Any, values: Floats) -> float:
    """Return `reduce` of the values that are not NaN, and NaN where there is none."""
    numbers = values[~np.isnan(values)]
    return float(reduce(numbers)) if numbers.size else math.nan
