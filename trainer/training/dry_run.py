"""Whether model, dataset and configuration fit, before anything is downloaded: `trainer fit`.

The dataset is known by what its builder says of itself. The model is built for one example of it,
by shapes alone: its variables get no values, so that a large one needs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import keras

from trainer.config.schema import Config
from trainer.data import prepare
from trainer.data.spec import require_slices
from trainer.models import registry
from trainer.models.spec import InputSpec
from trainer.strategies import placement
from trainer.topology import topology_of

# Of a label without names the number of classes is known once the dataset is prepared.
_SOME_CLASSES = 2


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found to fit: input features, classes (0: not known yet), parameters of the model.

    `inputs` are the shapes and types of one example by the names of its features.
    """

    inputs: dict[str, str]
    classes: int
    parameters: int


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` where what is configured cannot be done with the model.

    It would be found otherwise by the first step, or after the last one.
    """
    name = config.model.name
    registry.require_trainable(name, model)
    if config.training.jit_compile:
        registry.require_compilable(model)
    if "keras" in config.export.formats:
        registry.require_readable(name, model)
    if topology_of(config.training.strategy).servers and not config.cluster.existing_servers:
        paths = [variable.path for variable in model.variables]
        placement.check(paths, config.cluster.parameter_servers, config.cluster.placement)


def fit(config: Config, scratch: Path) -> Fit:
    """Build the model of a configuration for its dataset, in a process that does nothing else.

    Args:
        config: the run.
        scratch: folder for what TFDS writes about the dataset; removed at the end.

    Raises:
        UserError: there is no such dataset or model, or they do not fit.
    """
    selection = prepare.selected(config.data, scratch)
    classes = selection.num_classes or _SOME_CLASSES
    require_slices(config, selection.specs, selection.label)
    spec = InputSpec.of(selection.specs, selection.inputs, classes)
    # Never left: that would give all variables their values.
    keras.StatelessScope().__enter__()
    model = registry.build(config.model, spec, config.training.seed)
    require(config, model)
    inputs = {name: selection.specs[name] for name in selection.inputs}
    return Fit(
        inputs={name: f"{each.dtype} {list(each.shape)}" for name, each in inputs.items()},
        classes=selection.num_classes,
        parameters=int(model.count_params()),
    )
