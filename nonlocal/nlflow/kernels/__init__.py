"""Formulas of k and their parameters, a family a file."""

import lazy_loader

# Names are loaded when they are first used; the stub beside this file lists them, also for type checkers.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader

_NAMED = {
    "gaussian": "Gaussian", "laplace": "Laplace", "tophat": "TopHat", "matern": "Matern",
    "rational-quadratic": "RationalQuadratic", "inverse-multiquadric": "InverseMultiquadric",
    "wendland": "Wendland", "truncated-power": "TruncatedPower", "dot": "ExpDotProduct",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a kernel, loaded now, or `NAMED`, the kernels by name."""
    return {key: _load(kind) for key, kind in _NAMED.items()} if name == "NAMED" else _load(name)
