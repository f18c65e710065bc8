"""A model that counts in weights how often each example is visited.

The gradient of an example's weight is -1 / batch size in each batch that contains the example, and
0 in all others. Plain SGD with the batch size as its learning rate therefore adds 1 per visit. A
checkpoint stores these counts together with the input position.
"""

from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.features.dataset_spec import DatasetSpec

EXAMPLES = 1000
BATCH = 16
WEIGHT = "variables/model.Svisits.Scount/.ATTRIBUTES/VARIABLE_VALUE"


class Numbers(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "all"}

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"number": np.int64, "even": np.float32}
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("number", "even"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {"train": self._examples(0, EXAMPLES), "test": self._examples(EXAMPLES, 20)}

    def _generate_examples(self) -> Any:
        raise NotImplementedError

    def _examples(self, first: int, count: int) -> Any:
        for number in range(first, first + count):
            yield number, {"number": number, "even": float(number % 2)}


@keras.saving.register_keras_serializable("tests")
class Visits(keras.layers.Layer):
    def build(self, _shape: Any) -> None:
        self.count = self.add_weight(shape=(EXAMPLES,), initializer="zeros", name="count")

    def call(self, numbers: Any) -> Any:
        found = keras.ops.take(self.count, numbers % EXAMPLES)
        self.add_loss(-keras.ops.mean(found))
        return keras.ops.stop_gradient(found) * 0


def model(_spec: DatasetSpec) -> keras.Model:
    given = keras.Input((), dtype="int64", name="number")
    return keras.Model(given, keras.layers.Reshape((1,))(Visits(name="visits")(given)))


def published(folder: Path) -> str:
    config = DataConfig(dataset="tests.cluster.visited:Numbers", validation=0)
    return prepare(config, storage.uri_of(folder), folder / "scratch").uri


def settings(strategy: str, steps: int, averaged: int = 1, **named: Any) -> dict[str, Any]:
    """Return the configuration of a run that averages `averaged` batches per update."""
    sections = {
        "data": {
            "dataset": "tests.cluster.visited:Numbers",
            "validation": 0,
            "partition": "dynamic",
        },
        "model": {"name": "tests.cluster.visited:model"},
        "training": {
            "strategy": strategy,
            "steps": steps,
            "batch_size": BATCH,
            "checkpoint_every": 100,
            "validate_every": 0,
            "keep": 100,
            "optimizer": {"name": "sgd", "learning_rate": float(BATCH * averaged)},
        },
        "cluster": {"parameter_servers": 1, "workers": 2},
        "gate": {"min": {}, "champion": {}},
    }
    return {name: {**keys, **named.get(name, {})} for name, keys in sections.items()}


def visits(checkpoints: str) -> tuple[np.ndarray, dict[str, Any]]:
    uri, _ = newest_checkpoint(checkpoints)
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return np.rint(reader.get_tensor(WEIGHT)), dict(storage.read_manifest(uri).fields)
