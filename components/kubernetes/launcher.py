"""The TFJob launcher: creates or adopts the job of a run, watches it, and never leaves an orphan.

A job must not outlive its launcher, however that one ends. Each of these ends it, and the first
that works is enough: the signal handler asks for a stop before anything else (`shutdown.Stop`), or
deletes the job where nobody would answer; `launch` deletes it on every return; the exit step ends
what has the run's label; the guard of the leading task ends the job when it is asked to, and when
the heartbeat stops; the job has an owner reference to the step's pod; and an active deadline.

The heartbeat is an annotation on the job, which needs no permission beyond those on the job itself.
It is renewed for the first time before training can begin: a launcher that may not is refused.

The operator fails the whole job when a pod of it is deleted, evicted or preempted. The launcher
then deletes the job, waits until its pods are gone, and makes it again from the same manifest:
training resumes from the newest checkpoint, which the chief has published in its grace period.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from components.image import DEFAULTS, PodDefaults
from components.kubernetes import names
from components.kubernetes.adoption import Adoption
from components.kubernetes.api import rbac
from components.kubernetes.api.client import (
    Api,
    Connection,
    RefusedError,
    UnreachableError,
    connect,
)
from components.kubernetes.api.retry import deleted_by_another, refused, with_retry
from components.kubernetes.api.watch import Watch
from components.kubernetes.deadlines import Deadlines
from components.kubernetes.logs import EventRelay, Logs
from components.kubernetes.names import Tree
from components.kubernetes.pods import pod_state
from components.kubernetes.pods.pod_state import Loss
from components.kubernetes.pods.shutdown import Stop
from components.kubernetes.supervisor import DRAIN_SECONDS, JobEvents, Restarts, Supervisor
from components.tfjob.manifest import (
    GRACE_SECONDS,
    Place,
    isolated,
    leading,
    manifest,
    network_policy,
    replicas,
)
from trainer.cluster.launcher import Job
from trainer.cluster.signals import on_interrupt
from trainer.config.kubernetes import DeadlinesConfig, KubernetesConfig
from trainer.errors import ConfigError, RunInterruptedError, UserError
from trainer.topology import Task

log = logging.getLogger(__name__)
# Several heartbeats may be lost before the guard takes the job for an orphan.
HEARTBEATS = 10
MAX_HEARTBEAT_SECONDS = 20.0
# Variables of the step that address the object store; its credentials come from secrets.
ENDPOINTS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "GOOGLE_CLOUD_PROJECT", "STORAGE_EMULATOR_HOST", "FLOTILLA_STORAGE_DEADLINE",
)  # fmt: skip
# Time for the removal of pods from their nodes after the grace period.
REMOVAL_SECONDS = 60
# How long the exit step retries while the API is unreachable.
DELETE_SECONDS = 120.0


def launch(job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` as a TFJob; see `trainer.cluster.launcher.Launcher`.

    After SIGINT or SIGTERM the chief publishes a last checkpoint within its grace period, and the
    job is deleted; a second signal deletes it without that. `defaults` hold where the
    configuration does not.

    Raises:
        ConfigError: the configuration asks for servers that are not pods of the job.
    """
    for key in ("in_process", "existing_servers"):
        if getattr(job.config.cluster, key):
            raise ConfigError(f"cluster.{key}: not with cluster.launcher tfjob; leave it out")
    connection = connect()
    namespace = job.config.cluster.kubernetes.namespace or connection.namespace
    _Launch(job, connection, namespace, defaults).run()


def delete_jobs(settings: KubernetesConfig, run_id: str) -> list[str]:
    """End the jobs of a run that are left, and return their names; raises `UserError`.

    This process may have ten seconds: a job whose leading task runs is asked to end by itself, with
    a last checkpoint, before it is waited for and deleted.
    """
    connection = connect()
    api = Api(connection, settings.namespace or connection.namespace)
    label = f"{names.RUN}={names.label_value(run_id)}"
    try:
        orphans = with_retry(partial(api.labelled, names.PLURAL, label), DELETE_SECONDS, time.sleep)
        for orphan in orphans:
            name, uid = orphan["metadata"]["name"], orphan["metadata"]["uid"]
            log.warning("ending the job %s, which its launcher has left", name)
            if not pod_state.is_finished(orphan) and not orphan["metadata"].get(
                "deletionTimestamp"
            ):
                _stop(api, orphan)
            with_retry(partial(api.delete_job, name, uid), DELETE_SECONDS, time.sleep)
    except RefusedError as error:
        # Where the kind is not served there is no job.
        if error.is_unserved:
            return []
        raise UserError(f"cannot delete the jobs with the label {label}: {error}") from None
    return [orphan["metadata"]["name"] for orphan in orphans]


