"""Measures the cost of one gradient of each model on a core of this machine.

`python -m benchmarks.scaling.gradient` prints it as JSON. The unit is CPU seconds, which depend
little on other programs on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks import launched

# Number of repetitions after tracing, and of local steps in each. The median repetition is used.
ROUNDS, STEPS = 5, 100
SERVERS = (1, 2, 3, 4)
MODELS: dict[str, tuple[str, str]] = {
    "softmax": ("softmax", "{}"),
    "784-100-10": ("mlp", "{hidden_units: [100]}"),
    "784-1000-10": ("mlp", "{hidden_units: [1000]}"),
}


def settings_of(model: str) -> dict[str, Any]:
    """Return the settings that select a model."""
    name, arguments = MODELS[model]
    return {"model.name": name, "model.args": arguments}


def measured() -> dict[str, dict[str, Any]]:
    """Measure each model in a new process, and return its `gradient` seconds and `held` bytes."""
    one_core = {"TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.scaling.gradient"]
    environment = {**os.environ, **one_core, **quiet}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def gradient_of(model: str) -> dict[str, Any]:
    """Measure local steps of a model in this process, with the baseline's batch size."""
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    settings = settings_of(model)
    built = launched.model(settings)
    size = launched.configuration(settings).training.batch_size
    images = tf.constant(np.random.default_rng(0).integers(0, 256, (size, 28, 28, 1), np.uint8))
    labels = tf.constant(np.arange(size) % 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = [each.value for each in built.trainable_variables]

    @tf.function  # type: ignore[untyped-decorator]
    def steps(count: Any) -> Any:
        for _ in tf.range(count):
            with tf.GradientTape() as tape:
                found = loss(labels, built(images, training=True))
            # Update the weights, because TensorFlow would not compute an unused gradient.
            for weight, each in zip(weights, tape.gradient(found, weights), strict=True):
                weight.assign_sub(1e-9 * each)
        return count

    steps(tf.constant(1)).numpy()
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        steps(tf.constant(STEPS)).numpy()
        rounds.append((time.process_time() - began) / STEPS)
    return {"gradient": sorted(rounds)[ROUNDS // 2], "held": _held(built)}


def _held(model: Any) -> dict[str, list[int]]:
    from flotilla.trainer.strategies.placement import Sized, assign  # noqa: PLC0415

    sized = [
        Sized(path=each.path, bytes=int(np.prod(each.shape)) * each.value.dtype.size)
        for each in model.variables
    ]
    found = {}
    for servers in SERVERS:
        held = [0] * servers
        for each, server in zip(sized, assign(sized, servers, {}), strict=True):
            held[server] += each.bytes
        found[str(servers)] = held
    return found


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps({name: gradient_of(name) for name in MODELS})}\n")
