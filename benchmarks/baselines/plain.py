"""`model.fit` of Keras, and the test accuracy that it comes to: the published perceptron, plainly.

The only argument is a JSON object of `Settings`. Keras's own optimizer and schedule, variables and
gradients of one process: nothing of Flotilla has a part in it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import keras

from benchmarks.baselines.fit import STEPS_PER_EXECUTION, batches, perceptron
from benchmarks.baselines.mnist import held_out_examples


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What training is; the rate falls along a cosine to zero with the last step.

    Attributes:
        optimizer: its class in Keras.
        rate: of the first step.
        batch: examples of a step.
        steps: of training.
        seed: of weights and orders.
    """

    optimizer: str
    rate: float
    batch: int
    steps: int
    seed: int = 0

    def words(self) -> str:
        """Return the argument of this program."""
        return json.dumps(asdict(self))


def main() -> None:
    """Train, and print the share of right answers as a JSON object."""
    settings = Settings(**json.loads(sys.argv[1]))
    keras.utils.set_random_seed(settings.seed)
    model = perceptron()
    rate = keras.optimizers.schedules.CosineDecay(settings.rate, settings.steps)
    model.compile(
        optimizer=getattr(keras.optimizers, settings.optimizer)(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    # Shuffled already; Keras warns unless this is declared.
    model.fit(batches(settings.batch), steps_per_epoch=settings.steps, shuffle=False, verbose=0)
    images, labels = held_out_examples()
    found = model.evaluate(images, labels, batch_size=1000, verbose=0, return_dict=True)
    sys.stdout.write(f"{json.dumps({'accuracy': found['accuracy']})}\n")


if __name__ == "__main__":
    main()
