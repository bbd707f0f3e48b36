"""What helps a trained model."""
