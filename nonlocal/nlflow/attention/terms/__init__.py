"""Terms on tensors, without models."""
