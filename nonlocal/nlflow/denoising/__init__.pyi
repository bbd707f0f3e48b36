from .api import denoise as denoise
from .api import problem as problem
from .info import DenoiseInfo as DenoiseInfo
from .options import Options as Options
from .progress import Trail as Trail
from .runs import Problem as Problem
