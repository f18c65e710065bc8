"""One task of a local cluster as a process: command, environment, folder, log and last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from trainer import gpus, parent
from trainer.cluster import Cluster, Task
from trainer.errors import UserError
from trainer.launcher import Job
from trainer.topology import topology_of

# What a task writes in its folder when it ends by an error of the user: one line, no traceback.
WORDS = "words.txt"
# TensorFlow imports Keras 3 at once unless it is told of Keras 2, which it imports when it is used:
# never, in a server.
_SERVER = {"TF_USE_LEGACY_KERAS": "1"}
CONFIG = "config.json"
LOG = "log.txt"


class TaskProcess:
    """A task that can be started, and started again, always in the same folder and on its port."""

    def __init__(self, job: Job, cluster: Cluster, task: Task) -> None:
        """Lay out the folder `<workdir>/<role>-<index>`."""
        self.task = task
        self.folder = job.workdir.absolute() / str(task)
        self.log = self.folder / LOG
        self._job = job
        self._cluster = cluster
        self._leads = topology_of(job.config.training.strategy).leads(task)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; its output is added to the log of its folder.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / WORDS).unlink(missing_ok=True)
            (self.folder / CONFIG).write_text(self._job.config.model_dump_json(), encoding="utf-8")
            output = self.log.open("ab")
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}") from None
        with output:
            self._popen = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its own session: a Ctrl-C of the terminal goes to the launcher alone.
                start_new_session=True,
            )
        return self._popen

    def terminate(self) -> None:
        """Ask for an end."""
        if self._popen and self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now and wait until it is gone."""
        if self._popen:
            self._popen.kill()
            self._popen.wait()

    def words(self) -> str:
        """Return the line with which the task ended, or nothing if it just died."""
        path = self.folder / WORDS
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def last_line(self) -> str:
        """Return the last line of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "(nothing)"

    def _command(self) -> list[str]:
        stage = [sys.executable, "-m", "trainer", "task", "--config", str(self.folder / CONFIG)]
        uris = ["--dataset", self._job.dataset, "--checkpoints", self._job.checkpoints]
        return [*stage, *uris, "--workdir", str(self.folder)]

    def _environment(self) -> dict[str, str]:
        return {
            # TensorFlow's own account of its devices drowns what the task has to say.
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            **({} if self._leads else _SERVER),
            **gpus.environment(self._job.config, self.task),
            **parent.environment(),
            "TF_CONFIG": self._cluster.tf_config(self.task),
            # A dead peer is an error at once and not after gRPC's own patience.
            "GRPC_FAIL_FAST": "use_caller",
            # The user's own modules stand where the run was started, not in the task's folder.
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])
            ),
        }
