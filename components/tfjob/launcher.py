"""The TFJob launcher: one job for a run, under control from the first second to the last.

It ends with the job, whatever happens: the first act of the signal handler is the delete; this
function deletes in its own end; the exit step deletes by label; a guard beside the leading task
misses the heartbeat; the job belongs to the step's pod; and it has a deadline of its own.

The launcher's sign of life: an annotation on the job that it renews.

A guard beside the leading task ends training when the sign stands still, so that a launcher that
vanished without a word leaves no job. An annotation needs no permission beyond the job's own.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from components.image import DEFAULTS, PodDefaults
from components.tfjob import names
from components.tfjob.adoption import Adoption
from components.tfjob.client import Api, Connection, RefusedError, Tree, UnreachableError, connect
from components.tfjob.deadlines import Stages
from components.tfjob.logs import Logs, Progress
from components.tfjob.manifest import GRACE_SECONDS, Place, leading, manifest, replicas
from components.tfjob.retry import with_retry
from components.tfjob.supervisor import DRAIN_SECONDS, JobEvents, Supervisor
from components.tfjob.watch import Watch
from trainer.cluster.launcher import Job
from trainer.cluster.signals import on_interrupt
from trainer.config.kubernetes import KubernetesConfig
from trainer.errors import ConfigError, RunInterruptedError, UserError
from trainer.topology import Task

log = logging.getLogger(__name__)
# A sign may be missed a few times before the guard takes the launcher for gone.
HEARTBEATS = 10
MOST_HEARTBEAT_SECONDS = 20.0


class Heartbeat(threading.Thread):
    """Renews the annotation of a job until stopped."""

    def __init__(self, api: Api, name: str, deadline: float) -> None:
        """Beat `SIGNS` times in the seconds after which the guard gives the launcher up."""
        super().__init__(name="heartbeat", daemon=True)
        self._api = api
        self._name = name
        self._every = min(deadline / HEARTBEATS, MOST_HEARTBEAT_SECONDS)
        self._token = secrets.token_hex(4)
        self._count = 0
        self._halted = threading.Event()

    def sign(self) -> dict[str, str]:
        """Return the next value of the annotation; two launchers never give the same."""
        self._count += 1
        return {names.HEARTBEAT: f"{self._token}-{self._count}"}

    def stop(self) -> None:
        """Give no further sign."""
        self._halted.set()

    def run(self) -> None:
        """Give signs."""
        while not self._halted.wait(self._every):
            try:
                self._api.patch_job(self._name, {"metadata": {"annotations": self.sign()}})
            except UnreachableError as error:
                log.debug("no sign could be given: %s", error)
            except RefusedError as error:
                if error.is_forbidden:
                    log.warning("the job cannot be annotated, so that no guard watches: %s", error)
                    return


# Variables of the step that say where the object store is; what opens it comes from secrets.
ENDPOINTS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "GOOGLE_CLOUD_PROJECT", "STORAGE_EMULATOR_HOST", "FLOTILLA_STORAGE_DEADLINE",
)  # fmt: skip
# After their time to end, pods still have to be taken off their nodes.
SLACK_SECONDS = 60
# For so long the exit step asks an API that is out of reach.
DELETE_SECONDS = 120.0


def launch(job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` as a TFJob; see `trainer.cluster.launcher.Launcher`.

    SIGINT and SIGTERM delete the job, whose chief publishes a last checkpoint in its time to end;
    a second one ends at once. `defaults` hold where the configuration says nothing.

    Raises:
        ConfigError: the configuration asks for servers that are no pods of the job.
    """
    for key in ("in_process", "existing_servers"):
        if getattr(job.config.cluster, key):
            raise ConfigError(f"cluster.{key}: not with cluster.launcher tfjob; leave it out")
    connection = connect()
    namespace = job.config.cluster.kubernetes.namespace or connection.namespace
    tree = manifest(job, _place(connection, namespace, defaults))
    _Launch(job, tree, connection, namespace).run()


