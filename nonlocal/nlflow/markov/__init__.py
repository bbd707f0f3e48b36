"""Finite Markov chains whose transition operator is the averaging operator of an affinity."""

from nlflow.markov.chain import MarkovChain

__all__ = ["MarkovChain"]
