from .injection.adapters import Adapter, Block, blocks
from .injection.attach import attach, detach, register
from .loading.inputs import image_inputs, text_inputs, token_inputs
from .loading.models import load_model
from .probing.discretisation import Discretisation, Extrapolation, discretise, extrapolate
from .probing.heads import Head
from .probing.metrics import (
    energy_per_token,
    gradient_cosine,
    head_redundancy,
    hfc_lfc,
    mean_cosine,
    participation_rank,
    token_similarity,
)
from .probing.probe import probe
from .probing.recording import Taken
from .probing.trace import Layer, LayerTrace
from .terms.modules import NeutrenoAttention, SignedProjection
from .terms.neutreno import FeatScale

__all__ = [
    "Adapter",
    "Block",
    "Discretisation",
    "Extrapolation",
    "FeatScale",
    "Head",
    "Layer",
    "LayerTrace",
    "NeutrenoAttention",
    "SignedProjection",
    "Taken",
    "attach",
    "blocks",
    "detach",
    "discretise",
    "energy_per_token",
    "extrapolate",
    "gradient_cosine",
    "head_redundancy",
    "hfc_lfc",
    "image_inputs",
    "load_model",
    "mean_cosine",
    "participation_rank",
    "probe",
    "register",
    "text_inputs",
    "token_inputs",
    "token_similarity",
]
