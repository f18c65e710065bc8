"""A worker or a parameter server: serves TensorFlow's runtime to the chief.

Free of Keras, whose import costs more than TensorFlow's own: a server only runs graphs.
"""

from __future__ import annotations

import tensorflow as tf

from trainer.cluster import Cluster, Task
from trainer.input import stage_input
from trainer.launcher import Job


def serve(job: Job, cluster: Cluster, task: Task) -> None:
    """Stage this worker's shards, then serve on the task's address; never returns.

    The chief's input pipelines run in this process, in its working folder: they find the shards
    of this worker, and no others, as `shards/*.tfrecord`.

    Raises:
        UserError: the shards cannot be fetched.
    """
    stage_input(job, cluster, task)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()), job_name=task.role, task_index=task.index
    )
    server.join()
