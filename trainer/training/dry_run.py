"""The dry run, which checks model, task, dataset and configuration before a cluster starts.

The dataset is described by its manifest, its first rows or its builder. Most variables of a large
model get no values. With a smaller model, the dry run tries one step and one validation on a few
examples, real or artificial, and an export. Artificial values should not make any model fail: they
are random bytes, random numbers from 0 to 1, the integers 0 and 1 (also used as classes), and the
string "a".
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import Variable

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import index, warm_start
from flotilla.trainer.config.cluster import amount
from flotilla.trainer.config.model import OF_MODEL
from flotilla.trainer.config.schema import Config, OutputConfig, TrainingConfig
from flotilla.trainer.config.thresholds import present_name, split_rule
from flotilla.trainer.config.topology import TOPOLOGIES, find_topology
from flotilla.trainer.data import prepare
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.export import formats
from flotilla.trainer.export.formats import Subject, format_path
from flotilla.trainer.features.class_names import ClassIndex
from flotilla.trainer.features.dataset_spec import (
    DatasetSpec,
    require_buckets,
    require_slices,
    shard_name,
)
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.length import Splits, resolve
from flotilla.trainer.features.names import length_name
from flotilla.trainer.models import choice, registry
from flotilla.trainer.models.registry import freeze
from flotilla.trainer.optimizers import optimizers
from flotilla.trainer.optimizers.loss_scale import LossScale
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies import placement
from flotilla.trainer.strategies.gradients import build_pulled_gradient
from flotilla.trainer.strategies.strategy import (
    build_gradient,
    build_own_step,
    find_class,
    has_own_step,
    require_updates,
)
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.classification import TWO
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.training.task_contract import (
    LENGTH,
    call_user_code,
    is_built_in,
    number_rows,
    prefix_errors,
    require_task,
)

# Maximum number of values in a model to try. They take 40 MB, and their gradients another 40 MB.
MOST_TRIED = 10_000_000
# Maximum number of layers in a user's model to export and read back. 150 layers take five seconds.
MOST_LAYERS = 50
# The strategies that support a custom `train_step`, because each replica has the whole model.
OWN_STEP = tuple(name for name, each in TOPOLOGIES.items() if each.capabilities.own_steps)
# Number of examples in a step, and in a second step if the first one is inconclusive.
EXAMPLES, MORE_EXAMPLES = 2, 64
_MADE_UP = "made-up"
# Maximum size of a shard that is fetched for its first examples, in bytes. The limit exists because
# the pipeline step requests little disk space.
MOST_BYTES = 1 << 30
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a dry run. `why` explains the task. `notes` are hints from the first rows."""

    model: str
    inputs: dict[str, str]
    targets: dict[str, str]
    task: str
    why: str
    parameters: int
    notes: tuple[str, ...] = ()


def require(config: Config, model: keras.Model, objective: Objective) -> None:
    """Raise `ConfigError` if the configuration does not suit the model."""
    name = config.model.name
    registry.require_trainable(name, model)
    if has_own_step(model):
        # Check a custom `train_step` first: its error asks for another strategy or model.
        _require_own_step(config, model)
    paths = [variable.path for variable in model.variables]
    warm_start.check(config.training.warm_start, paths)
    require_updates(config, model)
    if config.training.jit_compile:
        registry.require_compilable(model)
        _require_known_lengths(model)
    # Skip built-in models, which can always be read back.
    if "keras" in config.export.formats and ":" in name:
        registry.require_readable(name, model)
    if any(form.startswith("tflite") for form in config.export.formats):
        registry.require_lite(model)
    if find_topology(config.training.strategy).servers and not config.cluster.existing_servers:
        placement.check(paths, config.cluster.parameter_servers, config.cluster.placement)
    _require_memory(config, model)
    _require_compiler(config, objective)
    require_metrics(config, objective)
    if config.training.callbacks:
        # Import this module late, because it imports TensorBoard.
        from flotilla.trainer.training.journal import check_callbacks  # noqa: PLC0415

        check_callbacks(config.training)


def _require_known_lengths(model: keras.Model) -> None:
    for given in model.inputs:
        if None in given.shape[1:]:
            raise ConfigError(
                f"training.jit_compile: the input {given.name} varies in length, and XLA compiles "
                "the step again for each length; leave the key out, or set a length in data.shapes"
            )


