"""One process: trains a Keras model with `fit`, and resumes from the newest checkpoint."""

import argparse
import glob
import json
import os
import signal
import sys

import keras
from rows import read_rows

CHECKPOINTS = os.environ["FLOTILLA_CHECKPOINTS"]


class Recorder(keras.callbacks.Callback):
    """Saves a checkpoint at regular steps, at the last step, and on SIGTERM."""

    def __init__(self, steps, every):
        super().__init__()
        self.steps, self.every, self.ending = steps, every, False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ending", True))

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        last = self.ending or step >= self.steps
        if last or step % self.every == 0:
            with open(os.environ["FLOTILLA_METRICS"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **logs}) + "\n")
            # Rename the complete file, so that readers never see a partial one. The newest file has
            # the highest number.
            part = os.path.join(CHECKPOINTS, "part.keras")
            self.model.save(part)
            os.replace(part, os.path.join(CHECKPOINTS, f"model-{step:08d}.keras"))
            for old in sorted(glob.glob(os.path.join(CHECKPOINTS, "model-*.keras")))[:-2]:
                os.remove(old)
        self.model.stop_training = last


def build(shape, rate):
    model = keras.Sequential(
        [
            keras.Input(shape, name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(100, "relu"),
            keras.layers.Dense(10, "softmax", name="probabilities"),
        ]
    )
    model.compile(keras.optimizers.Adam(rate), loss="sparse_categorical_crossentropy")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save_every", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    flags = parser.parse_args()

    rows = read_rows("train").map(lambda row: (row["image"], row["label"])).cache()
    batches = rows.shuffle(10_000).repeat().batch(flags.batch_size, drop_remainder=True)
    saved = sorted(glob.glob(os.path.join(CHECKPOINTS, "model-*.keras")))
    shape = batches.element_spec[0].shape[1:]
    model = keras.models.load_model(saved[-1]) if saved else build(shape, flags.learning_rate)
    print("begins at step", int(model.optimizer.iterations), flush=True)
    recorder = Recorder(flags.steps, flags.save_every)
    if int(model.optimizer.iterations) < flags.steps:
        model.fit(
            batches, steps_per_epoch=flags.steps, callbacks=[recorder], shuffle=False, verbose=0
        )
    if recorder.ending:
        sys.exit(128 + signal.SIGTERM)
    model.save(os.path.join(os.environ["FLOTILLA_MODEL"], "model.keras"))


if __name__ == "__main__":
    main()
