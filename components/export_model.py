"""Exports a blessed model, checks that its formats agree, and registers and promotes it."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from kfp import dsl

from flotilla.components import descriptor, evaluate_model
from flotilla.components.image import component
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import choose_output, is_local_run, scratch_folder
from flotilla.trainer import storage
from flotilla.trainer.code import load_bundle
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data import listing
from flotilla.trainer.promotion import gate, lineage, registration, registry
from flotilla.trainer.promotion import training_data as trained


@component
def export_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision: str,
    image: str,
    model: dsl.Output[dsl.Model],
    registration: dsl.Output[dsl.Model],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
    checkpoint_descriptor: dsl.Input[dsl.Model] = None,
    decision_descriptor: dsl.Input[dsl.Artifact] = None,
) -> str:
    """Export, register and promote a blessed checkpoint; return "promoted" or "refused"."""
    from flotilla.components.export_model import work
    from flotilla.components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Export and register the model, and return `promoted` or `refused`."""
    uri = step.stage("export_model", export)
    return step.stage("register_model", register, model_uri=uri)


def export(step: Step) -> str:
    """Export the model. Raises a `UserError` if it is not blessed or its formats disagree."""
    with scratch_folder() as scratch:
        descriptor.check(step.dataset_descriptor, step.dataset)
        descriptor.check(step.checkpoint_descriptor, step.checkpoint)
        descriptor.check(step.decision_descriptor, step.decision)
        from flotilla.trainer.export import export

        settings = load_bundle(step.config)
        # Include the decision, so that a new decision (after a change of champion) gets a new URI.
        created = storage.read_manifest(step.checkpoint).created
        origin = (step.dataset, created, step.decision, *settings.export.formats)
        output = choose_output(step.root, step.run_id, "model", step.checkpoint, *origin)
        inputs = (step.dataset, step.checkpoint, step.decision)
        exported = export.export(settings, *inputs, output, scratch)
        forms = exported.parity["formats"]
        differences = {name: form["max_difference"] for name, form in forms.items()}
        step.output.done(exported.uri, differences)
        descriptor.describe(step.model, exported.uri, differences)
        return exported.uri


def register(step: Step) -> str:
    """Check the exported model, register it and promote it. Return `promoted` or `refused`."""
    with scratch_folder() as scratch:
        settings = load_bundle(step.config)
        run = (step.root, step.run_id)
        request = registration.Request(
            config=settings,
            root=step.root,
            model=step.model_uri,
            output=choose_output(*run, "registration", step.model_uri, settings.registry.digest()),
            lineage=_lineage(settings, *run, step.model_uri, step.image),
            by=f"run {step.run_id}",
            compare=partial(_compare, settings, *run, step.model_uri, scratch),
        )
        made = registration.register(request, scratch)
        word = registration.PROMOTED if made.promoted else registration.REFUSED
        trained.end(*run, word)
        if made.promoted:
            registration.announce(step.root, settings.name, made.version, settings.registry.hub)
        numbers = {"version": made.version, "promotion": made.promotion}
        judged = {"decision": word, "headline": made.headline, **numbers}
        step.output.done(made.uri, {**judged, "reasons": list(made.reasons)})
        judged = {"model": step.model_uri, **judged}
        descriptor.describe(step.registration, made.uri, judged)
        return word


def _compare(
    config: Config, root: str, run_id: str, model: str, scratch: Path, champion: registry.Version
) -> gate.Decision:
    made_from = storage.read_manifest(model).fields["made_from"]
    inputs = (made_from["dataset"], made_from["checkpoint"], champion.uri)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="comparison-") as folder:
        # Skip the baselines, because the run's own evaluation has already measured them.
        alone = config.evaluation.model_copy(update={"baseline": "none"})
        settings = config.model_copy(update={"evaluation": alone})
        measured = evaluate_model.evaluate_checkpoint(settings, root, run_id, *inputs, Path(folder))
    return evaluate_model.decide(config, root, run_id, measured.uri)


def _lineage(config: Config, root: str, run_id: str, model: str, image: str) -> dict[str, Any]:
    fields = storage.read_manifest(model).fields
    measured = storage.read_manifest(fields["evaluation"]).fields
    checkpoint = fields["made_from"]["checkpoint"]
    return {
        "run_id": run_id,
        "dataset": fields["made_from"]["dataset"],
        "fingerprint": fields["made_from"]["fingerprint"],
        "data_version": config.data.version,
        "spans": listing.list_spans(root, config.data.version) if config.data.source else {},
        "config": config.digest(),
        "commit": lineage.commit(),
        "code": config.code,
        # Record no image for a local run, which uses the code of this machine.
        "image": "" if is_local_run() else image,
        "checkpoint": checkpoint,
        "warmed_from": str(storage.read_manifest(checkpoint).fields.get("warmed_from", "")),
        "evaluation": fields["evaluation"],
        "decision": fields["decision"],
        "metrics": measured["metrics"],
    }
