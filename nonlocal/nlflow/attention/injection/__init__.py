"""Terms inside models."""
