"""Write a blessed model in the forms in which it leaves, and prove that all give the same answers.

The model is published with `saved_model/` (signature `serving_default`: the input features by name,
to `logits` and `probabilities`), `model.keras`, `labels.txt`, `config.json` and `parity.json`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import gate, storage
from trainer.config import Config
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.evaluate import SPLIT, made_before, read_inputs, restored
from trainer.models.registry import first_line

KIND = "model"
SIGNATURE = "serving_default"
PARITY_EXAMPLES = 512
TOLERANCE = 1e-5

Answers = Mapping[str, np.ndarray[Any, np.dtype[np.floating[Any]]]]
Predictor = Callable[[Any], Answers]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Where a model is published, and by how much each of its forms differs from the original."""

    uri: str
    parity: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One written form of a model: the name below the model's directory, writer and reader."""

    path: str
    write: Callable[[keras.Model, DatasetSpec, Path], None]
    read: Callable[[DatasetSpec, Path], Predictor]


def export(  # noqa: PLR0913, PLR0917
    config: Config, dataset: str, checkpoint: str, decision: str, output: str, scratch: Path
) -> Exported:
    """Publish the model of `checkpoint` at `output` in every form of `export.formats`.

    Each form is read back from disk and asked about real test examples. The same inputs again are a
    no-op that returns the parity published before.

    Args:
        config: says how the model is built, and the forms.
        dataset: URI of the published dataset: names of inputs and labels, test examples.
        checkpoint: URI of the published checkpoint.
        decision: URI of the gate's published decision on it.
        output: URI of the model.
        scratch: local folder for what is fetched and made.

    Raises:
        UserError: the decision is not a blessing of this checkpoint, a form cannot be written or
            read back, or its answers differ by more than the tolerance; nothing is published then.
    """
    spec, inputs_from = read_inputs(dataset, checkpoint)
    _require_blessed(decision, inputs_from)
    made_from = {**inputs_from, "formats": ",".join(config.export.formats)}
    if made_before(output, KIND, made_from):
        return Exported(uri=output, parity=json.loads(storage.read_file(output, "parity.json")))
    model, step = restored(config, spec, checkpoint, scratch)
    examples = _examples(spec, dataset, scratch)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="export-") as name:
        folder = Path(name)
        parity = _write_forms(config.export.formats, model, spec, examples, folder)
        _write_text(folder / "parity.json", json.dumps(parity, indent=1))
        _write_text(folder / "config.json", json.dumps(config.model_dump(mode="json"), indent=1))
        _write_text(folder / "labels.txt", "\n".join(_labels(spec)))
        fields = {
            "name": config.name,
            "global_step": step,
            "formats": list(config.export.formats),
            "inputs": [_described(spec, feature) for feature in spec.inputs],
            "num_classes": spec.num_classes,
            "decision": decision,
            "made_from": made_from,
        }
        storage.publish(folder, output, kind=KIND, fields=fields)
    return Exported(uri=output, parity=parity)


