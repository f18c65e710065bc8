"""Runs Flotilla's training as `flotilla train` does, and reads the history of the run."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from benchmarks.baselines.mnist import VALIDATION, folder
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import Progress
from flotilla.trainer.models import registry as models
from flotilla.trainer.models.spec import InputSpec

# The model, the optimizer and the batch size of the published program.
SAME_AS_BASELINE = {
    "name": "bench",
    "data.dataset": "mnist",
    "data.manual_dir": folder(),
    "data.validation": VALIDATION,
    "data.partition": "reshuffle",
    "model.name": "mlp",
    "training.batch_size": 100,
    "training.optimizer.learning_rate": 0.01,
    "training.validate_every": 0,
    "cluster.parameter_servers": 1,
    "cluster.workers": 2,
}
NONE: Mapping[str, Any] = MappingProxyType({})
# Share of the steps that is not measured, because graphs are traced at the start of training.
# `benchmarks.baselines.fit` similarly skips the first of four epochs.
_WARM = 0.25


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a training.

    Attributes:
        steps_per_second: global steps per second after the first quarter.
        local_steps_per_second: local steps per second of all workers after the first quarter.
        checkpoints: URI of the checkpoints.
        rows: progress of the training; its clock stops while checkpoints are saved.
    """

    steps_per_second: float
    local_steps_per_second: float
    checkpoints: str
    rows: list[Progress]


@cache
def mnist() -> str:
    """Publish MNIST, once for all comparisons in this process, and return its URI."""
    folder = tempfile.mkdtemp(prefix="flotilla-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return prepared(Path(folder))


def prepared(workdir: Path, settings: Mapping[str, Any] = NONE) -> str:
    """Publish MNIST below a folder, optionally with other settings, and return its URI."""
    program = (
        "import sys; from pathlib import Path; from flotilla.trainer.data import prepare; "
        "from flotilla.trainer.config.data import DataConfig; "
        "print(prepare.prepare(DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], "
        "Path(sys.argv[3])).uri)"
    )
    data = configuration(settings).data.model_dump_json()
    scratch = workdir / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", program, data, storage.uri_of(workdir), str(scratch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[-1]


def configuration(settings: Mapping[str, Any]) -> Any:
    """Return the baseline's configuration with `settings` changed."""
    whole = {**SAME_AS_BASELINE, **settings}
    whole.setdefault("training.checkpoint_every", whole.get("training.steps", 1))
    return load_config(None, [f"{key}={value}" for key, value in whole.items()])


def model(settings: Mapping[str, Any] = NONE) -> Any:
    """Return a new, untrained model for the configuration."""
    spec = InputSpec(shape=(28, 28, 1), dtype="uint8", output_shape=(10,))
    return models.build(configuration(settings).model, spec, 0)


def train(workdir: Path, dataset: str, **settings: Any) -> Trained:
    """Train with the baseline's configuration and `settings`. `__` in a key stands for a dot."""
    config = configuration({key.replace("__", "."): value for key, value in settings.items()})
    return trained(config, workdir, dataset)


def trained(config: Config, workdir: Path, dataset: str) -> Trained:
    """Train on a published dataset, below the folder `workdir`."""
    checkpoints = storage.join(storage.uri_of(workdir), "run", "checkpoints")
    job = Job(config=config, dataset=dataset, checkpoints=checkpoints, workdir=workdir / "tasks")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    log = workdir / "events.jsonl"
    with mock.patch.dict(os.environ, {events.VARIABLE: str(log)}):
        local.launch(job)
    rows = clocked(events.read(log))
    return Trained(
        steps_per_second=_speed(rows, lambda row: row.global_step),
        local_steps_per_second=_speed(rows, _local_steps),
        checkpoints=checkpoints,
        rows=rows,
    )


def clocked(run_events: Iterable[events.Event]) -> list[Progress]:
    """Return the progress of a run. Its `seconds` exclude the time of checkpoints."""
    rows: list[Progress] = []
    saving = 0.0
    for each in run_events:
        if isinstance(each, events.Saved):
            saving += each.seconds
        elif isinstance(each, Progress):
            rows.append(replace(each, seconds=each.time - saving))
    return rows


def _local_steps(row: Progress) -> int:
    workers = row.metrics.get("workers", {})
    return sum(each["local_steps"] for each in workers.values()) or row.global_step


def _speed(rows: list[Progress], count: Callable[[Progress], int]) -> float:
    warm = _WARM * rows[-1].global_step
    first = next(row for row in rows if row.global_step >= warm)
    return (count(rows[-1]) - count(first)) / (rows[-1].seconds - first.seconds)