def _require_memory(config: Config, model: keras.Model) -> None:
    cluster, topology = config.cluster, find_topology(config.training.strategy)
    role = "ps" if topology.servers else "worker" if topology.workers else "chief"
    limit = cluster.kubernetes.of(role).resources.limits.get("memory", "")
    if cluster.launcher == "local" or cluster.existing_servers or not limit:
        return
    pods = cluster.parameter_servers if topology.servers else 1
    size = sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in model.variables)
    if size > pods * amount(limit):
        raise ConfigError(
            f"cluster.kubernetes: the variables of model {config.model.name} take {size / 1e9:.3g} "
            f"GB, more than the memory limit of {role} ({pods} x {limit}); raise the limit"
        )


def _require_own_step(config: Config, model: keras.Model) -> None:
    name, strategy = f"model {config.model.name}", config.training.strategy
    if strategy not in OWN_STEP:
        raise ConfigError(
            f"{name} has a custom train_step, which training.strategy {strategy} cannot run; use "
            f"{' or '.join(OWN_STEP)}, or write a compute_loss instead, which works with every "
            "strategy"
        )
    if config.training.jit_compile:
        raise ConfigError(
            f"training.jit_compile: {name} has a custom train_step, which runs without XLA; "
            "leave the key out"
        )
    own = [key for key, value in vars(model).items() if isinstance(value, keras.Optimizer)]
    if own:
        raise ConfigError(
            f"{name}: its train_step has a separate optimizer ({', '.join(own)}), which no "
            "checkpoint would save; use self.optimizer, which training.optimizer sets"
        )


def _require_compiler(config: Config, objective: Objective) -> None:
    """Reject XLA if only the model's `compile` enables it. Log if its optimizer is unused."""
    found = objective.compiled
    if found and found.jit_compile and not config.training.jit_compile:
        raise ConfigError(
            f"model {config.model.name} is compiled with jit_compile=True, but "
            "training.jit_compile is false; set it to true, or remove the argument from compile"
        )
    if config.training.optimizer.name == OF_MODEL:
        optimizers.accept_compiled(config.training, objective.optimizer)
    elif found:
        log.info(
            "ignoring the optimizer %s of the compiled model, because training.optimizer sets %s; "
            "to use the optimizer of the model, set training.optimizer.name: model",
            type(found.optimizer).__name__,
            config.training.optimizer.name,
        )


def require_metrics(config: Config, objective: Objective) -> None:
    """Raise `ConfigError` if the gate or the task needs a metric that is not measured."""
    known, main = objective.directions, config.task.main_metric
    bounds = {"min": config.gate.min, "max": config.gate.max}
    rules = [(f"gate.{bound}.{rule}", rule) for bound, found in bounds.items() for rule in found]
    if compared := config.gate.champion.metric:
        rules.append(("gate.champion.metric", compared))
    if main:
        rules.append(("task.main_metric", main))
    for key, rule in rules:
        metric = rule if rule == main else split_rule(rule, known)[0]
        if metric not in known:
            hint = present_name(metric, known) or f" (measured: {', '.join(sorted(known))})"
            task = objective.task.name
            raise ConfigError(f"{key}: {task} and the model do not measure {metric!r}{hint}")
    compared = compared or objective.main_metric
    direction, better = known.get(compared), config.gate.champion.better
    if better and direction and better != direction:
        raise ConfigError(
            f"gate.champion.better: {compared} is better when {direction}; leave the key out"
        )
    if main and not known[main]:
        raise ConfigError(
            f"task.main_metric: cannot tell which value of {main!r} is better; set "
            f"gate.champion.metric to {main}, and gate.champion.better to higher or lower"
        )


def fit(config: Config, scratch: Path, uri: str = "", *, whole: bool = True) -> Fit:
    """Build the model of a configuration for its dataset, and try it unless it is large.

    `uri` is empty before the dataset is prepared. Temporary files in `scratch` are removed. With
    `whole=False`, only the first rows are known. The function then tries several assumptions about
    the other rows, and raises an error only if all of them fail. Raises `UserError`.
    """
    dataset = find_dataset(config, scratch, uri)
    config = resolve(config, Splits(*map(dataset.examples, Splits._fields)))
    if whole:
        return _fit_dataset(config, dataset, uri)
    errors = []
    for reading in _readings(config, dataset):
        # If the first rows give no gradient, try artificial rows, because sorted rows may all be
        # equal or have no weight.
        for examples in (uri, ""):
            try:
                return _fit_dataset(config, reading, examples)
            except ConfigError as error:
                errors.append(error)
                if not isinstance(error, _NoGradientError):
                    break
    refused = max(errors, key=_find_line)
    with suppress(ConfigError):
        # Labels that look like classes may be quantities, so try that reading too.
        found = _fit_dataset(config, _read_as_numbers(config, dataset), "")
        return replace(found, notes=(f"in the first rows: {refused}",))
    raise refused


