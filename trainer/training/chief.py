"""The task that leads: trains from the newest valid checkpoint to the end."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

import keras
import tensorflow as tf

from trainer import storage
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.history import VALIDATION_LOSS
from trainer.checkpoints.remote import checkpoints_of
from trainer.cluster.launcher import Job
from trainer.cluster.lease import NoLease
from trainer.config.schema import Config
from trainer.data.read import evaluation_batches, training_batches
from trainer.data.spec import DatasetSpec
from trainer.errors import ClusterLostError
from trainer.evaluation import evaluate
from trainer.models import registry as models
from trainer.models.registry import refused_input
from trainer.models.spec import InputSpec
from trainer.strategies import registry as strategies
from trainer.strategies.strategy import Problem, Strategy
from trainer.topology import Cluster, Task
from trainer.training.input import NUMBER_FILE, PATTERN, VALIDATION_PATTERN, stage_input
from trainer.training.loop import Patience, Surroundings, train
from trainer.training.optimizers import build_optimizer
from trainer.training.server import configure_gpus, serve_in_process
from trainer.training.stall import stall_watch

# What TensorFlow raises in the chief when a server that it relies on has gone or has begun anew.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)


def lead(job: Job, cluster: Cluster, task: Task, lock: NoLease) -> None:
    """Train from the newest valid checkpoint to the end; see `trainer.training.loop.train`.

    `lock` is that of the checkpoints.
    """
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    stopping = _stop_on_sigterm(lock)
    config = job.config
    data = storage.read_manifest(job.dataset)
    spec = DatasetSpec.from_manifest(data)
    inputs = InputSpec.of(spec.features, spec.inputs, spec.num_classes)
    build_model = partial(_build_model, config, inputs)
    if config.training.mixed_precision:
        # bfloat16 has the range of float32, so that no loss has to be scaled.
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    configure_gpus(config, task)
    stage_input(job, cluster, task)
    if config.cluster.in_process and task.role == "chief":
        serve_in_process(cluster)
    strategy = strategies.create(config, cluster, task)
    problem = partial(_problem, config, spec, build_model)
    watch = stall_watch(strategy, cluster, task, job.workdir)
    validates = spec.examples("validation") and not config.cluster.evaluator
    kept = checkpoints_of(
        job.checkpoints,
        keep=config.training.keep,
        scratch=job.workdir / "scratch",
        fingerprint=data.fields["fingerprint"],
        awaited=config.cluster.evaluator,
        alone=task.role == "chief",
    )
    kept.lock = lock
    around = Surroundings(
        problem=problem,
        validate=partial(_validate, problem(0)) if validates else None,
        stopping=stopping,
        enough=partial(_has_stopped_to_gain, config, kept),
        stepping=watch.stepping,
    )
    watch.begin()
    try:
        with refused_input(), kept.settled():
            train(config, strategy, kept, around)
    except tf.errors.OpError as error:
        if not is_lost(error):
            raise
        raise ClusterLostError(f"a task of the cluster is gone: {_cause(error)}") from error
    finally:
        strategy.close()


def is_lost(error: tf.errors.OpError) -> bool:
    """Say whether an error means that a task, or a message to one, is gone; and not a bad step."""
    if isinstance(error, tf.errors.InternalError):
        # Now and then a message is mangled on its way, and the server cannot read it.
        return "Unable to parse request" in str(error)
    return isinstance(error, _LOST)


def _cause(error: tf.errors.OpError) -> str:
    """Return the line of TensorFlow's error that says what has happened, and to which task."""
    # It stands below the stack of the graph, and the tasks stand below it.
    first, *more = str(error).strip().split("\n\n")[-1].splitlines()
    words = f"{first} {more[0]}" if more and first.endswith(":") else first
    return re.sub(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", r"\1-\2", words)


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
        totals=partial(_totals, config, spec),
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


def _totals(
    config: Config, spec: DatasetSpec, model: keras.Model, part: tf.Tensor, of: int
) -> list[tf.Tensor]:
    """Return what a validation sums up over a part of the examples."""
    size = config.evaluation.batch_size
    batches = evaluation_batches(spec, VALIDATION_PATTERN, batch_size=size, part=part, of=of)
    return evaluate.totals(model, batches)


def _validate(problem: Problem, strategy: Strategy) -> dict[str, float]:
    return evaluate.means(strategy.totals(problem))


def _has_stopped_to_gain(config: Config, kept: Checkpoints) -> bool:
    """Say whether the evaluator has seen no gain for `training.patience` checkpoints."""
    patience = Patience(limit=config.training.patience)
    asked = config.cluster.evaluator and patience.limit
    rows = kept.measured() if asked else []
    return any(patience.exhausted(row[VALIDATION_LOSS]) for row in rows)


def _stop_on_sigterm(lock: NoLease) -> Callable[[], bool]:
    asked: list[int] = []

    def stopping() -> bool:
        lock.require()
        return bool(asked)

    def remember(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return stopping
