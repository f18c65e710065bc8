"""Checkpoints: published directories `step-00001500` that every strategy can read."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.contents import PREFIX, StoredVariable, is_data, to_field
from flotilla.trainer.checkpoints.decisions import MAX_AWAITED, Retention
from flotilla.trainer.checkpoints.history import HISTORY_FILE, RowFile, read_validations
from flotilla.trainer.checkpoints.index import (
    list_checkpoints,
    publish_anew,
    read_checkpoint,
    read_index,
)
from flotilla.trainer.checkpoints.part_saver import PartSaver
from flotilla.trainer.checkpoints.servers import PartServers
from flotilla.trainer.checkpoints.tensor_bundle import BundleWriter, Layout, assign
from flotilla.trainer.checkpoints.uploads import UploadQueue
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings import table_state
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import NOTHING
from flotilla.trainer.optimizers.averaging import AVERAGE, MODEL
from flotilla.trainer.optimizers.loss_scale import LOSS_SCALE
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    RunInterruptedError,
    UserError,
    describe_divergence,
)
from flotilla.trainer.storage.errors import report_errors

# What a checkpoint of another configuration may lack.
_OPTIONAL = (AVERAGE, LOSS_SCALE)
_NUMBER = re.compile(r"-\d+$")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """The newest valid checkpoint, fetched and verified.

    Attributes:
        folder: its files on this machine.
        fields: of its manifest.
        apart: whether the values are not in the folder: the servers fetch what each needs.
    """

    uri: str
    global_step: int
    folder: Path
    fields: Mapping[str, Any]
    apart: bool = False


class Checkpoints:
    """The checkpoints of one run below one URI; nothing is written unless `lease` is held."""

    lease = NoLease()
    learnt = NOTHING
    #: The positive class of each output that has one, which a checkpoint is trained for.
    positive: Any = None
    #: Raises where a run may not go on with a checkpoint.
    require_fit: Callable[[RestoredCheckpoint], None] = staticmethod(lambda _: None)
    #: The URI of what is trained on.
    dataset = ""
    #: Where the servers write and read their own variables.
    parts: PartSaver | None = None
    #: The newest global step that is known to be published.
    published_step = -1

    def __init__(
        self, uri: str, *, keep: int, scratch: Path, fingerprint: str = "", awaited: bool = False
    ) -> None:
        """Keep the newest `keep` checkpoints below `uri`, and the best; `scratch` is for copies.

        `fingerprint` is that of the dataset: no attempt may continue with other data, whose
        training examples could be test examples by now. `awaited`: an evaluator measures each
        checkpoint.
        """
        self.uri = uri
        self._fingerprint = fingerprint
        self._retention = Retention(newest=keep, unmeasured=MAX_AWAITED if awaited else 0)
        self.scratch = scratch
        self.uploads = UploadQueue()
        self._writer = BundleWriter(scratch)
        self.last: str = ""
        self.passed_over: set[str] = set()

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, and log which newer ones were passed over, and why.

        Raises `UserError` for other data, and for an error such as a full disk: a fresh start would
        then throw away a good checkpoint.
        """
        for uri, step in reversed(self._candidates()):
            folder = self.scratch / "restored"
            try:
                fields, apart = self._fetch(uri, folder)
            except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
                self.passed_over.add(uri)
                log.warning("passed over %s: %s", uri, error)
                events.emit(events.CheckpointPassedOver(uri=uri, reason=str(error)))
                continue
            if fields.get("fingerprint", "") != self._fingerprint:
                raise UserError(
                    f"{uri} was trained on other data than this run would continue with: restore "
                    "the data section and the dataset, or begin a new run"
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
        """Fetch a checkpoint; of one that servers read by parts, verify the data where it is."""
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
        """Return the global step of the newest checkpoint, valid or not; -1 without one."""
        return max((step for _, step in self._candidates()), default=-1)

    @property
    def servers(self) -> PartServers | None:
        """Return the servers that read what they hold themselves."""
        return self.parts.servers if self.parts else None

    def by_parts(self, servers: PartServers, least: int) -> None:
        """Have servers write their own variables, where they hold `least` bytes or more."""
        self.parts = PartSaver(servers, self, self.uploads, self.scratch, least)

    def measured(self) -> list[dict[str, Any]]:
        """Return the validations of the evaluator so far; see `history.read_validations`."""
        return read_validations(self.uri)

    def prepare(self, variables: Mapping[str, tf.Variable], io_device: str | None) -> None:
        """Make what the first save of these variables would take longer for; made once."""
        if self.parts and self.parts.takes(variables):
            self.parts.layout_of(variables)
        else:
            self._writer.prepare(variables, io_device)

    def save(
        self, variables: Mapping[str, tf.Variable], *, io_device: str | None, fields: dict[str, Any]
    ) -> str:
        """Publish `variables` by path, `global_step` among them; return the URI."""
        step = int(variables["global_step"].numpy())
        if (uri := self.uri_of(variables)) == self.last:
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
        # Training was paused for so long.
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
        """Write all values on this machine, and publish them."""
        values = self._writer.read(variables, io_device)
        for path in values.not_finite:
            raise self.not_finite(path, fields["global_step"])
        stored = {path: StoredVariable.of(each) for path, each in variables.items()}
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="saving-") as folder:
            self._writer.write(values, Path(folder, PREFIX), io_device)
            del values
            for path, data in files.items():
                Path(folder, path).write_bytes(data)
            self._publish(Path(folder), uri, {**fields, "variables": to_field(stored)})

    def before_publication(self) -> None:
        """Raise where nothing may be published any more."""
        self.lease.check()

    def not_finite(self, path: str, step: int) -> UserError:
        """Return the error of a variable that is not finite."""
        last = next((uri for uri, _ in reversed(self._candidates())), "")
        return UserError(describe_divergence(f"{path} is not finite", step, last))

    def require(self) -> None:
        """Raise where the lease is known to be lost, or where a save by parts has failed."""
        self.lease.require()
        if self.parts:
            self.parts.require()

    def published(self, uri: str, step: int) -> None:
        """Emit that a checkpoint is published, and delete those that retention does not keep."""
        self.published_step = step
        events.emit(events.CheckpointPublished(uri=uri, global_step=step))
        # A later one was passed over, and must not replace one that can be read.
        readable = [each for each in read_index(self.uri) if each.global_step <= step]
        for old in self._retention.outdated(readable):
            storage.delete(old)

    @property
    def logs(self) -> Path | None:
        """Return the local folder for TensorBoard's files."""
        return storage.local_path(storage.join(self.uri, "logs"))

    @cached_property
    def history(self) -> RowFile:
        """Return the writer of the history of the run."""
        return RowFile(storage.join(self.uri, HISTORY_FILE), self._require_lease)

    def _require_lease(self) -> None:
        # It is acquired after this was made.
        self.lease.require()

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Wait at the end until all that was saved in this block is published; raises `UserError`.

        An attempt that ends by `ClusterLostError` does not wait: the next one finds what it left.
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
        """Wait until all that was saved is published; raises `UserError`."""
        (self.parts or self.uploads).flush()

    def _candidates(self) -> list[tuple[str, int]]:
        return list_checkpoints(self.uri)

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        self.lease.check()
        publish_anew(folder, uri, fields)
        self.published(uri, fields["global_step"])

    def uri_of(self, variables: Mapping[str, tf.Variable]) -> str:
        """Return the URI of the checkpoint of `variables`, by the global step among them."""
        return storage.join(self.uri, f"step-{int(variables['global_step'].numpy()):08d}")


