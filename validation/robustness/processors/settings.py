"""Which processors a machine can play, and what an interpreter says that it plays.

Numba compiles for the processor that it is told of, OpenBLAS and torch choose their loops by name. What changes is the
order of sums in products of matrices, the width of vectors, and contraction to fused multiply-add.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SETTINGS", "SHORT", "Setting", "in_effect", "lacking"]

_AVX2 = ("avx2", "fma", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")


@dataclass(frozen=True)
class Setting:
    """A processor to play.

    Attributes
    ----------
    name : str
    numba, blas, torch : str
        Names as Numba, OpenBLAS and torch know them; '' for the processor that is there.
    threads : int
        Of compiled loops, OpenBLAS and torch.
    needs : tuple of str
        Features that the machine must have, as LLVM names them: instructions that it lacks end the process.
    """

    name: str
    numba: str = ""
    blas: str = ""
    torch: str = ""
    threads: int = 1
    needs: tuple[str, ...] = field(default=())

    def environment(self) -> dict[str, str]:
        """Return the environment in which an interpreter plays the processor: that of this process, changed."""
        result = dict(os.environ)
        for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY"):
            result.pop(name, None)
        if self.numba:
            result["NUMBA_CPU_NAME"] = self.numba
        if self.numba == "x86-64":
            result["NUMBA_CPU_FEATURES"] = ""  # else Numba adds those of the host
        if self.blas:
            result["OPENBLAS_CORETYPE"] = self.blas
        if self.torch:
            result["ATEN_CPU_CAPABILITY"] = self.torch
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NLFLOW_TEST_THREADS"):
            result[name] = str(self.threads)
        return result

    def missed(self, effect: Mapping[str, Any]) -> list[str]:
        """Return what an interpreter plays otherwise than it was asked to; `effect` is its `in_effect`."""
        wanted = {"numba": self.numba, "torch": self.torch.upper()}
        wrong = [f"{name} plays {effect[name]}" for name, value in wanted.items() if value and effect[name] != value]
        known = {self.blas, "Haswell"} if self.blas == "Zen" else {self.blas}  # Zen has the loops of Haswell in wheels
        other = [core for core in effect["blas"] if self.blas and core not in known]
        return wrong + [f"OpenBLAS plays {core}" for core in other]


SETTINGS = (
    Setting("this processor, one thread"),
    Setting("this processor, two threads", threads=2),
    Setting("Numba: x86-64 without features", numba="x86-64"),
    Setting("Numba: nehalem", numba="nehalem", needs=("sse4.2",)),
    Setting("Numba: haswell", numba="haswell", needs=_AVX2),
    Setting("Numba: znver3", numba="znver3", needs=_AVX2),
    Setting("Numba: skylake-avx512", numba="skylake-avx512", needs=_AVX512),
    Setting("OpenBLAS: Nehalem", blas="Nehalem", needs=("sse4.2",)),
    Setting("OpenBLAS: Haswell", blas="Haswell", needs=_AVX2),
    Setting("OpenBLAS: Zen", blas="Zen", needs=_AVX2),
    Setting("OpenBLAS: SkylakeX", blas="SkylakeX", needs=_AVX512),
    Setting("torch: default", torch="default"),
    Setting("torch: AVX2", torch="avx2", needs=_AVX2),
)
"""What `make portable` runs."""

SHORT = (
    Setting("x86-64, Nehalem, torch default", "x86-64", "Nehalem", "default", 1, ("sse4.2",)),
    Setting("haswell, Haswell, torch AVX2, two threads", "haswell", "Haswell", "avx2", 2, _AVX2),
)
"""The short form; `make test` runs the first."""


def lacking(setting: Setting) -> list[str]:
    """Return the features that this machine lacks for a setting."""
    from llvmlite.binding import get_host_cpu_features

    there = get_host_cpu_features()
    return [name for name in setting.needs if not there.get(name)]


def in_effect() -> dict[str, Any]:
    """Return what this interpreter plays: Numba's and torch's processor, and that of each OpenBLAS."""
    import numpy as np
    import scipy.linalg  # noqa: F401  # brings an OpenBLAS of its own
    import torch
    from numba.core.registry import cpu_target
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    pools = [pool for pool in threadpool_info() if pool["internal_api"] == "openblas"]
    return {
        "numba": cpu_target.target_context.codegen().magic_tuple()[1],
        "blas": sorted({pool["architecture"] for pool in pools}),
        "torch": torch.backends.cpu.get_cpu_capability(),
        "threads": sorted({pool["num_threads"] for pool in pools}),
    }
