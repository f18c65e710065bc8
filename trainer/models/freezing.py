"""Variables that are not trained: `training.freeze`, globs over the paths of a model's variables.

A frozen variable has no gradient and no slots of the optimizer, and no worker pushes it; it is
read, saved and exported like all others. Keras's own flags say so, which every strategy reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import keras

from trainer.errors import ConfigError, nearest

_KEY = "training.freeze"


def freeze(model: keras.Model, globs: Sequence[str]) -> None:
    """Freeze the variables of a built model whose path fits a glob.

    A layer of which all variables fit is frozen as by `layer.trainable = False`: of a
    BatchNormalization the moving statistics are then used, and stay as they are. They cannot be
    frozen otherwise.

    Raises:
        ConfigError: a glob fits no variable, or nothing that could be frozen.
    """
    paths = [variable.path for variable in model.variables]
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise ConfigError(f"{_KEY}: {glob!r} fits no variable{nearest(glob, paths)}")
    frozen = {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}
    moving = dict[str, str]()
    for layer in model._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if own and not layer._layers and frozen.issuperset(each.path for each in own):
            layer.trainable = False
            continue
        for variable in layer._trainable_variables:
            if variable.path in frozen:
                variable.trainable = False
        if layer.trainable:
            moving |= {each.path: layer.path for each in layer._non_trainable_variables}
    for glob in globs:
        fits = [path for path in paths if fnmatchcase(path, glob)]
        if moving.keys() >= set(fits):
            raise ConfigError(
                f"{_KEY}: {glob!r} fits only {fits[0]}, state that no gradient trains; it stays as "
                f"it is where its whole layer is frozen: '{moving[fits[0]]}/*'"
            )