def _find_line(error: ConfigError) -> int:
    """Return the line of `_fit_dataset` that failed. A later line means that more checks passed."""
    below = error.__traceback__ and error.__traceback__.tb_next
    return below.tb_lineno if below else 0


def _fit_dataset(config: Config, dataset: DatasetSpec, uri: str) -> Fit:
    config = choice.with_model(config, dataset)
    dataset = tasks.set_positive(config.task, dataset)
    require_slices(config, dataset.features, dataset.targets)
    require_buckets(config.data.buckets, [n for n in dataset.roles if dataset.features[n].varies])
    find_class(config)
    if config.training.optimizer.name != OF_MODEL:
        optimizers.build_optimizer(config.training)
    if precision := config.training.mixed_precision:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}")
    objective = _objective(config, dataset)
    require_task(objective.task, dataset.features)
    with _few_values():
        model = evaluate.build_model(config, dataset, objective)
        freeze(model, config.training.freeze)
        require(config, model, objective)
    parameters = int(model.count_params())
    if parameters <= MOST_TRIED:
        _try_out(config, dataset, model, objective, uri)
    return Fit(
        model=config.model.name,
        inputs={name: describe_feature(dataset.features[name]) for name in dataset.inputs},
        task=objective.task.name,
        why=tasks.describe_task(config.task, dataset),
        targets={name: describe_feature(dataset.features[name]) for name in dataset.targets},
        parameters=parameters,
    )


def _objective(config: Config, dataset: DatasetSpec) -> Objective:
    found: Objective = call_user_code(
        f"task {config.task.name}", tasks.make_objective, config, dataset
    )
    return found


def find_dataset(config: Config, scratch: Path, uri: str) -> DatasetSpec:
    """Return the dataset at `uri` or, if `uri` is empty, the dataset that the source describes."""
    if uri:
        learnt = index.learnt_of_dataset(uri)
        return DatasetSpec.from_manifest(storage.read_manifest(uri), learnt)
    selection = prepare.select_features(config.data, scratch)
    return DatasetSpec(
        features=selection.specs,
        inputs=selection.inputs,
        targets=selection.targets,
        weight=selection.weight,
        group=selection.group,
        shards={},
    )


def _readings(config: Config, sample: DatasetSpec) -> Iterator[DatasetSpec]:
    """Yield possible datasets that begin with these rows. Their labels may have more classes."""
    # Drop moments and counts, because a few rows do not represent the dataset. Keep the counts of
    # integer labels without class names: they give the number of classes.
    counts = {
        name: each
        for name, each in sample.target_counts.items()
        if not sample.features[name].num_classes
    }
    sample = replace(sample, target_moments={}, target_counts=counts)
    for least in (TWO, TWO + 1):
        yield _add_classes(config, sample, least)
    if width := _width(config, _add_classes(config, sample, TWO)):
        yield _add_classes(config, sample, width)


def _read_as_numbers(config: Config, sample: DatasetSpec) -> DatasetSpec:
    """Return the dataset with numeric labels read as quantities instead of classes.

    In a few rows, quantities may look like classes. Raises `ConfigError` without such labels.
    """
    features, said = dict(sample.features), config.data.types
    for name in sample.targets if config.data.source and not config.data.map else ():
        feature = features[name]
        if name not in said and feature.labels and all(map(_is_number, feature.labels)):
            features[name] = FeatureSpec(shape=feature.shape, dtype="float32", stored="float")
    if features == sample.features:
        raise ConfigError("no label may be a quantity")
    return replace(sample, features=features, target_moments={}, target_counts={})


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _add_classes(config: Config, sample: DatasetSpec, least: int) -> DatasetSpec:
    """Return the dataset with the configured classes and at least `least` classes in its labels."""
    features, counts = dict(sample.features), dict(sample.target_counts)
    for name in sample.targets:
        feature = features[name]
        if name in counts:
            counts[name] = {
                split: [*each, *[0] * (least - len(each))] for split, each in counts[name].items()
            }
        if not feature.labels or feature.dtype == "bool":
            continue
        labels = [*feature.labels, *_find_configured(config, name, feature.labels, least)]
        labels += [f"(class {number})" for number in range(len(labels), least)]
        features[name] = replace(feature, labels=tuple(labels), num_classes=len(labels))
    return replace(sample, features=features, target_counts=counts)


