"""The first step: resolves the configuration, prepares the dataset and applies the data gate."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kfp import dsl

from flotilla.components import contract, descriptor, in_use, resolve_config
from flotilla.components.image import component
from flotilla.components.records import run_store
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import choose_output
from flotilla.components.table import READY, REFUSED, UNCHANGED
from flotilla.trainer import events
from flotilla.trainer.cluster import fitting
from flotilla.trainer.code.bundle import load_bundle
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.masking import printable


# The arguments up to `settings` are the fields of KFP's form. A test compares them with
# `flotilla.trainer.config.form`.
@contract.mark_component
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
    resolved = step.stage("resolve_config", resolve)
    run = resolved._asdict()
    if run.pop("is_unchanged"):
        return Prepared(**run, dataset_uri="", Output=UNCHANGED)
    if step.published:
        return Prepared(**run, dataset_uri=step.published, Output=READY)
    with _try_model(step, resolved.config):
        uri, run["config"] = step.stage("prepare_data", prepare, **run)
        word = step.stage("validate_data", validate, **run, dataset_uri=uri)
    return Prepared(**run, dataset_uri=uri, Output=READY if word == "accepted" else REFUSED)


def resolve(step: Step) -> resolve_config.Resolved:
    """Resolve the configuration. For an unchanged run, write placeholder artifacts for KFP's UI."""
    resolved = resolve_config.work(step)
    if resolved.is_unchanged:
        for artifact in (step.dataset, step.validation):
            descriptor.write(artifact, {"decision": UNCHANGED})
        Path(step.page.path).write_text("<p>An earlier run with these inputs has finished.</p>\n")
    return resolved


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
        known = resolve_config.add_choices(config, prepared.uri, step.root, step.run_id)
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
