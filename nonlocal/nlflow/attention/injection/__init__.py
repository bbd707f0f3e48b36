"""Terms inside models of transformers: where the attention of a model is, what runs in it, and `attach`."""
