"""Make the picture at the head of the README: ``python docs/pictures.py`` writes ``docs/before_after.png``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from skimage import data, io

from nlflow import denoise

SIGMA = 30.0
ROWS, COLUMNS = slice(0, 300), slice(20, 420)


def main() -> None:
    photograph = data.astronaut()[ROWS, COLUMNS].astype(np.float32)
    noisy = photograph + np.random.default_rng(0).normal(0, SIGMA, photograph.shape).astype(np.float32)
    clean = denoise(noisy, channel_axis=-1)
    picture = np.concatenate([noisy, np.full((len(noisy), 6, 3), 255.0), clean], axis=1)
    io.imsave(Path(__file__).with_name("before_after.png"), picture.clip(0, 255).round().astype(np.uint8))


if __name__ == "__main__":
    main()
