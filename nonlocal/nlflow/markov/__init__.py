"""Finite Markov chains of affinities."""

from nlflow.markov.chain import MarkovChain

__all__ = ["MarkovChain"]
