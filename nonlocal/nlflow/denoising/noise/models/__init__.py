"""What noise is: models, how they are sampled, and what of them is undone without a flow."""
