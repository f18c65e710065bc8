"""The folders of a program's task: its dataset, its command, its checkpoints and its model.

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

A checkpoint is published when it is complete. If its layout does not tell whether it is complete,
it must not have changed between two checks. The publication has its files below `checkpoint/` and,
after the end of the program, the model below `model/`. The files are first linked into another
folder, so that the program may delete them. If the program changes a file during the publication,
the publication is discarded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import HISTORY_FILE, LogFiles, UploadQueue, row_file
from flotilla.trainer.checkpoints.index import (
    KIND,
    Retention,
    list_checkpoints,
    read_checkpoint,
    read_index,
)
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.config.program import fill as fill_placeholders
from flotilla.trainer.config.program import task_values
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.program import layouts
from flotilla.trainer.program.layouts import Stored
from flotilla.trainer.program.metrics import Metrics
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse_mapping
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
        command = [fill_placeholders(word, values) for word in program.command]
        own = {name: fill_placeholders(value, values) for name, value in program.env.items()}
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


CHECKPOINT, MODEL = "checkpoint", "model"
#: The manifest field that describes the checkpoint and model of a program.
FIELD = "program"
# The file that records which checkpoint in the folder is already published.
_KNOWN = "known.json"
_LATER = re.compile(r"step-\d+-([1-9]\d{0,8})", re.ASCII)
_DESCRIPTION = "program.json"
StepAt = Callable[[float, int], int]
log = logging.getLogger(__name__)


def find_published(uri: str, damaged: Collection[str] = ()) -> tuple[str, int]:
    """Return the URI and step of the newest valid checkpoint below `uri`, or "" and 0 if none."""
    for at, step in reversed(list_checkpoints(uri)):
        try:
            manifest = read_checkpoint(at)
        except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
            _pass_over(at, error)
            continue
        if at not in damaged and manifest.fields.get(FIELD, {}).get("checkpoint"):
            return at, step
    return "", 0


def _pass_over(uri: str, error: UserError) -> None:
    log.warning("skipped %s: %s", uri, error)
    events.emit(events.CheckpointPassedOver(uri=uri, reason=str(error)))


def fill(folders: TaskFolders, uri: str, *, keeps: bool = False) -> None:
    """Download a published checkpoint into the program's folder. Raises `UserError`.

    Other content of the folder is removed, unless `keeps` is set. Set `keeps` if the program may
    still read that content.
    """
    folder = folders.checkpoints
    with report_errors(f"restore a checkpoint to {folder}"):
        if not keeps:
            clear(folder)
        if not uri:
            return
        staged = folders.exchange / "filling"
        shutil.rmtree(staged, ignore_errors=True)
        below = f"{CHECKPOINT}/"
        manifest = storage.fetch(uri, staged, only=lambda path: path.startswith(below))
        paths = [Path(each.path) for each in manifest.files if each.path.startswith(below)]
        # Move the state file last, because it names the checkpoint.
        for path in sorted(paths, key=lambda each: each.name == layouts.STATE):
            target = folder / path.relative_to(CHECKPOINT)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / path, target)
        shutil.rmtree(staged, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove everything in a folder. Raises `UserError`."""
    with report_errors(f"empty {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _name(step: int, count: int = 1) -> str:
    return f"step-{step:08d}" if count == 1 else f"step-{step:08d}-{count}"


class Publisher:
    """Publishes the checkpoints and the model of the leading task's program."""

    def __init__(self, job: Job, folders: TaskFolders, lease: NoLease) -> None:
        """Store the arguments. Publishing requires `lease`."""
        self._job, self._folders, self._lease = job, folders, lease
        self._marker = job.config.program.checkpoint_marker
        self._uploads = UploadQueue()
        self._logs = LogFiles(folders.logs, storage.join(job.checkpoints, "logs"))
        self._retention = Retention(
            newest=job.config.training.keep, every_hours=job.config.training.keep_every_hours
        )
        self._seen: Stored | None = None
        self._known = self._read_known()
        #: The URI and step of the newest published checkpoint, or empty and 0 if there is none.
        self.last, self.step = "", 0
        self.history = row_file(storage.join(job.checkpoints, HISTORY_FILE), lease.require)

    def begin(self, earlier: Metrics) -> str:
        """Publish a checkpoint left unpublished, restore the newest one, and return its URI."""
        found = layouts.find_newest(self._folders.checkpoints, self._marker)
        self.last, self.step = find_published(self._job.checkpoints)
        if found and self._digest(found) != self._known:
            step = self._count(found, earlier.step_at(found.modified, found.number))
            self._publish(found, step, {})
        damaged: set[str] = set()
        while True:
            self.last, self.step = find_published(self._job.checkpoints, damaged)
            try:
                fill(self._folders, self.last)
                break
            except (storage.Corrupt, storage.Missing) as error:
                damaged.add(self.last)
                _pass_over(self.last, error)
        if found := layouts.find_newest(self._folders.checkpoints, self._marker):
            self._note(found)
        return self.last

    def resume(self) -> None:
        """Continue with a program that is already running, without changing its folder."""
        self.last, self.step = find_published(self._job.checkpoints)

    def look(self, step_at: StepAt, metrics: Mapping[str, Any]) -> None:
        """Queue the newest checkpoint for publication if it is complete and new.

        If the layout does not tell whether a checkpoint is complete, the newest checkpoint of the
        last call is queued, unless one of its files has changed since.
        """
        self._lease.require()
        newest = layouts.find_newest(self._folders.checkpoints, self._marker)
        before, self._seen = self._seen, newest
        found = newest if newest and newest.is_committed else before
        digest = self._digest(found) if found else self._known
        if found and digest != self._known and self._is_unchanged(found):
            # Remember this checkpoint, so that the next call does not queue it again.
            self._known = digest
            step = self._count(found, step_at(found.modified, found.number))
            self._uploads.put(CHECKPOINT, partial(self._publish, found, step, dict(metrics)))
            self._uploads.put("history", self.history.upload)
            self._uploads.put("logs", self._logs.upload)

    def finish(self, step_at: StepAt, metrics: Mapping[str, Any], *, with_model: bool) -> str:
        """Publish the last checkpoint of a program that has ended, and return the newest URI.

        Nothing is published if that checkpoint is already published, unless there is a model to
        publish and `with_model` is set. Raises `UserError`.
        """
        self._uploads.put("logs", self._logs.upload)
        self._uploads.put("history", self.history.upload)
        self._uploads.flush()
        for folder in (self._folders.checkpoints, self._folders.model):
            layouts.require_readable(folder)
        found = layouts.find_newest(self._folders.checkpoints, self._marker)
        said = step_at(found.modified, found.number) if found else step_at(float("inf"), -1)
        # Publish again if the program reported a higher step for the checkpoint after publication.
        is_new = found and (self._digest(found) != self._read_known() or said > self.step)
        model = self._folders.model if with_model else None
        if model and layouts.is_empty(model):
            model = None
        if found is None and not with_model:
            return self.last
        if not is_new and not model and self.last:
            return self.last
        step = self._count(found, said) if is_new or not found else self.step
        self._publish(found, max(step, self.step), dict(metrics), model=model, is_last=True)
        return self.last

    def _count(self, found: Stored | None, said: int) -> int:
        """Return the reported step of a checkpoint, else the step in its name, else a new step."""
        if said >= 0:
            return said
        if found and found.number >= 0:
            return found.number
        return self.step + 1 if found else self.step

    def _publish(
        self,
        found: Stored | None,
        step: int,
        metrics: Mapping[str, Any],
        model: Path | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        earlier = self._list_at(step)
        uri = self._name_next(step, earlier)
        staged = self._folders.exchange / "publishing"
        with report_errors(f"publish {uri}"):
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            is_whole = self._stage(found, model, staged)
            if is_whole:
                self._lease.check()
                fields = self._fields(found, step, metrics, model)
                storage.publish(staged, uri, kind=KIND, fields=fields)
        shutil.rmtree(staged, ignore_errors=True)
        if not is_whole or (found and not self._is_unchanged(found)):
            self._discard(uri, is_whole=is_whole, is_last=is_last)
            return
        self.last, self.step = uri, step
        if found:
            self._note(found)
        events.emit(events.CheckpointPublished(uri=uri, global_step=step))
        outdated = self._retention.list_outdated(read_index(self._job.checkpoints))
        for old in dict.fromkeys((*earlier, *outdated)):
            if old != uri:
                storage.delete(old)

    def _list_at(self, step: int) -> list[str]:
        first = _name(step)
        found = storage.names(self._job.checkpoints)
        return [
            storage.join(self._job.checkpoints, name)
            for name in found
            if name == first or name.startswith(f"{first}-")
        ]

    def _name_next(self, step: int, earlier: Collection[str]) -> str:
        """Return a new URI, so that earlier checkpoints of this step are kept until publication."""
        later = [_LATER.fullmatch(storage.name_of(each)) for each in earlier]
        count = 1 + max((int(found[1]) if found else 1 for found in later), default=0)
        return storage.join(self._job.checkpoints, _name(step, count))

    def _discard(self, uri: str, *, is_whole: bool, is_last: bool) -> None:
        if is_whole:
            storage.delete(uri)
        # Forget the checkpoint, so that the next call of `look` queues it again.
        self._known = self._read_known()
        if is_last:
            raise UserError(
                f"{self._folders.checkpoints} changed after the program ended: another "
                "process still writes there; make the program wait for its child processes"
            )

    def _stage(self, found: Stored | None, model: Path | None, staged: Path) -> bool:
        """Link the files to publish into `staged`, and return whether all still exist."""
        description = {"layout": found.layout if found else "", "name": str(found and found.prefix)}
        (staged / _DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        source = self._folders.checkpoints
        pairs = [
            (source / path, Path(CHECKPOINT) / path) for path in (found.files if found else ())
        ]
        for path in sorted(layouts.files_below(model)) if model else ():
            pairs.append((path, Path(MODEL) / path.relative_to(model or path)))
        for path, name in pairs:
            target = staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path.resolve(), target)
            except FileNotFoundError:
                return False
            except OSError:
                shutil.copyfile(path, target)
        if found and found.state:
            layouts.write_state(staged / CHECKPOINT / found.state, found.prefix)
        return True

    def _is_unchanged(self, found: Stored) -> bool:
        """Return whether no file has been written to. A deleted file counts as unchanged."""
        for name, when in layouts.times(found.signature).items():
            path = self._folders.checkpoints / name
            if path.exists() and path.stat().st_mtime_ns != when:
                return False
        return True

    def _fields(
        self, found: Stored | None, step: int, metrics: Mapping[str, Any], model: Path | None
    ) -> dict[str, Any]:
        config = self._job.config
        return {
            "global_step": step,
            "fingerprint": storage.read_manifest(self._job.dataset).fields["fingerprint"],
            "dataset": self._job.dataset,
            "strategy": config.training.strategy,
            "config_hash": config.digest(),
            "metrics": dict(metrics),
            FIELD: {
                "checkpoint": CHECKPOINT if found else "",
                "model": MODEL if model else "",
                "layout": found.layout if found else "",
            },
        }

    def _digest(self, found: Stored) -> str:
        return hashlib.sha256(found.signature.encode()).hexdigest()

    def _note(self, found: Stored) -> None:
        self._known = self._digest(found)
        text = json.dumps({"digest": self._known})
        with report_errors(f"write {self._folders.exchange}"):
            (self._folders.exchange / _KNOWN).write_text(text, encoding="ascii")

    def _read_known(self) -> str:
        try:
            tree = parse_mapping((self._folders.exchange / _KNOWN).read_bytes())
        except (OSError, ValueError):
            return ""
        return str(tree.get("digest", ""))
