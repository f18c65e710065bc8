"""What a strategy does for tables that grow: layers with `grows`.

Their variables change where they are placed, in the forward pass of a training step: no worker
pulls them, those of a shard are on one server, and a row that is given to another id gets new slots
of the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.strategies.remade import Remade

# Where each worker has a copy of all variables.
_COPIES = "multi_worker_mirrored"
# Where a worker whose gradient is not waited for may still look up, after all others have ended.
_SYNCHRONOUS = "sync_parameter_server"
# Where a gradient is of an earlier step than that of its update.
_ASYNCHRONOUS = "async_parameter_server"
# What a variable has that got no values: its initializer.
BEGINS = "begins_by"
log = logging.getLogger(__name__)


def tables_of(model: keras.Model) -> list[Any]:
    """Return the layers of a model that are tables that grow."""
    return [layer for layer in model._flatten_layers() if getattr(layer, "grows", False)]


def parts_of(model: keras.Model) -> list[Any]:
    """Return the shards of these layers."""
    return [part for table in tables_of(model) for part in table.parts()]


def state_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model that are not trained, and that workers pull and push."""
    kept = {id(each) for table in tables_of(model) for each in table.bookkeeping()}
    return [each for each in model.non_trainable_variables if id(each) not in kept]


def together(model: keras.Model) -> list[list[tf.Variable]]:
    """Return groups of variables, each of which has to be on one server."""
    return [group for table in tables_of(model) for group in table.together()]


def connect(model: keras.Model, optimizer: keras.optimizers.Optimizer, steps: tf.Variable) -> None:
    """Give the tables of a built model the counter of steps, and the slots of their rows."""
    tables = tables_of(model)
    for table in tables:
        table.connect(steps, lambda variable: list(slots_of(optimizer, variable)), tables[0])


def restored(model: keras.Model) -> None:
    """Let the tables of a model find their rows again, after its variables were assigned."""
    for table in tables_of(model):
        table.restored()


def remake(model: keras.Model, remade: Remade) -> None:
    """Make again what tables have on lost servers besides the values of a checkpoint.

    `restored_on` has to follow when they have these.
    """
    for part in (each for table in tables_of(model) for each in table.parts()):
        if remade.was_on(part.device):
            for each in part.unsaved:
                remade.variable(each)
            before = (part.map, part.mutex)
            part.make_map()
            for old, new in zip(before, (part.map, part.mutex), strict=True):
                remade.handle(old, new)


def restored_on(model: keras.Model, remade: Remade) -> None:
    """Let tables find their rows again whose variables were assigned on lost servers."""
    for table in tables_of(model):
        table.restored(remade.was_on)


def metrics(model: keras.Model) -> Mapping[str, Any]:
    """Return the metrics of the tables for the history, by their names; empty without one."""
    found = {table.name: table.metrics() for table in tables_of(model)}
    return {"tables": found} if found else {}


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` where the tables of a model cannot be trained as it is configured.

    A line warns of a row that may be given to another id while a gradient of it is on its way.
    """
    workers, needed = config.cluster.workers, config.training.replicas_to_aggregate
    for table in tables_of(model):
        if config.training.strategy == _ASYNCHRONOUS and table.min_age <= workers > 1:
            log.warning(
                "the table %s gives a row to another id after %d steps without use, and with %d "
                "workers a gradient may take as many: set its min_age to several times that",
                table.name,
                table.min_age,
                workers,
            )
        if config.training.pull_every > 1:
            raise ConfigError(
                f"training.pull_every: the table {table.name} grows at every step, and is never "
                "pulled whole; leave the key out"
            )
        if config.training.strategy == _SYNCHRONOUS and 0 < needed < workers:
            raise ConfigError(
                f"training.replicas_to_aggregate: with {needed} of {workers} workers, a late one "
                f"changes the table {table.name} while a checkpoint is saved; leave the key out"
            )
        if config.training.strategy == _COPIES:
            raise ConfigError(
                f"training.strategy: {_COPIES} has a copy of the table {table.name} in each "
                "worker, which would grow apart; take one with parameter servers"
            )


def slots_of(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Iterator[tuple[tf.Variable, Any]]:
    """Return what an optimizer has for a variable, and what it begins with: None for its value.

    Keras's optimizers have a list for each kind of slots, in the order of the variables.
    """
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
        # Adafactor has a number of each row in one list, and of each column in another.
        if slot.shape != variable.shape and (slot.shape != variable.shape[:1] or name == "_c"):
            continue
        yield slot.value, None if slots is averages else _first_value(slot)


def _first_value(slot: keras.Variable) -> float:
    if initializer := getattr(slot, BEGINS, None):
        return float(tf.reshape(initializer([1] * len(slot.shape), dtype=slot.dtype), [-1])[0])
    with tf.device(slot.value.device):
        return float(tf.reshape(slot.value.sparse_read([0]), [-1])[0])
