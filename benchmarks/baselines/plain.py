"""Trains the published perceptron with Keras's `model.fit`, and prints its test accuracy.

The only argument is a JSON object of `Settings`. The program runs in one process with Keras's own
optimizer and schedule, and does not use Flotilla.
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
    """Settings of the training. The learning rate decays to zero along a cosine.

    Attributes:
        optimizer: name of the Keras class.
        rate: initial learning rate.
        batch: examples per step.
        steps: number of steps.
        seed: seed of the weights and of the order of examples.
    """

    optimizer: str
    rate: float
    batch: int
    steps: int
    seed: int = 0

    def words(self) -> str:
        """Return the command-line argument for this program."""
        return json.dumps(asdict(self))


def main() -> None:
    """Train, and print the accuracy as a JSON object."""
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
    # Keras warns about shuffling these batches, which are already shuffled.
    model.fit(batches(settings.batch), steps_per_epoch=settings.steps, shuffle=False, verbose=0)
    images, labels = held_out_examples()
    found = model.evaluate(images, labels, batch_size=1000, verbose=0, return_dict=True)
    sys.stdout.write(f"{json.dumps({'accuracy': found['accuracy']})}\n")


if __name__ == "__main__":
    main()
