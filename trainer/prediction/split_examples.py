"""A split of a prepared dataset as input, in the order in which an evaluation reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from trainer import storage
from trainer.data.read import stage_shards
from trainer.data.records import parse
from trainer.data.spec import KIND, DatasetSpec, FeatureSpec, length_name
from trainer.errors import ConfigError, UserError, nearest
from trainer.prediction.batch import Batch, Examples
from trainer.prediction.exported_model import ExportedModel
from trainer.prediction.file_examples import ROW
from trainer.prediction.request import ALL, Request


class SplitExamples(Examples):
    """The examples of one split."""

    def __init__(self, model: ExportedModel, request: Request, scratch: Path) -> None:
        """Read the dataset that is named, or that of the model.

        Raises:
            UserError: it is gone, has no such split, or not what the model takes.
        """
        self._model, self._request, self._scratch = model, request, scratch
        self._uri = request.inputs[0] if request.inputs else model.dataset
        try:
            manifest = storage.read_manifest(self._uri)
        except storage.NotPublished:
            raise UserError(
                f"the dataset {self._uri} is not there"
                f"{'' if request.inputs else ', on which the model was trained'}: name another one"
            ) from None
        if manifest.kind != KIND:
            raise UserError(f"{self._uri} is a {manifest.kind} and no {KIND}: leave --split out")
        self._spec = DatasetSpec.from_manifest(manifest)
        self._check()
        self._spec.files(request.split)
        self.total = self._spec.examples(request.split)
        if not self.total:
            raise UserError(f"the split {request.split!r} of {self._uri} has no example")

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all examples, in the order of the shards."""
        features = self._spec.features
        copied = self._copied()
        inputs = [each.feature for each in self._model.inputs]
        varying = [name for name in inputs if features[name].varies]
        more = [length_name(name) for name in varying[:1]]
        wanted = {name: features[name] for name in dict.fromkeys([*inputs, *copied, *more])}
        split = self._request.split
        files = stage_shards(self._uri, self._scratch / split, split)
        records = tf.data.Dataset.from_tensor_slices([str(path) for path in files])
        records = records.flat_map(tf.data.TFRecordDataset).batch(size)
        parsed = records.map(lambda batch: parse(wanted, batch)).prefetch(2)
        before = 0
        for values in parsed.as_numpy_iterator():
            count = len(next(iter(values.values())))
            columns = {ROW: pa.array(np.arange(before + 1, before + count + 1))}
            columns |= {name: _column(features[name], values[name]) for name in copied}
            before += count
            yield Batch(
                {name: values[name] for name in inputs},
                pa.table(columns),
                values[more[0]] if more else None,
            )

    def _check(self) -> None:
        for each in self._model.inputs:
            there = self._spec.features.get(each.feature)
            if there is None:
                raise UserError(
                    f"the dataset {self._uri} has no feature {each.feature!r}, which the model "
                    f"takes{nearest(each.feature, self._spec.features)}"
                )
            if (there.shape, there.dtype) != (each.spec.shape, each.spec.dtype):
                raise UserError(
                    f"{each.feature!r} of the dataset {self._uri} is {_said(there)}, and the model "
                    f"takes {_said(each.spec)}"
                )
            if there.labels != each.spec.labels:
                raise UserError(
                    f"{each.feature!r} of the dataset {self._uri} has other classes than that "
                    "which the model was trained on"
                )

    def _copied(self) -> list[str]:
        features = self._spec.features
        able = [name for name, spec in features.items() if not spec.shape]
        if ALL in self._request.columns:
            return able
        for name in self._request.columns:
            if name not in able:
                what = "is no single value" if name in features else "is no feature"
                hint = nearest(name, able) or f" (one of {', '.join(able)})"
                raise ConfigError(f"--columns: {name!r} {what} of the dataset{hint}")
        return list(dict.fromkeys(self._request.columns))


def _said(spec: FeatureSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)}" if spec.shape else f"one {spec.dtype}"


def _column(spec: FeatureSpec, values: NDArray[Any]) -> pa.Array:
    if spec.labels:
        names = np.array([*spec.labels, None], object)
        known = np.where((values >= 0) & (values < len(spec.labels)), values, len(spec.labels))
        return pa.array(names[known.astype(np.int64)].tolist(), pa.string())
    if spec.dtype == "string":
        return pa.array([each.decode(errors="replace") for each in values.tolist()], pa.string())
    return pa.array(values)
