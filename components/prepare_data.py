"""The first step: resolves the configuration, prepares the dataset and applies the data gate."""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kfp import dsl

from flotilla.components import descriptor, in_use
from flotilla.components.image import check_mark, component, mark_component
from flotilla.components.records import run_store, step_record
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import choose_output
from flotilla.components.table import READY, REFUSED, UNCHANGED, find_maker
from flotilla.trainer import code as bundle
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import fitting
from flotilla.trainer.code import load_bundle
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
from flotilla.trainer.storage.uri import is_local

# Keys of two pinned values: the digest of the listing, and the source that was listed.
_FILES, _LISTED = "listing of data.source", "what was listed"
_log = logging.getLogger(__name__)


# The arguments up to `settings` are the fields of KFP's form. A test compares them with
# `flotilla.trainer.config.form`.
@mark_component
@component
def prepare_data(
    name: str,
    source: str,
    label: str,
    model: str,
    steps: int,
    epochs: float,
    batch_size: int,
    learning_rate: float,
    strategy: str,
    workers: int,
    servers: int,
    gpus: int,
    storage_root: str,
    settings: dict,  # type: ignore[type-arg]
    kfp_run_id: str,
    configuration: dsl.Output[dsl.Artifact],
    dataset: dsl.Output[dsl.Dataset],
    validation: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    published: str = "",
    is_whole_run: bool = True,
) -> NamedTuple(
    "Prepared",
    [("config", str), ("root", str), ("run_id", str), ("dataset_uri", str), ("Output", str)],
):
    """Prepare the dataset and apply the data gate; return "ready", "unchanged" or "refused".

    `published` is the URI of an existing dataset to train on instead. "unchanged" means that an
    earlier run has already done the same work; only a run of the whole pipeline returns it.
    """
    from flotilla.components.prepare_data import work
    from flotilla.components.records.record import run

    return run(work, locals())


class Prepared(NamedTuple):
    """The outputs of the first step. `config` is the configuration as JSON.

    `Output` is the result. KFP's local runner accepts no other output name in a condition.
    """

    config: str
    root: str
    run_id: str
    dataset_uri: str
    Output: str


def work(step: Step) -> Prepared:
    """Run the stages in order, or only the first if nothing is new or a dataset is given."""
    prepared = step.stage("resolve_config", resolve)
    if prepared.Output == UNCHANGED or step.published:
        return prepared
    run = {name: getattr(prepared, name) for name in ("config", "root", "run_id")}
    with _try_model(step, prepared.config):
        uri, run["config"] = step.stage("prepare_data", prepare, **run)
        word = step.stage("validate_data", validate, **run, dataset_uri=uri)
    return Prepared(**run, dataset_uri=uri, Output=READY if word == "accepted" else REFUSED)


def resolve(step: Step) -> Prepared:
    """Resolve the configuration. For an unchanged run, write placeholder artifacts for KFP's UI."""
    prepared = resolve_config(step)
    if prepared.Output == UNCHANGED:
        for artifact in (step.dataset, step.validation):
            descriptor.write(artifact, {"decision": UNCHANGED})
        Path(step.page.path).write_text("<p>An earlier run with these inputs has finished.</p>\n")
    return prepared


def resolve_config(step: Step) -> Prepared:
    """Build, check and publish the configuration. The result is `ready` or `unchanged`."""
    check_mark()
    artifact, config = step.configuration, from_form(vars(step))
    root = run_store.find_root(config.storage.root, artifact.uri, step.kfp_run_id)
    if os.environ.get("KFP_POD_NAME"):
        _check_remote(root, config.data.source)
    run_id = run_store.find_run_id(step.kfp_run_id)
    code = {"code": config.code} if config.code else {}
    if config.code:
        bundle.enter(config.code)
        bundle.note_run(root, run_id, config.code)
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
        step.output.metrics |= {"decision": UNCHANGED, "reasons": [reason]}
    descriptor.write(artifact, config.model_dump(mode="json"))
    artifact.metadata.update({"name": config.name, "root": root, "run_id": run_id})
    return Prepared(
        # Escape control characters, because KFP logs its parameters unchanged.
        config=printable(config.model_dump_json()),
        root=root,
        run_id=run_id,
        dataset_uri="" if earlier else step.published,
        Output=UNCHANGED if earlier else READY,
    )


