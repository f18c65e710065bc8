"""Checkpoints: published directories such as `step-00001500`, which every strategy can read.

In an object store, a checkpoint is saved locally first, and published in the background.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import (
    HISTORY_FILE,
    LogFiles,
    RowFile,
    UploadQueue,
    read_validations,
    row_file,
)
from flotilla.trainer.checkpoints.index import (
    MAX_AWAITED,
    PREFIX,
    Retention,
    StoredVariable,
    is_data,
    list_checkpoints,
    publish_anew,
    read_checkpoint,
    read_index,
    to_field,
)
from flotilla.trainer.checkpoints.part_saver import PartSaver, PartServers
from flotilla.trainer.checkpoints.tensor_bundle import BundleWriter, Layout, assign
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import NOTHING
from flotilla.trainer.optimizers.loss_scale import LOSS_SCALE
from flotilla.trainer.optimizers.optimizers import AVERAGE, MODEL
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    RunInterruptedError,
    UserError,
    describe_divergence,
)
from flotilla.trainer.storage.errors import report_errors

# Prefixes of variables that a checkpoint of another configuration may lack.
_OPTIONAL = (AVERAGE, LOSS_SCALE)
_NUMBER = re.compile(r"-\d+$")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """A checkpoint whose files are on this machine.

    Attributes:
        folder: the folder with its files.
        fields: the fields of its manifest.
        apart: whether the folder lacks the values, because each server reads its own.
    """

    uri: str
    global_step: int
    folder: Path
    fields: Mapping[str, Any]
    apart: bool = False


class Checkpoints:
    """The checkpoints of one run below a URI. Writing requires the `lease`."""

    lease = NoLease()
    learnt = NOTHING
    #: The positive class of each output that has one. Each checkpoint records them.
    positive: Any = None
    #: A function that raises an error if the run may not continue from the newest checkpoint.
    require_fit: Callable[[RestoredCheckpoint], None] = staticmethod(lambda _: None)
    dataset = ""
    #: The saver of parts, or None if the chief writes and reads all variables.
    parts: PartSaver | None = None
    #: The global step of the newest checkpoint that is known to be published, or -1.
    published_step = -1

    def __init__(  # noqa: PLR0913
        self,
        uri: str,
        *,
        keep: int,
        scratch: Path,
        keep_every_hours: float = 0.0,
        fingerprint: str = "",
        awaited: bool = False,
    ) -> None:
        """Keep checkpoints below `uri` according to `Retention`, and temporary files in `scratch`.

        `fingerprint` identifies the dataset. A run does not continue with another dataset, because
        the test split may contain old training examples. `awaited` means that an evaluator runs.
        """
        self.uri = uri
        self._fingerprint = fingerprint
        self._retention = Retention(
            newest=keep, unmeasured=MAX_AWAITED if awaited else 0, every_hours=keep_every_hours
        )
        self.scratch = scratch
        self.uploads = UploadQueue()
        self._writer = BundleWriter(scratch)
        self.last: str = ""
        self.passed_over: set[str] = set()

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, if any, and log why newer ones are skipped.

        Raises `UserError` if the dataset differs, and on errors such as a full disk, because
        starting over would discard a good checkpoint.
        """
        for uri, step in reversed(self._candidates()):
            folder = self.scratch / "restored"
            try:
                fields, apart = self._fetch(uri, folder)
            except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
                self.passed_over.add(uri)
                log.warning("skipped %s: %s", uri, error)
                events.emit(events.CheckpointPassedOver(uri=uri, reason=str(error)))
                continue
            if fields.get("fingerprint", "") != self._fingerprint:
                raise UserError(
                    f"{uri} was trained on different data: restore the data section and "
                    "the dataset of that training, or start a new run"
                )
            found = RestoredCheckpoint(
                uri=uri, global_step=step, folder=folder, fields=fields, apart=apart
            )
            self.require_fit(found)
            self.last = uri
            self.published_step = step if self._is_shared(uri) else -1
            return found
        return None

    def _fetch(self, uri: str, folder: Path) -> tuple[Mapping[str, Any], bool]:
        """Fetch a checkpoint. If servers read its data by parts, only verify the data in place."""
        manifest = read_checkpoint(uri)
        values = sum(each.bytes for each in manifest.files if is_data(each.path))
        if not self.parts or values < self.parts.least or not self._is_shared(uri):
            storage.fetch(uri, folder, manifest=manifest)
            return manifest.fields, False
        storage.verify(uri)
        storage.fetch(uri, folder, only=lambda path: not is_data(path), manifest=manifest)
        return manifest.fields, True

    def _is_shared(self, uri: str) -> bool:  # noqa: ARG002
        return True

    def newest_step(self) -> int:
        """Return the global step of the newest checkpoint, even if it is invalid, or -1."""
        return max((step for _, step in self._candidates()), default=-1)

    @property
    def servers(self) -> PartServers | None:
        """The servers if they read their own variables, or None."""
        return self.parts.servers if self.parts else None

    def enable_parts(self, servers: PartServers, least: int) -> None:
        """Let servers write their own variables if these total at least `least` bytes."""
        self.parts = PartSaver(servers, self, self.uploads, self.scratch, least)

    def read_validations(self) -> list[dict[str, Any]]:
        """Return the evaluator's validations so far. See `history.read_validations`."""
        return read_validations(self.uri)

    def prepare(self, variables: Mapping[str, tf.Variable], io_device: str | None) -> None:
        """Prepare to save these variables, so that the first save is fast."""
        if self.parts and self.parts.takes(variables):
            self.parts.get_layout(variables)
        else:
            self._writer.prepare(variables, io_device)

    def save(
        self, variables: Mapping[str, tf.Variable], *, io_device: str | None, fields: dict[str, Any]
    ) -> str:
        """Save a checkpoint of `variables`, which include `global_step`, and return its URI."""
        step = int(variables["global_step"].numpy())
        if (uri := self.build_uri(variables)) == self.last:
            return uri
        began = time.monotonic()
        own = {"global_step": step, "fingerprint": self._fingerprint, **fields}
        own |= {"dataset": self.dataset} if self.dataset else {}
        files = {statistics.FILE: self.learnt.data} if self.learnt.data else {}
        with report_errors(f"save {uri}"):
            if self.parts and self.parts.takes(variables):
                self.parts.save(uri, variables, own, files)
            else:
                self._save(uri, variables, io_device, own, files)
        self.last = uri
        pause = round(time.monotonic() - began, 4)
        events.emit(events.Saved(uri=uri, global_step=step, seconds=pause))
        return uri

    def _save(
        self,
        uri: str,
        variables: Mapping[str, tf.Variable],
        io_device: str | None,
        fields: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        values = self._writer.read(variables, io_device)
        for path in values.not_finite:
            raise self.not_finite(path, fields["global_step"])
        stored = {path: StoredVariable.describe(each) for path, each in variables.items()}
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="saving-") as folder:
            self._writer.write(values, Path(folder, PREFIX), io_device)
            del values
            for path, data in files.items():
                Path(folder, path).write_bytes(data)
            self._publish(Path(folder), uri, {**fields, "variables": to_field(stored)})

    def prepare_publication(self) -> None:
        """Raise an error if this process may no longer publish."""
        self.lease.check()

    def not_finite(self, path: str, step: int) -> UserError:
        """Return the error for a variable with a value that is not finite."""
        last = next((uri for uri, _ in reversed(self._candidates())), "")
        return UserError(describe_divergence(f"{path} is not finite", step, last))

    def require(self) -> None:
        """Raise an error if the lease is known to be lost or a save by parts has failed."""
        self.lease.require()
        if self.parts:
            self.parts.require()

    def note_published(self, uri: str, step: int) -> None:
        """Emit an event for a published checkpoint, and delete outdated checkpoints."""
        self.published_step = step
        events.emit(events.CheckpointPublished(uri=uri, global_step=step))
        # Ignore later checkpoints: they were invalid at the start, and must not count as newest.
        readable = [each for each in read_index(self.uri) if each.global_step <= step]
        for old in self._retention.list_outdated(readable):
            storage.delete(old)

    @property
    def logs(self) -> Path | None:
        """The local folder for TensorBoard's files, or None if the store is remote."""
        return storage.local_path(storage.join(self.uri, "logs"))

    @cached_property
    def history(self) -> RowFile:
        """The writer of the history, which in an object store is uploaded before a checkpoint."""
        return row_file(storage.join(self.uri, HISTORY_FILE), self._require_lease)

    def _require_lease(self) -> None:
        # Read `self.lease` at each call, because it may be replaced after `history` is created.
        self.lease.require()

    @contextmanager
    def flush_at_end(self) -> Iterator[None]:
        """Wait at the end of the block until all saves are published. Raises `UserError`.

        After a `ClusterLostError`, it does not wait, because the next attempt finds the unpublished
        files. It does not wait after an unexpected error either.
        """
        try:
            yield
        except ClusterLostError:
            raise
        except RunInterruptedError:
            self.flush()
            raise
        except UserError:
            try:
                self.flush()
            except UserError as error:
                log.warning("%s", error)
            raise
        self.flush()

    def flush(self) -> None:
        """Wait until all saves are published. Raises `UserError`."""
        (self.parts or self.uploads).flush()

    def _candidates(self) -> list[tuple[str, int]]:
        return list_checkpoints(self.uri)

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        self.lease.check()
        publish_anew(folder, uri, fields)
        self.note_published(uri, fields["global_step"])

    def build_uri(self, variables: Mapping[str, tf.Variable]) -> str:
        """Return the URI for a checkpoint of `variables`, which contains their global step."""
        return storage.join(self.uri, f"step-{int(variables['global_step'].numpy()):08d}")


