"""What a pipeline step does around a stage of the trainer.

Each function reads the JSON configuration, calls one stage, fills the artifacts that the KFP UI
shows, and gives back URIs. An error of the user ends the step with one line and an exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from components import launching, settled
from components.image import IMAGE
from components.step_record import recorded
from trainer import checkpoint_listing, events, keeping, lineage, registry, storage
from trainer.config import Config, DataConfig
from trainer.errors import UserError
from trainer.launcher import Job
from trainer.parameters import from_parameters

RUN_ID = "FLOTILLA_RUN_ID"
RUN_FOLDER = settled.RUN_FOLDER


class Resolved(NamedTuple):
    """What the first step passes on."""

    config: str
    data: str
    root: str
    run_id: str


def run_id_of(kfp_run_id: str) -> str:
    """Return the run id: the command line's where it started the run, else KFP's own."""
    return os.environ.get(RUN_ID) or kfp_run_id


def root_of(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return `storage.root`, or the folder of ours below the run's KFP pipeline root.

    Args:
        configured: `storage.root`.
        artifact: URI of an output: `<pipeline root>/<pipeline>/<run id>/<step>/<name>`, which may
            carry the endpoint of its store behind a question mark.
        kfp_run_id: KFP's id of the run.

    Raises:
        UserError: there is none.
    """
    if configured:
        return configured
    path, mark, query = artifact.partition("?")
    before, found, _ = path.partition(f"/{kfp_run_id}/")
    pipeline_root = before.rpartition("/")[0]
    if not found or "://" not in pipeline_root:
        raise UserError("storage.root is empty: set it to the URI below which all is published")
    return storage.join(f"{pipeline_root}{mark}{query}", "flotilla")


def resolve_config(values: Mapping[str, Any]) -> Resolved:
    """Check all run parameters; the data section alone is what preparing data depends on.

    `values` holds KFP's run id too, and an artifact `place` that tells the pipeline root.
    """
    with recorded("resolve_config") as record:
        config = from_parameters(values)
        root = root_of(config.storage.root, values["place"].uri, values["kfp_run_id"])
        config = settled.with_champion(config, root)
        # On this machine nothing is reused by KFP, and preparing finds the version itself.
        data = config.data if os.environ.get(RUN_ID) else settled.with_version(config.data)
        record.figures = {"name": config.name, "data_version": data.version}
        return Resolved(
            config=config.model_dump_json(),
            data=data.model_dump_json(),
            root=root,
            run_id=run_id_of(values["kfp_run_id"]),
        )


def prepare_data(data: str, root: str, artifact: Any) -> str:
    """Prepare the dataset; `artifact` is a KFP Dataset."""
    with recorded("prepare_data") as record, _scratch() as scratch:
        from trainer.data import prepare

        section = DataConfig.model_validate_json(data)
        key = f"version of {section.dataset}"
        chosen = section.version or settled.known(key)
        prepared = prepare.prepare(section.model_copy(update={"version": chosen}), root, scratch)
        fields = prepared.manifest.fields
        version = fields["version"]
        settled.keep(key, version)
        if not chosen:
            events.emit("newest_version", dataset=section.dataset, version=version)
        examples = {split: each["examples"] for split, each in fields["splits"].items()}
        record.done(prepared.uri, {**examples, "reused": prepared.reused, "version": version})
        origin = {"fingerprint": fields["fingerprint"], "version": version}
        artifact.metadata = {"uri": prepared.uri, **origin, **examples}
        return prepared.uri


def train_model(config: str, root: str, run_id: str, dataset: str, artifact: Any) -> str:
    """Train; `artifact` is a KFP Model."""
    with recorded("train_model") as record:
        job = Job(
            config=_config(config),
            dataset=dataset,
            checkpoints=storage.join(root, run_id, "checkpoints"),
            workdir=_folder() / "cluster",
        )
        launching.launch(job)
        uri, step = checkpoint_listing.newest(job.checkpoints)
        # What is handed on may have been damaged since it was published.
        fields = storage.verify(uri).fields
        best = keeping.best(keeping.kept(job.checkpoints))
        figures = {"global_step": step, **fields["metrics"]}
        if fields.get("warmed_from"):
            figures["warmed_from"] = fields["warmed_from"]
        if best:
            figures |= {"best_global_step": best.global_step, "best_validation_loss": best.loss}
        record.done(uri, figures)
        artifact.metadata = {"uri": uri, **figures}
        return uri


def evaluate_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    metrics: Any,
    confusion: Any,
) -> str:
    """Evaluate; `metrics` and `confusion` are KFP Metrics and ClassificationMetrics."""
    with recorded("evaluate_model") as record, _scratch() as scratch:
        from trainer import evaluate

        settings = _config(config)
        found = registry.rival(root, settings.name, checkpoint)
        champion = found.uri if found else ""
        origin = (dataset, _created(checkpoint), champion, *settings.evaluation.slices)
        output = _output(root, run_id, "evaluation", checkpoint, *origin)
        result = evaluate.evaluate(settings, dataset, checkpoint, output, scratch, champion)
        record.done(result.uri, result.metrics)
        for name, value in result.metrics.items():
            metrics.log_metric(name, value)
        metrics.metadata["uri"] = result.uri
        measured = json.loads(storage.read_file(result.uri, "metrics.json"))
        confusion.log_confusion_matrix(measured["labels"], measured["confusion_matrix"])
        return result.uri


