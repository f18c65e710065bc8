"""What one gradient of a configured model costs here: `trainer calibrate`, for `flotilla plan`.

The model is built for its dataset and computes local steps on one batch, on one core or on the
GPU that it sees. Seconds on a core are those of the processor, so that other work on the machine
hardly counts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.evaluation import evaluate
from trainer.models.freezing import freeze
from trainer.strategies.gradients import PureGradient, accumulated
from trainer.strategies.parameter_server import looks_up
from trainer.strategies.placement import Sized, assign
from trainer.strategies.strategy import has_own_step
from trainer.tasks import registry as tasks
from trainer.training import dry_run, trial_step
from trainer.training.optimizers import build_optimizer

# Repetitions after the one that traces; the median of them counts.
ROUNDS = 5
# What a repetition takes at least, as far as steps are short enough.
SECONDS = 0.3
MOST_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured of a model.

    Attributes:
        gradient: seconds of a core, or of the GPU, for the gradient of one step's examples.
        bytes: of all variables of the model.
        slots: bytes of the optimizer's variables.
        held: bytes of the model on each server, by the number of servers.
        step_bytes: what the process has grown by while it built the model and took steps.
        gpu: whether a GPU computed.
    """

    gradient: float
    bytes: int
    slots: int
    held: dict[int, list[int]]
    step_bytes: int
    gpu: bool


def calibrate(config: Config, scratch: Path, servers: Sequence[int], uri: str = "") -> Calibration:
    """Measure the model of a configuration.

    Args:
        config: the run.
        scratch: folder for what TFDS writes about the dataset.
        servers: numbers of servers that the variables are placed on.
        uri: the dataset; before it is prepared, empty, and examples are made up.

    Raises:
        UserError: there is no such dataset or model, or it is of a kind that is not measured.
    """
    dataset = dry_run.dataset_of(config, scratch, uri)
    training = config.training
    if precision := training.mixed_precision:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}")
    objective = tasks.objective_of(config, dataset)
    before = _resident_bytes()
    model = evaluate.build_model(config, dataset, objective)
    freeze(model, training.freeze)
    _require_pulled(config, model)
    optimizer = build_optimizer(training, objective.optimizer)
    optimizer.build(model.trainable_variables)
    with tempfile.TemporaryDirectory(prefix="flotilla-calibrate-") as name:
        (batch,) = trial_step.batches_of(dataset, Path(name), uri)
    steps = _local_steps(config, model, objective.loss, _filled(batch, config))
    gpu = bool(tf.config.list_logical_devices("GPU"))
    seconds = _seconds(steps, time.monotonic if gpu else time.process_time)
    sizes = [_bytes(each) for each in model.variables]
    return Calibration(
        gradient=seconds,
        bytes=sum(sizes),
        slots=sum(map(_bytes, optimizer.variables)),
        held={count: _held(config, model, sizes, count) for count in servers},
        step_bytes=max(0, _resident_bytes() - before),
        gpu=gpu,
    )


def _require_pulled(config: Config, model: keras.Model) -> None:
    name = f"model {config.model.name}"
    if has_own_step(model):
        raise ConfigError(f"{name}: it has a train_step of its own, which is not measured")
    if looks_up(model) and not config.training.jit_compile:
        raise ConfigError(
            f"{name}: it looks up rows of a table, and what these cost was not measured: a plan "
            "for it would not be true; run it for some steps and see `flotilla compare`"
        )


def _filled(batch: Any, config: Config) -> Any:
    """Return the batch with as many examples as a step takes of one worker, in its parts."""
    size, parts = config.training.batch_size, config.training.accumulate

    def filled(each: tf.Tensor) -> tf.Tensor:
        times = -(-size // int(each.shape[0]))
        whole = tf.repeat(each, times, axis=0)[:size]
        return tf.stack([whole] * parts) if parts > 1 else whole

    return tf.nest.map_structure(filled, batch)


def _local_steps(config: Config, model: keras.Model, loss: Any, batch: Any) -> Callable[[int], Any]:
    training = config.training
    pure = PureGradient(model, loss, jit=training.jit_compile)
    one = accumulated(pure, training.accumulate) if training.accumulate > 1 else pure
    compute = tf.autograph.experimental.do_not_convert(one)

    @tf.function
    def steps(count: tf.Tensor) -> tf.Tensor:
        values = pure.pulled()
        weights, state = values.weights, values.state
        total = tf.constant(0.0)
        for _ in tf.range(count):
            loss, found, moved = compute(weights, state, batch)
            # A step on the weights: an unused gradient would not be computed.
            weights = [w - tf.cast(1e-9, w.dtype) * g for w, g in zip(weights, found, strict=True)]
            state = pure.moved(values.state, moved)
            total += loss
        return total

    return lambda count: steps(tf.constant(count)).numpy()


def _seconds(steps: Callable[[int], Any], clock: Callable[[], float]) -> float:
    """Return the seconds of one step, by the median round."""
    steps(1)
    began = clock()
    steps(2)
    one = max(1e-7, (clock() - began) / 2)
    count = int(min(MOST_STEPS, max(1, SECONDS / one)))
    rounds = []
    for _ in range(ROUNDS):
        began = clock()
        steps(count)
        rounds.append((clock() - began) / count)
    return sorted(rounds)[ROUNDS // 2]


def _held(config: Config, model: keras.Model, sizes: Sequence[int], servers: int) -> list[int]:
    variables = zip(model.variables, sizes, strict=True)
    sized = [Sized(path=variable.path, bytes=size) for variable, size in variables]
    held = [0] * servers
    for each, server in zip(sized, assign(sized, servers, config.cluster.placement), strict=True):
        held[server] += each.bytes
    return held


def _bytes(variable: keras.Variable) -> int:
    return int(variable.value.shape.num_elements() or 0) * int(variable.value.dtype.size)


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system has no `/proc`."""
    try:
        text = Path("/proc/self/statm").read_text("ascii")
    except OSError:
        return 0
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
