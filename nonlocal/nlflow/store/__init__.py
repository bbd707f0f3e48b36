"""What is kept: atomic writing, archives, checkpoints, records, locks."""
