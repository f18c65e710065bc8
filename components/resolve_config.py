"""The first stage: builds the configuration from the form, and looks up the inputs of the run."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from flotilla.components import contract, descriptor, table
from flotilla.components.records import record, run_store, step_record
from flotilla.components.records.record import Step
from flotilla.trainer import events, storage
from flotilla.trainer.code import bundle
from flotilla.trainer.config.base import AUTO
from flotilla.trainer.config.data import SINCE_CHAMPION, DataConfig
from flotilla.trainer.config.form import from_form
from flotilla.trainer.config.model import CHAMPION, ModelConfig, initial_weights
from flotilla.trainer.config.schema import OF_TWO_CLASSES, Config, OutputConfig
from flotilla.trainer.data import listing
from flotilla.trainer.features import length
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.promotion.registry import champion_checkpoint, champion_positive
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.runtime.masking import printable
from flotilla.trainer.storage import patterns

# Keys of two pinned values: the digest of the listing, and the source that was listed.
_FILES, _LISTED = "listing of data.source", "what was listed"
_log = logging.getLogger(__name__)


class Resolved(NamedTuple):
    """Arguments of the next stages. `is_unchanged` is true if an earlier run did the same work."""

    config: str
    root: str
    run_id: str
    is_unchanged: bool


def run_step(call: Mapping[str, Any]) -> NoReturn:
    """Refuse a step of an old pipeline with nine steps, which a schedule may still start."""
    record.run(_refuse, call)
    raise AssertionError


def _refuse(step: Step) -> None:
    step.stage("resolve_config", lambda _step: contract.refuse(contract.find_mark(sys.argv)))


def work(step: Step) -> Resolved:
    """Build, check and publish the configuration, and return the arguments of the next stages."""
    contract.check()
    artifact, config = step.configuration, from_form(vars(step))
    root = run_store.find_root(config.storage.root, artifact.uri, step.kfp_run_id)
    _check_shared(root)
    _check_source(config.data)
    run_id = run_store.find_run_id(step.kfp_run_id)
    code = _enter_bundle(config.code, root, run_id)
    config = add_listing(config, root)
    if config.data.source:
        trained.begin(config, root, run_id)
    earlier = find_finished_run(config, root) if step.is_whole_run else ""
    config = add_positive(add_champion(config, root), root)
    step_record.publish_config(run_store.find_run(root, run_id), config.model_dump_json(indent=2))
    step.output.metrics = {"name": config.name, "data_version": config.data.version, **code}
    if step.published:
        config = add_choices(config, step.published, root, run_id)
    if earlier:
        reason = (
            f"the files and the configuration are the same as in the finished run {earlier}; to "
            "train again, set training.when_unchanged=train"
        )
        step.output.metrics |= {"decision": table.UNCHANGED, "reasons": [reason]}
    descriptor.write(artifact, config.model_dump(mode="json"))
    artifact.metadata.update({"name": config.name, "root": root, "run_id": run_id})
    return Resolved(
        # Escape control characters, because KFP logs its parameters unchanged.
        config=printable(config.model_dump_json()),
        root=root,
        run_id=run_id,
        is_unchanged=bool(earlier),
    )


def _check_shared(root: str) -> None:
    """Raise a `ConfigError` in a pod if `root` is a local folder, which no other pod can read."""
    if os.environ.get("KFP_POD_NAME") and storage.local_path(root):
        raise ConfigError(
            f"storage.root: {root} is a folder in this pod, which no other step can read: set it "
            "to gs://, s3:// or minio://BUCKET/FOLDER, or leave it empty"
        )


def _check_source(data: DataConfig) -> None:
    """Raise a `ConfigError` in a pod if the source is a local path, which does not exist there."""
    if data.source and os.environ.get("KFP_POD_NAME") and patterns.is_local(data.source):
        raise ConfigError(
            f"data.source: {data.source} is a path, but this pod does not have your files: "
            "upload them to gs://, s3:// or minio://BUCKET/FOLDER"
        )


def add_champion(config: Config, root: str) -> Config:
    """Replace the warm start `champion` with the champion's checkpoint, or "" if none exists."""
    training, name = config.training, config.name
    weights = initial_weights(training.warm_start)
    if weights.source != CHAMPION:
        return config
    uri = run_store.pin_once(f"champion of {name}", lambda: champion_checkpoint(root, name))
    if not uri:
        reason = f"{name} has no champion yet below {root}"
        events.emit(events.FromScratch(reason=reason))
    value = replace(weights, source=uri).value() if uri else ""
    return config.model_copy(update={"training": training.model_copy(update={"warm_start": value})})


def add_positive(config: Config, root: str) -> Config:
    """Return the configuration with the champion's positive class wherever none is set.

    By default, the rarer class is positive. If two classes are about equally frequent, the rarer
    one may change between runs, and with it the meaning of a prediction.
    """
    task = config.task
    if task.name not in (AUTO, *OF_TWO_CLASSES, "multi_output"):
        return config
    pinned = run_store.pin_once(
        f"the positive classes of the champion of {config.name}",
        lambda: json.dumps(champion_positive(root, config.name)),
    )
    found: dict[str, str] = json.loads(pinned)
    if task.outputs or len(config.data.label) > 1:
        outputs = dict(task.outputs)
        for label in filter(None, found):
            said = outputs.get(label, OutputConfig())
            outputs[label] = said.model_copy(update={"positive": said.positive or found[label]})
        task = task.model_copy(update={"outputs": outputs})
    elif "" in found and not task.positive:
        events.emit(events.DataNote(text=f"task.positive is {found['']!r}, as in the champion"))
        task = task.model_copy(update={"positive": found[""]})
    return config.model_copy(update={"task": task})


