"""`.keras` files that consist of Keras's own classes, so that Keras alone can read them.

A layer of this package has a method `plain` if Keras's own layers and operations can replace it.
The method applies them to symbolic tensors. New layers contain copies of the values. All other
layers are shared with the model. If a layer of this package has no `plain` or is called twice, the
file refers to classes of this package, as in earlier versions. Keras finds them if their modules
have been imported.
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


def read(path: Path) -> keras.Model:
    """Read a model without its loss from a file of this or an earlier version.

    Keras's errors are not converted to `UserError`.
    """
    for place in MODELS.values():
        importlib.import_module(place.partition(":")[0])
    with inputs_by_feature():
        return keras.saving.load_model(path, compile=False)


@contextmanager
def inputs_by_feature() -> Iterator[None]:
    """Suppress the warning about models whose inputs and input layers have different names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When providing `inputs` as a dict", UserWarning)
        yield


def list_modules(path: Path) -> list[str]:
    """Return the modules of the classes that a file refers to, except those of Keras."""
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
    """Return an equivalent model of Keras's own classes, or the model itself if there is none."""
    if not any(hasattr(each, "plain") for each in model.layers):
        return model
    try:
        with inputs_by_feature():
            outputs = model._run_through_graph(model._inputs, call_fn=_call)
            return keras.Model(model._inputs_struct, outputs, name=model.name)
    # A layer may be called twice, or have arguments that the Keras layer does not support.
    except (ValueError, TypeError) as error:
        _log.info("loading the model's Keras file requires Flotilla's classes: %s", error)
        return model


def _call(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(operation, "plain", operation)(*args, **kwargs)
