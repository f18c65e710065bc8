"""Fetches an exported model, verifies it with its manifest, and loads it for prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer import signing, storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.files.columns import RecordedInput, make_inputs
from flotilla.trainer.evaluation.signature import LABELS, SERVING
from flotilla.trainer.evaluation.threshold import read_thresholds
from flotilla.trainer.models.registry import report_bad_input
from flotilla.trainer.promotion.registry import read_kinds
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.errors import report_errors

KIND = "model"
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A loaded model.

    Attributes:
        config: the configuration of the run that trained it.
        inputs: its inputs, in order.
        kinds: the kind of task of each output, by output name. A single output has an empty name.
        labels: the class names of each output.
        thresholds: the decision threshold of each output with a positive class.
        dataset: the URI of the dataset that it was trained on.
    """

    uri: str
    config: Config
    inputs: tuple[RecordedInput, ...]
    kinds: Mapping[str, str]
    labels: Mapping[str, Sequence[str]]
    dataset: str
    signature: Any
    names: Mapping[str, str]
    thresholds: Mapping[str, float] = field(default_factory=dict)

    @property
    def varying_answers(self) -> frozenset[str]:
        """The outputs whose second axis is as long as the longest input in the batch."""
        return frozenset(
            name
            for name, each in self.signature.structured_outputs.items()
            if len(each.shape) > 1 and each.shape[1] is None
        )

    def ask(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Return the predictions for a batch, with inputs keyed by feature. Raises `UserError`."""
        given = {
            self.names[each.feature]: tf.constant(inputs[each.feature], each.spec.dtype)
            for each in self.inputs
        }
        with _refusals(self.uri), report_bad_input():
            return {name: each.numpy() for name, each in self.signature(**given).items()}


def fetch_model(uri: str, folder: Path) -> ExportedModel:
    """Fetch the model published at `uri` into `folder`, verify it, and load it.

    Raises:
        UserError: the model is missing, damaged, of an earlier version, or cannot be loaded, or a
            key for verifying signatures is set and the signature is missing or invalid.
    """
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(
            f"{uri} is of kind {manifest.kind!r}, not {KIND!r}; pass the URI of an exported model"
        )
    fields = manifest.fields
    if "reads" not in fields:
        raise UserError(
            f"{uri} was exported by an earlier version, which did not record how to read the "
            "inputs; export it again"
        )
    place = str(fields["saved_model"])
    few = {LABELS, "config.json"}
    signing.fetch(
        uri, folder, manifest, only=lambda path: path in few or path.startswith(f"{place}/")
    )
    with report_errors(f"use {uri}", storage.Corrupt), storage.check_form(f"config.json of {uri}"):
        config = parse_config(parse_mapping((folder / "config.json").read_bytes()))
    with _refusals(uri):
        signature = tf.saved_model.load(folder / place).signatures[SERVING]
    labels = folder / LABELS
    with storage.check_form(f"the manifest of {uri}"):
        kinds = read_kinds(fields)
        return ExportedModel(
            uri=uri,
            config=config,
            inputs=make_inputs(fields["reads"]),
            kinds=kinds,
            labels=fields.get("labels")
            or {"": labels.read_text(encoding="utf-8").splitlines() if labels.is_file() else []},
            thresholds={name: each.value for name, each in read_thresholds(fields, kinds).items()},
            dataset=str(fields.get("made_from", {}).get("dataset", "")),
            signature=signature,
            names={each["feature"]: each["name"] for each in fields["inputs"]},
        )


@contextmanager
def _refusals(uri: str) -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError:
        raise UserError("there is not enough memory for a batch; lower --batch-size") from None
    except UserError:
        raise
    # Calling a SavedModel may raise any exception.
    except Exception as error:
        line = " ".join(str(user_code.format_error(error)).split())[:500]
        raise UserError(f"the model {uri} cannot predict: {line}") from error
