"""Functionals of signals.

`energies` has J and E, `minimizer` the linear system of their minimizer, `krylov` the methods that solve it, helped by
`preconditioners`, and `accuracy` says when it is solved. `fidelity` draws to the observed signal. `variational` has J_p
and E_p (`jp`, `ep`), nonlocal total variation among them.
"""

import lazy_loader

# Names are loaded when they are first used; the stub beside this file lists them, also for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
