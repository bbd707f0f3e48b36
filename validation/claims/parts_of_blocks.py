"""What parts of a block change in the similarity of tokens, where it has a closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from validation.harness import Check, Claim, Context, Outcome, largest
from validation.networks import libraries, on_one_thread


def block(omega: float, rotated: float) -> Any:
    """Return a model of one block x + P x W with uniform P and W = omega I + rotated J, J a turn by a right angle."""
    torch, _ = libraries()
    nn = torch.nn

    class Attention(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.v, self.out = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
            turn = torch.kron(torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).double()
            self.v.weight.data = (omega * torch.eye(4, dtype=torch.float64) + rotated * turn).T.contiguous()
            self.out.weight.data = torch.eye(4).double()

        def forward(self, x: Any) -> Any:
            q, v = torch.zeros_like(x)[:, None], self.v(x)[:, None]
            return self.out(nn.functional.scaled_dot_product_attention(q, q, v)[:, 0])

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Any) -> Any:
            return x + self.attention(x)

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model().eval()


def after(t: float, mean: float, rest: float) -> float:
    """Return t_sim where the mean token is stretched by one factor, and what differs from it by another."""
    return mean**2 * t / (mean**2 * t + rest**2 * (1 - t))


@on_one_thread
def run(context: Context) -> Outcome:
    torch, _ = libraries()
    from nlflow.attention import Adapter, explain

    worst: dict[str, float] = {"mixing": 0.0, "projection": 0.0, "norms": 0.0, "sum of the parts": 0.0}
    random = torch.Generator().manual_seed(62)
    for omega in np.linspace(-0.8, 3, context.pick(20, 6)):
        for rotated in (0.0, 0.7):
            x = torch.randn(3, 6, 4, generator=random, dtype=torch.float64) + 0.5
            found = explain(block(float(omega), rotated), x, adapter=Adapter("layers.*.attention", projection="out"))
            one = found.blocks[0]
            values = {name: one.of_inputs(one.parts[name], "t_sim") for name in ("norms", "mixing", "projection")}
            start = one.points["before"].values["t_sim"]
            change = one.points["after"].values["t_sim"] - start
            # W turns and stretches both the mean token and what differs, by w or 1 + w as P is there or not.
            whole, trace = float(np.hypot(1 + omega, rotated)), abs(1 + omega)
            for item, t in enumerate(start):
                mixed, end = after(t, trace, 1.0), after(t, whole, 1.0)
                expected = {
                    "norms": 0.0, "mixing": ((mixed - t) + (end - t)) / 2, "projection": (end - mixed) / 2,
                }  # fmt: skip
                for name, value in expected.items():
                    worst[name] = largest(worst[name], abs(values[name][item] - value))
            total = sum(values.values())
            worst["sum of the parts"] = largest(worst["sum of the parts"], float(np.abs(total - change).max()))
    return Outcome([Check(f"{name} against its closed form", value, 1e-12) for name, value in worst.items()])


CLAIM = Claim(
    name="parts-of-blocks",
    title="What P and W_V W_O change in token similarity adds up",
    statement=(
        "With uniform P and W = ωI + ρJ, J a turn by a right angle, the block x + P x W stretches the mean token by "
        "√((1+ω)² + ρ²) and leaves what differs from it; with W's trace part alone by |1 + ω|; without P all by the "
        "same. So t_sim = t becomes m²t/(m²t + 1 − t) with the stretch m, the norms change nothing, and mixing and "
        "W_V W_O share the change by the mean of both orders. `explain` gives these parts, and their sum is the "
        "change."
    ),
    source="derived; t_sim of arXiv 2312.06182",
    run=run,
)
