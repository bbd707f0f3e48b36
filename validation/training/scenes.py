"""Drawn scenes to segment: discs, boxes, triangles and striped boxes, in front of each other, on a texture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLASSES", "draw_scenes", "inside"]

CLASSES = ("background", "disc", "box", "triangle", "stripes")

Floats = NDArray[np.float64]
_SIDES = tuple(math.pi / 2 + number * 2 * math.pi / 3 for number in range(3))  # directions of a triangle's sides


def draw_scenes(count: int, side: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pictures and the class of each of their pixels.

    Colours say nothing about the class: they are drawn alike for all, and every picture has noise.

    Parameters
    ----------
    count : int
    side : int
        Height and width in pixels.
    seed : int
        Scene i of a seed is the same for any `count`.

    Returns
    -------
    images : array of uint8 of shape (count, side, side, 3)
    labels : array of int64 of shape (count, side, side)
        Places in `CLASSES`.
    """
    images = np.empty((count, side, side, 3), dtype=np.uint8)
    labels = np.empty((count, side, side), dtype=np.int64)
    for number in range(count):
        images[number], labels[number] = _scene(side, np.random.default_rng((seed, number)))
    return images, labels


def _scene(side: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    y, x = np.mgrid[:side, :side] + 0.5
    picture = rng.uniform(40, 215, 3) + _texture(side, rng)
    labels = np.zeros((side, side), dtype=np.int64)
    for _ in range(rng.integers(2, 6)):
        kind = int(rng.integers(1, len(CLASSES)))
        centre, radius = rng.uniform(0.1 * side, 0.9 * side, 2), rng.uniform(0.12, 0.28) * side
        turn = rng.uniform(0, 2 * math.pi)
        # Coordinates in which the shape stands upright and has radius 1.
        u = (math.cos(turn) * (x - centre[0]) + math.sin(turn) * (y - centre[1])) / radius
        v = (math.cos(turn) * (y - centre[1]) - math.sin(turn) * (x - centre[0])) / radius
        covered = inside(kind, u, v)
        colour, other = rng.uniform(20, 235, (2, 3))
        fill: Any = colour
        if CLASSES[kind] == "stripes":
            fill = np.where((np.floor(u * rng.uniform(2.5, 4)) % 2 == 0)[..., None], colour, other)[covered]
        picture[covered] = fill
        labels[covered] = kind
    picture += rng.normal(0, 12, picture.shape)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8), labels


def inside(kind: int, u: Floats, v: Floats) -> NDArray[np.bool_]:
    """Return which pixels belong to a shape of radius about 1."""
    if CLASSES[kind] == "disc":
        return u**2 + v**2 < 0.8
    if CLASSES[kind] == "triangle":
        return np.max([math.cos(angle) * u + math.sin(angle) * v for angle in _SIDES], axis=0) < 0.6
    return np.maximum(np.abs(u), np.abs(v)) < 0.8


def _texture(side: int, rng: np.random.Generator) -> Floats:
    """Return a coarse texture, bilinear between random numbers on a grid of 6 × 6."""
    coarse = rng.normal(0, 25, (6, 6, 3))
    place = np.linspace(0, 5, side)
    low = np.minimum(place.astype(int), 4)
    part = (place - low)[:, None, None]
    rows = coarse[low] * (1 - part) + coarse[low + 1] * part
    part = (place - low)[None, :, None]
    result: Floats = rows[:, low] * (1 - part) + rows[:, low + 1] * part
    return result