def _find_configured(config: Config, label: str, known: Sequence[str], least: int) -> Iterator[str]:
    """Yield the classes that the configuration names and the first rows lack."""
    said = config.task.outputs.get(label, OutputConfig())
    named = [said.positive or config.task.positive] if len(known) < TWO else []
    if least > TWO:
        weights = (said.class_weights, config.training.class_weights)
        named += [name for each in weights if isinstance(each, Mapping) for name in each]
        rules = (split_rule(rule, (), [label]) for rule in (*config.gate.min, *config.gate.max))
        named += [value or "" for _, feature, value in rules if feature == label]
    classes = ClassIndex(tuple(known))
    yield from dict.fromkeys(name for name in named if name and classes.number(name) < 0)


def _width(config: Config, dataset: DatasetSpec) -> int:
    """Return the size of the last axis of the model's output, or 0 if unknown."""
    found = []

    def see(_: keras.Model, outputs: Any) -> None:
        found.append(keras.tree.flatten(outputs)[0].shape[-1])

    with suppress(ConfigError), _few_values():
        objective = _objective(config, tasks.set_positive(config.task, dataset))
        evaluate.build_model(config, dataset, objective, see)
    return found[0] if found and isinstance(found[0], int) else 0


@contextmanager
def _few_values() -> Iterator[None]:
    """Initialize new variables only until they have `MOST_TRIED` values in total."""
    initialize, assign = Variable._initialize_with_initializer, Variable._direct_assign
    left = MOST_TRIED

    def initialize_few(self: Variable, initializer: Any) -> None:
        nonlocal left
        left -= math.prod(self._shape)
        if left >= 0:
            initialize(self, initializer)
        else:
            # Keras creates the value at the first read, and a symbolic graph does not read it.
            self._value, self._initializer = None, initializer

    def assign_existing(self: Variable, value: Any) -> None:
        if self._value is not None:
            assign(self, value)

    Variable._initialize_with_initializer, Variable._direct_assign = initialize_few, assign_existing
    try:
        yield
    finally:
        Variable._initialize_with_initializer, Variable._direct_assign = initialize, assign


def _try_out(
    config: Config, dataset: DatasetSpec, model: keras.Model, objective: Objective, uri: str = ""
) -> None:
    with tempfile.TemporaryDirectory(prefix="flotilla-try-") as name:
        folder = Path(name)
        batches = make_batch(dataset, folder, uri)
        with prefix_errors(f"model {config.model.name}"):
            try:
                _require_step(config.training, model, objective, batches)
            except _NumbersError:
                # Try more examples, because the first ones may all be equal or have no weight.
                more = make_batch(dataset, folder, uri, MORE_EXAMPLES)
                _require_step(config.training, model, objective, more)
        subject = Subject(model=model, task=objective.task, spec=dataset)
        ((given, *_),) = batches
        inputs = given if isinstance(given, Mapping) else {dataset.inputs[0]: given}
        calibration = {name: inputs[name].numpy() for name in dataset.inputs}
        # Skip built-in models and tasks, which can always be served and read back.
        parts = objective.task.parts.values()
        own = ":" in config.model.name or not all(map(is_built_in, parts))
        if own:
            formats.require_served(subject)
        small = len(model._flatten_layers()) <= MOST_LAYERS
        for form in config.export.formats:
            if (own and small) or form.startswith("tflite"):
                path = folder / format_path(form, config.name, 0)
                formats.check_form(form, subject, path, calibration)


def describe_feature(feature: FeatureSpec) -> str:
    """Return the dtype, shape and number of classes of a feature, for display."""
    classes = f" of {feature.num_classes} classes" if feature.num_classes else ""
    sizes = ", ".join("any" if size is None else str(size) for size in feature.shape)
    return f"{feature.dtype} [{sizes}]{classes}"


def examples(spec: DatasetSpec, count: int = EXAMPLES) -> dict[str, Any]:
    """Return artificial examples: an array for each feature of a batch."""
    random = np.random.default_rng(0)
    found = {name: _values(spec.features[name], random, count) for name in spec.roles}
    for name in spec.roles:
        if spec.features[name].varies:
            found[length_name(name)] = np.full(count, LENGTH, np.int64)
    if spec.weight:
        found[spec.weight] = np.ones_like(found[spec.weight])
    return found


