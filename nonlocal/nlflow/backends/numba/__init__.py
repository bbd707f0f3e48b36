"""Compiled loops."""

import os

from nlflow.errors import InputError

_asked = os.environ.get("NUMBA_NUM_THREADS", "").strip()
if _asked.lstrip("+-").isdecimal() and not 0 < int(_asked) <= 2**12:
    # Numba ends in a trace of its own where it is imported, or starts threads until the system has no more.
    raise InputError(
        f"NUMBA_NUM_THREADS: got {_asked}, expected a number of threads from 1 to {2**12}; unset it to use all cores"
    )

RUN = 64
"""Groups of patches whose references lie in a row are filtered so many at a time, and their sums added in one go."""
