"""
A graph of networkx
===================

Two members of a karate club quarrelled, and the club split (Zachary 1977, doi 10.1086/jar.33.4.3629752). The minimizer
of :class:`nlflow.E` on :func:`nlflow.affinity_from_graph`, which knows the two alone, tells where the others went.
"""

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np

from nlflow import E, GradientFlow, J, MarkovChain, affinity_from_graph, solve

club = nx.karate_club_graph()
graph = affinity_from_graph(club)
print(graph.reason)

# %%
# At these two the fidelity is large, elsewhere 0: there the minimizer is the average of its neighbours.

f, known = np.zeros(34), np.zeros(34)
f[[0, 33]], known[[0, 33]] = (1, -1), 1000
found = E(graph, f, known).minimizer().u
joined = np.array([1 if club.nodes[node]["club"] == "Mr. Hi" else -1 for node in club])
right = int(np.sum(np.sign(found) == joined))
print(f"{right} of {len(club)} members are told rightly")
assert right >= 32

# %%
# The flow of :class:`nlflow.J` forgets the two sides at the rate of the spectral gap.

chain = MarkovChain(graph)
times = np.linspace(0, 40, 41)
course = solve(GradientFlow(J(graph), metric="degree"), found, t_eval=times)
distance = [np.sqrt(np.sum(chain.stationary * (u - chain.limit(found)) ** 2)) for u in course.u]
rate = 1 - np.sort(chain.eigenvalues())[-2]
assert 0.9 < distance[-1] / (distance[0] * np.exp(-rate * times[-1])) <= 1

figure, (left, right_side) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
layout = nx.spring_layout(club, seed=1)
places = np.array([layout[node] for node in club])
for i, j in club.edges:
    left.plot(*places[[i, j]].T, color="0.8", lw=0.8, zorder=1)
for side, marker in ((1, "o"), (-1, "s")):
    chosen = joined == side
    points = left.scatter(*places[chosen].T, c=found[chosen], marker=marker, vmin=-1, vmax=1, edgecolors="black")
figure.colorbar(points, ax=left, label="minimizer")
left.set_title("Circles went with node 0, squares with 33", fontsize="medium")
left.set_xlabel("drawn at")
left.set_ylabel("drawn at")
right_side.semilogy(times, distance, label="flow")
right_side.semilogy(times, distance[0] * np.exp(-rate * times), "--", label="exp(-gap t)")
right_side.set_title("The flow forgets at the rate of the gap", fontsize="medium")
right_side.set_xlabel("t")
right_side.set_ylabel("distance to the mean")
right_side.legend()
plt.show()
