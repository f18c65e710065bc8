"""Whether model, dataset and configuration fit, before a cluster starts: `trainer fit`.

Before anything is downloaded, the dataset is known by what its builder says of itself. The model is
built for one example of it; of a large one most variables get no values, so that it needs no
memory. One that is not large is tried: one step and one validation of two examples, made up or the
dataset's first ones, and the conversions of an export.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
from keras.src.backend import Variable

from trainer import storage, user_code
from trainer.checkpoints import learnt_before, warm_start
from trainer.config.optimizer import OF_MODEL
from trainer.config.schema import Config
from trainer.data import prepare
from trainer.data.spec import DatasetSpec, FeatureSpec, require_slices
from trainer.errors import ConfigError, nearest
from trainer.evaluation import evaluate
from trainer.export.formats import FORMATS, Subject
from trainer.models import registry
from trainer.models.registry import freeze
from trainer.strategies import placement
from trainer.strategies.strategy import has_own_step, require_updates
from trainer.tasks import registry as tasks
from trainer.tasks.objective import Objective
from trainer.topology import TOPOLOGIES, topology_of
from trainer.training import optimizers, trial_step, trial_task

# Numbers in the variables of a model that is tried with values: 40 MB of them, and as much again
# for a gradient.
MOST_TRIED = 10_000_000
# Each replica has the whole model there, which an update of the model's own needs.
OWN_STEP = tuple(name for name, each in TOPOLOGIES.items() if each.capabilities.own_steps)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found to fit: the features of one example by name, the task, and the model's size.

    `parameters` are the numbers in all variables of the model.
    """

    inputs: dict[str, str]
    targets: dict[str, str]
    task: str
    parameters: int


def require(config: Config, model: keras.Model, objective: Objective) -> None:
    """Raise `ConfigError` where what is configured cannot be done with the model.

    It would be found otherwise by the first step, or after the last one.
    """
    name = config.model.name
    registry.require_trainable(name, model)
    if has_own_step(model):
        # First, since another strategy or another model is what it asks for.
        _require_own_step(config, model)
    paths = [variable.path for variable in model.variables]
    warm_start.check(config.training.warm_start, paths)
    require_updates(config, model)
    if config.training.jit_compile:
        registry.require_compilable(model)
        _require_known_lengths(model)
    if "keras" in config.export.formats:
        registry.require_readable(name, model)
    if topology_of(config.training.strategy).servers and not config.cluster.existing_servers:
        placement.check(paths, config.cluster.parameter_servers, config.cluster.placement)
    _require_compiler(config, objective)
    require_metrics(config, objective)


def _require_known_lengths(model: keras.Model) -> None:
    for given in model.inputs:
        if None in given.shape[1:]:
            raise ConfigError(
                f"training.jit_compile: the input {given.name} varies in length, and XLA compiles "
                "the step again for each length; set it to false, or give data.shapes a length"
            )


def _require_own_step(config: Config, model: keras.Model) -> None:
    name, strategy = f"model {config.model.name}", config.training.strategy
    if strategy not in OWN_STEP:
        raise ConfigError(
            f"{name}: it has a train_step of its own, which {' and '.join(OWN_STEP)} run, and not "
            f"training.strategy {strategy}: each step there is made of parts; write a compute_loss "
            "instead, which counts under every strategy"
        )
    if config.training.jit_compile:
        raise ConfigError(
            f"training.jit_compile: {name} has a train_step of its own, which runs as it is; set "
            "it to false"
        )
    own = [key for key, value in vars(model).items() if isinstance(value, keras.Optimizer)]
    if own:
        raise ConfigError(
            f"{name}: its train_step has an optimizer of its own ({', '.join(own)}), which no "
            "checkpoint would hold; use self.optimizer, which training.optimizer says"
        )


def _require_compiler(config: Config, objective: Objective) -> None:
    """Refuse XLA that only the model asks for, and an optimizer of its own that cannot be used."""
    found = objective.compiled
    if found and found.jit_compile and not config.training.jit_compile:
        raise ConfigError(
            f"model {config.model.name}: it is compiled with jit_compile=True, and "
            "training.jit_compile is false; set it there, or leave it out of compile"
        )
    if config.training.optimizer.name == OF_MODEL:
        optimizers.accepted(config.training, objective.optimizer)
    elif found:
        log.info(
            "the optimizer %s that the model is compiled with is not used: training.optimizer says "
            "%s (name: model uses it)",
            type(found.optimizer).__name__,
            config.training.optimizer.name,
        )


