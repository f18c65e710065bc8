"""What a pipeline step does around a stage of the trainer.

Each function reads the JSON configuration, calls one stage, fills the artifacts that the KFP UI
shows, and gives back URIs. An error of the user ends the step with one line and an exit code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from components import gather_report, launchers, locations, pinned_inputs, published_record, ui
from components.image import PodDefaults
from components.locations import (
    RUN_ID,
    folder_of_run,
    output_of,
    root_of,
    run_at,
    run_id_of,
    scratch_folder,
)
from components.record import recorded
from trainer import events, storage
from trainer.checkpoints.index import best_of, index_of, newest_checkpoint
from trainer.cluster.launcher import Job
from trainer.config.run_parameters import from_parameters
from trainer.config.schema import Config, DataConfig
from trainer.errors import UserError
from trainer.promotion import lineage
from trainer.promotion.registry import opponent


class Resolved(NamedTuple):
    """What the first step passes on."""

    config: str
    data: str
    root: str
    run_id: str
    seal: str


def resolve_config(values: Mapping[str, Any]) -> Resolved:
    """Check all run parameters; the data section alone is what preparing data depends on.

    `values` holds KFP's run id too, and an artifact `place` that tells the pipeline root.
    """
    place, kfp_run_id = values["place"].uri, values["kfp_run_id"]
    at = locations.run_at_first(values["storage_root"], place, kfp_run_id)
    with recorded("resolve_config", at) as record:
        config = from_parameters(values)
        root, run_id = root_of(config.storage.root, place, kfp_run_id), run_id_of(kfp_run_id)
        config = pinned_inputs.with_champion(config, root)
        published_record.publish_config(at, config.model_dump_json(indent=2))
        # On this machine nothing is reused by KFP, and preparing finds the version itself.
        data = config.data if os.environ.get(RUN_ID) else pinned_inputs.with_version(config.data)
        record.figures = {"name": config.name, "data_version": data.version}
        return Resolved(
            config=config.model_dump_json(),
            data=data.model_dump_json(),
            root=root,
            run_id=run_id,
            seal=_seal(data, root) or run_id,
        )


def _seal(data: DataConfig, root: str) -> str:
    # No run on this machine is cached, and preparing looks for the dataset by itself.
    if os.environ.get(RUN_ID):
        return ""
    from trainer.data import key

    return key.seal(data, root)


def prepare_data(data: str, root: str, _seal: str, artifact: Any) -> str:
    """Prepare the dataset; `artifact` is a KFP Dataset.

    The seal is there for KFP's cache alone: it is another one in every run until the dataset is
    published, and again when it is gone or damaged, so that the cache never gives its URI then.
    """
    at = run_at(root, locations.run_id_in(artifact.uri, "prepare-data"))
    with recorded("prepare_data", at) as record, scratch_folder() as scratch:
        from trainer.data import prepare

        section = DataConfig.model_validate_json(data)
        key = f"version of {section.dataset}"
        chosen = section.version or pinned_inputs.known(key)
        prepared = prepare.prepare(section.model_copy(update={"version": chosen}), root, scratch)
        fields = prepared.manifest.fields
        version = fields["version"]
        pinned_inputs.keep(key, version)
        if not chosen:
            events.emit("newest_version", dataset=section.dataset, version=version)
        examples = {split: each["examples"] for split, each in fields["splits"].items()}
        record.done(prepared.uri, {**examples, "reused": prepared.reused, "version": version})
        origin = {"fingerprint": fields["fingerprint"], "version": version}
        artifact.metadata = {"uri": prepared.uri, **origin, **examples}
        return prepared.uri


def train_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    image: str,
    store_secret: str,
    artifact: Any,
    viewers: Any,
) -> str:
    """Train; `artifact` is a KFP Model, and `viewers` a file by which the UI shows TensorBoard.

    The pods of a TFJob get the image and the secret of the run where its settings name none.
    """
    at = run_at(root, run_id)
    with recorded("train_model", at, inputs={"dataset": dataset}) as record:
        settings = _config(config)
        record.held = gather_report.held_by(settings.model_dump())
        job = Job(
            config=settings,
            dataset=dataset,
            checkpoints=storage.join(root, run_id, "checkpoints"),
            workdir=folder_of_run() / "cluster",
        )
        logs = ui.logs_of(job.checkpoints)
        ui.write_viewers(viewers, logs)
        launchers.launch(job, PodDefaults(image=image, store_secret=store_secret))
        uri, step = newest_checkpoint(job.checkpoints)
        # What is handed on may have been damaged since it was published.
        fields = storage.verify(uri).fields
        best = best_of(index_of(job.checkpoints))
        figures = {"global_step": step, **fields["metrics"]}
        if fields.get("warmed_from"):
            figures["warmed_from"] = fields["warmed_from"]
        if best:
            figures |= {"best_global_step": best.global_step, "best_validation_loss": best.loss}
        record.done(uri, figures)
        artifact.metadata = {"uri": uri, "tensorboard": logs, **figures}
        return uri


def evaluate_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    metrics: Any,
    confusion: Any,
    roc: Any,
) -> str:
    """Evaluate; `metrics` is KFP Metrics, `confusion` and `roc` are ClassificationMetrics."""
    at, took = run_at(root, run_id), {"dataset": dataset}
    with recorded("evaluate_model", at, inputs=took) as record, scratch_folder() as scratch:
        from trainer.evaluation import evaluate

        settings = _config(config)
        found = opponent(root, settings.name, checkpoint)
        champion = found.uri if found else ""
        origin = (dataset, _created(checkpoint), champion, *settings.evaluation.slices)
        output = output_of(root, run_id, "evaluation", checkpoint, *origin)
        result = evaluate.evaluate(settings, dataset, checkpoint, output, scratch, champion)
        record.done(result.uri, result.metrics)
        ui.log_metrics(metrics, result.metrics, result.uri)
        measured = json.loads(storage.read_file(result.uri, "metrics.json"))
        ui.log_confusion(confusion, measured["labels"], measured["confusion_matrix"])
        ui.log_roc(roc, measured.get("roc", ()))
        return result.uri


def check_gate(config: str, root: str, run_id: str, evaluation: str, decision_path: str) -> str:
    """Return `blessed` or `refused`; the file `decision_path` gets the URI of the reasons."""
    with recorded("check_gate", run_at(root, run_id)) as record:
        from trainer.promotion import gate

        policy = _config(config)
        output = output_of(root, run_id, "decision", evaluation, policy.gate.digest())
        decision = gate.check(policy, evaluation, output)
        word = "blessed" if decision.blessed else "refused"
        record.done(decision.uri, {"decision": word, "reasons": list(decision.reasons)})
        Path(decision_path).write_text(decision.uri, encoding="utf-8")
        return word


def export_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision: str,
    artifact: Any,
) -> str:
    """Export; `artifact` is a KFP Model."""
    at, took = run_at(root, run_id), {"dataset": dataset}
    with recorded("export_model", at, inputs=took) as record, scratch_folder() as scratch:
        from trainer.export import export

        settings = _config(config)
        # A decision beside another champion is another one, and so is its model.
        origin = (dataset, _created(checkpoint), decision, *settings.export.formats)
        output = output_of(root, run_id, "model", checkpoint, *origin)
        exported = export.export(settings, dataset, checkpoint, decision, output, scratch)
        forms = exported.parity["formats"]
        differences = {name: form["max_difference"] for name, form in forms.items()}
        record.done(exported.uri, differences)
        artifact.metadata = {"uri": exported.uri, **differences}
        return exported.uri


def register_model(
    config: str, root: str, run_id: str, model: str, image: str, artifact: Any
) -> str:
    """Return `promoted` or `refused`; `artifact` is a KFP Model."""
    with recorded("register_model", run_at(root, run_id)) as record, scratch_folder() as scratch:
        from trainer.promotion import registration

        settings = _config(config)
        request = registration.Request(
            config=settings,
            root=root,
            model=model,
            output=output_of(root, run_id, "registration", model, settings.registry.digest()),
            lineage=_lineage(settings, run_id, model, image),
            by=f"run {run_id}",
        )
        made = registration.register(request, scratch)
        word = registration.PROMOTED if made.promoted else registration.REFUSED
        figures = {"version": made.version, "promotion": made.promotion}
        record.done(made.uri, {"decision": word, **figures, "reasons": list(made.reasons)})
        artifact.metadata = {"uri": model, "decision": word, **figures}
        return word


def _lineage(config: Config, run_id: str, model: str, image: str) -> dict[str, Any]:
    fields = storage.read_manifest(model).fields
    measured = storage.read_manifest(fields["evaluation"]).fields
    return {
        "run_id": run_id,
        "dataset": fields["made_from"]["dataset"],
        "fingerprint": fields["made_from"]["fingerprint"],
        "config": config.digest(),
        "commit": lineage.commit(),
        # On a machine of one's own the code runs as it stands there.
        "image": "" if os.environ.get(RUN_ID) else image,
        "checkpoint": fields["made_from"]["checkpoint"],
        "warmed_from": _warmed_from(fields["made_from"]["checkpoint"]),
        "evaluation": fields["evaluation"],
        "decision": fields["decision"],
        "metrics": measured["metrics"],
    }


def _warmed_from(checkpoint: str) -> str:
    return str(storage.read_manifest(checkpoint).fields.get("warmed_from", ""))


def finish(
    status: Any,
    root: str,
    launcher: str,
    kubernetes: str,
    kfp_run_id: str,
    artifact: Any,
    glance: Any,
) -> None:
    """End what is left of the training cluster and report; artifacts are KFP HTML and Markdown.

    `status` is KFP's final status of the run.
    The report is written whether the job could be ended or not.
    """
    at = locations.run_at_first(root, artifact.uri, kfp_run_id)
    with recorded("finish", at, exit_step=True) as record:
        from components import gather_report
        from trainer.report import summary

        run_id, folder = run_id_of(kfp_run_id), folder_of_run()
        # Without a root the first step has failed, and says so.
        with suppress(UserError):
            root = root_of(root, artifact.uri, kfp_run_id)
        try:
            launchers.end(launcher, kubernetes, run_id)
        finally:
            page, words = folder / "report.html", status.error_message or ""
            uri = storage.join(root, run_id, page.name) if root else ""
            facts = gather_report.write(status.state, root, run_id, folder, page, words)
            Path(artifact.path).write_bytes(page.read_bytes())
            Path(glance.path).write_bytes(summary.as_markdown(facts, uri))
            if root:
                storage.write_bytes(uri, page.read_bytes())
                record.done(uri, {})


def _config(text: str) -> Config:
    return Config.model_validate_json(text)


def _created(uri: str) -> str:
    return storage.read_manifest(uri).created
