from .active import Question as Question
from .active import ask_next as ask_next
from .classifiers import HarmonicClassifier as HarmonicClassifier
from .classifiers import HarmonicRegressor as HarmonicRegressor
from .classifiers import PLaplacianClassifier as PLaplacianClassifier
from .classifiers import PLaplacianRegressor as PLaplacianRegressor
from .classifiers import PoissonClassifier as PoissonClassifier
from .embedding import DiffusionMap as DiffusionMap
from .embedding import spectral_clustering as spectral_clustering
from .selection import Curve as Curve
from .selection import choose as choose
from .selection import choose_width as choose_width
from .selection import log_evidence as log_evidence
from .spreading import LabelSpreading as LabelSpreading
from .widths import WidthCurve as WidthCurve

__all__ = [
    "Curve",
    "DiffusionMap",
    "HarmonicClassifier",
    "HarmonicRegressor",
    "LabelSpreading",
    "PLaplacianClassifier",
    "PLaplacianRegressor",
    "PoissonClassifier",
    "Question",
    "WidthCurve",
    "ask_next",
    "choose",
    "choose_width",
    "log_evidence",
    "spectral_clustering",
]
