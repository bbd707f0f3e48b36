"""Convergence rates and limits, measured and compared with theory."""

from nlflow.studies.fits import Fit
from nlflow.studies.result import StudyResult
from nlflow.studies.runner import run_study

__all__ = ["Fit", "StudyResult", "run_study"]
