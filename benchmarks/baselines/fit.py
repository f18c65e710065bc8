"""Runs Keras's `model.fit` in one process, and prints its speed and device as JSON.

The input follows Keras's documentation: arrays in memory are shuffled, batched and prefetched by
`tf.data`. One call into TensorFlow runs 500 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import keras
import tensorflow as tf

from benchmarks.baselines.mnist import training_examples

BATCH, RATE = 100, 0.01
STEPS_PER_EXECUTION = 500
# The first epoch is not measured, because it traces graphs.
EPOCHS = 4


def main() -> None:
    """Train, and print the steps per second after the first epoch."""
    options = _options()
    model, jit = (_cnn(), True) if options.network == "cnn" else (perceptron(), "auto")
    model.compile(
        optimizer=keras.optimizers.Adam(RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
        jit_compile=jit,
    )
    began: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda _epoch, _logs: began.append(time.monotonic())
    )
    steps = -(-options.steps // EPOCHS)
    model.fit(
        batches(BATCH),
        epochs=EPOCHS,
        steps_per_epoch=steps,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    speed = (EPOCHS - 1) * steps / (time.monotonic() - began[1])
    result = {"steps_per_second": speed, "device": _device()}
    sys.stdout.write(f"{json.dumps(result)}\n")


def perceptron() -> keras.Model:
    """Return the published perceptron: images [n, 784] to logits [n, 10]."""
    layers = [
        keras.Input((784,)),
        keras.layers.Dense(100, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def batches(size: int) -> tf.data.Dataset:
    """Return endless shuffled batches of training examples: images [size, 784], labels [size]."""
    images, labels = training_examples()
    examples = tf.data.Dataset.from_tensor_slices((images, labels.argmax(1)))
    return examples.cache().shuffle(len(images)).repeat().batch(size).prefetch(2)


def _cnn() -> keras.Model:
    """Return Flotilla's `cnn` in plain Keras, with bfloat16 except for variables and logits."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layers: list[keras.layers.Layer] = [keras.Input((784,)), keras.layers.Reshape((28, 28, 1))]
    for filters in (32, 64):
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
        layers.append(keras.layers.MaxPooling2D(2, padding="same"))
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, dtype="float32"),
    ]
    return keras.Sequential(layers)


def _device() -> str:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "no GPU"
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "a GPU"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=["perceptron", "cnn"], default="perceptron")
    parser.add_argument("--steps", type=int, default=8000, help="total number, over all epochs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
