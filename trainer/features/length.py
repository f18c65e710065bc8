"""The length of training: global steps, epochs, and defaults by the number of examples.

A configuration contains `auto` until the dataset is prepared. `resolve` replaces it with numbers.
The defaults follow published work on tables (Gorishniy et al. 2021, Revisiting Deep Learning Models
for Tabular Data): AdamW, a batch size that depends on the size of the table, a constant learning
rate, the best weights by validation, and a patience of 16 validations. On eight tables, a cosine
schedule was never better than a constant rate and often worse, because training that stops early
does not reach the end of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flotilla.trainer import storage
from flotilla.trainer.config.base import AUTOMATIC
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import OF_MODEL
from flotilla.trainer.config.schema import Config

LEARNING_RATE = 0.002
WITHOUT_GAIN = 16
# Minimum number of steps between validations. With fewer, validations and checkpoints would take
# most of the time.
LEAST_STEPS = 50
# Minimum default for the number of steps if the run validates. Even a small table needs this many.
LEAST_CEILING = 1_500
# An epoch has one validation per `MOST_STEPS` steps: at least one, and at most `MOST_VALIDATIONS`.
MOST_STEPS, MOST_VALIDATIONS = 250, 4
# Before about 100 updates, Adam's second moments are unreliable (Ma and Yarats 2021, On the
# Adequacy of Untuned Warmup).
WARMUP_STEPS, WARMUP_SHARE = 100, 0.05
# Fraction of the default epochs to train for if the run does not validate. Without validation,
# training for all of them would overfit.
WITHOUT_VALIDATION = 0.2
# Minimum number of epochs that is formatted without decimals.
_WHOLE = 10


class Size(NamedTuple):
    """Defaults for datasets with fewer than `examples` training examples."""

    examples: float
    batch: int
    epochs: int


SIZES = (
    Size(2_000, 32, 100),
    Size(5_000, 64, 100),
    Size(12_000, 128, 100),
    Size(50_000, 256, 100),
    Size(200_000, 512, 50),
    Size(1_000_000, 1024, 20),
    Size(math.inf, 1024, 10),
)


class Splits(NamedTuple):
    """The numbers of examples in the splits of a prepared dataset."""

    train: int
    validation: int

    @classmethod
    def read(cls, dataset: Mapping[str, Any]) -> Splits:
        """Read the numbers from the fields of a dataset's manifest."""
        found = (dataset["splits"].get(name) for name in cls._fields)
        return cls(*(int(each["examples"]) if each else 0 for each in found))


def examples_of_step(config: Config) -> int:
    """Return the number of examples per global step. An asynchronous step is one worker's step."""
    training, topology = config.training, config.topology
    return (
        training.step_examples
        * _batches_of_step(config)
        * (training.pull_every if topology.capabilities.mixes_steps else 1)
    )


def _batches_of_step(config: Config) -> int:
    training, cluster = config.training, config.cluster
    topology, devices = config.topology, max(1, cluster.gpus_per_worker)
    if not topology.workers or topology.capabilities.mixes_steps:
        return devices
    needed = training.replicas_to_aggregate if topology.capabilities.aggregates else 0
    return devices * (needed or cluster.workers)


def count_steps(config: Config, epochs: float, examples: int) -> int:
    """Return the number of global steps in a number of epochs, at least 1."""
    return max(1, math.ceil(epochs * examples / examples_of_step(config)))


def is_resolved(config: Config) -> bool:
    """Return whether all values that depend on the number of examples are numbers, not `auto`."""
    training = config.training
    return AUTOMATIC not in (
        training.steps,
        training.batch_size,
        training.checkpoint_every,
        training.validate_every,
        training.patience,
        training.schedule.warmup_steps,
        training.optimizer.learning_rate,
    )


def resolve_for_dataset(config: Config, uri: str) -> Config:
    """Return the configuration with `auto` resolved for a published dataset. Raises `UserError`."""
    if is_resolved(config):
        return config
    return resolve(config, Splits.read(storage.read_manifest(uri).fields))


def resolve(config: Config, splits: Splits) -> Config:
    """Return the configuration with numbers in place of `auto`. Raises `ConfigError`."""
    if is_resolved(config):
        return config
    size = next(each for each in SIZES if splits.train < each.examples)
    # `size.batch` is global: divide it among the batches of one update, but not below the smallest
    # batch size.
    batch = max(size.batch // _batches_of_step(config), min(size.batch, SIZES[0].batch))
    config = _replace_auto(config, batch_size=batch)
    validates = splits.validation and (config.training.validate_every or config.cluster.evaluator)
    ceiling = size.epochs if validates else size.epochs * WITHOUT_VALIDATION
    if config.training.epochs:
        steps = count_steps(config, config.training.epochs, splits.train)
    else:
        steps = max(LEAST_CEILING if validates else 1, count_steps(config, ceiling, splits.train))
    config = _replace_auto(config, steps=steps)
    config = _replace_auto(config, validate_every=_steps_between_validations(config, splits.train))
    every, steps = config.training.validate_every, config.training.steps
    config = _replace_auto(
        config,
        patience=WITHOUT_GAIN if validates else 0,
        # Only a saved checkpoint can be selected, so save one at each validation.
        checkpoint_every=every or _steps_between_validations(config, splits.train),
        learning_rate=LEARNING_RATE,
        warmup_steps=min(WARMUP_STEPS, int(WARMUP_SHARE * steps)),
        epochs=0.0,
    )
    # Check the configuration again, because rules about several keys may need these numbers.
    return parse_config(config.model_dump(mode="json"))


def _replace_auto(config: Config, **values: float) -> Config:
    """Replace each `auto` with the value given for its key, and set `epochs`."""

    def replace_in(section: Any) -> Any:
        fields = type(section).model_fields
        new = {
            name: value
            for name, value in values.items()
            if name in fields and (name == "epochs" or getattr(section, name) == AUTOMATIC)
        }
        return section.model_copy(update=new)

    training = replace_in(config.training)
    below = {name: replace_in(getattr(training, name)) for name in ("optimizer", "schedule")}
    return config.model_copy(update={"training": training.model_copy(update=below)})


def _steps_between_validations(config: Config, examples: int) -> int:
    epoch = examples / examples_of_step(config)
    number = min(MOST_VALIDATIONS, max(1, int(epoch // MOST_STEPS)))
    return max(LEAST_STEPS, math.ceil(epoch / number))


def describe_choices(asked: Config, known: Config, splits: Splits) -> str:
    """Describe in one line the values that depend on the number of examples."""
    training, batch = known.training, known.training.batch_size
    epochs = asked.training.epochs or count_epochs(known, splits.train)
    by_validation = training.patience and asked.training.steps == AUTOMATIC
    most = "at most " if by_validation and not asked.training.epochs else ""
    parts = [
        f"{splits.train:,} examples: batches of {batch:,}",
        f"{most}{format_epochs(epochs)} ({training.steps:,} steps)",
    ]
    if training.optimizer.name != OF_MODEL:
        parts.append(f"learning rate {training.optimizer.learning_rate:g}")
    if training.patience:
        parts.append(f"ends after {training.patience} validations without improvement")
    return ", ".join(parts)


def count_epochs(config: Config, examples: int) -> float:
    """Return the number of epochs that the configured steps cover."""
    return config.training.steps * examples_of_step(config) / max(examples, 1)


def format_epochs(epochs: float) -> str:
    """Format a number of epochs."""
    text = f"{epochs:,.0f}" if epochs >= _WHOLE else f"{epochs:.2g}"
    return f"{text} epoch{'' if text == '1' else 's'}"
