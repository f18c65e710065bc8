"""The leading task, which prepares and runs an attempt of training, and ends if it stalls.

It passes `Hooks` (`flotilla.trainer.training.loop`) to the outer loop.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import keras
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints import index
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, open_checkpoints
from flotilla.trainer.checkpoints.part_saver import PartServers
from flotilla.trainer.cluster import loopback, termination
from flotilla.trainer.cluster.launcher import Job, is_over, record_end
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.cluster.liveness import STARTING_SECONDS, Peers, probe_peers
from flotilla.trainer.cluster.local import EVALUATION_SECONDS
from flotilla.trainer.config.data import DYNAMIC
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, find_topology
from flotilla.trainer.data.read import evaluation_batches, make_random_access, training_batches
from flotilla.trainer.data.shard_feed import Streaming
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.evaluation.signature import find_positive
from flotilla.trainer.features.dataset_spec import DatasetSpec, require_buckets
from flotilla.trainer.features.length import examples_of_step
from flotilla.trainer.models.registry import freeze, report_bad_input
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime import signals, user_code
from flotilla.trainer.runtime.errors import (
    BEGIN_AGAIN,
    ClusterLostError,
    UserError,
    describe_out_of_memory,
)
from flotilla.trainer.runtime.loop import Loop
from flotilla.trainer.runtime.streams import say
from flotilla.trainer.storage import Manifest
from flotilla.trainer.strategies.input_position import Stream
from flotilla.trainer.strategies.parameter_server import worker_number
from flotilla.trainer.strategies.server_state import is_lost
from flotilla.trainer.strategies.strategy import Problem, Strategy, create
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.telemetry.metrics import export_metrics
from flotilla.trainer.training import dry_run
from flotilla.trainer.training.loop import EarlyStopping, Hooks, train
from flotilla.trainer.training.server import (
    PATTERN,
    SHARDS,
    VALIDATION_PATTERN,
    configure_gpus,
    find_streaming,
    serve_in_process,
    stage_input,
)
from flotilla.trainer.training.task_contract import require_task

log = logging.getLogger(__name__)
# Number of reads of the counter per timeout.
_READS = 4
_REMEDY = "raise training.stall_timeout if a step takes longer"


def lead(job: Job, cluster: Cluster, task: Task, lease: NoLease) -> None:
    """Train from the newest valid checkpoint to the end.

    `lease` is the lease of the checkpoints, which this task holds if it publishes them.

    Raises:
        UserError: training failed permanently. See `flotilla.trainer.training.loop.train`.
        RunInterruptedError: SIGINT or SIGTERM arrived. A last checkpoint is published.
        ClusterLostError: a required task is lost. A new attempt may succeed.
    """
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    stop_requested = signals.catch_stop_signals()
    dataset = storage.read_manifest(job.dataset)
    if precision := job.config.training.mixed_precision:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}")
    configure_gpus(job.config, task)
    feed = stage_input(job, cluster, task)
    if job.config.cluster.in_process and task.role == "chief":
        serve_in_process(job.config, cluster)
    strategy = create(job.config, cluster, task)
    watch = StallWatch(strategy, partial(probe_peers, cluster, task), job.workdir)
    checkpoints = _open_checkpoints(job, task, dataset, lease)
    if servers := cluster.count("ps"):
        training = job.config.training
        checkpoints.enable_parts(
            PartServers(servers, strategy.io_device), training.checkpoint_parts_mb * 10**6
        )
    streaming = find_streaming(job, cluster)
    hooks = make_hooks(job.config, dataset, checkpoints, watch, stop_requested, streaming)
    if strategy.publishes and checkpoints.positive:
        spec = tasks.set_positive(job.config.task, DatasetSpec.from_manifest(dataset))
        events.emit(events.DataNote(text=tasks.describe_task(job.config.task, spec)))
    if find_topology(job.config.training.strategy).workers:
        # Close the port to other machines before the strategy connects, because connecting
        # starts a server.
        loopback.close_to_others(cluster.address(task))
    watch.begin()
    fed = feed.reporting() if feed else nullcontext()
    publishes = export_metrics(job, cluster, task) if strategy.publishes else nullcontext()
    with fed, publishes, _convert_lost_task(strategy), report_bad_input():
        with checkpoints.flush_at_end():
            train(job.config, strategy, checkpoints, hooks)
        _end(job, strategy, checkpoints, stop_requested)


def _end(
    job: Job, strategy: Strategy, checkpoints: Checkpoints, stop_requested: Callable[[], bool]
) -> None:
    """Record the end of training, and wait for other leading tasks. Raises `ClusterLostError`."""
    if strategy.publishes:
        checkpoints.lease.check()
        record_end(job, checkpoints.last)
        cluster = job.config.cluster
        # The local launcher itself waits for the evaluator, and detects if it fails permanently.
        if cluster.evaluator and cluster.launcher != "local":
            await_validation(checkpoints, stop_requested)
    strategy.leave()
    if not strategy.publishes and not is_over(job):
        raise ClusterLostError("worker-0 was lost before it recorded the end of training")


def await_validation(
    checkpoints: Checkpoints, stop_requested: Callable[[], bool], poll: float = 1.0
) -> None:
    """Wait for the evaluator to measure the last checkpoint, before the engine ends both tasks.

    The evaluator has `EVALUATION_SECONDS` for each checkpoint.
    """
    created = storage.read_manifest(checkpoints.last).created
    measured, since = -1, 0.0
    # Poll the rows, because a store does not notify readers of new ones.
    pause = threading.Event()
    while not stop_requested():
        rows = checkpoints.read_validations()
        if rows and rows[-1]["created"] == created:
            return
        if len(rows) > measured:
            measured, since = len(rows), time.monotonic()
            log.info("waiting for the evaluator, which has evaluated %d checkpoints", measured)
        elif time.monotonic() - since > EVALUATION_SECONDS:
            reason = f"no evaluation for {EVALUATION_SECONDS:g} s"
            events.emit(events.EvaluatorLeft(reason=reason))
            return
        pause.wait(poll)


def _open_checkpoints(job: Job, task: Task, dataset: Manifest, lease: NoLease) -> Checkpoints:
    checkpoints = open_checkpoints(
        job.checkpoints,
        keep=job.config.training.keep,
        keep_every_hours=job.config.training.keep_every_hours,
        scratch=job.workdir / "scratch",
        fingerprint=dataset.fields["fingerprint"],
        awaited=job.config.cluster.evaluator,
        alone=task.role == "chief",
    )
    checkpoints.lease, checkpoints.dataset = lease, job.dataset
    checkpoints.learnt = index.learnt_of_run(job.checkpoints, job.config.training, job.dataset)
    return checkpoints


def make_hooks(  # noqa: PLR0913, PLR0917
    config: Config,
    dataset: Manifest,
    checkpoints: Checkpoints,
    watch: StallWatch,
    stop_requested: Callable[[], bool],
    streaming: Streaming | None = None,
) -> Hooks:
    """Return the hooks of the outer loop. Without `streaming`, all shards are staged."""
    spec = DatasetSpec.from_manifest(dataset, checkpoints.learnt)
    spec = tasks.set_positive(config.task, spec)
    # Check the buckets here too, because an existing dataset is reused even if the buckets change.
    require_buckets(config.data.buckets, [n for n in spec.roles if spec.features[n].varies])
    objective = tasks.make_objective(config, spec)
    require_task(objective.task, spec.features)
    checkpoints.positive = find_positive(objective.task)
    checkpoints.require_fit = partial(evaluate.require_positive, objective.task, spec)
    problems = _Problems(config=config, spec=spec, objective=objective, streaming=streaming)
    validates = spec.examples("validation") and not config.cluster.evaluator

    def should_stop() -> bool:
        checkpoints.require()
        return stop_requested()

    return Hooks(
        make_problem=problems.build,
        validate=partial(_validate, objective, problems.build(0)) if validates else None,
        should_stop=should_stop,
        should_stop_early=partial(_evaluator_sees_no_gain, config, checkpoints, objective),
        judged_by=lambda: objective.judged_by,
        watch_steps=watch.stepping,
        steps_of_epoch=spec.examples("train") / examples_of_step(config),
    )


@contextmanager
def _convert_lost_task(strategy: Strategy) -> Iterator[None]:
    """Convert TensorFlow's error about a lost task, and close the strategy after the block."""
    try:
        yield
    except tf.errors.OpError as error:
        if line := describe_out_of_memory(error):
            raise UserError(line) from error
        if not is_lost(error):
            raise
        # The actual message follows the graph's stack trace. Its second line names the tasks.
        text = user_code.full_message(error).strip().split("\n\n")[-1]
        first, *more = text.splitlines() or [type(error).__name__]
        line = f"{first} {more[0]}" if more and first.endswith(":") else first
        cause = re.sub(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", r"\1-\2", line)
        raise ClusterLostError(f"the cluster lost a task: {cause}") from error
    finally:
        strategy.close()


@dataclass(frozen=True, kw_only=True)
class _Problems:
    """Builds the problem of an attempt. Without `streaming`, all shards are staged."""

    config: Config
    spec: DatasetSpec
    objective: Objective
    streaming: Streaming | None

    def build(self, start: int) -> Problem:
        config, objective = self.config, self.objective
        training = config.training
        return Problem(
            build_model=self._build_model,
            check=lambda model: dry_run.require(config, model, objective),
            # `objective.optimizer` is known only after a model has been built.
            build_optimizer=lambda: build_optimizer(training, objective.optimizer),
            loss=objective.loss,
            chance_loss=objective.task.chance_loss(),
            batches=partial(self._batches, start),
            totals=self._totals,
            stream=_stream(self.spec, training.seed) if config.data.partition == DYNAMIC else None,
            weighed=objective.weigh_batch,
        )

    def _build_model(self) -> keras.Model:
        model = evaluate.build_model(self.config, self.spec, self.objective)
        freeze(model, self.config.training.freeze)
        return model

    def _batches(self, start: int) -> tf.data.Dataset:
        """Return the training batches of the task in whose working directory the graph runs."""
        training = self.config.training
        taken = _count_taken(self.config, start)
        # If the number of consumed examples is unknown, shuffle in another order after a restart.
        seed = training.seed + (0 if taken else start)
        return training_batches(
            self.spec,
            self.streaming or PATTERN,
            batch_size=training.batch_size,
            buckets=self.config.data.buckets,
            # Use another seed on each worker, because workers may share examples.
            seed=seed + 7919 * worker_number(),
            taken=taken,
        )

    def _totals(self, model: keras.Model, part: tf.Tensor, of: int) -> tf.Tensor:
        size, files = self.config.evaluation.batch_size, self.streaming or VALIDATION_PATTERN
        batches = evaluation_batches(self.spec, files, batch_size=size, part=part, of=of)
        return self.objective.totals(model, batches)


def _stream(spec: DatasetSpec, seed: int) -> Stream:
    read = make_random_access(spec, SHARDS)
    examples = spec.examples("train")
    return Stream(examples=examples, seed=seed, held=read.held, read=read.read, run=read.run)


def _count_taken(config: Config, start: int) -> int:
    """Estimate how many examples each worker consumed before a global step, or 0 if unknown."""
    if not find_topology(config.training.strategy).capabilities.mixes_steps:
        return 0
    return start * examples_of_step(config) // config.cluster.workers


def _validate(objective: Objective, problem: Problem, strategy: Strategy) -> dict[str, float]:
    return objective.means(strategy.totals(problem))


def _evaluator_sees_no_gain(config: Config, checkpoints: Checkpoints, objective: Objective) -> bool:
    patience = config.training.patience
    rows = checkpoints.read_validations() if config.cluster.evaluator and patience else []
    stopping = EarlyStopping(patience=patience, main=MainMetric.of(objective.judged_by))
    return any(stopping.update(row) for row in rows)


class StallWatch:
    """A thread that ends this process if training stalls for `training.stall_timeout`.

    A stopped task keeps its connections open, and TensorFlow waits on them forever. The exact
    counter shows progress, so a long inner loop with slow steps is not a stall.
    """

    def __init__(self, strategy: Strategy, probe: Callable[[], Peers], folder: Path) -> None:
        """Watch the steps. `probe` checks the other tasks. The message is written to `folder`."""
        self._strategy = strategy
        self._seconds = strategy.config.training.stall_timeout
        self._probe = probe
        self._folder = folder
        self._began = time.monotonic()
        self._has_stepped = False
        self._seen = -1
        # The number of consecutive timeouts in which every task answered but no step was completed.
        self._waits = 0
        self._moved = threading.Event()
        self._stepping = threading.Event()

    def begin(self) -> None:
        """Start the thread, which runs until the process ends."""
        threading.Thread(target=self._wait, name="stall", daemon=True).start()
        pause = self._seconds / _READS
        Loop(self._read_counter, pause, name="steps", failing="cannot read the global step").start()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Expect steps in this block. Outside of it, only an unresponsive task is a stall."""
        self._moved.set()
        self._stepping.set()
        try:
            yield
            self._has_stepped = True
        finally:
            self._stepping.clear()
            self._moved.set()

    def _read_counter(self) -> None:
        # Ignore errors, because there is no counter before the cluster is connected.
        with suppress(Exception):
            step = self._strategy.global_step()
            if step != self._seen:
                self._moved.set()
            self._seen = step

    def _wait(self) -> None:
        while True:
            self._moved.clear()
            if self._moved.wait(self._seconds):
                self._waits = 0
            else:
                self._judge()

    def _judge(self) -> None:
        peers = self._probe()
        if self._moved.is_set():
            return
        names = [str(task) for task in peers.silent]
        if names:
            events.emit(events.Stalled(tasks=tuple(names), seconds=self._seconds))
            are_spared = self._strategy.capabilities.spares_workers
            if not are_spared or {t.role for t in peers.silent} != {"worker"}:
                verb = "do" if len(names) > 1 else "does"
                self._end(f"{', '.join(names)} {verb} not answer", self._seconds)
        elif self._stepping.is_set() and not peers.gone and self._is_warm():
            self._waits += 1
            # Wait for two timeouts, because a restarted task answers before it completes a step.
            if self._waits > 1:
                self._end(f"every task responds; {_REMEDY}", self._waits * self._seconds)

    def _is_warm(self) -> bool:
        """Return whether all graphs are traced and compiled, or have had enough time for it."""
        warm = self._has_stepped and not self._strategy.warming
        return warm or time.monotonic() - self._began > STARTING_SECONDS

    def _end(self, why: str, seconds: float) -> NoReturn:
        message = f"no progress for {seconds:g} s: {why}"
        # An exception would not reach the main thread, which waits inside TensorFlow.
        termination.write(self._folder, message)
        say(f"flotilla: {message}")
        os._exit(BEGIN_AGAIN)
