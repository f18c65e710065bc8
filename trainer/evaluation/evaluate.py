"""Evaluates a checkpoint on the whole test split.

The evaluation is published as `metrics.json`, `curves.json`, `predictions/*.npy` (`label`,
`output`, `weight` and `champion_output` in dataset order, with one file for each target) and
`worst/*.png` (the examples with the highest losses, if their input is an image). Predictions are
written to disk batch by batch, so that memory use does not grow with the number of examples.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from flotilla.trainer import storage
from flotilla.trainer.baselines.rows import Splits
from flotilla.trainer.checkpoints import index
from flotilla.trainer.checkpoints.checkpoints import RestoredCheckpoint, fetch, restore_model
from flotilla.trainer.config.main_metric import main_first
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.read import (
    evaluation_batches,
    labelled_columns,
    read_columns,
    stage_shards,
)
from flotilla.trainer.evaluation.baselines import compare_constant, is_beaten, judge_baselines
from flotilla.trainer.evaluation.champion import compare_champion, load_champion
from flotilla.trainer.evaluation.contamination import Judges
from flotilla.trainer.evaluation.predictions import (
    Predictions,
    Writer,
    measure_predictions,
    predict,
)
from flotilla.trainer.evaluation.program_model import PROGRAM, describe_taken, load_program_model
from flotilla.trainer.evaluation.signature import map_outputs
from flotilla.trainer.evaluation.slices import slice_metrics
from flotilla.trainer.evaluation.threshold import choose_thresholds
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.class_names import ClassIndex
from flotilla.trainer.features.dataset_spec import DatasetSpec, slice_features
from flotilla.trainer.models import choice, registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import finite
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.base import SplitError, Task
from flotilla.trainer.tasks.objective import Objective

KIND = "evaluation"
SPLIT = "test"
TRAIN = "train"
_PREDICTING = f"predicting the {SPLIT} split"
# Maximum number of training examples from which the most popular items are determined.
_MOST_LEARNT = 10_000_000
# Number of test examples for the first call of a program's model.
_EXAMPLES = 512


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The URI of a published evaluation, and its metrics."""

    uri: str
    metrics: dict[str, float]


def evaluate(  # noqa: PLR0913, PLR0917
    config: Config, dataset: str, checkpoint: str, output: str, scratch: Path, champion: str = ""
) -> Evaluation:
    """Evaluate `checkpoint` on the test split of `dataset`, and publish the result at `output`.

    If a champion is given, it predicts the same examples. If `output` has already been published
    for the same inputs, return its metrics. All strings are URIs. Raises `UserError`.
    """
    spec, inputs_from = read_inputs(config, dataset, checkpoint)
    made_from = {**inputs_from, **describe_request(config, champion)}
    if is_reusable(output, KIND, made_from):
        return _read(output)
    if not spec.examples(SPLIT):
        raise UserError(f"{dataset} has no {SPLIT} examples to evaluate the model on")
    features = slice_features(spec.features, spec.targets, config.evaluation.slices)
    objective = tasks.make_objective(config, spec)
    trained = load_trained_model(config, spec, objective, checkpoint, scratch, dataset)
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    size = config.evaluation.batch_size
    thresholds = choose_thresholds(objective, trained.model, spec, dataset, scratch, size)
    objective = objective.set_thresholds(thresholds)
    read = [*dict.fromkeys([*features, *objective.task.columns])]
    batches = labelled_columns(spec, files, batch_size=size, columns=read)
    if objective.task.learns:
        objective.task.learn(_read_training_columns(spec, objective.task.learns, dataset, scratch))
    opponent = load_champion(champion, objective.task, spec, scratch) if champion else None
    answer = opponent.answer if opponent else None
    with tempfile.TemporaryDirectory(dir=scratch, prefix="evaluation-") as name:
        folder, columns = Path(name, "evaluation"), Path(name, "columns")
        writer = Writer(folder / "predictions", columns, spec.examples(SPLIT), objective.task)
        with closing(writer), _naming(dataset), Work(_PREDICTING, "rows", writer.rows) as work:
            found = predict(objective, trained.model, spec, batches, writer, answer, work.add)
        _require_sound(spec, found, dataset, checkpoint)
        summary = summarize_predictions(spec, objective, found, features)
        summary |= {"global_step": trained.global_step, **trained.described}
        judges = Judges.load(dataset, config.data.gate)
        remarks = judges.remarks(checkpoint) if judges else []
        summary["remarks"] = [*remarks, *describe_taken(config.program.outputs, trained.described)]
        if opponent:
            there = compare_champion(opponent, objective, found, config.gate.champion, judges)
            summary["champion"] = there
            beaten = is_beaten(summary["constant"], there.get("metrics", {}))
            summary["constant"]["champion"] = beaten
        if config.evaluation.baseline == "auto":
            splits = Splits(spec=spec, uri=dataset, scratch=scratch)
            summary["baselines"] = judge_baselines(objective, found.own, splits)
        summary = finite(summary)
        _publish(folder, summary, found, made_from, output)
    return Evaluation(uri=output, metrics=_drop_undefined(summary["metrics"]))


