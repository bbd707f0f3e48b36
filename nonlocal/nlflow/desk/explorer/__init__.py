"""The explorer: a page on this machine on which denoising, flows and layers of transformers are tried.

What is computed (`denoising_view`, `flow_view`, `proposition_view`, `layers_view`) knows nothing of pages.
"""
