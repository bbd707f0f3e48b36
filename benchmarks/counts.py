"""Operations, synchronizations and copies of flows and of the denoiser on a GPU: ``python -m benchmarks.counts``.

They are counted on the pretended GPU of the tests, so that no device is needed, and a device that is there is not
asked. A GPU waits for the host at each synchronization, which costs more than an operation where these are small.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness import Row, table
from benchmarks.tensors import SIGMA, drawn
from nlflow import AttentionFlow, Batch, ExpDotProduct, GradientFlow, J, Points, RungeKutta, affinity, denoise, solve
from tests import pretended

MOST = {
    "J-flow and its affinity, 5000 x 8, t = 3": {"synchronizations": 2},
    "denoise, 256 x 256, balanced": {"copies": 12, "synchronizations": 12, "operations": 1200},
}
"""Most of each; that of the attention flow is a synchronization a step, beside three for the start and the energies."""
_FLOW = "attention flow, 2 x 4 heads of 100 tokens, t = 2"


def works(best: bool = False) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Give the work that is counted, by name; on the pretended GPU."""
    generator = torch.Generator().manual_seed(0)

    def drawn_there(*shape: int) -> Any:
        return pretended.put(torch.randn(*shape, generator=generator))

    x, u = drawn_there(5000, 8), drawn_there(5000, 8)
    points = Points(range(5000))

    def j_flow() -> Any:
        return solve(GradientFlow(J(affinity(ExpDotProduct(), points, x, method="tiled")), "degree"), u, t=3.0)

    yield "J-flow and its affinity, 5000 x 8, t = 3", j_flow
    tokens = drawn_there(2, 4, 100, 16)
    heads = affinity(ExpDotProduct(), Batch(Points(range(100)), (2, 4)), tokens)
    yield _FLOW, lambda: solve(AttentionFlow(heads), tokens, t=2.0, integrator=RungeKutta())
    image = pretended.put(torch.from_numpy(drawn((256, 256))[1]))
    for quality in ("balanced", "best") if best else ("balanced",):
        yield f"denoise, 256 x 256, {quality}", lambda quality=quality: denoise(image, SIGMA, quality=quality)


def rows(best: bool = False) -> Iterator[tuple[dict[str, Any], pretended.Counts]]:
    """Give what each work counts, and the lines that ask."""
    with pretended.gpu():
        for name, work in works(best):
            with pretended.counting() as counts:
                done = work()
            steps = {"steps": int(done.stats["steps"])} if hasattr(done, "stats") else {}
            yield {
                "work": name, **steps, "operations": counts.operations, "synchronizations": counts.synchronizations,
                "copies_to_device": counts.copies_to_device, "copies_to_host": counts.copies_to_host,
            }, counts  # fmt: skip


def held(row: dict[str, Any]) -> list[Row]:
    """Return the goals of a work beside what was counted."""
    # Beside the steps: whether the start is finite, how long the first step is to be, and the energies at the end.
    most = {"synchronizations": row["steps"] + 3} if row["work"] == _FLOW else MOST.get(row["work"], {})
    known = row | {"copies": row["copies_to_device"] + row["copies_to_host"]}
    return [
        Row.of("counts", f"{row['work']}: {what}", "", "", known[what], most=goal) for what, goal in most.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__.splitlines()[0])
    parser.add_argument("--best", action="store_true", help="the slower quality too")
    parser.add_argument("--places", action="store_true", help="which lines ask")
    chosen = parser.parse_args()
    goals: list[Row] = []
    for row, counts in rows(chosen.best):
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        goals += held(row)
        if chosen.places:
            print(counts)
    print(table(goals), file=sys.stderr)
    raise SystemExit(0 if all(goal.met for goal in goals) else 1)


if __name__ == "__main__":
    main()
