"""The explorer: a page on which denoising, flows and layers of transformers are tried."""
