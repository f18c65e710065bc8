"""Reads the official MNIST files as the published programs do: floats and one-hot labels."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Number of validation examples, as in the published programs.
VALIDATION = 5000
FILES = tuple(
    f"{split}-{content}-ubyte.gz"
    for split in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_HEADER_OF_IMAGES, _HEADER_OF_LABELS = 16, 8


def folder() -> Path:
    """Return the folder of the four official files."""
    return Path(os.environ.get("FLOTILLA_MNIST_DIR", "../shared/data/mnist")).resolve()


def require() -> None:
    """Exit with a message if an official file is missing."""
    absent = [name for name in FILES if not (folder() / name).is_file()]
    if absent:
        sys.exit(
            f"FLOTILLA_MNIST_DIR={folder()} lacks {', '.join(absent)}: set it to the folder of "
            "these files"
        )


def training_examples() -> tuple[Floats, Floats]:
    """Return images [55000, 784] between 0 and 1, and one-hot labels [55000, 10]."""
    images, labels = _read("train")
    return images[VALIDATION:], np.eye(10, dtype=np.float32)[labels[VALIDATION:]]


def held_out_examples() -> tuple[Floats, NDArray[np.uint8]]:
    """Return images [10000, 784] between 0 and 1, and labels [10000]."""
    return _read("t10k")


def _read(split: str) -> tuple[Floats, NDArray[np.uint8]]:
    def content(name: str, header: int) -> NDArray[np.uint8]:
        raw = gzip.decompress((folder() / f"{split}-{name}-ubyte.gz").read_bytes())
        return np.frombuffer(raw, np.uint8, offset=header)

    images = content("images-idx3", _HEADER_OF_IMAGES).reshape(-1, 784)
    return images.astype(np.float32) / np.float32(255), content("labels-idx1", _HEADER_OF_LABELS)


class Batches:
    """Endless batches, reshuffled in each epoch."""

    def __init__(self, images: Floats, labels: Floats, size: int, seed: int) -> None:
        """Shuffle the first epoch with `seed`."""
        self._images, self._labels, self._size = images, labels, size
        self._random = np.random.default_rng(seed)
        self._at = len(images)

    def next(self) -> tuple[Any, Any]:
        """Return the next batch of images and labels."""
        if self._at + self._size > len(self._images):
            order = self._random.permutation(len(self._images))
            self._images, self._labels, self._at = self._images[order], self._labels[order], 0
        begin, self._at = self._at, self._at + self._size
        return self._images[begin : self._at], self._labels[begin : self._at]
