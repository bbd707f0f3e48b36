"""Flows of functionals: integrators, the time loop, trackers and results."""
