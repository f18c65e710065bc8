"""Memory of an evaluation does not grow with the examples, only with the predictions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.objectives import NO_ROLES
from tests.trainer.small_run import CLASSES, publish_checkpoint
from trainer import storage
from trainer.config.load import parse_config
from trainer.data.preparation.shards import ShardWriter
from trainer.data.records import encode
from trainer.data.spec import SCHEMA, FeatureSpec
from trainer.models import registry
from trainer.models.spec import InputSpec

SHAPE = (64, 64, 1)
FEW, MANY = 10_000, 60_000
FEATURES = {
    "image": FeatureSpec(shape=SHAPE, dtype="uint8", stored="raw"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=CLASSES),
}
# Of resident memory: it settles within the first thousands of examples.
SLACK = 60 << 20
# `ru_maxrss` would begin with what the process that starts this one has taken.
PEAK = """
import re, sys
from pathlib import Path
from trainer.config.load import parse_config
from trainer.evaluation.evaluate import evaluate
dataset, checkpoint, output, scratch = sys.argv[1:]
config = parse_config({"model": {"name": "softmax"}, "evaluation": {"batch_size": 200}})
evaluate(config, dataset, checkpoint, output, Path(scratch))
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024)
"""


def published(folder, examples):
    source = folder / f"source-{examples}"
    source.mkdir()
    writer = ShardWriter(source, "test", 4)
    generator = np.random.default_rng(0)
    for _ in range(examples // 500):
        batch = {
            "image": generator.integers(0, 256, (500, *SHAPE), np.uint8),
            "label": generator.integers(0, CLASSES, 500),
        }
        for record in encode(FEATURES, batch):
            writer.add(record)
    writer.flush()
    uri = storage.uri_of(folder / f"dataset-{examples}")
    fields = {
        "dataset_schema": SCHEMA, "fingerprint": "0", "inputs": ["image"], "targets": ["label"],
        **NO_ROLES,
        "features": {name: feature.to_json() for name, feature in FEATURES.items()},
        "splits": {"test": {"examples": examples, "shards": writer.examples}},
    }  # fmt: skip
    storage.publish(source, uri, kind="dataset", fields=fields)
    return uri


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_for_many_examples_is_that_for_few_and_the_predictions(tmp_path):
    config = parse_config({"model": {"name": "softmax"}})
    spec = InputSpec(shape=SHAPE, dtype="uint8", output_shape=(CLASSES,))
    checkpoint = publish_checkpoint(tmp_path / "ckpt", registry.build(config.model, spec, 0))
    peaks = []
    for examples in (FEW, MANY):
        dataset = published(tmp_path, examples)
        scratch = tmp_path / f"scratch-{examples}"
        scratch.mkdir()
        output = storage.uri_of(tmp_path / f"evaluation-{examples}")
        command = [sys.executable, "-c", PEAK, dataset, checkpoint, output, str(scratch)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        peaks.append(int(ended.stdout))
    more = MANY - FEW
    predictions = more * (2 * CLASSES * tf.float32.size + tf.int64.size)
    # scikit-learn works on copies of them.
    allowed = 4 * predictions + SLACK
    assert allowed * 2 < more * np.prod(SHAPE), "the examples themselves would be noticed"
    assert peaks[1] - peaks[0] < allowed