class _Launch:
    def __init__(self, job: Job, tree: Tree, connection: Connection, namespace: str) -> None:
        settings = job.config.cluster.kubernetes
        self._job = job
        self._tree = tree
        self._name = tree["metadata"]["name"]
        self._api = Api(connection, namespace)
        # A handler may come while a thread holds the pool of the other one.
        self._handlers_api = Api(connection, namespace)
        self._own_namespace = namespace == connection.namespace
        self._unreachable = settings.deadlines.unreachable
        grace = max(
            settings.of(role).grace_seconds or GRACE_SECONDS for role in replicas(job.config)
        )
        self._gone_seconds = grace + SLACK_SECONDS
        self._uid = ""
        self._is_asked = False
        self._happenings: JobEvents = queue.SimpleQueue()
        self._heartbeat = Heartbeat(self._api, self._name, settings.deadlines.heartbeat)

    def run(self) -> None:
        with on_interrupt(self._asked):
            try:
                made = self._adopted()
                self._uid = made["metadata"]["uid"]
                self._follow(made)
            finally:
                self._heartbeat.stop()
                self._delete()

    def _adopted(self) -> Tree:
        own: Tree = {"annotations": self._heartbeat.sign()}
        owner = _owner()
        if owner and self._own_namespace:
            own["ownerReferences"] = [owner]
        adoption = Adoption(self._api, self._unreachable, self._wait)
        return adoption.job(self._tree, own, self._gone_seconds)

    def _follow(self, made: Tree) -> None:
        config = self._job.config
        counts = replicas(config)
        stages = Stages(config.cluster.kubernetes.deadlines, sum(counts.values()))
        logs = Logs(self._api, _teller(leading(config), Progress(stages.moved)))
        watches = [
            self._watching(names.PLURAL, _named(self._name), "TFJob"),
            self._watching("pods", _belonging(self._name), "Pod"),
        ]
        supervisor = Supervisor(self._job, made, self._api, logs, stages, self._happenings)
        self._heartbeat.start()
        for watch in watches:
            watch.start()
        try:
            supervisor.run()
            self._delete()
            if not supervisor.wait_gone(self._gone_seconds):
                log.warning("pods of the job %s are still on their nodes", self._name)
            logs.drain(DRAIN_SECONDS)
        except UserError:
            # What becomes of a job that is being ended is no failure.
            if not self._is_asked:
                raise
            raise self._interrupted(supervisor, logs) from None
        finally:
            logs.stop()
            for watch in watches:
                watch.stop()

    def _interrupted(self, supervisor: Supervisor, logs: Logs) -> RunInterruptedError:
        """Wait for the last checkpoint, and return what to say."""
        self._delete()
        try:
            gone = supervisor.wait_gone(self._gone_seconds)
        except RunInterruptedError as twice:
            return twice
        if not gone:
            return RunInterruptedError(
                f"interrupted; the job {self._name} was not gone after {self._gone_seconds} s, "
                "the checkpoint before it is whole"
            )
        logs.drain(DRAIN_SECONDS, leading(self._job.config))
        return RunInterruptedError(supervisor.words() or "interrupted before training began")

    def _asked(self) -> None:
        """End the job first of all: this process may have one second left."""
        self._is_asked = True
        with suppress(RefusedError, UnreachableError):
            self._handlers_api.delete_job(self._name, quick=True)
        self._happenings.put(None)

    def _delete(self) -> None:
        """Delete the job, unless it is gone or another one has its name by now."""
        try:
            with_retry(
                lambda: self._api.delete_job(self._name, self._uid), SLACK_SECONDS, time.sleep
            )
        except (RefusedError, UserError) as error:
            log.warning("the job %s could not be deleted: %s", self._name, error)

    def _wait(self, seconds: float) -> None:
        """Wait; raise when an end is asked for."""
        with suppress(queue.Empty):
            if self._happenings.get(timeout=seconds) is None:
                raise RunInterruptedError("interrupted before training began")

    def _watching(self, plural: str, query: Mapping[str, str], kind: str) -> Watch:
        def tell(tree: Tree, gone: bool) -> None:
            # Objects in a list do not say their kind.
            self._happenings.put(({**tree, "kind": kind}, gone))

        return Watch(self._api, plural, query, tell, self._happenings.put)


def delete_jobs(settings: KubernetesConfig, run_id: str) -> list[str]:
    """Delete the jobs of a run that are left, and return their names; raises `UserError`."""
    connection = connect()
    api = Api(connection, settings.namespace or connection.namespace)
    label = f"{names.RUN}={names.run_label(run_id)}"
    try:
        left = with_retry(lambda: api.jobs(label), DELETE_SECONDS, time.sleep)
        for job in left:
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            log.warning("the job %s was left, and is deleted", name)
            with_retry(partial(api.delete_job, name, uid), DELETE_SECONDS, time.sleep)
    except RefusedError as error:
        raise UserError(f"cannot delete the jobs with the label {label}: {error}") from None
    return [job["metadata"]["name"] for job in left]


def _place(connection: Connection, namespace: str, defaults: PodDefaults) -> Place:
    own = namespace == connection.namespace
    return Place(
        namespace=namespace,
        service_account=connection.service_account if own else "",
        variables={name: os.environ[name] for name in ENDPOINTS if os.environ.get(name)},
        defaults=defaults,
    )


def _owner() -> Tree | None:
    """Return the step's own pod, whose end ends the job; only in its own namespace."""
    name, uid = (os.environ.get(key, "") for key in ("KFP_POD_NAME", "KFP_POD_UID"))
    if not (name and uid):
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def _named(name: str) -> Mapping[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _belonging(name: str) -> Mapping[str, str]:
    return {"labelSelector": f"{names.JOB_NAME}={name}"}


def _teller(leader: Task, progress: Progress) -> Any:
    def tell(task: Task, text: str) -> None:
        sys.stdout.write(f"[{task}] {text}\n")
        sys.stdout.flush()
        if task == leader:
            progress.take(text)

    return tell
