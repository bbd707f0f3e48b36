"""What is kept: atomic writing, archives, checkpoints, records, series of frames, locks."""
