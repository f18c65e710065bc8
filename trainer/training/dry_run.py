"""Whether model, dataset and configuration fit, before anything is downloaded: `trainer fit`.

The dataset is known by what its builder says of itself. The model is built for one example of it,
by shapes alone: its variables get no values, so that a large one needs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import keras

from trainer.checkpoints import warm_start
from trainer.config.schema import Config
from trainer.data import prepare
from trainer.data.spec import DatasetSpec, FeatureSpec, require_slices
from trainer.evaluation import evaluate
from trainer.models import registry
from trainer.models.freezing import freeze
from trainer.strategies import placement
from trainer.tasks import registry as tasks
from trainer.topology import topology_of


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found to fit: the features of one example by name, the task, and the model's size.

    `parameters` are the numbers in all variables of the model.
    """

    inputs: dict[str, str]
    targets: dict[str, str]
    task: str
    parameters: int


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` where what is configured cannot be done with the model.

    It would be found otherwise by the first step, or after the last one.
    """
    name = config.model.name
    registry.require_trainable(name, model)
    paths = [variable.path for variable in model.variables]
    warm_start.check(config.training.warm_start, paths)
    if config.training.jit_compile:
        registry.require_compilable(model)
    if "keras" in config.export.formats:
        registry.require_readable(name, model)
    if topology_of(config.training.strategy).servers and not config.cluster.existing_servers:
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
    require_slices(config, selection.specs, selection.targets)
    dataset = DatasetSpec(
        features=selection.specs, inputs=selection.inputs, targets=selection.targets, shards={}
    )
    objective = tasks.objective_of(config, dataset)
    # Never left: that would give all variables their values.
    keras.StatelessScope().__enter__()
    model = evaluate.build_model(config, dataset, objective)
    freeze(model, config.training.freeze)
    require(config, model)
    inputs = {name: selection.specs[name] for name in selection.inputs}
    return Fit(
        inputs={name: described(each) for name, each in inputs.items()},
        task=objective.task.name,
        targets={name: described(selection.specs[name]) for name in selection.targets},
        parameters=int(model.count_params()),
    )


def described(feature: FeatureSpec) -> str:
    """Return type, shape and classes of a feature, as a person reads them."""
    classes = f" of {feature.num_classes} classes" if feature.num_classes else ""
    return f"{feature.dtype} {list(feature.shape)}{classes}"
