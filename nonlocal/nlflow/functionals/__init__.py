"""J and E, their fidelity, preconditioners and minimisers; p-functionals and nonlocal total variation."""
