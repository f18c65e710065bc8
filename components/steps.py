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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from components import launching
from components.step_record import recorded
from trainer import checkpoint_listing, storage
from trainer.config import Config, DataConfig
from trainer.errors import UserError
from trainer.launcher import Job
from trainer.parameters import from_parameters

RUN_ID = "FLOTILLA_RUN_ID"
RUN_FOLDER = "FLOTILLA_RUN_FOLDER"


class Resolved(NamedTuple):
    """What the first step passes on."""

    config: str
    data: str
    root: str
    run_id: str


def run_id_of(kfp_run_id: str) -> str:
    """Return the run id: the command line's where it started the run, else KFP's own."""
    return os.environ.get(RUN_ID) or kfp_run_id


def resolve_config(values: Mapping[str, Any]) -> Resolved:
    """Check all run parameters; the data section alone is what preparing data depends on."""
    with recorded("resolve_config") as record:
        config = from_parameters(values)
        if not config.storage.root:
            raise UserError("storage.root is empty: set it to the URI below which all is published")
        record.figures = {"name": config.name}
        return Resolved(
            config=config.model_dump_json(),
            data=config.data.model_dump_json(),
            root=config.storage.root,
            run_id=run_id_of(values["kfp_run_id"]),
        )


def prepare_data(data: str, root: str, artifact: Any) -> str:
    """Prepare the dataset; `artifact` is a KFP Dataset."""
    with recorded("prepare_data") as record, _scratch() as scratch:
        from trainer.data import prepare

        prepared = prepare.prepare(DataConfig.model_validate_json(data), root, scratch)
        fields = prepared.manifest.fields
        examples = {split: each["examples"] for split, each in fields["splits"].items()}
        record.done(prepared.uri, {**examples, "reused": prepared.reused})
        artifact.metadata = {"uri": prepared.uri, "fingerprint": fields["fingerprint"], **examples}
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
        metrics = storage.read_manifest(uri).fields["metrics"]
        record.done(uri, {"global_step": step, **metrics})
        artifact.metadata = {"uri": uri, "global_step": step, **metrics}
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

        output = _output(root, run_id, "evaluation", checkpoint, dataset, _created(checkpoint))
        result = evaluate.evaluate(_config(config), dataset, checkpoint, output, scratch)
        record.done(result.uri, result.metrics)
        for name, value in result.metrics.items():
            metrics.log_metric(name, value)
        metrics.metadata["uri"] = result.uri
        measured = json.loads(storage.read_bytes(storage.join(result.uri, "metrics.json")))
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
        origin = (dataset, _created(checkpoint), *settings.export.formats)
        output = _output(root, run_id, "model", checkpoint, *origin)
        exported = export.export(settings, dataset, checkpoint, decision, output, scratch)
        forms = exported.parity["formats"]
        differences = {name: form["max_difference"] for name, form in forms.items()}
        record.done(exported.uri, differences)
        artifact.metadata = {"uri": exported.uri, **differences}
        return exported.uri


def finish(state: str, root: str, kfp_run_id: str, artifact: Any) -> None:
    """Write the report; `artifact` is a KFP HTML."""
    with recorded("finish", exit_step=True) as record:
        from components import reporting

        run_id, folder = run_id_of(kfp_run_id), _folder()
        page = folder / "report.html"
        reporting.write(state, root, run_id, folder, page)
        Path(artifact.path).write_bytes(page.read_bytes())
        # Without a root the first step has failed, and says so.
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
    _, _, name = source.rpartition("/")
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
