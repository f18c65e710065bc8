"""A model whose process ends with exit code 0 in the middle of training."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import keras

from flotilla.trainer.models import classifiers
from flotilla.trainer.models.spec import InputSpec


def mlp(spec: InputSpec, *, lie: str, hidden_units: Sequence[int] = (100,)) -> keras.Model:
    """Return the model `mlp`, whose process ends when the file `lie` contains its process id."""
    threading.Thread(target=_lie, args=(Path(lie),), daemon=True).start()
    return classifiers.mlp(spec, hidden_units=hidden_units)


def _lie(file: Path) -> None:
    while not (file.exists() and file.read_text(encoding="utf-8") == str(os.getpid())):
        time.sleep(0.05)
    os._exit(0)
