from .classifiers import HarmonicClassifier as HarmonicClassifier
from .classifiers import HarmonicRegressor as HarmonicRegressor
from .classifiers import LabelSpreading as LabelSpreading
from .classifiers import PLaplacianClassifier as PLaplacianClassifier
from .classifiers import PLaplacianRegressor as PLaplacianRegressor
from .classifiers import PoissonClassifier as PoissonClassifier

__all__ = [
    "HarmonicClassifier",
    "HarmonicRegressor",
    "LabelSpreading",
    "PLaplacianClassifier",
    "PLaplacianRegressor",
    "PoissonClassifier",
]
