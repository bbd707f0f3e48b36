"""Terms inside models of transformers."""
