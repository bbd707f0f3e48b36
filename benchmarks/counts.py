"""Operations, synchronizations and copies of flows and of the denoiser on tensors: ``python -m benchmarks.counts``.

Where each of them is made, too, with ``--places``. A device waits for the host where a number is asked for; that costs
more than the operation where these are small. On CPU tensors copies cannot be told.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nlflow
from benchmarks.tensors import SIGMA, drawn
from nlflow import AttentionFlow, Batch, ExpDotProduct, GradientFlow, J, Points, affinity, denoise, solve

ASKS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"})
"""Operators whose result the host waits for."""


class Counted(TorchDispatchMode):
    """Counts the operators of torch that are called within it, and where what takes long is asked for.

    Attributes
    ----------
    counts : Counter
        ``operations``, ``synchronizations``, ``to_device``, ``to_host``.
    places : Counter
        The last three by the line of the package that asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter(operations=0, synchronizations=0, to_device=0, to_host=0)
        self.places: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.counts["operations"] += 1
        if name in ASKS or (name == "index" and any(_is_mask(i) for i in args[1])):
            self._note("synchronizations")
        elif name in ("_to_copy", "copy_"):
            before = args[0 if name == "_to_copy" else 1].device.type
            if before != result.device.type:
                self._note("to_host" if result.device.type == "cpu" else "to_device")
        return result

    def _note(self, what: str) -> None:
        self.counts[what] += 1
        frame: Any = sys._getframe(2)
        while frame is not None and _PACKAGE not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            self.places[what, f"{frame.f_code.co_filename.split(_PACKAGE)[-1]}:{frame.f_lineno}"] += 1


_PACKAGE = nlflow.__path__[0] + "/"


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def works(device: str, best: bool = False) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Give the work that is counted, by name."""
    generator = torch.Generator().manual_seed(0)
    x, u = (torch.randn(5000, 8, generator=generator).to(device) for _ in range(2))
    p = affinity(ExpDotProduct(), Points(range(5000)), x, method="tiled")
    yield "J-flow, 5000 x 8, t = 3", lambda: solve(GradientFlow(J(p), "degree"), u, t=3.0)
    tokens = torch.randn(2, 4, 100, 16, generator=generator).to(device)
    heads = affinity(ExpDotProduct(), Batch(Points(range(100)), (2, 4)), tokens)
    yield "attention flow, 2 x 4 heads of 100 tokens, t = 2", lambda: solve(AttentionFlow(heads), tokens, t=2.0)
    image = torch.from_numpy(drawn((256, 256))[1]).to(device)
    for quality in ("balanced", "best") if best else ("balanced",):
        yield f"denoise, 256 x 256, {quality}", lambda quality=quality: denoise(image, SIGMA, quality=quality)


def rows(device: str, best: bool = False) -> Iterator[tuple[dict[str, Any], Counter[tuple[str, str]]]]:
    """Give what each work counts, and where; each is done once before."""
    for name, work in works(device, best):
        work()
        with Counted() as counted:
            work()
        known = dict(counted.counts)
        if device == "cpu":
            known |= {"to_device": None, "to_host": None}
        yield {"work": name, **known}, counted.places


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="[%(default)s]")
    parser.add_argument("--best", action="store_true", help="the slower quality too")
    parser.add_argument("--places", action="store_true", help="which lines ask")
    chosen = parser.parse_args()
    for row, places in rows(chosen.device, chosen.best):
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        for (what, place), count in places.most_common() if chosen.places else ():
            print(f"    {count:5d} {what} {place}")


if __name__ == "__main__":
    main()