def restore(
    found: RestoredCheckpoint,
    variables: Mapping[str, tf.Variable],
    *,
    io_device: str | None,
    servers: PartServers | None = None,
) -> None:
    """Assign the values of the checkpoint to all `variables`; raises `UserError` on a misfit.

    The `servers` assign where the values are apart. What a checkpoint may lack stays as it is.
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
        of_two = (two_for_one(there.get(path), each.shape) for path, each in variables.items())
        hints = (uncut(there, variables), *of_two)
        raise UserError(
            f"the checkpoint {found.uri} does not fit model and optimizer of the configuration "
            f"({reason}); train the same ones, or begin a new run{next(filter(None, hints), '')}"
        ) from None


def uncut(there: Collection[str], here: Collection[str]) -> str:
    """Return how a table's model is as it was before it cut numbers into pieces; else empty."""
    new = {path for path in here if path.endswith("/flotilla_pieces/kernel")}
    if not new or new & set(there):
        return ""
    before = "{pieces: 0, hidden_units: [64, 32], dropout: 0.0}"
    return f"; one of before takes model.args: {before}, or those that it was trained with"


def two_for_one(there: Sequence[int] | None, here: Sequence[int | None]) -> str:
    """Return what to do where a model of two classes had two outputs, and has one; else empty."""
    if there is None or [*there] != [*here[:-1], 2] or [*here[-1:]] != [1]:
        return ""
    return "; two classes have one logit now, and set task.name: classification for one each"


def select_resumed(
    found: RestoredCheckpoint, variables: Mapping[str, tf.Variable], training: TrainingConfig
) -> dict[str, tf.Variable]:
    """Return those of `variables` that are restored when a run is resumed.

    New averages and a new loss scale begin with this attempt. With another `training.freeze` a
    variable that was frozen has no slots in the checkpoint, and begins with new ones; so do slots
    that only a number tells apart (those of Adafactor), since the number means another variable.
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
        "training.freeze has changed: %d of %d slots of the optimizer begin anew",
        len(variables) - len(kept),
        sum(path in slots for path in variables),
    )
    return kept


def shapes(found: RestoredCheckpoint) -> dict[str, list[int]]:
    """Return the shapes of all variables in a checkpoint by path."""
    return dict(Layout.read(found.folder / PREFIX).shapes)


def fetch(uri: str, folder: Path) -> RestoredCheckpoint:
    """Fetch and verify one checkpoint; raises `UserError` where it is missing, damaged or none."""
    fields = storage.fetch(uri, folder, manifest=read_checkpoint(uri)).fields
    step = int(fields["global_step"])
    return RestoredCheckpoint(uri=uri, global_step=step, folder=folder, fields=fields)


def restore_model(uri: str, model: keras.Model, scratch: Path) -> RestoredCheckpoint:
    """Assign the checkpoint at `uri` to the variables of a model; raises `UserError`."""
    found = fetch(uri, scratch / "checkpoint")
    named = {f"{MODEL}{variable.path}": variable.value for variable in model.variables}
    restore(found, select_exported(found, named), io_device=None)
    table_state.restore_tables(model)
    return found


def select_exported(
    found: RestoredCheckpoint, variables: Mapping[str, tf.Variable]
) -> dict[str, tf.Variable]:
    """Return variables of a model by what they get outside of training: averages where kept."""
    there = shapes(found)
    averages = {path: f"{AVERAGE}{path.removeprefix(MODEL)}" for path in variables}
    return {
        averages[path] if averages[path] in there else path: each
        for path, each in variables.items()
    }
