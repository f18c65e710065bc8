"""How often tasks have been started again: counted here, since the operator counts only some."""

from __future__ import annotations

from components.tfjob.manifest import replicas
from components.tfjob.pods import restart_policy
from components.tfjob.state import Ended
from trainer import events
from trainer.cluster import Task
from trainer.config import Config
from trainer.errors import BEGIN_AGAIN

# Under the operator's policy `ExitCode` a task with a lower code is not started again.
RETRYABLE = 128


class Restarts:
    """The restarts of all tasks of a job together."""

    def __init__(self, config: Config) -> None:
        """Count from 0 up to `cluster.max_restarts`."""
        self.limit = config.cluster.max_restarts
        self._config = config
        self._count = 0
        # How many restarts there had been when a task was last started.
        self._born = {
            Task(role=role, index=index): 0
            for role, number in replicas(config).items()
            for index in range(number)
        }

    def is_final(self, ended: Ended) -> bool:
        """Say whether the operator does not start the task again, so that the job fails."""
        policy = restart_policy(self._config, ended.task.role)
        if policy == "ExitCode":
            return ended.code is not None and ended.code < RETRYABLE
        return policy == "Never"

    def count(self, ended: Ended) -> bool:
        """Count a task that is started again; False where the limit was reached before."""
        if self.is_final(ended):
            return True
        again = ended.code == BEGIN_AGAIN and self._born.get(ended.task, 0) < self._count
        # A task that begins again because another one was lost is the same incident, and training
        # never notices the evaluator.
        if not again and ended.task.role != "evaluator":
            if self._count >= self.limit:
                return False
            self._count += 1
        self._born[ended.task] = self._count
        events.emit("restart", task=str(ended.task), cause=ended.cause, restarts=self._count)
        return True
