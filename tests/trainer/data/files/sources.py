"""Helpers that open test files as a source and read its examples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.files.file_source import FileSource
from flotilla.trainer.data.listing import Listing, list_source
from flotilla.trainer.features.dataset_spec import SPLITS


def listed(folder: Path) -> Listing:
    return list_source(DataConfig(source=str(folder)))


def source(folder: Path, **keys: Any) -> FileSource:
    config = DataConfig.model_validate({"source": str(folder), **keys})
    return FileSource(config, listed(folder), folder)


def read(made: FileSource, selection: Selection) -> dict[str, Any]:
    """Return all columns, with each example's split in the column `split`."""
    batches = [each for part in made.parts() for each in made.read(part, selection)]
    columns = {
        name: np.concatenate([each.columns[name] for each in batches]) for name in selection.specs
    }
    splits = np.concatenate([each.splits for each in batches])
    return {**columns, "split": [SPLITS[each] for each in splits]}


def opened(folder: Path, **keys: Any) -> tuple[Selection, dict[str, Any]]:
    made = source(folder, **keys)
    selection = made.select()
    return selection, read(made, selection)


def sizes(found: dict[str, Any]) -> Counter[str]:
    return Counter(found["split"])


def picture(path: Path, value: int = 0, size: tuple[int, int] = (8, 6), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), value % 256, np.uint8)
    pixels[0, 0] = (value // 256, value % 7, 9)
    Image.fromarray(pixels).convert(mode).save(path)
