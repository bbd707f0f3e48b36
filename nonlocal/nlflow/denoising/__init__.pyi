from .api import denoise as denoise
from .api import problem as problem
from .info import DenoiseInfo as DenoiseInfo
from .options import Options as Options
from .runs import Problem as Problem
from .runs import Trail as Trail
