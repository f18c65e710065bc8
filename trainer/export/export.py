"""Exports a blessed model in several formats, and checks that their predictions agree.

The published model consists of the formats in `flotilla.trainer.export.formats` and these files:

    labels.txt      the class names, one per line, if the task has classes
    model_card.md   the model card (Mitchell et al. 2019), from measured values only
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import keras

from flotilla.trainer import signing, storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.program import describe_program, hide_environment
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.files.columns import read_recorded
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation import signature
from flotilla.trainer.evaluation.evaluate import (
    SPLIT,
    TrainedModel,
    is_reusable,
    load_trained_model,
    read_inputs,
)
from flotilla.trainer.evaluation.program_model import PROGRAM, SAVED_MODEL
from flotilla.trainer.export.formats import (
    FORMATS,
    Batch,
    Fresh,
    Original,
    answer_in_process,
    format_path,
    fresh_process,
    prove,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.models import keras_file
from flotilla.trainer.promotion import gate
from flotilla.trainer.promotion.registry import kserve_service
from flotilla.trainer.report import headline, views, wording
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.masking import one_line
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.objective import Objective

KIND = "model"
PARITY_EXAMPLES = 512
CALIBRATION_EXAMPLES = 200
# Maximum number of class names that the card lists.
_MOST_NAMES = 20


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
            formats = _list_formats(config, trained)
            subject = _original(trained.model, objective, spec, dataset, scratch, formats)
            fields = {
                **_describe(config, subject, trained.global_step, dataset, evaluation),
                **{"decision": decision, "evaluation": evaluation, "made_from": made_from},
                **{"formats": formats, **trained.described},
            }
            parity = _write_forms(folder, subject, fields, process)
        if "keras" in fields["formats"]:
            fields["keras_modules"] = keras_file.list_modules(folder / format_path("keras", "", 0))
        if spec.learnt.data:
            (folder / statistics.FILE).write_bytes(spec.learnt.data)
        _write_texts(folder, config, parity, fields, output)
        signing.sign(folder, fields)
        storage.publish(folder, output, kind=KIND, fields=fields)
    return Exported(uri=output, parity=parity)


def _describe(
    config: Config, subject: Original, step: int, dataset: str, evaluation: str
) -> dict[str, Any]:
    spec, task = subject.spec, subject.task
    return {
        "name": config.name,
        "global_step": step,
        "inputs": signature.describe_inputs(spec),
        "reads": read_recorded(spec, storage.read_manifest(dataset), config.data),
        "task": task.name,
        **subject.objective.judged_by,
        "outputs": subject.columns(),
        "num_labels": len(task.labels),
        "labels": signature.list_labels(task),
        "kinds": signature.list_kinds(task),
        "links": signature.list_links(task),
        "positive": signature.find_positive(task),
        "threshold": _thresholds(evaluation),
        "saved_model": format_path("saved_model", config.name, step),
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
        (folder / signature.LABELS).write_text("\n".join([*lines, ""]), encoding="utf-8")
    parity["smoke"] = answer_in_process(subject, folder, fields["saved_model"], process)
    return parity


def _list_formats(config: Config, trained: TrainedModel) -> list[str]:
    is_saved_model = trained.described.get(PROGRAM, {}).get("layout") == SAVED_MODEL
    return [form for form in config.export.formats if form != "keras" or not is_saved_model]


def _original(  # noqa: PLR0913, PLR0917
    model: keras.Model,
    objective: Objective,
    spec: DatasetSpec,
    dataset: str,
    scratch: Path,
    formats: Sequence[str],
) -> Original:
    calibration = None
    if any(FORMATS[form].calibrated for form in formats):
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


def _write_texts(
    folder: Path,
    config: Config,
    parity: Mapping[str, Any],
    fields: Mapping[str, Any],
    output: str,
) -> None:
    public = hide_environment(config.model_dump(mode="json"))
    for name, text in {
        "parity.json": json.dumps(parity, indent=1, ensure_ascii=False),
        "config.json": json.dumps(public, indent=1, ensure_ascii=False),
        "kserve.yaml": kserve_service(config.name, output),
        "model_card.md": _make_card(config, parity, fields),
    }.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _make_card(config: Config, parity: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    decided = storage.read_json(fields["decision"], "decision.json")
    measured = storage.read_json(decided["evaluation"], "metrics.json")
    # Compute the headline here, because decisions of earlier versions do not contain one.
    facts = {"name": config.name, "verdict": decided["decision"], "rules": decided["rules"]}
    return make_template().render(
        config=config,
        program=describe_program(config.model_dump(mode="json")),
        step=fields["global_step"],
        dataset=storage.read_manifest(fields["made_from"]["dataset"]).fields,
        decided=decided,
        measured=measured,
        metric=MainMetric.of(measured).name,
        headline=headline.headline({**facts, "measured": headline.describe_metric(measured)}),
        rows=views.metric_rows(measured, measured["metrics"]),
        opponents=[_cell(name) for name in headline.opponents(measured)],
        remarks=views.remarks(measured),
        slices={name: views.weakest(measured, rows) for name, rows in measured["slices"].items()},
        parity=parity,
        fields=fields,
        positives=signature.map_outputs(fields["positive"]),
        thresholds=signature.map_outputs(fields["threshold"]),
    )


def make_template() -> jinja2.Template:
    """Return the template of the model card, with the filters that it uses."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        cell=_cell,
        code=lambda text: " ".join(one_line(str(text)).replace("`", "'").split()),
        formatted=wording.format_value,
        interval=lambda pair: wording.interval_text(pair) or wording.NOTHING,
        number=wording.round_value,
        words=lambda name: _cell(wording.spell_metric(name)),
    )
    made.globals.update(
        labels_file=signature.LABELS,
        most_names=_MOST_NAMES,
        serialized=signature.SERIALIZED,
        serving=signature.SERVING,
    )
    return made.get_template("model_card.md.j2")


def _cell(text: object) -> str:
    """Escape text so that it can neither end its table cell nor create a link or tag."""
    plain = " ".join(one_line(str(text)).split()) or "(empty)"
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>#&" else letter for letter in plain)
