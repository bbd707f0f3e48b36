r"""
Attention is a step of a flow
=============================

Theorem 1 of `arXiv 2312.00751 <https://arxiv.org/abs/2312.00751>`_: self-attention is one explicit Euler step of the
flow of :class:`nlflow.J`, where the step is one over the degree. The NeuTRENO layer :math:`u \leftarrow Pu +
\tilde\lambda (v_0 - u)` is the same step of the flow of E.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from nlflow import (
    AttentionFlow,
    AttentionStep,
    ExpDotProduct,
    J,
    MarkovChain,
    NeutrenoStep,
    Points,
    affinity,
    equilibrium,
    largest_stable_fidelity,
    solve,
)

rng = np.random.default_rng(0)
queries, keys = 1.5 * rng.standard_normal((2, 64, 16))
values = rng.standard_normal((64, 16))
tokens = Points(np.arange(64), weights=np.ones(64))

# %%
# J symmetrizes its kernel, K = k + kᵀ, so the amplitude is one half; queries are keys.

functional = J(affinity(ExpDotProduct(amplitude=0.5), tokens, keys))
step = values - functional.gradient(values) / functional.affinity.degree[:, None]
theirs = scaled_dot_product_attention(*map(torch.from_numpy, (keys, keys, values))).numpy()
print(f"queries = keys: Euler step of the flow of J against PyTorch {np.abs(step - theirs).max():.1e}")
assert np.abs(step - theirs).max() < 1e-13

# %%
# With other queries, attention is one step of the flow :math:`du/dt = Pu - u`.

attention = affinity(ExpDotProduct(), tokens, keys, queries=queries)
layer = solve(AttentionFlow(attention), values, t=1, integrator=AttentionStep()).final
theirs = scaled_dot_product_attention(*map(torch.from_numpy, (queries, keys, values))).numpy()
print(f"queries ≠ keys: attention step against PyTorch {np.abs(layer - theirs).max():.1e}")
assert np.abs(layer - theirs).max() < 1e-13

# %%
# Without the fidelity layers run to the constant :math:`\pi^T v`, with it to the equilibrium of the flow.

depth = np.arange(21.0)
fidelity = 0.4
print(f"NeuTRENO layers are stable below {largest_stable_fidelity(attention):.3f}")
kept_flow = AttentionFlow(attention, values, fidelity)
plain = solve(AttentionFlow(attention), values, t_eval=depth, integrator=AttentionStep()).u
kept = solve(kept_flow, values, t_eval=depth, integrator=NeutrenoStep()).u
chain, limit = MarkovChain(attention), equilibrium(kept_flow).u
to_constant = chain.distance_to_limit(values, 20)
to_limit = np.array([np.sqrt(((u - limit) ** 2).sum(axis=1) @ chain.stationary) for u in kept])
apart = np.sqrt(((limit - chain.limit(limit)) ** 2).sum(axis=1) @ chain.stationary)
print(f"left of the diversity after 20 layers: {to_constant[-1] / to_constant[0]:.1e}, ", end="")
print(f"with the fidelity {apart / to_constant[0]:.2f}")
assert np.abs(plain[-1] - chain.limit(values)).max() < 1e-6
others = chain.eigenvalues()[1:]
rates = np.abs(others).max(), np.abs(others - fidelity).max()
for course, rate in zip((to_constant, to_limit), rates, strict=True):
    print(f"a layer leaves {(course[12] / course[8]) ** (1 / 4):.3f} of the distance, predicted {rate:.3f}")
    assert abs((course[12] / course[8]) ** (1 / 4) - rate) < 0.03
assert apart > 0.2 * to_constant[0]

figure, axes = plt.subplots(1, 3, figsize=(7.8, 3.5), layout="constrained")
for axis, course, title in ((axes[0], plain, "attention"), (axes[1], kept, rf"NeuTRENO, $\tilde\lambda = {fidelity}$")):
    axis.plot(depth[:11], course[:11, ::4, 0], "-", color="#0b5394", linewidth=0.9)
    axis.set(title=title, xlabel="layer", ylabel="first channel of 16 tokens", ylim=(-2.4, 2.4))
axes[2].semilogy(depth, to_constant, "o", color="#d1711c", markersize=4, label="attention to $\\pi^T v$")
axes[2].semilogy(depth, to_limit, "s", color="#0b5394", markersize=4, label="NeuTRENO to $u^*$")
for course, rate, style in ((to_constant, rates[0], "k-"), (to_limit, rates[1], "k:")):
    axes[2].semilogy(depth, course[10] * rate ** (depth - 10), style, linewidth=1, label=f"${rate:.2f}^k$")
axes[2].axhline(apart, color="0.3", linestyle="--", linewidth=1, label="$u^*$ to its mean")
axes[2].set(title="distances", xlabel="layer k", ylabel="norm in the stationary law", ylim=(1e-9, None))
axes[2].legend(fontsize=7)
axes[2].grid(alpha=0.3)
plt.show()
