"""The task that leads: trains from the newest valid checkpoint to the end."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from functools import cache, partial
from types import FrameType

import keras
import tensorflow as tf

from trainer import evaluate, gpu_memory, storage
from trainer.checkpoints import Checkpoints
from trainer.cluster import Cluster, Task
from trainer.config import Config
from trainer.data.read import evaluation_batches, stage_shards, training_batches
from trainer.data.spec import DatasetSpec
from trainer.errors import ClusterLostError
from trainer.input import NUMBER_FILE, PATTERN, stage_input
from trainer.launcher import Job
from trainer.models import registry as models
from trainer.models.spec import InputSpec
from trainer.optimizers import build_optimizer
from trainer.refused_input import refused_input
from trainer.serve import serve_in_process
from trainer.strategies import registry as strategies
from trainer.strategies.interface import Problem, Strategy
from trainer.train import Surroundings, train

# What TensorFlow raises in the chief when a server that it relies on has gone or has begun anew.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)


def lead(job: Job, cluster: Cluster, task: Task) -> None:
    """Train from the newest valid checkpoint to the end; see `trainer.train.train`."""
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    stopping = _stop_on_sigterm()
    config = job.config
    data = storage.read_manifest(job.dataset)
    spec = DatasetSpec.from_manifest(data)
    inputs = InputSpec.of(spec.features, spec.inputs, spec.num_classes)
    build_model = partial(_build_model, config, inputs)
    if config.training.mixed_precision:
        # bfloat16 has the range of float32, so that no loss has to be scaled.
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    gpu_memory.settle(config, task)
    stage_input(job, cluster, task)
    if config.cluster.in_process and task.role == "chief":
        serve_in_process(cluster)
    strategy = strategies.create(config, cluster, task)
    around = Surroundings(
        problem=partial(_problem, config, spec, build_model),
        validate=_validator(job, spec, build_model),
        stopping=stopping,
    )
    kept = Checkpoints(
        job.checkpoints,
        keep=config.training.keep,
        scratch=job.workdir / "scratch",
        fingerprint=data.fields["fingerprint"],
    )
    try:
        with refused_input():
            train(config, strategy, kept, around)
    except _LOST as error:
        # The cause stands below the stack of the graph.
        cause = str(error).strip().split("\n\n")[-1].splitlines()[0]
        raise ClusterLostError(f"a task of the cluster is gone: {cause}") from error
    finally:
        strategy.close()


def _build_model(config: Config, inputs: InputSpec) -> keras.Model:
    model = models.build(config.model, inputs, config.training.seed)
    if config.training.jit_compile:
        models.require_compilable(model)
    return model


def _problem(
    config: Config, spec: DatasetSpec, build_model: Callable[[], keras.Model], start: int
) -> Problem:
    training = config.training
    return Problem(
        build_model=build_model,
        build_optimizer=partial(build_optimizer, training),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        chance_loss=math.log(max(2, spec.num_classes)),
        batches=partial(_batches, config, spec, start),
    )


def _batches(config: Config, spec: DatasetSpec, start: int) -> tf.data.Dataset:
    """Return the batches of the task in whose working folder this graph runs."""
    number = tf.strings.to_number(tf.io.read_file(NUMBER_FILE), tf.int32)
    return training_batches(
        spec,
        PATTERN,
        batch_size=config.training.batch_size,
        # Two workers on the same examples have orders of their own, and so has a resumed life.
        seed=config.training.seed + start + 7919 * number,
    )


def _validator(
    job: Job, spec: DatasetSpec, build_model: Callable[[], keras.Model]
) -> Callable[[Strategy], dict[str, float]] | None:
    if not spec.examples("validation"):
        return None
    files = stage_shards(job.dataset, job.workdir / "validation", "validation")

    @cache
    def measured_copy() -> tuple[keras.Model, evaluate.Measurer, tf.data.Dataset]:
        # Made at its first use: what is made before the cluster is connected stands on no device
        # that exists afterwards.
        copy = build_model()
        batches = evaluation_batches(spec, files, batch_size=job.config.evaluation.batch_size)
        return copy, evaluate.measurer(copy), batches

    def validate(strategy: Strategy) -> dict[str, float]:
        copy, measured, batches = measured_copy()
        trained = strategy.variables()
        for variable in copy.variables:
            variable.assign(trained[f"model/{variable.path}"])
        return measured(batches)

    return validate


def _stop_on_sigterm() -> Callable[[], bool]:
    asked: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return lambda: bool(asked)
