"""Figures without pyplot."""

from nlflow.denoising.quality import psnr
from nlflow.plotting.base import new_figure, render
from nlflow.plotting.bifurcations import bifurcation_figure, portrait_figure
from nlflow.plotting.chains import chain_figure, phase_figure
from nlflow.plotting.comparison import comparison_figure
from nlflow.plotting.cures import cures_figure, parts_figure
from nlflow.plotting.film import Film, Live
from nlflow.plotting.flows import Course, decay_figure, spacetime_figure
from nlflow.plotting.layers import layers_figure, survey_figure
from nlflow.plotting.noise import noise_figure
from nlflow.plotting.rates import Series, bounds_figure, rate_figure
from nlflow.plotting.stacks import stack_figure

__all__ = [
    "Course",
    "Film",
    "Live",
    "Series",
    "bifurcation_figure",
    "bounds_figure",
    "chain_figure",
    "comparison_figure",
    "cures_figure",
    "decay_figure",
    "layers_figure",
    "new_figure",
    "noise_figure",
    "parts_figure",
    "phase_figure",
    "portrait_figure",
    "psnr",
    "rate_figure",
    "render",
    "spacetime_figure",
    "stack_figure",
    "survey_figure",
]
