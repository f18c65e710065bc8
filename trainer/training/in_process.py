"""Training in the process that asks for it, step by step as Python code: for a debugger."""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

from trainer.cluster.launcher import Job
from trainer.cluster.local import HOST, free_port
from trainer.cluster.process import CONFIG
from trainer.storage.errors import reported
from trainer.training import task


def train_here(job: Job) -> None:
    """Train a job whose strategy needs no server, without a graph.

    An error of the user's code keeps its frames, which a graph does not have.

    Raises:
        UserError: see `trainer.training.chief.lead`.
    """
    # It has to be there when a trace of the error is made.
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    tf.config.run_functions_eagerly(True)
    with reported(f"write to {job.workdir}"):
        job.workdir.mkdir(parents=True, exist_ok=True)
        config = job.workdir / CONFIG
        config.write_text(job.config.model_dump_json(), encoding="utf-8")
    task.run(
        argparse.Namespace(
            config=config,
            dataset=job.dataset,
            checkpoints=job.checkpoints,
            workdir=job.workdir,
            chief_hosts=f"{HOST}:{free_port()}",
            ps_hosts="",
            worker_hosts="",
            job_name="chief",
            task_index=0,
        )
    )
