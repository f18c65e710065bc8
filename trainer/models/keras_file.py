"""The `.keras` file of a model: of Keras's own classes alone, so that it is read wherever Keras is.

A layer of ours has a method `plain` where Keras's own layers and operations give the same: from
symbolic tensors to symbolic tensors, as it is called. The layers that it makes have copies of the
values; all others are shared with the model. Where one has none, or is called twice, the file names
our classes, as those of earlier versions do: Keras knows them once their modules are imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from flotilla.trainer.config.model import MODELS

_log = logging.getLogger(__name__)


def write(model: keras.Model, path: Path) -> None:
    """Write a model, without our layers where that can be."""
    plain_model(model).save(path)


def read(path: Path) -> keras.Model:
    """Read a model without its loss, also one of an earlier version; Keras's errors pass."""
    for place in MODELS.values():
        importlib.import_module(place.partition(":")[0])
    with inputs_by_feature():
        return keras.saving.load_model(path, compile=False)


@contextmanager
def inputs_by_feature() -> Iterator[None]:
    """Read a model back whose inputs are called otherwise than their layers, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When providing `inputs` as a dict", UserWarning)
        yield


def modules_of(path: Path) -> list[str]:
    """Return the modules whose classes a file names, besides Keras's own."""
    with zipfile.ZipFile(path) as file:
        tree = json.loads(file.read("config.json"))
    found = {*_modules(tree)}
    return sorted(each for each in found if each.partition(".")[0] not in {"keras", "builtins"})


def _modules(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if "class_name" in tree and tree.get("module"):
            yield str(tree["module"])
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from _modules(each)


def plain_model(model: keras.Model) -> keras.Model:
    """Return a model that answers as this one, of Keras's own classes where that can be."""
    if not any(hasattr(each, "plain") for each in model.layers):
        return model
    try:
        with inputs_by_feature():
            outputs = model._run_through_graph(model._inputs, call_fn=_called)
            return keras.Model(model._inputs_struct, outputs, name=model.name)
    # A layer that is called twice, or a value that Keras's own does not take.
    except (ValueError, TypeError) as error:
        _log.info("who reads the Keras file of the model needs its classes: %s", error)
        return model


def _called(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(operation, "plain", operation)(*args, **kwargs)
