"""Terms against over-smoothing on tensors: row averages, what is added to them, and layers of one's own. No model."""