def add_listing(config: Config, root: str) -> Config:
    """Return the configuration with the digest of the selected files as its `data.version`.

    The listing is stored below `root`, and preparation reads it from there. Files that arrive later
    belong to the next run. Raises `UserError`.
    """
    data = config.data
    if not data.source or data.version:
        return config
    _require_same_source(data)
    version = run_store.pin_once(_FILES, lambda: _list_files(config, root))
    return config.model_copy(update={"data": data.model_copy(update={"version": version})})


def _require_same_source(data: DataConfig) -> None:
    """Raise a `ConfigError` if a resumed run has already listed another source or other spans."""
    # Compare the absolute path too, because the run may be resumed from another working directory.
    asked = [data.spans, data.source, os.path.abspath(data.source)]
    # If an earlier listing failed, the run has no files yet, so any source is allowed.
    listed = run_store.read_pinned(_LISTED) if run_store.read_pinned(_FILES) else ""
    before = json.loads(listed) if listed else asked
    if before[0] != asked[0] or not {*before[1:]} & {*asked[1:]}:
        raise ConfigError(
            f"data.source: a resumed run uses the files that it started with: {before[1]} with "
            f"data.spans {before[0]}; start a new run to use {data.source} with data.spans "
            f"{data.spans}"
        )
    run_store.pin(_LISTED, listed or json.dumps(asked))


def _list_files(config: Config, root: str) -> str:
    data, before = config.data, trained.TrainedData(spans={})
    if data.spans == SINCE_CHAMPION:
        before = trained.read_champion_data(root, config.name)
    found = listing.list_source(data)
    taken = listing.select_spans(found, data.spans, before.spans)
    spans = ", ".join(taken.spans)
    if before.version and found.spans and not spans:
        # No span is new. Use the champion's listing, which remains if listed files are deleted.
        _log.info(
            "data.source: the champion was trained on all %d spans; using its files",
            len(found.spans),
        )
        return before.version
    listing.publish(taken, root)
    events.emit(events.NewestVersion(dataset=data.source, version=taken.digest))
    _log.info(
        "data.source: selected %d files%s; listing %s",
        len(taken.files), f" of the spans {spans}" if spans else "", taken.digest,
    )  # fmt: skip
    return taken.digest


def add_choices(config: Config, dataset: str, root: str, run_id: str) -> Config:
    """Return the configuration with its `auto` values resolved for a prepared dataset."""
    known = _choose_length(_choose_model(config, dataset), dataset)
    if known != config:
        step_record.publish_config(
            run_store.find_run(root, run_id), known.model_dump_json(indent=2)
        )
    return known


def _choose_model(config: Config, dataset: str) -> Config:
    from flotilla.trainer.checkpoints.index import learnt_of_dataset
    from flotilla.trainer.features.dataset_spec import DatasetSpec
    from flotilla.trainer.models import choice

    if config.model.name != AUTO or config.program.command:
        return config
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset), learnt_of_dataset(dataset))
    # Prefer the earlier choice, because a different model would not fit the checkpoints of the run.
    name, why = choice.of_dataset(spec)
    if before := _model_before():
        name, why = before.name, "an earlier attempt of this run chose it"
        args = {**before.args, **config.model.args}
        model = config.model.model_copy(update={"name": name, "args": args})
        config = config.model_copy(update={"model": model})
    events.emit(events.DataNote(text=f"the model is {name}: {why}"))
    return choice.with_model(config, spec)


def _model_before() -> ModelConfig | None:
    """Return the model chosen when this run last started training on this machine, if any."""
    with suppress(KeyError, OSError, ValueError, UserError):
        at = storage.uri_of(os.environ[run_store.RUN_FOLDER])
        started = parse_mapping(storage.read_bytes(storage.join(at, run_store.CONFIG)))
        given = run_store.read_given(at, table.find_maker("checkpoint").name).arguments
        if (known := run_store.find_config(given)) and started["model"]["name"] == AUTO:
            return known.model
    return None


def _choose_length(config: Config, dataset: str) -> Config:
    if length.is_resolved(config):
        return config
    splits = length.Splits.read(storage.read_manifest(dataset).fields)
    known = length.resolve(config, splits)
    events.emit(events.DataNote(text=length.describe_choices(config, known, splits)))
    return known


def find_finished_run(config: Config, root: str) -> str:
    """Return the id of an earlier run that did the same work, or an empty string."""
    if not config.data.source or config.training.when_unchanged == "train":
        return ""
    return run_store.pin_once("run that has finished", lambda: trained.find_finished(config, root))


def _enter_bundle(code: str, root: str, run_id: str) -> dict[str, str]:
    """Add the run's code bundle, if there is one, to the import path, and mark it as used."""
    if not code:
        return {}
    bundle.enter(code)
    bundle.note_run(root, run_id, code)
    return {"code": code}
