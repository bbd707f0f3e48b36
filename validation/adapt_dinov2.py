"""A trained vision model, adapted to CIFAR-10 with the term, without it, and with FeatScale.

``python -m validation.adapt_dinov2 prepare --model DIR --data DIR`` writes what a run needs into a small folder, and
``python -m validation.adapt_dinov2 run`` trains. The last layers learn, with the final norm, a linear head, and what
the arm itself learns. All arms of a seed have the same head at the start and the same batches. Accuracies are compared
over the same test pictures: intervals of the paired difference hold for all arms at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from nlflow.attention import attach, load_model, mean_cosine
from nlflow.attention.sweeping.intervals import paired_differences
from nlflow.backends.machine import provenance
from nlflow.store.atomic import write_content
from nlflow.store.encoding import plain
from nlflow.store.storage import load_archive, save_archive
from validation.training.data import read_pictures

_KIND = "pictures to adapt to"
FOLDER = Path("build/adapt")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the pictures that the model was trained on
ARMS: dict[str, dict[str, Any] | None] = {
    "as it is": None,
    "term, explicit, 0.6": {"fidelity": 0.6, "semi_implicit": False},  # the paper's, which is for training
    "term, semi-implicit, 0.4": {"fidelity": 0.4, "semi_implicit": True},
    "FeatScale": {"fidelity": 0.0, "feat_scale": True},
}


def prepare(model: Path, data: Path, out: Path, train: int, test: int) -> None:
    """Write the weights in half precision and some pictures of each class into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "preprocessor_config.json"):
        if (model / name).is_file():
            write_content(out / name, (model / name).read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file({name: one.half().contiguous() for name, one in weights.items()}, out / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    parts = [
        read_pictures(data / f"cifar10-{part}.zip").some(count) for part, count in (("train", train), ("test", test))
    ]
    arrays = {"train": parts[0].images, "train_labels": parts[0].labels, "test": parts[1].images,
              "test_labels": parts[1].labels}  # fmt: skip
    save_archive(out / "pictures.npz", arrays, {"kind": _KIND, "classes": list(parts[0].classes)})
    size = sum(path.stat().st_size for path in out.iterdir()) / 2**20
    print(f"{out}: {size:.1f} MiB")


class Adapted(nn.Module):
    """A model with a linear head on its class token and the mean of its patches."""

    def __init__(self, body: Any, classes: int, learning: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(2 * body.config.hidden_size, classes)
        for parameter in body.parameters():
            parameter.requires_grad_(False)
        layers = next(one for one in body.modules() if isinstance(one, nn.ModuleList))
        for part in (*layers[len(layers) - learning :], body.layernorm):
            for parameter in part.parameters():
                parameter.requires_grad_(True)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, classes) and the last hidden states (B, N, D)."""
        states = self.body(pixel_values=pixels).last_hidden_state
        return self.head(torch.cat([states[:, 0], states[:, 1:].mean(dim=1)], dim=-1)), states


def pixels(images: Tensor, side: int, flip: Tensor | None = None) -> Tensor:
    """Return pictures of uint8 (B, 32, 32, 3) as pixel values (B, 3, side, side), some of them mirrored."""
    values = images.permute(0, 3, 1, 2).float() / 255
    if flip is not None:
        values = torch.where(flip[:, None, None, None], values.flip(-1), values)
    mean, deviation = (torch.tensor(one, device=images.device)[:, None, None] for one in (MEAN, DEVIATION))
    return functional.interpolate((values - mean) / deviation, size=(side, side), mode="bilinear", antialias=True)


def adapted(args: argparse.Namespace, arrays: dict[str, Tensor], arm: str, seed: int) -> dict[str, Any]:
    """Train one arm from one seed, and return its accuracy, picture by picture, and the cosine of its tokens."""
    torch.manual_seed(seed)
    body = load_model(args.folder)
    model = Adapted(body, int(arrays["train_labels"].max()) + 1, args.learning)
    if (given := ARMS[arm]) is not None:
        attach(body, **given)  # what it learns itself learns in all layers
    model = model.to(args.device)
    learned = [one for one in model.parameters() if one.requires_grad]
    steps = -(-len(arrays["train"]) // args.batch) * args.epochs
    rest = [one for name, one in model.named_parameters() if one.requires_grad and not name.startswith("head")]
    optimizer = torch.optim.AdamW(
        [{"params": model.head.parameters(), "lr": 1e-3}, {"params": rest, "lr": args.rate}], weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, args.rate], total_steps=steps, pct_start=0.1)
    curve, begun = [], perf_counter()
    for images, labels, flip in batches(arrays, args, seed):
        loss = functional.cross_entropy(model(pixels(images, args.side, flip))[0], labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        curve.append(float(loss.detach()))
    seconds = perf_counter() - begun
    model.eval()
    right, cosine = [], []
    with torch.no_grad():
        for images, labels in zip(
            arrays["test"].split(args.batch), arrays["test_labels"].split(args.batch), strict=True
        ):
            logits, states = model(pixels(images, args.side))
            right.append((logits.argmax(dim=-1) == labels).double().cpu())
            cosine.append(torch.as_tensor(mean_cosine(states[:, 1:].double().cpu())))
    return {
        "arm": arm, "seed": seed, "right": torch.cat(right).numpy(), "cosine": float(torch.cat(cosine).mean()),
        "loss": float(np.mean(curve[-max(1, len(curve) // args.epochs) :])), "seconds": seconds, "steps": steps,
    }  # fmt: skip


def batches(arrays: dict[str, Tensor], args: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pictures, labels and which are mirrored, the same for all arms of a seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(args.epochs):
        order = torch.randperm(len(arrays["train"]), generator=generator)
        for chosen in order.split(args.batch):
            flip = torch.rand(len(chosen), generator=generator) < 0.5
            place = chosen.to(args.device)
            yield arrays["train"][place], arrays["train_labels"][place], flip.to(args.device)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train all arms from all seeds, and return rows and what they differ by."""
    stored = load_archive(args.folder / "pictures.npz", _KIND)[0]
    arrays = {name: torch.from_numpy(np.asarray(one)).to(args.device) for name, one in stored.items()}
    if args.most:
        arrays = {name: one[: args.most] for name, one in arrays.items()}
    found = []
    for seed in range(args.seeds):
        for arm in ARMS:
            found.append(adapted(args, arrays, arm, seed))
            one = found[-1]
            print(f"seed {seed}, {arm}: accuracy {one['right'].mean():.4f}, cosine {one['cosine']:.3f}, "
                  f"{one['seconds']:.1f} s, {one['steps']} steps", flush=True)  # fmt: skip
    names = list(ARMS)
    # Of each test picture the mean over seeds: arms are compared on the same pictures from the same starts.
    each = {arm: np.mean([one["right"] for one in found if one["arm"] == arm], axis=0) for arm in names}
    differ = paired_differences(np.stack([each[arm] for arm in names[1:]]), each[names[0]])
    rows = []
    for number, arm in enumerate(names):
        own = [one for one in found if one["arm"] == arm]
        row = {"arm": arm, "accuracy": float(each[arm].mean()),
               "by_seed": [float(one["right"].mean()) for one in own],
               "cosine": float(np.mean([one["cosine"] for one in own])),
               "seconds": float(np.mean([one["seconds"] for one in own]))}  # fmt: skip
        if number:
            row |= {"gain": float(differ.mean[number - 1]), "low": float(differ.low[number - 1]),
                    "high": float(differ.high[number - 1])}  # fmt: skip
        rows.append(row)
    given = {name: value if isinstance(value, int | float | str) else str(value) for name, value in vars(args).items()}
    given = {name: value for name, value in given.items() if name not in ("act", "folder", "out")}
    return {"arguments": given, "pictures": {name: len(one) for name, one in arrays.items()}, "rows": rows,
            "provenance": provenance()}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the folder, or run the arms."""
    parser = argparse.ArgumentParser(prog="adapt_dinov2", description=__doc__)
    acts = parser.add_subparsers(dest="act", required=True)
    first = acts.add_parser("prepare", help="write weights and pictures into a folder")
    first.add_argument("--model", type=Path, required=True, help="folder of DINOv2 ViT-S/14")
    first.add_argument("--data", type=Path, required=True, help="folder of cifar10-train.zip and cifar10-test.zip")
    first.add_argument("--train", type=int, default=4000)
    first.add_argument("--test", type=int, default=1000)
    second = acts.add_parser("run", help="train all arms")
    second.add_argument("--out", type=Path, default=Path("training-output/adapt_dinov2.json"))
    second.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("seeds", 3), ("epochs", 10), ("batch", 128), ("side", 98), ("learning", 4), ("most", 0)):
        second.add_argument(f"--{name}", type=int, default=value)
    second.add_argument("--rate", type=float, default=1e-4)
    for one in (first, second):
        one.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args(arguments)
    if args.act == "prepare":
        prepare(args.model, args.data, args.folder, args.train, args.test)
        return 0
    result = run(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_content(args.out, (json.dumps(plain(result), indent=1) + "\n").encode())
    for row in result["rows"]:
        gain = f", gain {row['gain']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})" if "gain" in row else ""
        print(f"{row['arm']}: accuracy {row['accuracy']:.4f}, cosine {row['cosine']:.3f}{gain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
