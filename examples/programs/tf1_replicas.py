"""TensorFlow 1 with parameter servers: asynchronous or (with --sync) synchronous updates."""

import argparse
import json
import os
import signal
import sys

import tensorflow.compat.v1 as tf
from rows import read_rows

CHECKPOINTS, MODEL = os.environ["FLOTILLA_CHECKPOINTS"], os.environ["FLOTILLA_MODEL"]


class Recorder(tf.train.CheckpointSaverListener, tf.train.SessionRunHook):
    """Reports step and loss at each checkpoint; stops at the last step or on SIGTERM."""

    def __init__(self, loss, step, last):
        self.loss, self.step, self.last, self.ending = loss, step, last, False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ending", True))

    def after_run(self, run_context, run_values):
        # Read the step again. With --sync, no worker may continue alone after the last update.
        if self.ending or run_context.session.run(self.step) >= self.last:
            run_context.request_stop()

    def end(self, session, global_step_value=None):
        """Accept the arguments of both base classes, whose `end` methods differ."""

    def before_save(self, session, global_step_value):
        said = {"step": int(global_step_value), "loss": float(session.run(self.loss))}
        with open(os.environ["FLOTILLA_METRICS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


def infer(images):
    x = tf.reshape(tf.cast(images, tf.float32) / 255, [-1, images.shape[1:].num_elements()])
    for name, size, activation in (("hidden", 100, tf.nn.relu), ("logits", 10, tf.identity)):
        w = tf.get_variable(f"{name}/w", [x.shape[1], size])
        b = tf.get_variable(f"{name}/b", [size], initializer=tf.zeros_initializer())
        x = activation(tf.matmul(x, w) + b)
    return x


def train(flags, server, cluster):
    first, count = flags.task_index == 0, cluster.num_tasks("worker")
    worker = f"/job:worker/task:{flags.task_index}"
    rows = read_rows("train").shuffle(10_000).repeat().batch(flags.batch_size)
    with tf.device(tf.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        row = tf.data.make_one_shot_iterator(rows).get_next()
        step = tf.train.get_or_create_global_step()
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits
        loss = tf.reduce_mean(losses(labels=row["label"], logits=infer(row["image"])))
        optimizer = tf.train.AdamOptimizer(flags.learning_rate)
        recorder = Recorder(loss, step, flags.steps)
        hooks = [recorder]
        if flags.sync:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, count, count)
            hooks.append(optimizer.make_session_run_hook(first))
        update = optimizer.minimize(loss, global_step=step)
    # Worker 0 writes the checkpoint as one file, because the servers may be on other machines.
    with tf.device(f"{worker}/cpu:0"):
        scaffold = tf.train.Scaffold(saver=tf.train.Saver(max_to_keep=2))
    saver = tf.train.CheckpointSaverHook(
        CHECKPOINTS, save_steps=flags.save_every, scaffold=scaffold, listeners=[recorder]
    )
    with tf.train.MonitoredTrainingSession(
        server.target, first, CHECKPOINTS, scaffold, hooks, [saver], save_checkpoint_steps=None,
        save_checkpoint_secs=None, save_summaries_steps=None, save_summaries_secs=None,
        stop_grace_period_secs=5,
    ) as session:  # fmt: skip
        while not session.should_stop():
            session.run(update)
    return not recorder.ending, row["image"].shape[1:]


def export(shape):
    with tf.Graph().as_default(), tf.Session() as session:
        images = tf.placeholder(tf.uint8, [None, *shape], name="image")
        answers = tf.nn.softmax(infer(images))
        tf.train.Saver().restore(session, tf.train.latest_checkpoint(CHECKPOINTS))
        tf.saved_model.simple_save(
            session, os.path.join(MODEL, "model"), {"image": images}, {"probabilities": answers}
        )


def main():
    # Keep TensorFlow 2's resource variables. With reference variables, --sync may read a step too
    # early.
    tf.disable_eager_execution()
    parser = argparse.ArgumentParser()
    for name in ("ps_hosts", "worker_hosts", "job_name"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in {"task_index": 0, "steps": 300, "save_every": 100, "batch_size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    parser.add_argument("--sync", action="store_true")
    flags = parser.parse_args()
    hosts = {"ps": flags.ps_hosts.split(","), "worker": flags.worker_hosts.split(",")}
    cluster = tf.train.ClusterSpec(hosts)
    server = tf.train.Server(cluster, flags.job_name, flags.task_index)
    if flags.job_name == "ps":
        server.join()
    done, shape = train(flags, server, cluster)
    if not done:
        sys.exit(128 + signal.SIGTERM)
    if flags.task_index == 0:
        export(shape)


if __name__ == "__main__":
    main()