def _check_remote(root: str, source: str) -> None:
    """Raise a `ConfigError` if the root or the source is a local path, which no other pod has."""
    if storage.local_path(root):
        raise ConfigError(
            f"storage.root: {root} is a folder in this pod, which no other step can read: set it "
            "to gs://, s3:// or minio://BUCKET/FOLDER, or leave it empty"
        )
    if source and is_local(source):
        raise ConfigError(
            f"data.source: {source} is a path, but this pod does not have your files: "
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
    known = _choose_model(config, dataset)
    if not length.is_resolved(known):
        splits = length.Splits.read(storage.read_manifest(dataset).fields)
        of_model, known = known, length.resolve(known, splits)
        events.emit(events.DataNote(text=length.describe_choices(of_model, known, splits)))
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
    with suppress(KeyError, OSError, ValueError, UserError):
        at = storage.uri_of(os.environ[run_store.RUN_FOLDER])
        started = parse_mapping(storage.read_bytes(storage.join(at, run_store.CONFIG)))
        given = run_store.read_given(at, find_maker("checkpoint").name).arguments
        if (known := run_store.find_config(given)) and started["model"]["name"] == AUTO:
            return known.model
    return None


def find_finished_run(config: Config, root: str) -> str:
    """Return the id of an earlier run that did the same work, or an empty string."""
    if not config.data.source or config.training.when_unchanged == "train":
        return ""
    return run_store.pin_once("run that has finished", lambda: trained.find_finished(config, root))


@contextmanager
def _try_model(step: Step, config: str) -> Iterator[None]:
    """Try the model on the first rows of the data while the block runs.

    If the trial fails, it interrupts the block. In a local run, there is no trial here, because the
    process that runs the steps tries the model itself.
    """
    if run_store.is_local_run():
        yield
        return
    mistakes: list[ConfigError] = []
    is_over = threading.Event()

    def end(mistake: ConfigError) -> None:
        mistakes.append(mistake)
        if not is_over.is_set():
            # Send SIGTERM, so that the process also ends its child processes.
            os.kill(os.getpid(), signal.SIGTERM)

    def refuse(_stage: Step) -> None:
        raise mistakes[0]

    trial = fitting.begin(load_bundle(config), "", end)
    try:
        yield
        is_over.set()
        trial.join()
    except (SystemExit, KeyboardInterrupt):
        if mistakes:
            step.stage("resolve_config", refuse)
        raise
    if mistakes:
        step.stage("resolve_config", refuse)


def prepare(step: Step) -> tuple[str, str]:
    """Publish or reuse the dataset. Return its URI and the configuration without `auto` values."""
    with run_store.scratch_folder() as scratch:
        from flotilla.trainer.data import prepare

        config = load_bundle(step.config)
        section = config.data
        key = f"version of {section.name}"
        chosen = section.version or run_store.read_pinned(key)
        exact = section.model_copy(update={"version": chosen})
        prepared = prepare.prepare(exact, step.root, scratch)
        while not in_use.use(prepared.uri):
            # Prepare the dataset again, because retention removed it in the meantime.
            prepared = prepare.prepare(exact, step.root, scratch)
        fields = prepared.manifest.fields
        version = fields["version"]
        run_store.pin(key, version)
        if version and not chosen:
            events.emit(events.NewestVersion(dataset=section.name, version=version))
        examples = {split: each["examples"] for split, each in fields["splits"].items()}
        notes = list(fields.get("notes", ()))
        for text in notes:
            events.emit(events.DataNote(text=text))
        made = {"reused": prepared.reused, "version": version, "notes": notes}
        step.output.done(prepared.uri, {**examples, **made})
        origin = {"fingerprint": fields["fingerprint"], "version": version}
        descriptor.describe(step.dataset, prepared.uri, {**origin, **examples})
        known = add_choices(config, prepared.uri, step.root, step.run_id)
        return prepared.uri, printable(known.model_dump_json())


def validate(step: Step) -> str:
    """Check the dataset, compare it with the champion's, and return `accepted` or `refused`."""
    # Import this only here, because SciPy takes longer to import than a whole unchanged run.
    from flotilla.trainer.data_gate import validate

    settings = load_bundle(step.config)
    found = validate.check(settings, step.dataset_uri, validate.opponent(step.root, settings.name))
    uri = choose_output(step.root, step.run_id, "validation", step.dataset_uri, found.digest)
    validate.publish(found, uri)
    facts = found.facts
    for line in facts["warnings"]:
        events.emit(events.DataNote(text=line, is_warning=True))
    judged = {
        "decision": found.decision,
        "warned": len(facts["warnings"]),
        "reasons": facts["reasons"],
        "warnings": facts["warnings"],
    }
    step.output.done(uri, judged)
    descriptor.describe(step.validation, uri, judged)
    Path(step.page.path).write_bytes(found.page)
    return found.decision
