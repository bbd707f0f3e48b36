from .adapters import Adapter as Adapter
from .adapters import Block as Block
from .adapters import blocks as blocks
from .discretisation import Discretisation as Discretisation
from .discretisation import Extrapolation as Extrapolation
from .discretisation import discretise as discretise
from .discretisation import extrapolate as extrapolate
from .heads import Head as Head
from .loading import image_inputs as image_inputs
from .loading import load_model as load_model
from .loading import text_inputs as text_inputs
from .loading import token_inputs as token_inputs
from .metrics import energy_per_token as energy_per_token
from .metrics import gradient_cosine as gradient_cosine
from .metrics import head_redundancy as head_redundancy
from .metrics import hfc_lfc as hfc_lfc
from .metrics import mean_cosine as mean_cosine
from .metrics import participation_rank as participation_rank
from .metrics import token_similarity as token_similarity
from .modules import FeatScale as FeatScale
from .modules import NeutrenoAttention as NeutrenoAttention
from .probing import probe as probe
from .projections import SignedProjection as SignedProjection
from .recording import Taken as Taken
from .registry import attach as attach
from .registry import detach as detach
from .registry import register as register
from .trace import Layer as Layer
from .trace import LayerTrace as LayerTrace

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
