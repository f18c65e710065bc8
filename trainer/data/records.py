"""One record: a `tf.train.Example` of an example's features, written one by one, read in batches.

Reading is the inner loop of training. A batch is parsed by one op, and a tensor is restored by one
`decode_raw` a feature, five to ten times as fast as example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.data.examples import images, lengths
from trainer.data.spec import FeatureSpec

# `decode_raw` does not know these; it reads the signed type of the same size.
_SIGNED = {"uint32": tf.int32, "uint64": tf.int64}


def encode(features: Mapping[str, FeatureSpec], batch: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a record for each example of a batch of arrays by feature name.

    An image that is stored encoded is bytes that `images.stored_image` has returned, or pixels.
    """
    columns = [_column(feature, batch[name]) for name, feature in features.items()]
    for values in zip(*columns, strict=True):
        example = tf.train.Example(
            features=tf.train.Features(feature=dict(zip(features, values, strict=True)))
        )
        # The order of a map is free otherwise, and the same content has to give the same bytes.
        yield example.SerializeToString(deterministic=True)


def parse(features: Mapping[str, FeatureSpec], records: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return the tensors of `features`, by name, from records: strings of shape (batch,)."""
    if not features:
        return {}
    wire = {name: _wire(feature) for name, feature in features.items()}
    parsed = tf.io.parse_example(records, wire)
    return {name: _restore(feature, parsed[name]) for name, feature in features.items()}


def _column(feature: FeatureSpec, values: Any) -> Iterator[Any]:
    if feature.stored == "image":
        return map(_image_feature, values)
    dtype = object if feature.dtype == "string" else tf.as_dtype(feature.dtype).as_numpy_dtype
    if feature.stored == "sequence":
        make = _MAKERS["bytes" if feature.dtype == "string" else "raw"]
        return (make(np.asarray(value, dtype)) for value in values)
    return map(_MAKERS[feature.stored], np.asarray(values, dtype))


def _bytes_feature(values: list[bytes]) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _image_feature(image: Any) -> Any:
    # Pixels come back the same: a PNG loses nothing.
    return _bytes_feature([image if isinstance(image, bytes) else images.encode(image)])


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "raw": lambda value: _bytes_feature([value.tobytes()]),
    "bytes": lambda value: _bytes_feature(np.ravel(value).tolist()),
    "int": lambda value: tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value)])),
    "float": lambda value: tf.train.Feature(float_list=tf.train.FloatList(value=[float(value)])),
}


def _wire(feature: FeatureSpec) -> Any:
    if feature.stored == "sequence":
        return lengths.wire(feature)
    shape = feature.shape if feature.stored == "bytes" else ()
    kinds = {"int": tf.int64, "float": tf.float32}
    return tf.io.FixedLenFeature(shape, kinds.get(feature.stored, tf.string))


def _restore(feature: FeatureSpec, column: tf.Tensor) -> tf.Tensor:
    if feature.stored == "bytes":
        return column
    if feature.stored == "image":
        return images.decode(feature, column)
    if feature.stored == "sequence":
        return lengths.padded(feature, column)
    dtype = tf.as_dtype(feature.dtype)
    if feature.stored != "raw":
        return tf.cast(column, dtype)
    values = tf.io.decode_raw(column, _SIGNED.get(feature.dtype, dtype))
    if feature.dtype in _SIGNED:
        values = tf.bitcast(values, dtype)
    # The size of the batch stays known where it is.
    size = -1 if column.shape[0] is None else column.shape[0]
    return tf.reshape(values, (size, *feature.shape))
