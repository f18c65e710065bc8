"""Keras with MultiWorkerMirroredStrategy: all workers apply the mean of their gradients."""

import argparse
import json
import os
import signal
import sys

import keras
import tensorflow as tf
from rows import read_rows


def build(shape):
    return keras.Sequential(
        [
            keras.Input(shape, name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(100, "relu"),
            keras.layers.Dense(10, "softmax", name="probabilities"),
        ]
    )


def make_update(strategy, model, optimizer, step, batch_size):
    """Return the training step, because Keras 3 has no `fit` for this strategy."""
    losses = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def replica(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(row["label"], model(row["image"], training=True)))
            loss /= batch_size * strategy.num_replicas_in_sync
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    @tf.function
    def update(rows):
        loss = strategy.reduce("SUM", strategy.run(replica, [next(rows)]), axis=None)
        step.assign_add(1)
        return loss

    return update


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"steps": 300, "save_every": 100, "batch_size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    flags = parser.parse_args()
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = read_rows("train").shuffle(10_000).repeat().batch(flags.batch_size, drop_remainder=True)
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
        model, optimizer = build(rows.element_spec["image"].shape[1:]), keras.optimizers.Adam()
        optimizer.learning_rate = flags.learning_rate
        optimizer.build(model.trainable_variables)
    # Every worker saves to its own folder. Flotilla publishes only the leading worker's
    # checkpoints.
    checkpoint = tf.train.Checkpoint(step=step, model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, os.environ["FLOTILLA_CHECKPOINTS"], 2)
    manager.restore_or_initialize()
    print("begins at step", int(step.numpy()), flush=True)
    update = make_update(strategy, model, optimizer, step, flags.batch_size)
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: rows))
    while int(step.numpy()) < flags.steps and not ended:
        loss, now = update(iterator), int(step.numpy())
        if now % flags.save_every == 0 or now == flags.steps or ended:
            with open(os.environ["FLOTILLA_METRICS"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": now, "loss": float(loss)}) + "\n")
            manager.save(checkpoint_number=now)
    if ended:
        sys.exit(128 + signal.SIGTERM)
    plain = build(model.input_shape[1:])
    plain.set_weights(model.get_weights())
    plain.save(os.path.join(os.environ["FLOTILLA_MODEL"], "model.keras"))


if __name__ == "__main__":
    main()
