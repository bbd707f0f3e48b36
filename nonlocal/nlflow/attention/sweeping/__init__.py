"""What helps a trained model: cures against the model as it is, tasks, intervals that hold for all at once."""
