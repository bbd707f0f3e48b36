"""Functionals of signals.

`energies` has J and E, `minimizer` the linear system of their minimizer, `krylov` the methods that solve it, helped by
`preconditioners`, and `accuracy` says when it is solved. `fidelity` draws to the observed signal. `variational` has J_p
and E_p (`jp`, `ep`), nonlocal total variation among them.
"""
