"""The dataset that is always there: scikit-learn's 1,797 real handwritten digits, 8 by 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

TRAINING = 1437
# Not the seed of the configuration: train and test have to be the same in every run.
SEED = 20


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,437 training and 360 test examples (E. Alpaydin, C. Kaynak, UCI, 1998)."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of 43 people, scanned and reduced to 8 by 8 pixels.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        # It is not needed to find a dataset that is published.
        from sklearn.datasets import load_digits  # noqa: PLC0415

        source = load_digits()
        order = np.random.RandomState(SEED).permutation(len(source.target))
        # The source counts 0 to 16.
        images = np.round(source.images * 255 / 16).astype(np.uint8)[..., np.newaxis]
        return {
            "train": self._generate_examples(images, source.target, order[:TRAINING]),
            "test": self._generate_examples(images, source.target, order[TRAINING:]),
        }

    def _generate_examples(
        self, images: Any, labels: Any, chosen: Any
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in chosen:
            yield int(index), {"image": images[index], "label": int(labels[index])}
