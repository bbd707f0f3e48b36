"""A transformer once more, as plain sums in float64: what the layers of trained models are held against.

One sequence at a time, no dropout, no padding. Attention is an explicit matrix, and the term is added where equation 28
of arXiv 2312.00751 has it: to A v of each head, before heads are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import erf

from validation.harness import CannotRunError

Floats = NDArray[np.float64]
Affine = tuple[Floats, Floats]  # x @ matrix + shift, or x * gain + shift


@dataclass(frozen=True)
class Weights:
    """One layer."""

    q: Affine
    k: Affine
    v: Affine
    out: Affine
    norms: tuple[Affine, Affine]
    mlp: tuple[Affine, Affine]


@dataclass(frozen=True)
class Block:
    """What one layer has done: (H, N, d) of heads, (H, N, N) matrices, (N, D) hidden states."""

    q: Floats
    k: Floats
    v: Floats
    a: Floats
    before: Floats
    attended: Floats
    after: Floats


def _term(fidelity: float, a: Floats, v: Floats, v0: Floats) -> Floats:
    return a @ v + fidelity * (v0 - v)


@dataclass(frozen=True)
class PlainTransformer:
    """A stack of layers."""

    layers: Sequence[Weights]
    heads: int
    eps: float
    norm_first: bool
    causal: bool = False
    tanh: bool = False

    def run(
        self,
        x: Floats,
        fidelity: float | Sequence[float] = 0.0,
        *,
        term: Callable[[int, Floats, Floats, Floats], Floats] | None = None,
        projected: Callable[[int, Floats], Floats] = lambda layer, y: y,
        entering: Callable[[int, Floats], Floats] = lambda layer, y: y,
    ) -> list[Block]:
        """Return what the layers make of the embeddings x, (N, D).

        `term` (layer, A, v, v0) stands for the average with what is added to it, `projected` for what follows the
        output projection, `entering` for what precedes a layer.
        """
        strengths = np.broadcast_to(fidelity, len(self.layers))
        v0: Floats | None = None
        found = []
        for i, w in enumerate(self.layers):
            before = entering(i, x)
            y = self._norm(before, w.norms[0]) if self.norm_first else before
            q, k, v = (self._split(y @ matrix + shift) for matrix, shift in (w.q, w.k, w.v))
            a = attention_matrix(q, k, self.causal)
            v0 = v if v0 is None else v0
            # The values of the first layer are v0 itself: it has no term.
            step = _term(0.0 if i == 0 else float(strengths[i]), a, v, v0) if term is None else term(i, a, v, v0)
            attended = projected(i, step.transpose(1, 0, 2).reshape(x.shape) @ w.out[0] + w.out[1])
            if self.norm_first:
                between = before + attended
                x = between + self._mlp(self._norm(between, w.norms[1]), w)
            else:
                between = self._norm(before + attended, w.norms[0])
                x = self._norm(between + self._mlp(between, w), w.norms[1])
            found.append(Block(q, k, v, a, before, attended, x))
        return found

    def _split(self, y: Floats) -> Floats:
        return y.reshape(len(y), self.heads, -1).transpose(1, 0, 2)

    def _norm(self, y: Floats, affine: Affine) -> Floats:
        centred = y - y.mean(axis=-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.eps) * affine[0] + affine[1]

    def _mlp(self, y: Floats, w: Weights) -> Floats:
        (up, shift), (down, last) = w.mlp
        z = y @ up + shift
        # The Gaussian law, or the formula for it that GPT-2 was trained with.
        gate = 1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)) if self.tanh else 1 + erf(z / np.sqrt(2))
        return np.asarray(z * gate / 2 @ down + last)


def attention_matrix(q: Floats, k: Floats, causal: bool = False) -> Floats:
    """Return softmax(q kᵀ/√d) of each head."""
    logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        logits = np.where(np.tri(q.shape[-2], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


_BERT = {
    "layers": "encoder.layer",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "norms": ("attention.output.LayerNorm", "output.LayerNorm"),
    "mlp": ("intermediate.dense", "output.dense"),
}
_VIT = {
    "layers": "layers",
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "out": "attention.o_proj",
    "norms": ("layernorm_before", "layernorm_after"),
    "mlp": ("mlp.fc1", "mlp.fc2"),
}
_GPT2 = {"layers": "h", "out": "attn.c_proj", "norms": ("ln_1", "ln_2"), "mlp": ("mlp.c_fc", "mlp.c_proj")}


def plain_copy(model: Any) -> PlainTransformer:
    """Return the layers of a BERT, ViT, DeiT or GPT-2 model of transformers."""
    kind, config = type(model).__name__, model.config
    tensors = {name: tensor.detach().cpu().double().numpy() for name, tensor in model.state_dict().items()}
    names: dict[str, Any] = _BERT if "Bert" in kind else _GPT2 if "GPT2" in kind else _VIT

    def affine(layer: str, name: str) -> Affine:
        matrix = tensors[f"{layer}.{name}.weight"]
        shift = tensors.get(f"{layer}.{name}.bias", np.zeros(len(matrix)))
        # Linear keeps (out, in), GPT-2's own module (in, out), norms a vector.
        return (matrix if names is _GPT2 or matrix.ndim == 1 else matrix.T), shift

    try:
        layers = []
        for i in range(config.num_hidden_layers):
            layer = f"{names['layers']}.{i}"
            if names is _GPT2:
                matrix, shift = affine(layer, "attn.c_attn")
                q, k, v = zip(np.split(matrix, 3, axis=1), np.split(shift, 3), strict=True)
            else:
                q, k, v = (affine(layer, names[part]) for part in "qkv")
            norms, mlp = ([affine(layer, name) for name in names[part]] for part in ("norms", "mlp"))
            layers.append(Weights(q, k, v, affine(layer, names["out"]), (norms[0], norms[1]), (mlp[0], mlp[1])))
    except KeyError as error:
        raise CannotRunError(
            f"{kind} of this release of transformers names its weights otherwise ({error} is missing): "
            "pip install 'transformers==5.23'"
        ) from error
    eps = getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon
    return PlainTransformer(
        layers, config.num_attention_heads, float(eps), names is not _BERT, names is _GPT2, names is _GPT2
    )


# ---- metrics of states, as plain double sums


def mean_cosine(x: Floats) -> float:
    """Return the mean of cos(x_i, x_j) over i ≠ j; 0 for tokens of length 0 (DeiT's own, before it is trained)."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    units = x / np.where(lengths > 0, lengths, 1)
    table = units @ units.T
    return float(table[~np.eye(len(x), dtype=bool)].mean())


def token_similarity(x: Floats) -> float:
    """Return |ΠX|² / |X|² with the matrix Π."""
    mean = np.full((len(x), len(x)), 1 / len(x)) @ x
    return float((mean**2).sum() / (x**2).sum())


def energy(a: Floats, v: Floats) -> float:
    """Return ½ Σ_ij A_ij |v_i − v_j|² / N of one head."""
    return float((a * cdist(v, v, "sqeuclidean")).sum() / (2 * len(v)))


def direction_cosine(first: Floats, second: Floats) -> float:
    """Return the mean over tokens of the cosine of two directions (N, D).

    Tokens that see only themselves, up to rounding, have no direction and are left out.
    """
    lengths = [np.linalg.norm(way, axis=1) for way in (first, second)]
    moving = np.all([length > 1e-13 * length.max() for length in lengths], axis=0)
    return float(np.mean((first * second).sum(axis=1)[moving] / (lengths[0] * lengths[1])[moving]))
