"""Preconditioners of (I - P) + phi: a transform that diagonalizes P; on the graph of K multigrid, elimination, sweeps.

All are self-adjoint and positive in the inner product of the degree measure m_i = w_i d_i / sum w d, and take all
channels at once.
"""
