"""The folders, the dataset, the environment and the command of a program's task.

The dataset consists of TFRecord files and a description, readable by plain TensorFlow:

    train/*.tfrecord        the task's share of the training split
    validation/*.tfrecord   the whole validation split
    features.json           how the rows of each feature are packed into a record

A record is a `tf.train.Example` that holds many rows, packed by column (`data/blocks.py`). An entry
of `features.json` has these fields:

- `wire`: the type in the record, `int64`, `float32` or `string`
- `raw`: if not empty, the record has a single string with the bytes of all rows, of this type (for
  `decode_raw`)
- `dtype`, `shape`: type and shape of one row; the shape of an encoded image is empty
- `lengths`: if not empty, the feature that holds the first dimension of each row, which `shape`
  leaves out
- `image`: height, width and channels of an encoded image, else null
- `label`, `input`: the role of the feature
- `classes`: the names of the classes, or their number, or null
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.program import fill, task_values
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.errors import report_errors

# Variables that only Flotilla's own processes use. A guard does not inherit them.
_OWN = ("PYTHONSAFEPATH",)
_PREFIX = "FLOTILLA_"
FEATURES_FILE = "features.json"
_WIRES = {"int": "int64", "float": "float32"}
# `decode_raw` does not support these types. A cast from the signed type keeps the bits.
_SIGNED = {"uint32": "int32", "uint64": "int64"}
_FOLDERS = ("checkpoints", "model", "logs", "metrics")


class TaskFolders:
    """The folders of a task. The program writes to `checkpoints`, `model`, `logs` and `metrics`."""

    def __init__(self, *, folder: Path) -> None:
        """Store the folder of the task, without creating anything."""
        self.folder = folder
        names = ("dataset", "checkpoints", "model", "logs", "exchange")
        self._made = [folder / name for name in names]
        self.dataset, self.checkpoints, self.model, self.logs, self.exchange = self._made
        self.metrics = folder / "metrics.jsonl"

    def make(self) -> None:
        """Create the folders. Raises `UserError`."""
        with report_errors(f"create the folders of the program in {self.folder}"):
            for each in self._made:
                each.mkdir(parents=True, exist_ok=True)


def make_start(job: Job, cluster: Cluster, task: Task, attempt: int) -> dict[str, Any]:
    """Return the fields of the `start` message for the guard. Raises `ConfigError`."""
    program, folders = job.config.program, TaskFolders(folder=job.workdir)
    values = _values(job, cluster, task, folders)
    try:
        command = [fill(word, values) for word in program.command]
        own = {name: fill(value, values) for name, value in program.env.items()}
    except ValueError as error:
        raise ConfigError(f"program: {error}") from None
    given = {
        "TF_CONFIG": cluster.tf_config(task),
        "FLOTILLA_RUN_ID": job.run_id,
        **{
            f"{_PREFIX}{name.upper()}": values[name]
            for name in ("dataset", "dataset_files", *_FOLDERS)
        },
        # Disable buffering, because printed steps must arrive without delay.
        "PYTHONUNBUFFERED": "1",
    }
    return {"attempt": attempt, "command": command, "env": {**given, **own}}


def guard_environment(path: str) -> dict[str, str]:
    """Return the environment of a guard on this machine, with `path` first in `PATH`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIX) and name not in _OWN
    }
    return {**inherited, "PATH": os.pathsep.join(filter(None, (path, os.environ.get("PATH"))))}


def _values(job: Job, cluster: Cluster, task: Task, folders: TaskFolders) -> Mapping[str, str]:
    config = job.config
    has_files = config.program.data == "files" and task.role != "ps"
    return {
        **task_values(config.training, task.role, str(task.index), cluster.addresses),
        "gpu": str(task.index % _count_gpus(config, task.role)),
        "dataset": job.dataset,
        "dataset_files": str(folders.dataset) if has_files else "",
        **{name: str(getattr(folders, name)) for name in _FOLDERS},
    }


def _count_gpus(config: Config, role: str) -> int:
    """Return the number of GPUs of a task, at least 1, by its pod's limits or the configuration."""
    cluster = config.cluster
    pod = cluster.kubernetes.of(role).resources.limits if cluster.launcher != "local" else {}
    return max(1, int(pod.get(cluster.kubernetes.gpu_resource, cluster.gpus_per_worker)))


def stage_dataset(config: Config, cluster: Cluster, task: Task, uri: str, folder: Path) -> None:
    """Download and verify the part of a published dataset that `task` reads. Raises `UserError`.

    A parameter server gets no files, and an evaluator only the validation split. Other record files
    of an earlier start are removed.
    """
    if task.role == "ps":
        return
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri))
    part, of = choose_part(config, cluster, task)
    names = [] if task.role == "evaluator" else spec.files("train")
    if names and of > len(names):
        raise ConfigError(
            f"data.shards: {of} tasks cannot share the {len(names)} shards of 'train'; set "
            f"data.shards to {of} or more, or data.partition to reshuffle"
        )
    _fetch(uri, names[part::of], folder / "train")
    _fetch(
        uri, spec.files("validation") if spec.examples("validation") else [], folder / "validation"
    )
    with report_errors(f"write {folder / FEATURES_FILE}"):
        text = json.dumps(describe_features(spec), indent=1)
        (folder / FEATURES_FILE).write_text(text + "\n", encoding="utf-8")


def choose_part(config: Config, cluster: Cluster, task: Task) -> tuple[int, int]:
    """Return the index of a task's part of the training shards, and the number of parts.

    Without parameter servers, the chief trains like a worker and has the first part. With parameter
    servers it may train or only coordinate, so it gets all shards. If the partition is not
    disjoint, every task gets all shards.
    """
    trains = 1 if cluster.count("chief") and not cluster.count("ps") else 0
    of = trains + cluster.count("worker")
    part = {"chief": 0, "worker": trains + task.index}.get(task.role)
    shared = config.data.partition == "disjoint" and (task.role == "worker" or trains)
    return (part, of) if shared and part is not None else (0, 1)


def describe_features(spec: DatasetSpec) -> dict[str, dict[str, Any]]:
    """Return the entries of `features.json`, keyed by the name that a feature has in a record."""
    # Names are escaped as in `data/blocks.py`. Features with a dimension of size 0 are left out.
    return {
        f"\0{name}" if name.startswith("\0") else name: _describe(spec, name, feature)
        for name, feature in spec.features.items()
        if 0 not in feature.shape
    }


def _describe(spec: DatasetSpec, name: str, feature: FeatureSpec) -> dict[str, Any]:
    is_text, is_image = feature.dtype == "string", feature.stored == "image"
    is_raw = feature.stored == "raw" or (feature.varies and not is_text)
    return {
        "wire": _WIRES.get(feature.stored, "string"),
        "raw": _SIGNED.get(feature.dtype, feature.dtype) if is_raw else "",
        "dtype": "string" if is_image else feature.dtype,
        "shape": [] if is_image else [*feature.shape[1 if feature.varies else 0 :]],
        "lengths": length_name(name) if feature.varies else "",
        "image": [*feature.shape] if is_image else None,
        "label": name in spec.targets,
        "input": name in spec.inputs,
        "classes": [*feature.labels] or feature.num_classes or None,
    }


def _fetch(uri: str, names: Sequence[str], folder: Path) -> None:
    storage.fetch(uri, folder, only=set(names).__contains__)
    with report_errors(f"remove old record files from {folder}"):
        for path in folder.glob("*.tfrecord"):
            if path.name not in names:
                path.unlink()
