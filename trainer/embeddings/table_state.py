"""Functions that strategies call for dynamic tables: layers with the attribute `grows`.

The variables of a table change in place: no worker pulls them, the variables of a shard are on the
same server, and a reassigned row gets new optimizer slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.runtime.errors import ConfigError

# The attribute that holds the initializer of a variable that was created without values.
BEGINS = "begins_by"
log = logging.getLogger(__name__)


def list_tables(model: keras.Model) -> list[Any]:
    """Return the layers of a model that are dynamic tables."""
    return [layer for layer in model._flatten_layers() if getattr(layer, "grows", False)]


def list_shards(model: keras.Model) -> list[Any]:
    """Return the shards of the dynamic tables of a model."""
    return [part for table in list_tables(model) for part in table.parts()]


def list_state(model: keras.Model) -> list[keras.Variable]:
    """Return the non-trainable variables of a model that workers pull and push."""
    kept = {id(each) for table in list_tables(model) for each in table.bookkeeping()}
    return [each for each in model.non_trainable_variables if id(each) not in kept]


def list_groups(model: keras.Model) -> list[list[tf.Variable]]:
    """Return groups of variables. Each group must be on one server."""
    return [group for table in list_tables(model) for group in table.list_groups()]


def connect(model: keras.Model, optimizer: keras.optimizers.Optimizer, steps: tf.Variable) -> None:
    """Connect the tables of a built model to the step counter and to their optimizer slots."""
    tables = list_tables(model)
    for table in tables:
        table.connect(steps, lambda variable: list(list_slots(optimizer, variable)), tables[0])


def restore_tables(
    model: keras.Model, is_meant: Callable[[str], bool] = lambda _device: True
) -> None:
    """Rebuild the index of the tables on devices that `is_meant` accepts, after an assignment."""
    for table in list_tables(model):
        table.rebuild(is_meant)


def metrics(model: keras.Model) -> Mapping[str, Any]:
    """Return the metrics of the tables for the history, by name, or {} without tables."""
    found = {table.name: table.metrics() for table in list_tables(model)}
    return {"tables": found} if found else {}


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` if the configuration does not suit the tables of the model."""
    workers, needed = config.cluster.workers, config.training.replicas_to_aggregate
    may = find_topology(config.training.strategy).capabilities
    for table in list_tables(model):
        if may.mixes_steps and table.min_age <= workers > 1:
            log.warning(
                "the table %s gives a row to another id after %d steps without use, but with %d "
                "workers a gradient may be that old; set its min_age to several times the number "
                "of workers",
                table.name,
                table.min_age,
                workers,
            )
        if config.training.pull_every > 1:
            raise ConfigError(
                f"training.pull_every: workers cannot pull the table {table.name}, because it "
                "grows during training; leave the key out"
            )
        if may.aggregates and 0 < needed < workers:
            raise ConfigError(
                f"training.replicas_to_aggregate: with {needed} of {workers} workers, a late "
                f"worker may change the table {table.name} during a checkpoint; leave the key out"
            )
        if may.copies:
            raise ConfigError(
                f"training.strategy: {config.training.strategy} has a copy of the table "
                f"{table.name} in each worker, and the copies would diverge; use a "
                "strategy with parameter servers"
            )


def list_slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Iterator[tuple[tf.Variable, Any]]:
    """Yield a variable's optimizer slots and initial values. None means the variable's value."""
    trained = optimizer._trainable_variables
    index = next((i for i, each in enumerate(trained) if each is variable), None)
    if index is None:
        return
    averages = optimizer._model_variables_moving_average if optimizer.use_ema else None
    for name, slots in vars(optimizer).items():
        if not isinstance(slots, list) or len(slots) != len(trained) or slots is trained:
            continue
        slot = slots[index]
        if not isinstance(slot, keras.Variable) or slot is variable:
            continue
        # Adafactor has one slot with a value per row, and one (`_c`) with a value per column. Only
        # the first one belongs to the rows.
        if slot.shape != variable.shape and (slot.shape != variable.shape[:1] or name == "_c"):
            continue
        yield slot.value, None if slots is averages else _first_value(slot)


def _first_value(slot: keras.Variable) -> float:
    if initializer := getattr(slot, BEGINS, None):
        return float(tf.reshape(initializer([1] * len(slot.shape), dtype=slot.dtype), [-1])[0])
    with tf.device(slot.value.device):
        return float(tf.reshape(slot.value.sparse_read([0]), [-1])[0])
