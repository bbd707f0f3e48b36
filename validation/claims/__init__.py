"""One claim a file, in the order of the theory."""

from __future__ import annotations

from importlib import import_module

from validation.harness import Claim

MODULES = (
    "kernels_by_formula",
    "frechet_derivative",
    "p_functionals",
    "fourier_flows",
    "fractional_poisson",
    "attention_step",
    "derivatives_of_flows",
    "continuum_limit",
    "convergence_to_constants",
    "law_of_the_walk",
    "learning_on_graphs",
    "variable_bandwidths",
    "stationary_law",
    "numbers_of_chains",
    "limit_of_averages",
    "proposition_1",
    "gaussian_field",
    "choice_of_fidelity",
    "constant_limits",
    "stability_limit",
    "spectra_of_flows",
    "asymmetric_attention",
    "killed_walk",
    "energy_balance",
    "energy_with_reactions",
    "turing_instability",
    "pitchforks",
    "hopf",
    "cahn_hilliard",
    "equations_of_motion",
    "peridynamic_bar",
    "gibbs_law",
    "orders_of_noisy_steps",
    "volume_constraint",
    "order_of_steps",
    "steps_by_formula",
    "order_of_evolving_flows",
    "sphere_flows",
    "mean_field_limit",
    "metastable_clusters",
    "sinkhorn_attention",
    "noise_laws",
    "noise_found",
    "removed_noise",
    "judged_residuals",
    "nonlocal_bayes",
    "frozen_priors",
    "correlated_noise",
    "token_similarity",
    "energy_by_block",
    "gradient_cosine",
    "head_redundancy",
    "discretization_of_layers",
    "stability_of_fidelity",
    "neutreno_minilm",
    "cure_of_trained",
    "kernel_attention",
    "frequency_scaling",
    "sharpening_eigenvalue",
    "smoothing_verdicts",
    "linear_rate",
    "parts_of_blocks",
    "gradient_steps",
    "cost_of_the_term",
)


def all_claims() -> list[Claim]:
    """Return every claim; its name is that of its file with hyphens."""
    return [import_module(f"validation.claims.{module}").CLAIM for module in MODULES]
