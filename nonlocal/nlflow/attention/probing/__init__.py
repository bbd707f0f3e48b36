"""What a trained model does: its layers seen in one run, their heads as affinities and chains, metrics of tokens."""
