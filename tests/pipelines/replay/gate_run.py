"""A run below a storage root with a judged evaluation, made without TensorFlow."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from components import check_gate
from components.records.step_record import StepRecord, published_records
from pipelines.replay.replay import OutputArtifact
from trainer import storage
from trainer.config.load import parse_config

RUN = "digits-20260301-120000-abcd"


def published(folder: Path, uri: str, kind: str, files: dict[str, Any], **fields: Any) -> str:
    source = folder / f"source-{storage.name_of(uri)}"
    source.mkdir()
    for name, tree in files.items():
        (source / name).write_text(json.dumps(tree), encoding="utf-8")
    storage.publish(source, uri, kind=kind, fields=fields)
    return uri


def evaluation_at(folder: Path, root: str, accuracy: float = 0.9, run_id: str = RUN) -> str:
    metrics = {"metrics": {"accuracy": accuracy}, "global_step": 7}
    uri = storage.join(root, run_id, "evaluation", "step-7")
    return published(folder, uri, "evaluation", {"metrics.json": metrics})


def gated(
    folder: Path, root: str, evaluation: str, *, run_id: str = RUN, **gate: Any
) -> StepRecord:
    config = parse_config({"gate": {"min": {}, **gate}}).model_dump_json()
    artifact = OutputArtifact(
        f"s3://b/v2/flotilla/{run_id}/check-gate/1/decision", folder / "artifact"
    )
    with suppress(SystemExit):
        check_gate.check_gate.python_func(
            config, root, run_id, evaluation, str(folder / "uri"), artifact
        )
    at = storage.join(root, run_id)
    return next(each for each in published_records(at) if each.step == "check_gate")
