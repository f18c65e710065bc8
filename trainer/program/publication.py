"""Restores published checkpoints into the folder of a program, and publishes new ones from it.

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
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.decisions import Retention
from flotilla.trainer.checkpoints.history import HISTORY_FILE, RowFile, SegmentedRowFile
from flotilla.trainer.checkpoints.index import KIND, list_checkpoints, read_checkpoint, read_index
from flotilla.trainer.checkpoints.uploads import LogFiles, UploadQueue
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.program import layouts
from flotilla.trainer.program.layouts import Stored
from flotilla.trainer.program.metrics import Metrics
from flotilla.trainer.program.task_folders import TaskFolders
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.errors import report_errors

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
        kind = RowFile if storage.local_path(job.checkpoints) else SegmentedRowFile
        self.history = kind(storage.join(job.checkpoints, HISTORY_FILE), lease.require)

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
