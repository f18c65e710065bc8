"""Reads the dataset files that Flotilla placed on this machine, with TensorFlow alone."""

import json
import os

import tensorflow as tf


def read_rows(split, folder=None):
    """Return the rows of a split (train or validation) as a tf.data.Dataset of {feature: value}."""
    folder = folder or os.environ["FLOTILLA_DATASET_FILES"]
    with open(os.path.join(folder, "features.json"), encoding="utf-8") as file:
        features = json.load(file)
    wire = {name: tf.io.VarLenFeature(tf.as_dtype(f["wire"])) for name, f in features.items()}

    def parse(record):
        columns, rows = tf.io.parse_single_example(record, wire), {}
        for name, f in features.items():
            values = columns[name].values
            values = tf.io.decode_raw(values[0], f["raw"]) if f["raw"] else values
            rows[name] = tf.reshape(tf.cast(values, f["dtype"]), [-1, *f["shape"]])
            if f["lengths"]:
                lengths = columns[f["lengths"]].values
                rows[name] = tf.RaggedTensor.from_row_lengths(rows[name], lengths)
        return rows

    files = tf.data.Dataset.list_files(os.path.join(folder, split, "*.tfrecord"), shuffle=False)
    return tf.data.TFRecordDataset(files).map(parse).unbatch()