def _read_training_columns(
    spec: DatasetSpec, columns: Sequence[str], dataset: str, scratch: Path
) -> Iterator[dict[str, Any]]:
    few = -(-spec.examples(TRAIN) // _MOST_LEARNT)
    files = stage_shards(dataset, scratch / TRAIN, TRAIN, of=min(few, len(spec.files(TRAIN))))
    yield from read_columns(spec, files, columns)


def describe_request(config: Config, champion: str) -> dict[str, str]:
    """Return the inputs of an evaluation, except the examples and the model.

    The inputs include the champion rule even without a champion, because the rule sets the
    direction of a user's metric, which the comparison with the constant needs.
    """
    return {
        "slices": ",".join(config.evaluation.slices),
        "champion": champion,
        "compared_by": config.gate.champion.comparison_key(),
        "baseline": config.evaluation.baseline,
        "main_metric": config.task.main_metric,
    }


@contextmanager
def _naming(dataset: str) -> Iterator[None]:
    try:
        yield
    except SplitError as error:
        raise UserError(f"the {SPLIT} split of {dataset} has {error}") from None


def _publish(
    folder: Path,
    summary: dict[str, Any],
    found: Predictions,
    made_from: Mapping[str, str],
    output: str,
) -> None:
    summary["worst"] = found.worst.write(folder)
    for name, tree in (("curves", summary.pop("curves", [])), ("metrics", summary)):
        text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    fields = {name: summary[name] for name in ("metrics", "global_step")}
    storage.publish(folder, output, kind=KIND, fields={"made_from": made_from, **fields})


def _read(uri: str) -> Evaluation:
    with storage.check_form(f"metrics.json of {uri}"):
        measured = storage.read_json(uri, "metrics.json")["metrics"]
        return Evaluation(uri=uri, metrics=_drop_undefined(measured))


def _drop_undefined(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def read_inputs(
    config: Config, dataset: str, checkpoint: str
) -> tuple[DatasetSpec, dict[str, str]]:
    """Return the dataset in the form that the task expects, and `made_from` for a manifest."""
    data = storage.read_manifest(dataset)
    made_from = {
        "dataset": dataset,
        "fingerprint": str(data.fields["fingerprint"]),
        "checkpoint": checkpoint,
        # The URI is not enough: a resumed run may publish another checkpoint there.
        "checkpoint_created": storage.read_manifest(checkpoint).created,
    }
    learnt = index.learnt_of_checkpoint(checkpoint, dataset)
    return tasks.set_positive(config.task, DatasetSpec.from_manifest(data, learnt)), made_from


def is_reusable(output: str, kind: str, made_from: dict[str, str]) -> bool:
    """Return whether `output` has already been published from the same inputs."""
    try:
        there = storage.read_manifest(output)
    except storage.NotPublished:
        return False
    return there.kind == kind and there.fields.get("made_from") == made_from


def build_model(
    config: Config, spec: DatasetSpec, objective: Objective, check: registry.Check | None = None
) -> keras.Model:
    """Return the configured model for a dataset, with initial weights and the task's loss.

    If `check` is given, it replaces the objective's check of the model.
    """
    parts = objective.task.parts.values()
    inputs = InputSpec.of(
        spec.features,
        spec.inputs,
        objective.task.output_shape,
        targets=spec.targets,
        in_units=[part.target.name for part in parts if part.in_units],
        learnt=spec.learnt,
    )
    named = choice.named(config.model, spec)
    return registry.build(named, inputs, config.training.seed, check or objective.accept)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a checkpoint, and its global step.

    Attributes:
        described: for a program's model, how its outputs were interpreted.
    """

    model: keras.Model
    global_step: int
    described: Mapping[str, Any] = field(default_factory=dict)


def load_trained_model(  # noqa: PLR0913, PLR0917
    config: Config,
    spec: DatasetSpec,
    objective: Objective,
    checkpoint: str,
    scratch: Path,
    dataset: str = "",
) -> TrainedModel:
    """Return the model with the weights of the checkpoint. Raises `UserError`.

    A program's model is called with test examples of `dataset`.
    """
    if PROGRAM not in storage.read_manifest(checkpoint).fields:
        model = build_model(config, spec, objective)
        found = restore_model(checkpoint, model, scratch)
        require_positive(objective.task, spec, found)
        return TrainedModel(model=model, global_step=found.global_step)
    # Remove the files of another checkpoint. They would otherwise become part of this model.
    shutil.rmtree(scratch / PROGRAM, ignore_errors=True)
    found = fetch(checkpoint, scratch / PROGRAM)
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    batches = evaluation_batches(spec, files, batch_size=_EXAMPLES)
    examples, *_ = keras.utils.unpack_x_y_sample_weight(next(iter(batches)))
    named = examples if isinstance(examples, Mapping) else {spec.inputs[0]: examples}
    model, described = load_program_model(found, spec, objective, named, config.program.outputs)
    return TrainedModel(model=model, global_step=found.global_step, described={PROGRAM: described})


def require_positive(task: Task, spec: DatasetSpec, found: RestoredCheckpoint) -> None:
    """Raise `UserError` if a checkpoint was trained with the other class as the positive class."""
    trained = map_outputs(found.fields.get("positive", {}))
    for name, part in task.parts.items():
        if not part.positive_by:
            continue
        key, of_before = f"task.outputs.{name}" if name else "task", ""
        # Earlier versions used the dataset's second class as the positive class.
        before = part.labels[0 if part.target.name in spec.swapped else 1]
        if name in trained:
            before = trained[name]
        else:
            of_before = (
                f"; set {key}.name: classification if the checkpoint has an output for each class"
            )
        if ClassIndex(part.labels).number(before) != 1:
            raise UserError(
                f"{found.uri} was trained for the positive class {before!r}, but the positive "
                f"class is now {part.labels[1]!r}; set {key}.positive: {before!r}, or start a new "
                f"run{of_before}"
            )


def _require_sound(spec: DatasetSpec, found: Predictions, dataset: str, checkpoint: str) -> None:
    expected, count = spec.examples(SPLIT), found.own.count
    if count != expected:
        raise UserError(
            f"{dataset} returned {count} {SPLIT} examples, but its manifest says {expected}; "
            "delete the dataset and prepare it again"
        )
    bad, _ = found.unsound
    if bad:
        raise UserError(
            f"the model of {checkpoint} returns non-finite numbers for {bad} of {expected} {SPLIT} "
            "examples, so training has probably diverged; train again with a lower "
            "training.optimizer.learning_rate"
        )


def summarize_predictions(
    spec: DatasetSpec, objective: Objective, found: Predictions, features: Sequence[str]
) -> dict[str, Any]:
    """Return the entries of `metrics.json` for the predictions, with slices by `features`."""
    names = {feature: spec.features[feature].labels for feature in features}
    with Work("measuring"):
        summary, slices = (
            measure_predictions(objective, found.own),
            slice_metrics(objective, found.own, names),
        )
    main = objective.main_metric
    return {
        "split": SPLIT,
        "task": objective.task.name,
        **objective.judged_by,
        "examples": found.own.count,
        **summary,
        "metrics": main_first(summary["metrics"], main),
        "constant": compare_constant(objective, found.own, summary["metrics"], main),
        "slices": slices,
    }
