"""ParameterServerStrategy: the chief gives steps to workers without waiting for each of them."""

import argparse
import json
import os
import signal
import sys

import keras
import tensorflow as tf
from rows import read_rows

# Only the chief writes checkpoints, because the servers may be on other machines.
ON_CHIEF = tf.train.CheckpointOptions(experimental_io_device="/job:chief/task:0/device:CPU:0")


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


def train(flags, resolver, ended):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    shape = read_rows("train").element_spec["image"].shape
    with strategy.scope():
        model, optimizer = build(shape), keras.optimizers.Adam(flags.learning_rate)
        optimizer.build(model.trainable_variables)
        # Unlike the optimizer's count, this one is exact even if many workers update it.
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(step=step, model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, os.environ["FLOTILLA_CHECKPOINTS"], 2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint, ON_CHIEF).assert_existing_objects_matched()
    print("begins at step", int(step), flush=True)
    losses = keras.losses.SparseCategoricalCrossentropy()

    def replica(row):
        with tf.GradientTape() as tape:
            loss = losses(row["label"], model(row["image"], training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        step.assign_add(1)
        return loss

    @tf.function
    def update(iterator):
        return strategy.run(replica, [next(iterator)])

    def batches():
        return read_rows("train").shuffle(10_000).repeat().batch(flags.batch_size)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    while int(step) < flags.steps and not ended:
        first = int(step)
        for _ in range(min(flags.save_every - first % flags.save_every, flags.steps - first)):
            loss = coordinator.schedule(update, args=(iterator,))
        coordinator.join()
        with open(os.environ["FLOTILLA_METRICS"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": int(step), "loss": float(loss.fetch())}) + "\n")
        manager.save(checkpoint_number=int(step), options=ON_CHIEF)
    plain = build(shape)
    plain.set_weights(model.get_weights())
    return plain


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"steps": 300, "save_every": 100, "batch_size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    flags = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("ps", "worker"):
        spec, role, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        tf.distribute.Server(spec, role, index).join()
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    model = train(flags, resolver, ended)
    if ended:
        sys.exit(128 + signal.SIGTERM)
    model.save(os.path.join(os.environ["FLOTILLA_MODEL"], "model.keras"))


if __name__ == "__main__":
    main()
