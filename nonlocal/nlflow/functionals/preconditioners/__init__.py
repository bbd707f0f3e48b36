"""Preconditioners of (I - P) + phi, self-adjoint and positive in the degree measure."""
