"""Small trainings of the same transformer with different attention: what the fidelity term changes, with its error."""