def open_checkpoints(uri: str, *, alone: bool, **settings: Any) -> Checkpoints:
    """Open the checkpoints below `uri`. Set `alone` if no other task reads the newest of them."""
    if storage.local_path(uri):
        return Checkpoints(uri, **settings)
    return RemoteCheckpoints(uri, alone=alone, **settings)


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run in an object store."""

    def __init__(self, uri: str, *, scratch: Path, alone: bool = True, **settings: Any) -> None:
        """Keep checkpoints below `scratch` until they are published."""
        super().__init__(uri, scratch=scratch, **settings)
        self._alone = alone
        self._pending = storage.uri_of(scratch / "unpublished")
        self._log_files = LogFiles(scratch / "logs", storage.join(self.uri, "logs"))
        self._uploading = ""
        self._measured: list[dict[str, Any]] = []

    @property
    def logs(self) -> Path:
        """The folder for TensorBoard's files, which are uploaded with each checkpoint."""
        return self._log_files.folder

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, published or pending. See `Checkpoints.newest`."""
        found = super().newest()
        if found and found.uri.startswith(self._pending):
            self.last = storage.join(self.uri, storage.name_of(found.uri))
            self._queue(storage.name_of(found.uri))
        return found

    def read_validations(self) -> list[dict[str, Any]]:
        """Return the validations that the last background read found, and queue another read."""
        self.uploads.put("measured", self._refresh_validations)
        return self._measured

    def flush(self) -> None:
        """Wait until all saves are published, with the history. Raises `UserError`."""
        try:
            self.uploads.put("history", self.history.upload)
        finally:
            super().flush()

    def _candidates(self) -> list[tuple[str, int]]:
        there = list_checkpoints(self.uri)
        reached = {step for _, step in there}
        here = [pair for pair in list_checkpoints(self._pending) if pair[1] not in reached]
        return sorted([*there, *(here if self._alone else [])], key=lambda pair: pair[1])

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        # Require the lease already here, because a run also resumes from pending checkpoints.
        self.lease.require()
        name = storage.name_of(uri)
        here = storage.join(self._pending, name)
        publish_anew(folder, here, fields)
        # While the store is unavailable, a newer checkpoint replaces a waiting one.
        for old, _ in list_checkpoints(self._pending):
            if old not in (here, self._uploading):
                storage.delete(old)
        self._queue(name)

    def _queue(self, name: str) -> None:
        self.uploads.put("checkpoint", partial(self._upload, name))
        self.uploads.put("logs", self._upload_logs)

    def _upload(self, name: str) -> None:
        here = self._uploading = storage.join(self._pending, name)
        folder = storage.local_path(here)
        if folder is None or not storage.is_published(here):
            return
        self.prepare_publication()
        manifest = storage.read_manifest(here)
        there = storage.join(self.uri, name)
        try:
            if there in self.passed_over:
                # Delete it, because `publish` would keep invalid files under the same manifest.
                storage.delete(there)
            storage.publish(folder, there, kind=manifest.kind, fields=manifest.fields)
        except (storage.Conflict, storage.Corrupt, storage.UnknownSchema):
            # Check the lease before replacing a checkpoint: another job may have taken over the run
            # during the upload.
            self.lease.check()
            publish_anew(folder, there, manifest.fields)
        self.passed_over.discard(there)
        self.note_published(there, manifest.fields["global_step"])
        storage.delete(here)

    def prepare_publication(self) -> None:
        """Check the lease, and upload the history, which must precede its checkpoint."""
        super().prepare_publication()
        self.history.upload()

    def _is_shared(self, uri: str) -> bool:
        return not uri.startswith(self._pending)

    def _refresh_validations(self) -> None:
        try:
            self._measured = read_validations(self.uri)
        except UserError as error:
            # Only log the error, because nothing but early stopping needs the validations.
            log.warning("%s", error)

    def _upload_logs(self) -> None:
        self.lease.require()
        self._log_files.upload()


def restore(
    found: RestoredCheckpoint,
    variables: Mapping[str, tf.Variable],
    *,
    io_device: str | None,
    servers: PartServers | None = None,
) -> None:
    """Assign the checkpoint's values to `variables`. Raises `UserError` if they do not fit.

    If `found.apart` is set and all `servers` respond, the servers assign the values. Otherwise,
    this process does. Optional variables that the checkpoint lacks keep their values.
    """
    try:
        layout = Layout.read(found.folder / PREFIX)
        variables = layout.fitting(variables)
        if found.apart and servers and servers.are_ready():
            servers.restore(found.uri, layout, variables)
            return
        if found.apart:
            storage.fetch(found.uri, found.folder)
        assign(variables, layout, str(found.folder / PREFIX), io_device)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        reason, there = str(error).splitlines()[0], shapes(found)
        of_two = (advise_outputs(there.get(path), each.shape) for path, each in variables.items())
        hints = (advise_pieces(there, variables), *of_two)
        raise UserError(
            f"the checkpoint {found.uri} does not match the model and optimizer of the "
            f"configuration ({reason}); use those that it was trained with, or start a new "
            f"run{next(filter(None, hints), '')}"
        ) from None


def advise_pieces(there: Collection[str], here: Collection[str]) -> str:
    """Return a hint if a checkpoint predates `pieces` of `tabular` models, or an empty string."""
    new = {path for path in here if path.endswith("/flotilla_pieces/kernel")}
    if not new or new & set(there):
        return ""
    before = "{pieces: 0, hidden_units: [64, 32], dropout: 0.0}"
    return (
        f"; for a checkpoint of an earlier version, set model.args to {before}, or to the "
        "arguments that it was trained with"
    )


def advise_outputs(there: Sequence[int] | None, here: Sequence[int | None]) -> str:
    """Return a hint if only the checkpoint has two outputs for two classes, or an empty string."""
    if there is None or [*there] != [*here[:-1], 2] or [*here[-1:]] != [1]:
        return ""
    return "; set task.name: classification, because the checkpoint has one logit for each class"


def select_resumed(
    found: RestoredCheckpoint, variables: Mapping[str, tf.Variable], training: TrainingConfig
) -> dict[str, tf.Variable]:
    """Return the variables that a resumed run restores.

    Averages and a loss scale that the checkpoint lacks start with this attempt. If
    `training.freeze` has changed, a variable that was frozen has no slots in the checkpoint and
    gets new ones. Slots whose paths differ only in a number (Adafactor's) are also new, because the
    number may now refer to another variable.
    """
    if any(path.startswith(_OPTIONAL) for path in variables):
        found_there = shapes(found)
        variables = {
            path: each
            for path, each in variables.items()
            if path in found_there or not path.startswith(_OPTIONAL)
        }
    same = found.fields.get("freeze", []) == list(training.freeze)
    if same or found.fields.get("optimizer") != training.optimizer.name:
        return dict(variables)
    there = shapes(found)
    slots = {path for path in (*variables, *there) if path.startswith("optimizer/")}
    numbered = {family for path in slots if (family := _NUMBER.sub("", path)) != path}
    kept = {
        path: variable
        for path, variable in variables.items()
        if path not in slots or (path in there and _NUMBER.sub("", path) not in numbered)
    }
    log.warning(
        "training.freeze has changed: reinitialized %d of %d optimizer slots",
        len(variables) - len(kept),
        sum(path in slots for path in variables),
    )
    return kept


def shapes(found: RestoredCheckpoint) -> dict[str, list[int]]:
    """Return the shape of each variable in a checkpoint, keyed by the variable's path."""
    return dict(Layout.read(found.folder / PREFIX).shapes)


def fetch(uri: str, folder: Path) -> RestoredCheckpoint:
    """Fetch and verify a checkpoint. Raises `UserError` if it is missing, invalid or corrupted."""
    fields = storage.fetch(uri, folder, manifest=read_checkpoint(uri)).fields
    step = int(fields["global_step"])
    return RestoredCheckpoint(uri=uri, global_step=step, folder=folder, fields=fields)


def restore_model(uri: str, model: keras.Model, scratch: Path) -> RestoredCheckpoint:
    """Assign the checkpoint at `uri` to the variables of a model. Raises `UserError`."""
    found = fetch(uri, scratch / "checkpoint")
    named = {f"{MODEL}{variable.path}": variable.value for variable in model.variables}
    restore(found, select_exported(found, named), io_device=None)
    embedding_table.restore_tables(model)
    return found


def select_exported(
    found: RestoredCheckpoint, variables: Mapping[str, tf.Variable]
) -> dict[str, tf.Variable]:
    """Return the variables, keyed by the path of their average or, without one, by their own."""
    there = shapes(found)
    averages = {path: f"{AVERAGE}{path.removeprefix(MODEL)}" for path in variables}
    return {
        averages[path] if averages[path] in there else path: each
        for path, each in variables.items()
    }
