"""Other processors on this one: the numerical tests, and figures of the denoiser, under emulated arithmetic."""
