"""The sidecar of a user's program: runs the agent of its task, and watches the launcher.

Usage: python -m flotilla.components.kubernetes.pods.program_agent --dataset URI --checkpoints URI

The agent (`flotilla.trainer.program`) communicates with the guard in the user's container. As with
Flotilla's trainer, the sidecar of the leading task ends the job if the launcher requests it or is
dead, and workers and servers end after the leading task (`shutdown`). The kubelet stops the sidecar
after the user's container has ended, and restarts a sidecar that exits earlier.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from flotilla.components.kubernetes.pods.guard import watch_as_leader
from flotilla.components.kubernetes.pods.program import EXCHANGE
from flotilla.components.kubernetes.pods.shutdown import Shutdown, delete_job
from flotilla.components.kubernetes.pods.template import CONFIG_VARIABLE, grace_seconds
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config, leader
from flotilla.trainer.features import length
from flotilla.trainer.program.agent import Agent
from flotilla.trainer.program.link import Link
from flotilla.trainer.runtime import signals, streams
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    TRY_AGAIN,
    USAGE,
    TransientError,
    UserError,
)

log = logging.getLogger(__name__)
# The program's share of the pod's grace period. The rest is for publishing the last checkpoint.
PROGRAM_SHARE = 0.5
# How long to wait for SIGTERM after the end of the program, in seconds.
END_SECONDS = 60.0
# Seconds to wait for the guard to disconnect, because SIGTERM may arrive before that.
GONE_SECONDS = 2.0
_KILLED = 128 + signal.SIGTERM


class EndOfPod:
    """Handles SIGTERM, which the kubelet sends after the container of the program has ended.

    If the guard has not announced the end, for example after an out-of-memory kill, the agent
    publishes the files that the program wrote.
    """

    def __init__(self) -> None:
        """Install the signal handler."""
        self.agent: Agent | None = None
        self._event = threading.Event()
        signal.signal(signal.SIGTERM, self._handle)

    def wait(self) -> None:
        """Wait for SIGTERM, because the kubelet restarts a sidecar that exits earlier."""
        self._event.wait(END_SECONDS)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        # If the guard is still connected, the kubelet restarts this container, and the new agent
        # continues with this guard.
        if not self.agent or not self.agent.lose_guard(GONE_SECONDS):
            os._exit(_KILLED)


class Reaction:
    """Stops the program when its container or the whole job is asked to end.

    The leading task stops its program immediately. Workers and servers wait for the leading task.
    """

    def __init__(self, cluster: Cluster, task: Task, seconds: float) -> None:
        """Connect the tasks of a job. The leader has `seconds` to end."""
        self.agent: Agent | None = None
        self.ends_job = False
        self._seconds = seconds
        self._shutdown = Shutdown(cluster, task)

    def take(self, number: int) -> None:
        """Stop the program. In a worker or server, wait for the leader first."""
        assert self.agent
        agent = self.agent
        self._shutdown.take(number, agent.begin_no_more, lambda _: agent.stop(), self._seconds)

    def end_job(self, reason: str) -> None:
        """Stop the program after a last checkpoint, and fail the job to prevent new pods."""
        assert self.agent
        self.ends_job = True
        self.agent.stop(reason, code=FAILED)

    def finish(self, code: int) -> None:
        """Let the servers end if the leader has succeeded. Keep them if the leader may restart."""
        if code == DONE:
            self._shutdown.announce()


def main(arguments: list[str]) -> int:
    """Run the agent of this pod's task, and return the program's exit code."""
    streams.log_to_stderr()
    parser = argparse.ArgumentParser(prog="program_agent")
    for name in ("--config", "--dataset", "--checkpoints", "--workdir"):
        parser.add_argument(name, default="", metavar=name[2:].upper())
    options = parser.parse_args(arguments)
    signals.end_with_parent()
    ended = EndOfPod()
    # The program may run as another user, and must be able to write to the agent's folders.
    os.umask(0)
    try:
        check_variables()
        cluster, task = from_tf_config(os.environ.get("TF_CONFIG", ""))
        config = parse_config(json.loads(os.environ.get(CONFIG_VARIABLE) or "{}"))
    except UserError as error:
        # Kubernetes restarts this container, and the launcher reports that it does not start.
        streams.say(f"agent: {error}")
        return USAGE
    job = Job(
        config=config, dataset=options.dataset, checkpoints=options.checkpoints, workdir=Path.cwd()
    )
    code = _run(job, cluster, task, ended)
    ended.wait()
    return code


def _run(job: Job, cluster: Cluster, task: Task, ended: EndOfPod) -> int:
    try:
        config = length.resolve_for_dataset(job.config, job.dataset)
    except UserError as error:
        return _refuse(error)
    seconds = float(grace_seconds(config, task.role)) * PROGRAM_SHARE
    reaction = Reaction(cluster, task, seconds)
    agent = Agent(
        replace(job, config=config), cluster, task, on_signal=reaction.take, grace=seconds
    )
    reaction.agent = ended.agent = agent
    watched = watch_as_leader(reaction, cluster, os.environ) if task == leader(cluster) else {}
    code = agent.run()
    reaction.finish(code)
    if reaction.ends_job:
        delete_job(watched)
    return code


def _refuse(error: UserError) -> int:
    """Make the guard exit with an error that occurred before the agent started."""
    log.error("%s", error)
    link = Link(Path.cwd() / EXCHANGE)
    code = TRY_AGAIN if isinstance(error, TransientError) else error.exit_code
    while (link.receive(None) or {}).get("is") != "ready":
        pass
    link.send(do="exit", code=code, message=str(error))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