def serving_name(feature: str) -> str:
    """Return the name of a feature in the signature: TensorFlow takes letters, digits and `_`."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", feature)
    return name if re.match("[A-Za-z]", name) else f"input_{name}"


def _require_blessed(decision: str, inputs_from: Mapping[str, str]) -> None:
    kind = storage.read_manifest(decision).kind
    if kind != gate.KIND:
        raise UserError(
            f"{decision} is a {kind} and not a {gate.KIND}: pass on what the gate wrote"
        )
    decided = json.loads(storage.read_file(decision, "decision.json"))
    if decided["decision"] != gate.BLESSED:
        reasons = "; ".join(decided["reasons"])
        raise UserError(f"nothing is exported: the gate refused the model ({reasons})")
    judged = storage.read_manifest(decided["evaluation"]).fields["made_from"]
    other = [name for name, value in inputs_from.items() if judged[name] != value]
    if other:
        raise UserError(
            f"nothing is exported: {decision} was taken on another {other[0]} "
            f"({judged[other[0]]}); evaluate and check {inputs_from['checkpoint']} first"
        )


def _examples(spec: DatasetSpec, dataset: str, scratch: Path) -> Any:
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    for inputs, _ in evaluation_batches(spec, files, batch_size=PARITY_EXAMPLES):
        return inputs
    raise UserError(f"{dataset} has no {SPLIT} examples: the exported model cannot be proved")


def _write_forms(
    formats: tuple[str, ...], model: keras.Model, spec: DatasetSpec, examples: Any, folder: Path
) -> dict[str, Any]:
    expected = _answers(model(examples, training=False))
    count = len(expected["logits"])
    parity: dict[str, Any] = {"examples": count, "tolerance": TOLERANCE, "formats": {}}
    for name in formats:
        found = _written_and_asked(name, model, spec, examples, folder)
        difference = _difference(expected, found)
        # Written so that a NaN fails too.
        if not difference <= TOLERANCE:
            raise UserError(
                f"nothing is exported: as {name} the model's answers to {count} {SPLIT} examples "
                f"differ by up to {difference:g} from the original ({TOLERANCE:g} is allowed)"
            )
        parity["formats"][name] = {"max_difference": difference}
    return parity


def _written_and_asked(
    name: str, model: keras.Model, spec: DatasetSpec, examples: Any, folder: Path
) -> Answers:
    form = FORMS[name]
    path = folder / form.path
    try:
        form.write(model, spec, path)
        return form.read(spec, path)(examples)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"the model cannot be written as {name}: {first_line(error)}") from error
    # The user's own classes run here, and may fail in any way.
    except Exception as error:
        raise UserError(
            f"the model cannot be written as {name} and read back: {first_line(error)}; give its "
            f"own classes a get_config, or leave {name} out of export.formats"
        ) from error


def _difference(expected: Answers, found: Answers) -> float:
    """Return the largest difference: of values within -1..1 absolute, of larger ones relative."""
    return max(
        float(np.max(np.abs(found[name] - values) / np.maximum(np.abs(values), 1.0)))
        for name, values in expected.items()
    )


def _answers(logits: tf.Tensor) -> Answers:
    return {"logits": logits.numpy(), "probabilities": tf.nn.softmax(logits).numpy()}


def _write_saved_model(model: keras.Model, spec: DatasetSpec, path: Path) -> None:
    def serve(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        one = len(spec.inputs) == 1
        given = values[0] if one else dict(zip(spec.inputs, values, strict=True))
        logits = model(given, training=False)
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    signature = [
        tf.TensorSpec((None, *feature.shape), feature.dtype, name=serving_name(name))
        for name, feature in ((name, spec.features[name]) for name in spec.inputs)
    ]
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(SIGNATURE, serve, signature)
    archive.write_out(path, verbose=False)


def _read_saved_model(spec: DatasetSpec, path: Path) -> Predictor:
    loaded = tf.saved_model.load(path)

    def predict(examples: Any) -> Answers:
        named = examples if isinstance(examples, Mapping) else {spec.inputs[0]: examples}
        given = {serving_name(name): values for name, values in named.items()}
        answers = loaded.signatures[SIGNATURE](**given)
        return {name: values.numpy() for name, values in answers.items()}

    return predict


def _write_keras(model: keras.Model, _spec: DatasetSpec, path: Path) -> None:
    model.save(path)


def _read_keras(_spec: DatasetSpec, path: Path) -> Predictor:
    loaded = keras.models.load_model(path, compile=False)
    return lambda examples: _answers(loaded(examples, training=False))


FORMS = {
    "saved_model": Form(path="saved_model", write=_write_saved_model, read=_read_saved_model),
    "keras": Form(path="model.keras", write=_write_keras, read=_read_keras),
}


def _described(spec: DatasetSpec, feature: str) -> dict[str, Any]:
    found = spec.features[feature]
    return {
        "feature": feature,
        "name": serving_name(feature),
        "shape": list(found.shape),
        "dtype": found.dtype,
    }


def _labels(spec: DatasetSpec) -> list[str]:
    return list(spec.labels) or [str(index) for index in range(spec.num_classes)]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