def _values(feature: FeatureSpec, random: np.random.Generator, count: int) -> Any:
    shape = (count, *(LENGTH if size is None else max(size, 1) for size in feature.shape))
    if feature.dtype == "string":
        return np.full(shape, b"a", object)
    dtype = np.dtype(feature.dtype)
    if dtype == np.uint8 and not feature.num_classes:
        return random.integers(0, 256, shape).astype(dtype)
    return random.random(shape).astype(dtype) if dtype.kind == "f" else number_rows(shape, dtype)


def make_batch(
    spec: DatasetSpec, folder: Path, uri: str = "", count: int = EXAMPLES
) -> tf.data.Dataset:
    """Return one batch of a dataset's first shard, or of artificial examples."""
    if uri and _first_bytes(spec, uri) <= MOST_BYTES:
        shards = stage_shards(uri, folder, "train", of=len(spec.shards["train"]))
        return evaluation_batches(spec, shards, batch_size=count).take(1)
    made, path = examples(spec, count), folder / shard_name(_MADE_UP, 0, 1)
    write_shards(folder, _MADE_UP, {name: spec.features[name] for name in made}, made)
    return evaluation_batches(spec, [path], batch_size=count)


def _first_bytes(spec: DatasetSpec, uri: str) -> int:
    name = spec.files("train")[0]
    return sum(each.bytes for each in storage.read_manifest(uri).files if each.path == name)


def _require_step(
    training: TrainingConfig, model: keras.Model, objective: Objective, batches: tf.data.Dataset
) -> None:
    """Run one step and a validation. The model keeps its values unless it has its own step."""
    (batch,) = batches
    loss, gradients = call_user_code(
        "a step on a few examples", _step, training, model, objective, batch
    )
    _require_finite(loss, model, gradients, _why_not_finite(training, batch))

    def validate() -> None:
        objective.means(objective.totals(model, batches).numpy())

    call_user_code("a validation on a few examples", validate)


def _why_not_finite(training: TrainingConfig, batch: Any) -> str:
    inputs = batch[0] if isinstance(batch[0], Mapping) else {"the input": batch[0]}
    for name, each in inputs.items():
        if each.dtype.is_floating and np.isnan(each.numpy()).any():
            return (
                f"{name} is missing (NaN) in at least one of them; fill missing values, as the "
                "model tabular does"
            )
    why = "look for a logarithm, a root or a norm of zero, or a division by zero"
    if training.mixed_precision == "float16":
        why += f", or for a value beyond {np.finfo(np.float16).max:.0f}, the largest float16"
    return why


def _step(
    training: TrainingConfig, model: keras.Model, objective: Objective, batch: Any
) -> tuple[tf.Tensor, list[Any]]:
    optimizer = optimizers.build_optimizer(training, objective.optimizer)
    if has_own_step(model):
        optimizer.build(model.trainable_variables)
        step = build_own_step(model, optimizer, objective.weigh_batch)
        return tf.function(step, autograph=False)(batch), []
    gradient = build_gradient(model, objective.loss)
    if training.mixed_precision == "float16":
        scale = LossScale()
        gradient = build_pulled_gradient(
            model, objective.loss, jit=False, scale=scale, in_place=True
        )
    value, gradients = tf.function(gradient, autograph=False)(batch)
    return value, gradients


def _require_finite(loss: tf.Tensor, model: keras.Model, gradients: list[Any], why: str) -> None:
    if not np.isfinite(loss.numpy()):
        raise _NumbersError(f"its loss on a few examples is {float(loss)}: {why}")
    values = [tf.convert_to_tensor(each).numpy() for each in gradients]
    for variable, value in zip(model.trainable_variables, values, strict=False):
        if not np.isfinite(value).all():
            raise _NumbersError(
                f"the gradient of {variable.path} on a few examples is not finite, although the "
                f"loss is: {why}"
            )
    if values and not any(each.any() for each in values):
        raise _NoGradientError(
            "no variable has a gradient: the loss does not depend on what the model computes"
        )


class _NumbersError(ConfigError):
    """A step on a few examples gives a number that is not finite, or only zero gradients."""


class _NoGradientError(_NumbersError):
    """All gradients are zero."""