def check_gate(config: str, root: str, run_id: str, evaluation: str, decision_path: str) -> str:
    """Return `blessed` or `refused`; the file `decision_path` gets the URI of the reasons."""
    with recorded("check_gate") as record:
        from trainer import gate

        policy = _config(config)
        output = _output(root, run_id, "decision", evaluation, policy.gate.digest())
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
    with recorded("export_model") as record, _scratch() as scratch:
        from trainer import export

        settings = _config(config)
        # A decision beside another champion is another one, and so is its model.
        origin = (dataset, _created(checkpoint), decision, *settings.export.formats)
        output = _output(root, run_id, "model", checkpoint, *origin)
        exported = export.export(settings, dataset, checkpoint, decision, output, scratch)
        forms = exported.parity["formats"]
        differences = {name: form["max_difference"] for name, form in forms.items()}
        record.done(exported.uri, differences)
        artifact.metadata = {"uri": exported.uri, **differences}
        return exported.uri


def register_model(config: str, root: str, run_id: str, model: str, artifact: Any) -> str:
    """Return `promoted` or `refused`; `artifact` is a KFP Model."""
    with recorded("register_model") as record, _scratch() as scratch:
        from trainer import registration

        settings = _config(config)
        request = registration.Request(
            config=settings,
            root=root,
            model=model,
            output=_output(root, run_id, "registration", model, settings.registry.digest()),
            lineage=_lineage(settings, run_id, model),
            by=f"run {run_id}",
        )
        made = registration.register(request, scratch)
        word = registration.PROMOTED if made.promoted else registration.REFUSED
        figures = {"version": made.version, "promotion": made.promotion}
        record.done(made.uri, {"decision": word, **figures, "reasons": list(made.reasons)})
        artifact.metadata = {"uri": model, "decision": word, **figures}
        return word


def _lineage(config: Config, run_id: str, model: str) -> dict[str, Any]:
    fields = storage.read_manifest(model).fields
    measured = storage.read_manifest(fields["evaluation"]).fields
    return {
        "run_id": run_id,
        "dataset": fields["made_from"]["dataset"],
        "fingerprint": fields["made_from"]["fingerprint"],
        "config": config.digest(),
        "commit": lineage.commit(),
        # On a machine of one's own the code runs as it stands there.
        "image": "" if os.environ.get(RUN_ID) else IMAGE,
        "checkpoint": fields["made_from"]["checkpoint"],
        "warmed_from": _warmed_from(fields["made_from"]["checkpoint"]),
        "evaluation": fields["evaluation"],
        "decision": fields["decision"],
        "metrics": measured["metrics"],
    }


def _warmed_from(checkpoint: str) -> str:
    return str(storage.read_manifest(checkpoint).fields.get("warmed_from", ""))


def finish(
    state: str, root: str, launcher: str, kubernetes: str, kfp_run_id: str, artifact: Any
) -> None:
    """End what is left of the training cluster and write the report; `artifact` is a KFP HTML.

    The report is written whether the job could be ended or not.
    """
    with recorded("finish", exit_step=True) as record:
        from components import reporting

        run_id, folder = run_id_of(kfp_run_id), _folder()
        # Without a root the first step has failed, and says so.
        with suppress(UserError):
            root = root_of(root, artifact.uri, kfp_run_id)
        try:
            launching.end(launcher, kubernetes, run_id)
        finally:
            page = folder / "report.html"
            reporting.write(state, root, run_id, folder, page)
            Path(artifact.path).write_bytes(page.read_bytes())
            if root:
                uri = storage.join(root, run_id, "report.html")
                storage.write_bytes(uri, page.read_bytes())
                record.done(uri, {})


def _config(text: str) -> Config:
    return Config.model_validate_json(text)


def _output(root: str, run_id: str, kind: str, source: str, *origin: str) -> str:
    """Return where to publish what is made of `source`, whose name says its global step.

    What else it is made of is in the name too: a run that is resumed with another policy or other
    forms, or that had to train a lost checkpoint again, publishes beside what it had published.
    """
    name = storage.name_of(source)
    digest = hashlib.sha256("\n".join(origin).encode()).hexdigest()[:12]
    return storage.join(root, run_id, kind, f"{name}-{digest}")


def _created(uri: str) -> str:
    return storage.read_manifest(uri).created


def _folder() -> Path:
    """Return this run's folder on this machine: the command line's, else a temporary one."""
    return Path(os.environ.get(RUN_FOLDER) or tempfile.mkdtemp(prefix="flotilla-"))


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        yield Path(folder)
