"""Features of CIFAR-10 for the benchmark of learning on graphs: principal components, and a small network's.

The graph is that of the 10 000 test pictures. The network is trained on the 50 000 training pictures and their labels,
for a few minutes on one thread; the test pictures have no part in it.
"""

from __future__ import annotations

import io
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import files

COMPONENTS = 50
EPOCHS = 6
BATCH = 128
RATE = 3e-3


def load(path: Path) -> tuple[Any, Any]:
    """Return the pictures of an archive, (N, 32, 32, 3) of uint8, and the numbers of their classes."""
    from PIL import Image

    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith((".jpg", ".png")))
        kinds = [n.split("/")[-2] for n in names]
        taken = np.array([np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in names])
    return taken, np.unique(kinds, return_inverse=True)[1]


def components(pictures: Any) -> Any:
    """Return the principal components of pixels, (N, 50)."""
    X = pictures.reshape(len(pictures), -1).astype(np.float64) / 255
    X -= X.mean(axis=0)
    return X @ np.linalg.eigh(X.T @ X)[1][:, -COMPONENTS:]


def convolutional(folder: Path, pictures: Any, epochs: int = EPOCHS) -> tuple[Any, Any]:
    """Return features of pictures, (N, 128), and what their network takes the classes for."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    seen, y = load(files(folder, "cifar10-train.zip")[0])
    images = _tensor(seen)
    widths = (3, 32, 64, 128)
    layers: list[Any] = []
    for here, there in pairwise(widths):
        layers += [nn.Conv2d(here, there, 3, padding=1, bias=False), nn.BatchNorm2d(there), nn.ReLU(), nn.MaxPool2d(2)]
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(widths[-1], 10))
    steps = epochs * (len(y) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    rng, labels = np.random.default_rng(0), torch.as_tensor(y)
    for _ in range(epochs):
        order = torch.as_tensor(rng.permutation(len(y)))
        for start in range(0, len(y) - BATCH + 1, BATCH):
            few = order[start : start + BATCH]
            batch = images[few]
            if rng.random() < 0.5:
                batch = batch.flip(-1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels[few]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        test = _tensor(pictures)
        features = torch.cat([body(test[i : i + 500]) for i in range(0, len(test), 500)])
        told = model[1](features).argmax(dim=1).numpy()
    return features.numpy().astype(np.float64), told


def _tensor(pictures: Any) -> Any:
    import torch

    return torch.as_tensor(pictures).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def graphs(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return features by name, and the classes of the pictures; the folder holds two archives of CIFAR-10."""
    pictures, y = load(files(folder, "cifar10-test.zip")[0])
    learnt, told = convolutional(folder, pictures)
    right = 100 * float((told == y).mean())
    names = {
        f"{len(y)} test pictures of CIFAR-10, {COMPONENTS} principal components": components(pictures),
        f"{len(y)} test pictures of CIFAR-10, features of a network that tells {right:.1f} % of them": learnt,
    }
    return names, y
