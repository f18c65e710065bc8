"""`model.fit` of Keras in one process: the published perceptron, and its speed as a JSON object.

The input is what Keras's own documents advise: arrays in memory, through `tf.data`, shuffled,
batched and prefetched; many steps run in one call into TensorFlow, as they do in Flotilla.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import tensorflow as tf

from benchmarks.baselines.mnist import training_examples

BATCH, RATE = 100, 0.01
STEPS_PER_EXECUTION = 500
# The first is traced.
EPOCHS, STEPS_PER_EPOCH = 4, 2500


def main() -> None:
    """Train, and print the steps a second after the first epoch."""
    model = perceptron()
    model.compile(
        optimizer=keras.optimizers.Adam(RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    began: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda _epoch, _logs: began.append(time.monotonic())
    )
    model.fit(
        batches(BATCH),
        epochs=EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        verbose=0,
        callbacks=[clock],
    )
    seconds = time.monotonic() - began[1]
    speed = (EPOCHS - 1) * STEPS_PER_EPOCH / seconds
    sys.stdout.write(f"{json.dumps({'steps_per_second': speed})}\n")


def perceptron() -> keras.Model:
    """Return the published perceptron: images [n, 784] to logits [n, 10]."""
    layers = [
        keras.Input((784,)),
        keras.layers.Dense(100, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def batches(size: int) -> tf.data.Dataset:
    """Return the training examples without end, shuffled: images [size, 784], labels [size]."""
    images, labels = training_examples()
    examples = tf.data.Dataset.from_tensor_slices((images, labels.argmax(1)))
    return examples.cache().shuffle(len(images)).repeat().batch(size).prefetch(2)


if __name__ == "__main__":
    main()
