"""A worker or parameter server under test; a worker has `DEVICES` virtual devices."""

import os

import tensorflow as tf

from flotilla.trainer.config.topology import from_tf_config
from flotilla.trainer.runtime import signals


def main() -> None:
    """Serve until this process is killed or its parent, the test process, exits."""
    signals.end_with_parent()
    cluster, task = from_tf_config(os.environ["TF_CONFIG"])
    devices = int(os.environ.get("DEVICES", "1")) if task.role == "worker" else 1
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()),
        job_name=task.role,
        task_index=task.index,
        config=tf.compat.v1.ConfigProto(device_count={"CPU": devices}),
    )
    server.join()


if __name__ == "__main__":
    main()