def _stop(api: Api, job: Tree) -> None:
    """Have the leading task of a job end with a last checkpoint, where it runs, and wait for it."""
    stop = Stop(job)
    with suppress(RefusedError, UnreachableError):
        if stop.leader_runs(api):
            stop.request(api)
            stop.wait(api, time.sleep)


class Heartbeat(threading.Thread):
    """Renews the heartbeat of a job until `stopped` is set."""

    def __init__(
        self, api: Api, name: str, limit: float, on_refused: Callable[[RefusedError], None]
    ) -> None:
        """Send `HEARTBEATS` in the `limit` seconds after which the guard ends the job.

        `on_refused` is called when half of them in a row were refused.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._api = api
        self._name = name
        self._limit = limit
        self._interval = min(limit / HEARTBEATS, MAX_HEARTBEAT_SECONDS)
        self._on_refused = on_refused
        self._token = secrets.token_hex(4)
        self._count = -1
        self.stopped = threading.Event()

    def annotation(self) -> dict[str, str]:
        """Return the next heartbeat; two launchers never send the same."""
        self._count += 1
        return {names.HEARTBEAT: names.heartbeat(self._token, self._count)}

    def renew_first(self, limits: DeadlinesConfig, wait: Callable[[float], None]) -> None:
        """Renew the heartbeat of the job's creation: no guard relies on one that never was.

        Raises:
            UserError: it is refused, or the API does not answer in the time after which a guard
                may take the job for an orphan.
        """
        seconds = min(limits.unreachable or self._limit, self._limit)
        heartbeat = self.annotation()
        patch = {"metadata": {"annotations": heartbeat}}
        try:
            call = partial(self._api.patch_job, self._name, patch)
            job = with_retry(call, seconds, wait, limits.operator)
        except RefusedError as error:
            is_gone = error.is_missing and not error.is_unserved
            message = deleted_by_another(self._name) if is_gone else refused(error)
            raise UserError(message) from None
        if not heartbeat.items() <= (job["metadata"].get("annotations") or {}).items():
            raise UserError(
                f"the annotation {names.HEARTBEAT} of the job {self._name} is not kept by the "
                "Kubernetes API: exempt it from what changes objects in this namespace"
            )

    def run(self) -> None:
        """Send heartbeats."""
        refusals = 0
        while not self.stopped.wait(self._interval):
            try:
                self._api.patch_job(self._name, {"metadata": {"annotations": self.annotation()}})
                refusals = 0
            except UnreachableError as error:
                log.debug("a heartbeat was not sent: %s", error)
            except RefusedError as error:
                if error.is_missing:
                    return
                # Any other refusal may be temporary; without heartbeats the guard ends the job.
                refusals += 1
                if refusals * self._interval >= self._limit / 2:
                    self._on_refused(error)
                    return
                if refusals == 1:
                    log.warning("a heartbeat was refused, retrying: %s", error)


class _Launch:
    """The job of a run from its creation to its deletion, made again whenever it loses a pod."""

    def __init__(
        self, job: Job, connection: Connection, namespace: str, defaults: PodDefaults
    ) -> None:
        settings = job.config.cluster.kubernetes
        self._job, self._settings = job, settings
        self._manifest = manifest(job, _place(connection, namespace, defaults))
        self._name = self._manifest["metadata"]["name"]
        self._namespace = namespace
        self._api = Api(connection, namespace)
        # The handler may run while a thread holds the lock of the other pool.
        self._handler_api = Api(connection, namespace)
        self._is_own_namespace = namespace == connection.namespace
        grace = max(
            settings.of(role).grace_seconds or GRACE_SECONDS for role in replicas(job.config)
        )
        self._deletion_seconds = grace + REMOVAL_SECONDS
        self._uid = ""
        self._is_interrupted = self._is_stopping = False
        self._is_interrupted_again = threading.Event()
        self._stop: Stop | None = None
        self._is_adopted = False
        self._leader_runs: Callable[[], bool] = lambda: False
        # What the leading task said last, to whom an interrupt comes while there is no job.
        self._message = ""
        self._job_events: JobEvents = queue.SimpleQueue()
        self._heartbeat = self._new_heartbeat()
        self._deadlines = Deadlines(settings.deadlines, sum(replicas(job.config).values()))
        self._restarts = Restarts(job.config)

    def run(self) -> None:
        with on_interrupt(self._on_interrupt):
            try:
                rbac.require(self._api, self._namespace)
                self._isolate()
                while self._supervise(self._adopt_or_create()):
                    self._deadlines.begin_again()
            finally:
                self._heartbeat.stopped.set()
                self._delete()

    def _new_heartbeat(self) -> Heartbeat:
        limit = self._settings.deadlines.heartbeat
        return Heartbeat(self._api, self._name, limit, self._job_events.put)

    def _adopt_or_create(self) -> Tree:
        if self._is_interrupted:
            raise self._interruption()
        self._uid = ""
        self._stop = None
        self._heartbeat = self._new_heartbeat()
        own: Tree = {"annotations": self._heartbeat.annotation()}
        name, uid = (os.environ.get(key, "") for key in ("KFP_POD_NAME", "KFP_POD_UID"))
        # The deletion of the step's own pod deletes the job. An owner in another namespace does not
        # exist for Kubernetes: it would collect the job.
        if name and uid and self._is_own_namespace:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
            own["ownerReferences"] = [owner]
        limits = self._settings.deadlines
        adoption = Adoption(self._api, limits, self._wait)
        # A pod on a node that is gone stays until Kubernetes notices: as long as one without a node
        # may wait.
        patience = max(self._deletion_seconds, limits.queueing or math.inf)
        created = adoption.adopt_or_create(self._manifest, own, patience)
        self._uid, self._is_adopted = created["metadata"]["uid"], adoption.is_adopted
        self._stop = Stop(created)
        self._make_policy(created)
        self._heartbeat.renew_first(limits, self._wait)
        return created

    def _isolate(self) -> None:
        """Leave the pods to a network policy of the job, where it may be made."""
        if rbac.may_isolate(self._api, self._namespace):
            self._manifest = isolated(self._manifest)
            return
        log.warning(
            "the launcher may not %s in the namespace %s: other jobs of Flotilla there reach the "
            "tasks of this one; deploy/ grants it", rbac.ISOLATION, self._namespace,
        )  # fmt: skip

    def _make_policy(self, job: Tree) -> None:
        """Make the network policy of a job; an isolated one is not left open."""
        policy = network_policy(job)
        if policy is None:
            return
        try:
            limit = self._settings.deadlines.unreachable
            with_retry(partial(self._api.create_policy, policy), limit, self._wait)
        except RefusedError as error:
            raise UserError(
                f"{refused(error)}; the network policy of the job {self._name} cannot be made"
            ) from None

    def _supervise(self, created: Tree) -> Loss | None:
        """Watch a job until it is gone; return the loss for which it has to be made again."""
        leader = leading(self._job.config)
        relay = EventRelay(self._deadlines.progressed, self._restarts.progressed)

        def write(task: Task, text: str) -> None:
            # The log of the step, in which the user looks for the logs of all tasks.
            sys.stdout.write(f"[{task}] {text}\n")
            sys.stdout.flush()
            if task == leader:
                relay.take(text)

        logs = Logs(self._api, write)
        watches = [
            self._watch("TFJob", names.PLURAL, {"fieldSelector": f"metadata.name={self._name}"}),
            self._watch("Pod", "pods", {"labelSelector": f"{names.JOB_NAME}={self._name}"}),
        ]
        supervisor = Supervisor(
            self._job, created, self._api, logs, self._deadlines, self._restarts, self._job_events
        )
        self._leader_runs = supervisor.leader_runs
        self._heartbeat.start()
        for watch in watches:
            watch.start()
        try:
            lost = supervisor.run()
            if lost:
                self._report(lost)
            self._heartbeat.stopped.set()
            self._end(supervisor)
            logs.drain(DRAIN_SECONDS)
            self._message = supervisor.termination_message() or self._message
            if lost:
                # Not before: the last checkpoint, published in the grace period, is progress.
                self._restarts.count_loss(lost)
            return lost
        except UserError as error:
            # A job that is being deleted also fails, which is not an error of the run.
            if self._is_interrupted:
                raise self._interrupted(supervisor, logs) from None
            error.traceback = relay.traceback
            self._end(supervisor)
            raise
        finally:
            logs.stop()
            for watch in watches:
                watch.stopped.set()

    def _end(self, supervisor: Supervisor) -> None:
        """Delete the job and wait for its pods: with the step nothing of it is left."""
        if self._delete() and not supervisor.wait_until_deleted(self._deletion_seconds):
            log.warning("pods of the job %s are still on their nodes", self._name)

    def _report(self, lost: Loss) -> None:
        log.warning(
            "%s lost its pod %s: %s; the operator failed the job %s for it, which is made again",
            lost.task, lost.pod, lost.how, self._name,
        )  # fmt: skip

    def _interrupted(self, supervisor: Supervisor, logs: Logs) -> RunInterruptedError:
        """Wait for the last checkpoint, and return the error that names it."""
        if self._is_stopping and self._stop:
            self._stop.wait(self._api, self._is_interrupted_again.wait)
        self._delete()
        try:
            deleted = supervisor.wait_until_deleted(self._deletion_seconds)
        except RunInterruptedError as error:
            return error
        if not deleted:
            return RunInterruptedError(
                f"interrupted; the job {self._name} was not deleted after "
                f"{self._deletion_seconds} s, the last published checkpoint is intact"
            )
        logs.drain(DRAIN_SECONDS, leading(self._job.config))
        self._message = supervisor.termination_message() or self._message
        return self._interruption()

    def _interruption(self) -> RunInterruptedError:
        return RunInterruptedError(self._message or "interrupted before training began")

    def _on_interrupt(self) -> None:
        """End the job before anything else: this process may have one second left."""
        again, self._is_interrupted = self._is_interrupted, True
        if again:
            self._is_interrupted_again.set()
        self._is_stopping = not again and self._is_stop_requested()
        if not self._is_stopping:
            with suppress(RefusedError, UnreachableError):
                self._handler_api.delete_job(self._name, quick=True)
        self._job_events.put(None)

    def _is_stop_requested(self) -> bool:
        """Ask the guard of the leading task to end the job, and say whether it may answer."""
        if self._stop is None:
            return False
        try:
            # The pods of an adopted job may run before this launcher has seen any of them.
            if not self._leader_runs() and not (
                self._is_adopted and self._stop.leader_runs(self._handler_api)
            ):
                return False
            self._stop.request(self._handler_api)
        except (RefusedError, UnreachableError):
            return False
        return True

    def _delete(self) -> bool:
        """Delete the job, unless it is gone or another job has its name by now; say whether."""
        try:
            with_retry(
                lambda: self._api.delete_job(self._name, self._uid), REMOVAL_SECONDS, time.sleep
            )
        except (RefusedError, UserError) as error:
            log.warning("the job %s could not be deleted: %s", self._name, error)
            return False
        return True

    def _wait(self, seconds: float) -> None:
        """Sleep; raise `RunInterruptedError` at a signal."""
        with suppress(queue.Empty):
            if self._job_events.get(timeout=seconds) is None:
                raise self._interruption()

    def _watch(self, kind: str, plural: str, query: Mapping[str, str]) -> Watch:
        def put(item: Tree, deleted: bool) -> None:
            # The items of a list do not have a kind.
            self._job_events.put(({**item, "kind": kind}, deleted))

        return Watch(self._api, plural, query, put, self._job_events.put)


def _place(connection: Connection, namespace: str, defaults: PodDefaults) -> Place:
    own = namespace == connection.namespace
    return Place(
        namespace=namespace,
        service_account=connection.service_account if own else "",
        variables={name: os.environ[name] for name in ENDPOINTS if os.environ.get(name)},
        defaults=defaults,
    )
