"""Exports a blessed model in several formats, and checks that their predictions agree.

The published model consists of the formats in `flotilla.trainer.export.formats` and these files:

    labels.txt      the class names, one per line, if the task has classes
    model_card.md   the model card
    request.json    real examples, in the format of TensorFlow Serving's REST API
    kserve.yaml     a KServe InferenceService
    parity.json     how much the predictions of each format differ from the original
    config.json     the configuration of the run
    statistics.json the statistics of the training split, if the model uses them
    model.sig       the signature, if a signing key is configured
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from flotilla.trainer import signing, storage
from flotilla.trainer.config.program import hide_environment
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.files.recorded_columns import read_recorded
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation.evaluate import (
    SPLIT,
    TrainedModel,
    is_reusable,
    load_trained_model,
    read_inputs,
)
from flotilla.trainer.evaluation.program_model.load import is_saved_model
from flotilla.trainer.evaluation.signature import (
    LABELS,
    describe_inputs,
    find_positive,
    list_kinds,
    list_labels,
    list_links,
)
from flotilla.trainer.export import model_card
from flotilla.trainer.export.formats import FORMATS, format_path
from flotilla.trainer.export.parity import (
    Batch,
    Fresh,
    Original,
    answer_in_process,
    fresh_process,
    prove,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.models import keras_file
from flotilla.trainer.promotion import gate, kserve
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.objective import Objective

KIND = "model"
PARITY_EXAMPLES = 512
CALIBRATION_EXAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The URI of a published model, and how much the predictions of each format differ."""

    uri: str
    parity: dict[str, Any]


def export(  # noqa: PLR0913, PLR0917
    config: Config, dataset: str, checkpoint: str, decision: str, output: str, scratch: Path
) -> Exported:
    """Publish the model of `checkpoint` at `output` in all formats of `export.formats`.

    Each format is loaded from disk and predicts real test examples. A new process, which has only
    the written folder, answers a request. If the model has already been published from the same
    inputs, return its published parity.

    Args:
        config: the configuration of the model and the formats.
        dataset: URI of the published dataset, which has the names of inputs and labels, and the
            test examples.
        checkpoint: URI of the published checkpoint.
        decision: URI of the gate's published decision on the checkpoint.
        output: URI of the model.
        scratch: local folder for temporary files.

    Raises:
        UserError: the decision does not bless this checkpoint, a format cannot be written or
            loaded, or its predictions differ by more than the tolerance. Nothing is published.
    """
    spec, inputs_from = read_inputs(config, dataset, checkpoint)
    evaluation = _require_blessed(decision, inputs_from)
    made_from = {**inputs_from, "formats": ",".join(config.export.formats)}
    if is_reusable(output, KIND, made_from):
        return Exported(uri=output, parity=storage.read_json(output, "parity.json"))
    with tempfile.TemporaryDirectory(dir=scratch, prefix="export-") as name:
        folder = Path(name)
        with fresh_process(folder) as process:
            objective = tasks.make_objective(config, spec)
            trained = load_trained_model(config, spec, objective, checkpoint, scratch, dataset)
            step = trained.global_step
            facts = model_card.Facts(
                config=config, dataset=dataset, checkpoint=checkpoint, decision=decision, step=step
            )
            forms = {"formats": _list_formats(config, trained), **trained.described}
            calibrated = any(FORMATS[form].calibrated for form in forms["formats"])
            subject = _original(trained.model, objective, spec, dataset, scratch, calibrated)
            fields = {**_fields(facts, subject, evaluation, made_from), **forms}
            parity = _write_forms(folder, subject, fields, process)
        if "keras" in fields["formats"]:
            fields["keras_modules"] = keras_file.list_modules(folder / format_path("keras", "", 0))
        if spec.learnt.data:
            (folder / statistics.FILE).write_bytes(spec.learnt.data)
        _write_texts(folder, facts, parity, fields, output)
        signing.sign(folder, fields)
        storage.publish(folder, output, kind=KIND, fields=fields)
    return Exported(uri=output, parity=parity)


def _write_texts(
    folder: Path,
    facts: model_card.Facts,
    parity: Mapping[str, Any],
    fields: Mapping[str, Any],
    output: str,
) -> None:
    _write_json(folder / "parity.json", parity)
    _write_json(folder / "config.json", hide_environment(facts.config.model_dump(mode="json")))
    _write_text(folder / "kserve.yaml", kserve.service(facts.config.name, output))
    _write_text(folder / "model_card.md", model_card.write_card(facts, parity, fields))


