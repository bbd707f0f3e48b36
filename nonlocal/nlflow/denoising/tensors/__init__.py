"""`nlflow.denoise` on torch tensors, with derivatives."""