def require_metrics(config: Config, objective: Objective) -> None:
    """Raise `ConfigError` where the gate asks for a metric that is not measured."""
    known = objective.directions
    bounds = {"min": config.gate.min, "max": config.gate.max}
    rules = [(f"gate.{bound}.{rule}", rule) for bound, found in bounds.items() for rule in found]
    if compared := config.gate.champion.metric:
        rules.append(("gate.champion.metric", compared))
    for key, rule in rules:
        metric = rule.partition("@")[0]
        if metric not in known:
            hint = nearest(metric, known) or f" (measured: {', '.join(sorted(known))})"
            task = objective.task.name
            raise ConfigError(f"{key}: {task} and the model measure no {metric!r}{hint}")


def fit(config: Config, scratch: Path, uri: str = "") -> Fit:
    """Build the model of a configuration for its dataset, and try it where it is not large.

    Args:
        config: the run.
        scratch: folder for what TFDS writes about the dataset; removed at the end.
        uri: the dataset; before it is prepared, empty.

    Raises:
        UserError: there is no such dataset or model, or they do not fit.
    """
    dataset = dataset_of(config, scratch, uri)
    require_slices(config, dataset.features, dataset.targets)
    if precision := config.training.mixed_precision:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}")
    objective = tasks.objective_of(config, dataset)
    trial_task.require(objective.task, dataset.features)
    with _few_values():
        model = evaluate.build_model(config, dataset, objective)
        freeze(model, config.training.freeze)
        require(config, model, objective)
    parameters = int(model.count_params())
    if parameters <= MOST_TRIED:
        _try_out(config, dataset, model, objective, uri)
    return Fit(
        inputs={name: described(dataset.features[name]) for name in dataset.inputs},
        task=objective.task.name,
        targets={name: described(dataset.features[name]) for name in dataset.targets},
        parameters=parameters,
    )


def dataset_of(config: Config, scratch: Path, uri: str) -> DatasetSpec:
    """Return the dataset of a configuration: as it is published, or as its builder says."""
    if uri:
        learnt = learnt_before.of_dataset(uri)
        return DatasetSpec.from_manifest(storage.read_manifest(uri), learnt)
    selection = prepare.selected(config.data, scratch)
    return DatasetSpec(
        features=selection.specs,
        inputs=selection.inputs,
        targets=selection.targets,
        weight=selection.weight,
        group=selection.group,
        shards={},
    )


@contextmanager
def _few_values() -> Iterator[None]:
    """Give the variables that are made within values until these are `MOST_TRIED` numbers.

    A scope without state, Keras's own way to give none, takes neither an optimizer nor weights that
    are loaded: a model could not be compiled, or begin with those of another.
    """
    initialize, assign = Variable._initialize_with_initializer, Variable._direct_assign
    left = MOST_TRIED

    def initialized(self: Variable, initializer: Any) -> None:
        nonlocal left
        left -= math.prod(self._shape)
        if left >= 0:
            initialize(self, initializer)
        else:
            # Keras makes a value of it wherever one is read; no graph of shapes alone does.
            self._value, self._initializer = None, initializer

    def assigned(self: Variable, value: Any) -> None:
        if self._value is not None:
            assign(self, value)

    Variable._initialize_with_initializer, Variable._direct_assign = initialized, assigned
    try:
        yield
    finally:
        Variable._initialize_with_initializer, Variable._direct_assign = initialize, assign


def _try_out(
    config: Config, dataset: DatasetSpec, model: keras.Model, objective: Objective, uri: str = ""
) -> None:
    """Train, measure and export the model on the first examples, or on made-up ones."""
    with tempfile.TemporaryDirectory(prefix="flotilla-try-") as name:
        folder = Path(name)
        try:
            batches = trial_step.batches_of(dataset, folder, uri)
            trial_step.require_step(config.training, model, objective, batches)
        except ConfigError as error:
            raise ConfigError(f"model {config.model.name}: {error}") from error
        subject = Subject(model=model, task=objective.task, spec=dataset)
        inputs = trial_step.examples(dataset)
        calibration = {name: inputs[name] for name in dataset.inputs}
        for form in config.export.formats:
            # What Keras writes was read back before; what is served is of TensorFlow's own graphs.
            if form.startswith("tflite"):
                _require_form(form, subject, folder / form, calibration)


def _require_form(form: str, subject: Subject, path: Path, calibration: Mapping[str, Any]) -> None:
    found = FORMATS[form]
    try:
        found.write(subject, path, calibration if found.calibrated else None)
        found.read(subject, path)
    # The converter may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"export.formats: the model cannot be written as {form}: {user_code.message_of(error)};"
            f" leave {form} out"
        ) from error


def described(feature: FeatureSpec) -> str:
    """Return type, shape and classes of a feature, as a person reads them."""
    classes = f" of {feature.num_classes} classes" if feature.num_classes else ""
    sizes = ", ".join("any" if size is None else str(size) for size in feature.shape)
    return f"{feature.dtype} [{sizes}]{classes}"