def _fields(
    facts: model_card.Facts, subject: Original, evaluation: str, made_from: Mapping[str, str]
) -> dict[str, Any]:
    config, spec = facts.config, subject.spec
    return {
        "name": config.name,
        "global_step": facts.step,
        "inputs": describe_inputs(spec),
        "reads": read_recorded(spec, storage.read_manifest(facts.dataset), config.data),
        "task": subject.task.name,
        **subject.objective.judged_by,
        "outputs": subject.columns(),
        "num_labels": len(subject.task.labels),
        "labels": list_labels(subject.task),
        "kinds": list_kinds(subject.task),
        "links": list_links(subject.task),
        "positive": find_positive(subject.task),
        "threshold": _thresholds(evaluation),
        "saved_model": format_path("saved_model", config.name, facts.step),
        "decision": facts.decision,
        "evaluation": evaluation,
        "made_from": dict(made_from),
    }


def _thresholds(evaluation: str) -> Any:
    measured = storage.read_json(evaluation, "metrics.json")
    with storage.check_form(f"metrics.json of {evaluation}"):
        outputs = {"": measured, **measured.get("outputs", {})}
        found = {
            name: float(each["threshold"]["value"])
            for name, each in outputs.items()
            if "threshold" in each
        }
    return found.get("", found)


def _write_forms(
    folder: Path, subject: Original, fields: Mapping[str, Any], process: Fresh
) -> dict[str, Any]:
    name, step = fields["name"], fields["global_step"]
    paths = {str(form): format_path(form, name, step) for form in fields["formats"]}
    parity = prove(subject, paths, folder)
    if subject.task.labels:
        lines = [" ".join(label.splitlines()) for label in subject.task.labels]
        (folder / LABELS).write_text("\n".join([*lines, ""]), encoding="utf-8")
    parity["smoke"] = answer_in_process(subject, folder, fields["saved_model"], process)
    return parity


def _list_formats(config: Config, trained: TrainedModel) -> list[str]:
    if not is_saved_model(trained.described):
        return list(config.export.formats)
    return [form for form in config.export.formats if form != "keras"]


def _original(  # noqa: PLR0913, PLR0917
    model: keras.Model,
    objective: Objective,
    spec: DatasetSpec,
    dataset: str,
    scratch: Path,
    calibrated: bool,
) -> Original:
    calibration = None
    if calibrated:
        calibration, _ = next(_batches(spec, dataset, scratch, "train", CALIBRATION_EXAMPLES))
    return Original(
        model=model,
        task=objective.task,
        objective=objective,
        spec=spec,
        batches=lambda: _batches(spec, dataset, scratch, SPLIT, PARITY_EXAMPLES),
        calibration=calibration,
    )


def _batches(
    spec: DatasetSpec, dataset: str, scratch: Path, split: str, size: int
) -> Iterator[Batch]:
    files = stage_shards(dataset, scratch / split, split)
    for batch in evaluation_batches(spec, files, batch_size=size):
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
        named = inputs if isinstance(inputs, Mapping) else {spec.inputs[0]: inputs}
        yield named, (inputs, labels, weights)


def _require_blessed(decision: str, inputs_from: Mapping[str, str]) -> str:
    kind = storage.read_manifest(decision).kind
    if kind != gate.KIND:
        raise UserError(f"{decision} is a {kind}, not a {gate.KIND}: pass the decision of the gate")
    decided = storage.read_json(decision, "decision.json")
    with storage.check_form(f"decision.json of {decision}"):
        if decided["decision"] != gate.BLESSED:
            reasons = "; ".join(decided["reasons"])
            raise UserError(f"nothing is exported: the gate refused the model ({reasons})")
        judged = storage.read_manifest(decided["evaluation"]).fields["made_from"]
        other = [name for name, value in inputs_from.items() if judged[name] != value]
    if other:
        raise UserError(
            f"nothing is exported: {decision} was made for another {other[0]} "
            f"({judged[other[0]]}); evaluate {inputs_from['checkpoint']} and run the gate first"
        )
    return str(decided["evaluation"])


def _write_text(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _write_json(path: Path, tree: object) -> None:
    _write_text(path, json.dumps(tree, indent=1, ensure_ascii=False))
